"""The four baselines: what is asked of whom, and that a task's reward sees the answers it would otherwise see."""

from __future__ import annotations

import pytest

from mareinforce.errors import ConfigError, PromptError, UserCodeError
from mareinforce.rewards import Reward
from mareinforce.rollout.prompts import Formatters
from mareinforce.rollout.transition import Branch, Transition
from mareinforce.tasks.baselines import (
    FinalReward,
    LatestLogger,
    OneAgentLogger,
    OneAgentPrompt,
    OneAgentReward,
    Pipeline,
    discussion,
    split_answer,
    waits,
)
from mareinforce.tasks.story import length_ratio_reward, story_eval_logger
from tests.system.runs import Recorder, metrics, table_team, trainer

ROW = {"prompt": "2 + 2", "answer": "4"}


def solver(row):
    return f"Solve: {row['prompt']}"


def checker(row, external_prompts=None):
    return f"Check: {row['prompt']}" if external_prompts is None else external_prompts


def talker(row):
    return [{"role": "system", "content": "Be brief."}, {"role": "user", "content": checker(row)}]


def scored(reward, texts, **known):
    """Raw rewards and components of joint answers, through the contract."""
    agents = len(texts)
    given = {
        "turn": 0,
        "num_turns": 1,
        "prompt_history_per_agent": [["p"]] * agents,
        "response_history_per_agent": [[]] * agents,
        "ended": [[True] * len(texts[0])] * agents,
    }
    return Reward(reward, num_agents=agents).score(texts, row=ROW, prompt=ROW["prompt"], **{**given, **known})


class TestOneAgent:
    def test_all_tasks_are_in_one_prompt_in_order(self):
        prompt = OneAgentPrompt([solver, checker])(ROW)
        assert prompt.index("Solve: 2 + 2") < prompt.index("Check: 2 + 2")
        assert "[NEXT]" in prompt
        assert "<cut>" in OneAgentPrompt([solver], marker="<cut>")(ROW)
        with pytest.raises(PromptError, match="list"):
            OneAgentPrompt([talker])(ROW)

    @pytest.mark.parametrize(
        ("answer", "parts"),
        [
            ("a\n[NEXT]\nb", ["a", "b"]),
            ("a", ["a", ""]),
            ("", ["", ""]),
            ("[NEXT] b", ["", "b"]),
            ("a [NEXT] b [NEXT] c", ["a", "b [NEXT] c"]),
        ],
    )
    def test_an_answer_is_split_at_the_marker(self, answer, parts):
        assert split_answer(answer, 2) == parts
        assert len(split_answer(answer, 4)) == 4

    def test_the_reward_sees_the_parts_as_the_agents_answers(self):
        answers = ["a" * 10 + "\n[NEXT]\n" + "b" * 25, "a" * 10, "b" * 25 + "[NEXT]" + "a" * 10]
        expected = length_ratio_reward(["a" * 10, "a" * 10, "b" * 25], ["b" * 25, "", "a" * 10])
        assert scored(OneAgentReward(length_ratio_reward), [answers]).raw == pytest.approx(expected)
        assert expected[0] == 1.0 > expected[1]
        assert scored(OneAgentReward(length_ratio_reward, marker="#"), [["aa#bbbb"]]).raw == [1.0]

    def test_the_reward_gets_the_keywords_that_it_declares(self):
        seen = {}

        def reward(prompts, first, second, batch_items, ended, response_history_per_agent, prompt_history_per_agent):
            seen.update(locals())
            return {"reward": [1.0] * len(first), "lengths": [len(text) for text in second]}

        scores = scored(
            OneAgentReward(reward), [["a[NEXT]bc", "d"]], turn=1, num_turns=2, ended=[[True, False]],
            prompt_history_per_agent=[["p", "q"]], response_history_per_agent=[["x[NEXT]y"]],
        )  # fmt: skip
        assert scores.components == {"lengths": [2.0, 0.0]}
        assert seen["prompts"] == ["2 + 2"] * 2
        assert seen["batch_items"] == [ROW] * 2
        assert (seen["first"], seen["second"]) == (["a", "d"], ["bc", ""])
        assert seen["ended"] == [[True, False]] * 2
        assert seen["response_history_per_agent"] == [["x"], ["y"]]
        assert seen["prompt_history_per_agent"] == [["p", "q"]] * 2

    def test_what_does_not_fit_is_refused_when_it_is_made(self):
        with pytest.raises(ConfigError, match="answers of agent 2"):
            OneAgentReward(length_ratio_reward, num_parts=3)
        for wrong in ({"num_parts": 0}, {"marker": ""}):
            with pytest.raises(ConfigError, match="at least one part"):
                OneAgentLogger(story_eval_logger, **wrong)

    def test_the_logger_sees_the_parts_turn_by_turn(self):
        logger = OneAgentLogger(story_eval_logger)
        rows = logger([[["aa[NEXT]bbbb", "a"], ["a[NEXT]b"]]], batch_items=[ROW, ROW], prompts=["x", "y"])
        assert rows == story_eval_logger([[["aa", "a"], ["a"]], [["bbbb", ""], ["b"]]], [ROW, ROW], ["x", "y"])


