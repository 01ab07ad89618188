"""The evaluation protocol: what it plays, what it writes, and that training does not notice."""

from __future__ import annotations

import contextlib
import json

import pytest

from mareinforce.checkpoint import TeamCheckpoint
from mareinforce.errors import ConfigError, MareinforceWarning
from mareinforce.eval_arguments import configuration_arguments
from mareinforce.eval_protocol import EvalProtocol, ProtocolEvaluation
from tests.system.runs import metrics, table_team, train, unchanged, weights

ROWS = [{"prompt": prompt, "answer": answer} for prompt, answer in (("go", "x"), ("on", "y"), ("up", "x"))]


def agree(first, second, batch_items):
    """1 for two right answers, and whether the first is right, as a verdict."""
    right = [item["answer"] for item in batch_items]
    passed = [float(a == answer) for a, answer in zip(first, right, strict=True)]
    return {
        "reward": [float(a == b == answer) for a, b, answer in zip(first, second, right, strict=True)],
        "passed": passed,
    }


def evaluated(tmp_path, protocol, **options):
    callback = ProtocolEvaluation(protocol)
    made = train(
        tmp_path,
        reward=agree,
        rows=ROWS,
        eval_dataset=ROWS,
        callbacks=[callback],
        eval_interval=0,
        **options,
    )
    lines = [json.loads(line) for line in (made.run_folder / "eval.jsonl").read_text().splitlines()]
    return made, lines, json.loads((made.run_folder / "eval_summary.json").read_text())


def test_every_sample_is_written_and_the_summary_is_of_them(tmp_path):
    protocol = EvalProtocol(samples_per_row=5, k=[1, 3], at_start=True)
    _, lines, summary = evaluated(tmp_path, protocol, num_turns=2, external_transition=lambda prompt: [prompt, prompt])
    assert set(summary) == {"start", "end"}
    for at in ("start", "end"):
        here = [line for line in lines if line["at"] == at]
        assert [(line["row"], line["sample"], line["turn"]) for line in here] == [
            (row, sample, turn) for row in range(3) for sample in range(5) for turn in (1, 2)
        ]
        found = summary[at]
        for turn in (1, 2):
            rewards = [line["reward"] for line in here if line["turn"] == turn]
            assert found[f"turn_{turn}"]["reward_mean"] == pytest.approx(sum(rewards) / 15)
            low, high = found[f"turn_{turn}"]["reward_ci95"]
            assert low <= found[f"turn_{turn}"]["reward_mean"] <= high
        assert found["final"] == found["turn_2"]
        passes = [
            sum(line["components"]["passed"] for line in here if line["turn"] == 2 and line["row"] == row)
            for row in range(3)
        ]
        assert found["final"]["avg@5"] == found["final"]["pass@1"] == pytest.approx(sum(passes) / 15)
        assert found["final"]["pass@3"] >= found["final"]["pass@1"]
        gain = found["gain_turn_2_over_turn_1"]["mean"]
        assert gain == pytest.approx(found["turn_2"]["reward_mean"] - found["turn_1"]["reward_mean"])
        assert (found["rows"], found["samples_per_row"], found["tokens_per_row"]) == (3, 5, 5 * 2 * 2)
        assert found["seconds_per_row"] > 0
    samples = [[agent["completion"] for agent in line["agents"]] for line in lines if line["at"] == "start"]
    assert len({tuple(one) for one in samples}) > 1  # samples of a row have streams of their own


def test_training_does_not_notice(tmp_path):
    agents, alone = table_team(), table_team()
    protocol = EvalProtocol(samples_per_row=2, at_start=True)
    made, _, summary = evaluated(tmp_path / "with", protocol, agents=agents)
    without = train(tmp_path / "without", agents=alone, reward=agree, rows=ROWS, eval_dataset=ROWS, eval_interval=0)
    assert unchanged(weights(alone[0]), agents[0]) == [True, True]
    assert metrics(made) == metrics(without)
    assert (summary["start"]["env_step"], summary["end"]["env_step"]) == (0, 6)


def test_rows_temperature_and_seed_are_the_protocols(tmp_path):
    _, lines, summary = evaluated(tmp_path, EvalProtocol(rows=2, samples_per_row=4, temperature=0.0))
    assert summary["end"]["rows"] == 2
    for row in (0, 1):  # greedy: all samples of a row are alike
        assert len({str(line["agents"]) for line in lines if line["row"] == row}) == 1
    answers = []
    for seed in (1, 1, 2):
        _, lines, _ = evaluated(tmp_path, EvalProtocol(samples_per_row=8, seed=seed))
        answers.append([line["agents"][0]["completion"] for line in lines])
    assert answers[0] == answers[1] != answers[2]


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"rows": 0}, "eval.rows=0: must be all, or a whole number"),
        ({"samples_per_row": 0}, "eval.samples_per_row=0"),
        ({"k": [1, 5]}, r"eval.k=\[1, 5\]: must be a list of whole numbers from 1 to samples_per_row=1"),
        ({"temperature": -1.0}, "eval.temperature=-1.0"),
        ({"top_p": 0.0}, "eval.top_p=0.0"),
        ({"seed": -1}, "eval.seed=-1"),
        ({"batch_size": True}, "eval.batch_size=True"),
    ],
)
def test_protocols_that_cannot_be_meant(fields, message):
    with pytest.raises(ConfigError, match=message):
        EvalProtocol(**fields)


