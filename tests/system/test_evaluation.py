"""Evaluation plays every turn once, trains nothing, and happens when it should."""

from __future__ import annotations

import math

import pytest

from mareinforce.errors import ConfigError, DataError, RewardError
from mareinforce.rewards import RewardProcessors
from tests.system.runs import STATES, Recorder, metrics, table_team, train, trainer, unchanged, weights

EVAL_ROWS = [{"prompt": word, "answer": index} for index, word in enumerate(STATES)]


def next_states(num_agents):
    return ["on"] * num_agents


class Played(Recorder):
    """Scores every answer by its turn and keeps evaluation apart: it scores one joint answer at a time."""

    def __init__(self):
        super().__init__(lambda *texts: [float(self.known[-1]["turn"] + 1)] * len(texts[0]))

    @property
    def evaluated(self):
        calls = zip(self.texts, self.known, strict=True)
        return [(known["prompts"][0], known["turn"]) for texts, known in calls if len(texts[0]) == 1]

    @property
    def kinds(self):
        """'e' or 't' for every call at the first turn, in order."""
        calls = zip(self.texts, self.known, strict=True)
        return "".join("e" if len(texts[0]) == 1 else "t" for texts, known in calls if known["turn"] == 0)


def test_every_turn_is_played_although_training_stops_early(tmp_path):
    reward = Played()
    made = train(
        tmp_path, reward, num_turns=3, external_transition=next_states, early_termination_threshold=0.5,
        early_termination_value="hold", discount=0.5, eval_interval=1, eval_dataset=EVAL_ROWS, eval_num_samples=2,
    )  # fmt: skip
    assert reward.evaluated == [("go", 0), ("go", 1), ("go", 2), ("on", 0), ("on", 1), ("on", 2)]
    assert {known["num_turns"] for known in reward.known} == {3}
    first, second = metrics(made)
    assert {name: value for name, value in first.items() if name.startswith("eval/")} == {
        "eval/turn_1/reward_mean": 1.0, "eval/turn_1/expected_return": 1 + 0.5 * (2 + 0.5 * 3),
        "eval/turn_2/reward_mean": 2.0, "eval/turn_2/expected_return": 2 + 0.5 * 3,
        "eval/turn_3/reward_mean": 3.0, "eval/turn_3/expected_return": 3.0,
    }  # fmt: skip
    assert (first["step"], first["batch"], first["updates"]) == (0, 0, 0)  # before anything trained
    assert (second["step"], second["turn_2/coverage"]) == (2, 0.0)
    assert made.module.env_step == 2  # the training row's two joint actions alone
    assert not any(name.startswith("turn_") for name in first)


@pytest.mark.parametrize(
    ("interval", "kinds"),
    [(0, "tttttt"), (1, "etetetetetet"), (2, "ettetettet"), (3, "etttettt"), (16, "etttettt")],
)
def test_it_happens_before_the_batch_and_first_in_every_epoch(tmp_path, interval, kinds):
    reward = Played()
    made = train(
        tmp_path, reward, rows=STATES[:3], num_train_epochs=2, eval_interval=interval, eval_dataset=EVAL_ROWS,
        eval_num_samples=1,
    )  # fmt: skip
    assert reward.kinds == kinds
    steps = [row["step"] for row in metrics(made) if "eval/turn_1/reward_mean" in row]
    trained = [2 * kinds[:index].count("t") for index, kind in enumerate(kinds) if kind == "e"]
    assert steps == trained
    assert made.module.env_step == 12


def test_what_is_measured_is_the_policy_before_the_batch_trains(tmp_path):
    agents = table_team()
    made = trainer(
        tmp_path, lambda first, second: [float(text == "x") for text in first], agents, rows=STATES,
        num_generations=8, agent_learning_rate=3.0, eval_interval=3, eval_dataset=EVAL_ROWS, eval_num_samples=6,
    )  # fmt: skip
    before = made.evaluate()
    made.train()
    evaluations = [row["eval/turn_1/reward_mean"] for row in metrics(made) if "eval/turn_1/reward_mean" in row]
    assert evaluations[0] == before["eval/turn_1/reward_mean"] < 1.0
    assert made.evaluate()["eval/turn_1/reward_mean"] == 1.0  # after training it says x, so that a late look differs


@pytest.mark.parametrize(
    ("wanted", "rows", "played"), [(4, 6, 4), (4, 2, 2), (6, 6, 6), (100, 6, 6), (1, 6, 1), (0, 6, 0), (4, 0, None)]
)
@pytest.mark.parametrize("together", [1, 4])
def test_rows_are_used_once_each_and_no_more_than_there_are(tmp_path, wanted, rows, played, together):
    reward = Played()
    made = trainer(tmp_path, reward, eval_dataset=EVAL_ROWS[:rows], eval_num_samples=wanted, eval_batch_size=together)
    if played is None:
        with pytest.raises(ValueError, match=r"data\.eval"):
            made.evaluate()
        return
    found = made.evaluate()
    assert [prompt for prompt, _ in reward.evaluated] == list(STATES[:played])
    assert bool(found) is (played > 0)
    more = made.evaluate(num_eval_samples=5)  # an argument has the last word
    assert [prompt for prompt, _ in reward.evaluated][played:] == list(STATES[: min(5, rows)])
    assert more["eval/turn_1/reward_mean"] == 1.0