class TestPipeline:
    def prompts(self, pipeline, num_agents, turn, responses):
        branch = Branch(
            prompt="2 + 2", agent_completions=[history[-1] for history in responses],
            prompt_history_per_agent=[["p"] * (turn + 1)] * num_agents, response_history_per_agent=responses,
            batch_item=ROW, turn=turn, reward=0.0,
        )  # fmt: skip
        return Transition(pipeline, num_agents).next_prompts([branch])[0]

    def test_each_agent_speaks_in_its_own_turn_and_sees_those_before_it(self):
        pipeline = Pipeline([solver, checker, solver])
        first = self.prompts(pipeline, 3, 0, [["four"], [""], [""]])
        assert (first[0], first[2]) == (None, None)
        assert first[1].startswith("Check: 2 + 2")
        assert "Agent 1 answered:\nfour" in first[1]
        second = self.prompts(pipeline, 3, 1, [["four", ""], ["", "right"], ["", ""]])
        assert second[:2] == [None, None]
        assert second[2].startswith("Solve: 2 + 2")
        assert second[2].index("four") < second[2].index("Agent 2 answered:\nright")
        assert self.prompts(pipeline, 3, 2, [["four", "", ""], ["", "right", ""], ["", "", "yes"]]) == [None] * 3

    def test_later_agents_wait_at_turn_1_and_are_shown_the_transitions_prompt_as_it_is(self):
        for passthrough in (False, True):
            formatters = Formatters([solver, waits], 2, external_prompt_passthrough=passthrough)
            assert formatters.format(0, ROW) == "Solve: 2 + 2"
            assert formatters.format(1, ROW) is None
            assert formatters.format(1, ROW, "as it is") == "as it is"

    def test_messages_get_the_answers_at_the_end_of_the_last_one(self):
        shown = self.prompts(Pipeline([solver, talker]), 2, 0, [["four"], [""]])[1]
        assert [message["role"] for message in shown] == ["system", "user"]
        assert shown[1]["content"].startswith("Check: 2 + 2\n\nAgent 1 answered:\nfour")

    def test_a_formatter_an_agent_is_needed(self):
        with pytest.raises(UserCodeError, match="1 formatters and num_agents is 2"):
            self.prompts(Pipeline([solver]), 2, 0, [["a"], [""]])
        with pytest.raises(UserCodeError, match="NoneType"):
            self.prompts(Pipeline([solver, waits]), 2, 0, [["a"], [""]])

    def test_the_final_joint_answer_is_taken_from_the_history_of_agents_that_are_idle(self):
        known = {
            "turn": 1,
            "num_turns": 2,
            "prompt_history_per_agent": [["p", None], [None, "q"]],
            "response_history_per_agent": [["a" * 10], [""]],
        }
        texts = [["", ""], ["b" * 25, "b" * 10]]
        expected = length_ratio_reward(["a" * 10] * 2, texts[1])
        assert scored(FinalReward(length_ratio_reward), texts, **known).raw == pytest.approx(expected)
        assert expected[0] == 1.0 > expected[1]
        assert scored(length_ratio_reward, texts, **known).raw == [0.0, 0.0]  # without the adapter nothing is scored

    def test_only_the_last_turn_earns_and_those_who_speak_count_with_what_they_say_now(self):
        reward = FinalReward(length_ratio_reward)
        assert scored(reward, [["aa"], ["bbbb"]], turn=0, num_turns=2).raw == [0.0]
        known = {"prompt_history_per_agent": [["p", "p"]] * 2, "response_history_per_agent": [["a" * 9], ["b"]]}
        assert scored(reward, [["aa"], ["bbbb"]], turn=1, num_turns=2, **known).raw == [1.0]
        assert scored(reward, [[""], ["bbbb"]], turn=1, num_turns=2, **known).raw == [0.0]  # silent, but not idle
        never = {"prompt_history_per_agent": [["p"], [None]], "response_history_per_agent": [[], []]}
        assert scored(
            FinalReward(lambda first, second: [float(b == "") for b in second]), [["a"], [""]], **never
        ).raw == [1]

    def test_an_async_reward_is_awaited(self):
        async def judged(first, second):
            return [float(a != b) for a, b in zip(first, second, strict=True)]

        assert scored(FinalReward(judged), [["a", "a"], ["a", "b"]]).raw == [0.0, 1.0]
        assert scored(OneAgentReward(judged), [["a[NEXT]a", "a[NEXT]b"]]).raw == [0.0, 1.0]

    def test_the_logger_carries_latest_answers_forward(self):
        given = [[["aa", ""]], [["", "bbbb"]]]
        rows = LatestLogger(story_eval_logger)(given, batch_items=[ROW], prompts=["x"])
        assert rows == story_eval_logger([[["aa", "aa"]], [["", "bbbb"]]], [ROW], ["x"])
        assert rows[0]["turn_2/length_ratio"] == 2.0 != story_eval_logger(given, [ROW], ["x"])[0]["turn_2/length_ratio"]