def test_a_protocol_without_rows_is_refused(tmp_path):
    with pytest.raises(ConfigError, match="eval: there is nothing to evaluate on"):
        train(tmp_path, rows=ROWS, callbacks=[ProtocolEvaluation(EvalProtocol())])


class TestWhoIsEvaluated:
    @pytest.fixture
    def run(self, tmp_path):
        (tmp_path / "config.yaml").write_text("model: {}\n")
        for agent in (0, 1, 10):
            (tmp_path / "agents" / f"agent_{agent}").mkdir(parents=True)
        return tmp_path

    @staticmethod
    def agents(arguments):
        (found,) = [one for one in configuration_arguments(arguments) if one.startswith("--model.agents=")]
        return json.loads(found.split("=", 1)[1])

    def test_a_configuration_alone_is_left_as_it_is(self):
        given = ["--config", "a.yaml", "--ckpt_path", "last", "--model.num_agents", "3"]
        assert configuration_arguments(given) == given

    def test_a_run_stands_for_its_configuration_and_agents_in_their_order(self, run):
        arguments = configuration_arguments(["--run", str(run)])
        assert arguments[:2] == ["--config", str(run / "config.yaml")]
        assert self.agents(["--run", str(run)]) == [str(run / "agents" / f"agent_{n}") for n in (0, 1, 10)]
        assert {"--model.lora=null", "--model.agent_model=null", "--model.num_agents=3"} <= set(arguments)

    def test_agents_from_elsewhere_and_replacements(self, run):
        assert self.agents(["--config", "a.yaml", "--agents", "A/agent_0", "B/agent_1"]) == ["A/agent_0", "B/agent_1"]
        replaced = self.agents(["--run", str(run), "--replace", "agent_1=tiny-story"])
        assert replaced[1] == "tiny-story"
        assert replaced[0] == str(run / "agents" / "agent_0")

    @pytest.mark.parametrize(
        ("arguments", "message"),
        [
            (["--run", "nowhere"], "--run nowhere: there is no config.yaml"),
            (["--replace", "agent_0=x"], "--replace needs --run or --agents"),
            (["--agents", "a", "b", "--replace", "1=x"], "--replace 1=x: must be agent_I=NAME"),
            (["--agents", "a", "b", "--replace", "agent_2=x"], "there are 2 agents, agent_0 to agent_1"),
            (["--agents", "a", "--ckpt_path", "last"], "a checkpoint has its own agents"),
        ],
    )
    def test_what_cannot_be_meant(self, arguments, message):
        with pytest.raises(ConfigError, match=message):
            configuration_arguments(arguments)

    def test_a_run_without_agents(self, tmp_path):
        (tmp_path / "config.yaml").write_text("model: {}\n")
        with pytest.raises(ConfigError, match="it has no agents/agent_0"):
            configuration_arguments(["--run", str(tmp_path)])


def test_a_resumed_run_keeps_what_its_start_was_like(tmp_path):
    every_batch = TeamCheckpoint(every_n_batches=1, keep_last=9)
    protocol = EvalProtocol(at_start=True)
    callbacks = [ProtocolEvaluation(protocol), every_batch]
    made = train(tmp_path, reward=agree, rows=ROWS, eval_dataset=ROWS, callbacks=callbacks, eval_interval=0)
    before = json.loads((made.run_folder / "eval_summary.json").read_text())
    samples = (made.run_folder / "eval.jsonl").read_text()
    middle = next((made.run_folder / "checkpoints").glob("batch=2-*.ckpt"))
    for _ in range(2):
        made.train(resume_from_checkpoint=middle)
        after = json.loads((made.run_folder / "eval_summary.json").read_text())
        assert {name: summary["env_step"] for name, summary in after.items()} == {
            name: summary["env_step"] for name, summary in before.items()
        }
        assert after["start"] == before["start"]
        assert (made.run_folder / "eval.jsonl").read_text() == samples
        callbacks[0].summaries = {}  # as in a process of its own


def test_a_protocol_without_rows_is_refused_before_anything_is_trained(tmp_path):
    rewarded = []
    with pytest.raises(ConfigError, match=r"data\.eval"):
        train(
            tmp_path,
            reward=lambda first, second: rewarded.append(1) or [0.0] * len(first),
            rows=ROWS,
            callbacks=[ProtocolEvaluation(EvalProtocol())],
        )
    assert not rewarded


@pytest.mark.parametrize(("k", "warned"), [([1, 2], True), ([1], False)])
def test_pass_at_k_that_nothing_can_give_is_missed(tmp_path, recwarn, k, warned):
    callback = ProtocolEvaluation(EvalProtocol(samples_per_row=2, k=k))
    with contextlib.nullcontext() if not warned else pytest.warns(MareinforceWarning, match=r"eval.k=\[1, 2\]"):
        train(tmp_path, rows=ROWS[:1], eval_dataset=ROWS[:1], callbacks=[callback])
    assert warned or not [one for one in recwarn if "eval.k" in str(one.message)]