@pytest.mark.parametrize(("temperature", "said"), [(0.0, {"x"}), (None, {"x", "y"}), (1.0, {"x", "y"})])
def test_temperature_zero_is_greedy_and_none_is_that_of_training(tmp_path, temperature, said):
    agents, reward = table_team(), Recorder()
    for model in agents[0]:
        model.table.weight.data[:, 7] += 0.4  # x is likelier, by 0.6 to 0.4
    made = trainer(tmp_path, reward, agents, eval_dataset=EVAL_ROWS * 4, eval_temperature=temperature)
    made.evaluate(24)
    assert {text for texts in reward.texts for column in texts for text in column} == said


def test_nothing_is_changed_and_the_same_is_found_again(tmp_path):
    agents = table_team()
    before = weights(agents[0])
    made = trainer(
        tmp_path, lambda first, second: [float(text == "x") for text in first], agents, eval_dataset=EVAL_ROWS * 4
    )
    found = [made.evaluate(24) for _ in range(2)]
    assert found[0] == found[1]
    assert 0.0 < found[0]["eval/turn_1/reward_mean"] < 1.0
    assert unchanged(before, agents[0]) == [True, True]
    assert (made.module.env_step, made.module.updates, made.run_folder) == (0, [0, 0], None)


def test_the_users_logger_and_aggregator_get_texts_rows_and_prompts(tmp_path):
    reward, asked = Recorder(), []

    def measure(agent_completions_turns, batch_items, prompts):
        asked.append((agent_completions_turns, batch_items, prompts))
        rows = range(len(prompts))
        return [{"turns": [agent[row] for agent in agent_completions_turns]} for row in rows]

    def aggregate(measured, num_turns):
        lengths = [len(row["turns"][0]) for row in measured]
        return {f"turn_{turn + 1}/texts": sum(length > turn for length in lengths) for turn in range(num_turns)}

    def transition(prompt):
        return None if prompt == "on" else ["up", "by"]

    made = trainer(
        tmp_path, reward, num_turns=2, external_transition=transition, eval_dataset=EVAL_ROWS, eval_logger=measure,
        eval_aggregator=aggregate, eval_batch_size=2,
    )  # fmt: skip
    found = made.evaluate(3)
    ((completions, items, prompts),) = asked
    assert prompts == ["go", "on", "up"]
    assert items == EVAL_ROWS[:3]
    calls = zip(reward.prompts, reward.known, reward.texts, strict=True)
    texts = {(prompt, known["turn"]): columns for prompt, known, columns in calls}
    for agent in range(2):
        for row, prompt in enumerate(prompts):
            turns = range(1 if prompt == "on" else 2)  # where everybody is left out the branch is over
            assert completions[agent][row] == [texts[prompt, turn][agent][0] for turn in turns]
    assert (found["eval/turn_1/texts"], found["eval/turn_2/texts"]) == (3.0, 2.0)
    assert found["eval/turn_2/reward_mean"] == 0.0


@pytest.mark.parametrize(
    ("measure", "aggregate", "says"),
    [
        (lambda prompts: [{}], lambda measured: {}, "expected 2, got 1"),
        (lambda prompts: None, lambda measured: {}, "expected 2, got None"),
        (lambda prompts: [{}] * 2, lambda measured: {"turn_1/length": "long"}, "must return a dict of finite numbers"),
        (
            lambda prompts: [{}] * 2,
            lambda measured: {"turn_1/length": math.nan},
            "must return a dict of finite numbers",
        ),
        (lambda prompts: [{}] * 2, lambda measured: None, "must return a dict of finite numbers"),
    ],
)
def test_what_they_may_not_return_is_told(tmp_path, measure, aggregate, says):
    made = trainer(tmp_path, eval_dataset=EVAL_ROWS, eval_logger=measure, eval_aggregator=aggregate)
    with pytest.raises(ConfigError, match=says):
        made.evaluate(2)


def test_rows_without_a_prompt_stop_a_training_before_a_model_loads(tmp_path):
    made = trainer(tmp_path, eval_dataset=[{"question": "go"}], eval_interval=1)
    with pytest.raises(DataError, match=r"data\.eval.* no column 'prompt'.*question"):
        made.train()
    assert made.module.team is None
    made = trainer(tmp_path, rows=[{"question": "go"}], eval_dataset=[{"question": "go"}], prompt_column="question")
    assert made.evaluate()["eval/turn_1/reward_mean"] == 0.0


def test_rewards_are_processed_and_checked_as_in_training(tmp_path):
    options = {"eval_dataset": EVAL_ROWS, "reward_processor": RewardProcessors.scale(factor=100)}
    assert trainer(tmp_path, Played(), **options).evaluate(2)["eval/turn_1/reward_mean"] == 100.0
    with pytest.raises(RewardError, match=r"joint action 0 \(None\)"):
        trainer(tmp_path, lambda *texts: [None], **options).evaluate(2)