class TestDiscussion:
    def test_every_agent_sees_its_first_prompt_and_all_answers(self):
        first, second = discussion(["four", "five"], 2, [["Solve: 2 + 2"], ["Check: 2 + 2"]])
        assert first.startswith("Solve: 2 + 2")
        assert second.startswith("Check: 2 + 2")
        assert all("Agent 1 answered:\nfour" in each and "Agent 2 answered:\nfive" in each for each in (first, second))
        assert "You are agent 1" in first
        assert "You are agent 2" in second
        again = discussion(["4", "4"], 2, [["Solve: 2 + 2", first], ["Check: 2 + 2", second]])[0]
        assert again.startswith("Solve: 2 + 2")
        assert "four" not in again

    def test_messages_and_idle_agents(self):
        asked = [{"role": "user", "content": "Solve: 2 + 2"}]
        shown, idle = discussion(["four", ""], 2, [[asked], [None]])
        assert idle is None
        assert len(shown) == 1
        assert shown[0]["content"].startswith("Solve: 2 + 2\n\nAgent 1 answered:\nfour")
        assert asked[0]["content"] == "Solve: 2 + 2"
        with pytest.raises(PromptError, match="dict"):
            discussion(["a"], 1, [[{"role": "user", "content": "x"}]])


def end_in(word):
    """A formatter for agents that know single words: the last one decides what they say."""
    return lambda row, external_prompts=None: word


def test_a_pipeline_is_played_by_agents_in_turn(tmp_path):
    reward = Recorder(lambda *texts: [float(all(joint)) for joint in zip(*texts, strict=True)])
    made = trainer(
        tmp_path, FinalReward(reward), table_team(2), num_turns=2, formatters=[end_in("go"), waits],
        external_transition=Pipeline([end_in("go"), end_in("on")]), rollout_buffer_size="rollout",
    )  # fmt: skip
    made.train()
    row = metrics(made)[0]
    assert (row["turn_1/reward_mean"], row["turn_2/reward_mean"]) == (0.0, 1.0)
    assert row["turn_1/expected_return"] == 1.0  # what the first agent learns from is the final answer's worth
    for (first, second), known in zip(reward.texts, reward.known, strict=True):
        assert first == known["response_history_per_agent"][0] * len(first)
        assert {*first, *second} <= {"x", "y"}
        assert known["prompt_history_per_agent"][0] == ["go", None]
        assert known["prompt_history_per_agent"][1][0] is None
        assert known["prompt_history_per_agent"][1][1].startswith("on")
