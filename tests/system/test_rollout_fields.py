"""`rollouts.jsonl`, field by field, against what the reward was asked and what it said."""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

import lightning as L
import pytest
import torch
from mareinforce.callbacks import RolloutLog

from mareinforce import MAGRPOTrainer, MAREINFORCETrainer, read_rollouts
from mareinforce.algorithms.advantages import advantages
from tests.learning.games import table_agents
from tests.models import TEMPLATE, llama_model, word_tokenizer
from tests.system.expected_rollouts import expected_rollouts, halved, scored
from tests.system.runs import Recorder, column, rank, rollouts, train
from tests.unit.test_docs import DOCS, first_cells

ACTIONS = ("<eos>", "x", "feu", "火")
ALIGNED = {"raw_reward", "reward"}
MEANS = {"reward_mean": "reward", "raw_reward_mean": "raw_reward", "expected_return": "return"}
CROSS = {"joint_actions", "raw_rewards", "rewards"}


def team(count: int) -> tuple[list[Any], Any]:
    """Uniform over four tokens, one of which ends the answer."""
    return table_agents(["go", "on", *ACTIONS[1:]], ACTIONS, count)


class Versions(L.Callback):
    """The policy versions before each batch."""

    def __init__(self) -> None:
        self.seen: list[list[int]] = []

    def on_train_batch_start(self, trainer: Any, pl_module: Any, batch: Any, batch_idx: int) -> None:
        self.seen.append(pl_module.policy_versions)


def of(found: list[dict[str, Any]], names: Any) -> list[dict[str, Any]]:
    return [{name: line[name] for name in names} for line in found]


def two_turns(reward: Recorder, folder: Path, count: int, **options: Any) -> MAGRPOTrainer:
    def transition(agent_completions: list[str], **_: Any) -> list[str]:
        return [f"{text}\u2028 on" for text in agent_completions]

    options = {"external_transition": transition, "callbacks": [RolloutLog(ids=True)], **options}
    return train(
        folder, reward, team(count), num_turns=2, num_generations=3, discount=0.5, max_new_tokens=2,
        reward_processor=halved, rollout_buffer_size="rollout", shuffle=False, **options,
    )  # fmt: skip


def test_two_aligned_turns(tmp_path: Path) -> None:
    reward = Recorder(scored)
    rows = ('grün ✓ "go" \\ \u2028 go', "on\n\tgo")
    found = rollouts(two_turns(reward, tmp_path, 2, rows=rows))
    expected = expected_rollouts(reward, completions=3, discount=0.5)
    assert of(found, expected[0]) == expected
    assert len(found) == 2 * (3 + 9) * 2
    assert {line["prompt"] for line in found if line["turn"] == 1} == set(rows)
    assert len({line["prompt"] for line in found if line["turn"] == 2}) > 2  # branches were asked different things
    assert {line["ended"] for line in found} == {True, False}
    assert {line["completion"] for line in found} > {"", "火 火"}
    # another discount is seen, in the returns and nowhere else; a raw reward is no processed one
    other = expected_rollouts(reward, completions=3, discount=0.6)
    assert of(found, ["return"]) != of(other, ["return"])
    assert of(found, ["env_step", "reward"]) == of(other, ["env_step", "reward"])
    assert [line["raw_reward"] for line in found] != [line["reward"] for line in found]


def test_what_the_reward_is_not_told(tmp_path: Path) -> None:
    """Counters, tokens, log-probabilities, policy versions."""
    versions, tokenizer = Versions(), team(1)[1]
    callbacks = [versions, RolloutLog(ids=True)]
    found = rollouts(two_turns(Recorder(scored), tmp_path, 2, rows=("go", "on"), callbacks=callbacks))
    assert [line["env_step"] for line in found[:: 3 * 2]] == [*range(3, 25, 3)]
    assert [line["batch"] for line in found] == [1] * 24 + [2] * 24
    assert [line["row"] for line in found] == [0] * 24 + [1] * 24
    assert {(line["version"], line["epoch"], line["kl"], line["kl_penalty"]) for line in found} == {(1, 0, None, None)}
    for line in found:
        ids = line["completion_ids"]
        assert len(ids) == line["tokens"] <= 2
        assert line["completion"] == tokenizer.decode(ids, skip_special_tokens=True)
        assert line["ended"] == (ids[-1] == 0)
        assert line["policy_version"] == versions.seen[line["batch"] - 1][line["agent"]]
    assert versions.seen == [[0, 0], [2, 2]]
    uniform = [line["behaviour_logprob"] == pytest.approx(line["tokens"] * math.log(1 / 4), abs=1e-5) for line in found]
    assert all(uniform[:24])
    assert not any(uniform[24:])  # the second row was answered with weights that had learned


@pytest.mark.parametrize(("reduction", "other"), [("sum", "mean"), ("mean", "sum")])
def test_two_crossed_turns_with_idle_agents(tmp_path: Path, reduction: str, other: str) -> None:
    """The third agent is silent at turn 1, the first one at turn 2."""
    reward = Recorder(scored)

    def own(row: dict[str, Any]) -> Any:
        return row["prompt"]

    def later(row: dict[str, Any], external_prompts: Any = None) -> Any:
        return external_prompts

    made = two_turns(
        reward, tmp_path, 3, joint_mode="cross", cross_reduction=reduction, formatters=[own, own, later],
        external_transition=lambda: [None, "up on", "by go"],
    )  # fmt: skip
    found = rollouts(made)
    expected = expected_rollouts(reward, completions=3, discount=0.5, reduction=reduction)
    assert of(found, expected[0]) == expected
    assert [(line["agent"], line["joint_actions"]) for line in found[:6]] == [
        (0, [0, 1, 2]), (0, [3, 4, 5]), (0, [6, 7, 8]), (1, [0, 3, 6]), (1, [1, 4, 7]), (1, [2, 5, 8]),
    ]  # fmt: skip
    assert {(line["turn"], line["agent"]) for line in found} == {(1, 0), (1, 1), (2, 1), (2, 2)}
    assert [line["env_step"] for line in found[::6]] == [*range(9, 91, 9)]
    wrong = expected_rollouts(reward, completions=3, discount=0.5, reduction=other)
    assert of(found, ["return"]) != of(wrong, ["return"])


def test_paths_are_joint_actions_from_the_root_level_by_level(tmp_path: Path) -> None:
    made = train(
        tmp_path, num_turns=3, external_transition=lambda: ["on", "on"], rows=("go", "up"), prompts_per_step=2,
        rollout_buffer_size="rollout", shuffle=False, callbacks=[RolloutLog()],
    )  # fmt: skip
    found = rollouts(made)
    nodes = list(dict.fromkeys((line["env_step"], line["row"], line["path"], line["turn"]) for line in found))
    paths = [("", 1), ("0", 2), ("1", 2), ("0/0", 3), ("0/1", 3), ("1/0", 3), ("1/1", 3)]
    assert nodes == [(2 * (7 * row + i + 1), row, *paths[i]) for row in (0, 1) for i in range(7)]
    assert {line["batch"] for line in found} == {1}
    assert made.module.env_step == found[-1]["env_step"]


@pytest.mark.parametrize("placement", ["return", "advantage"])
def test_the_kl_and_its_charge_are_what_the_metrics_are_means_of(tmp_path: Path, placement: str) -> None:
    made = train(
        tmp_path, agents=team(2), rows=("go", "go", "go"), max_new_tokens=2, reference_kl_enabled=True,
        reference_kl_coef=0.3, reference_kl_placement=placement, callbacks=[RolloutLog()],
    )  # fmt: skip
    found = rollouts(made)
    for name, metric in {"kl": "turn_1/reference_kl_mean", "kl_penalty": "turn_1/reference_kl_penalty_mean"}.items():
        by_batch = [[line[name] for line in found if line["batch"] == batch] for batch in (1, 2, 3)]
        assert [sum(values) / 4 for values in by_batch] == pytest.approx(column(made, metric))
        assert any(by_batch[2])
        assert not any(by_batch[0])  # nothing had been learned
    for group in zip(found[::2], found[1::2], strict=True):
        returns, penalty = ([line[name] for line in group] for name in ("return", "kl_penalty"))
        assert returns == [0.0, 1.0]  # before any KL
        given = torch.tensor(returns, dtype=torch.float64), torch.tensor(penalty, dtype=torch.float64)
        inside = advantages(given[0] - given[1], "mean", False).tolist()
        after = (advantages(given[0], "mean", False) - given[1]).tolist()
        assert [line["advantage"] for line in group] == (inside if placement == "return" else after)
        assert inside != after or not any(penalty)


def test_means_of_the_lines_are_the_rows_of_the_metrics(tmp_path: Path) -> None:
    made = two_turns(Recorder(scored), tmp_path, 2, rows=("go", "on", "go"))
    found = rollouts(made)
    for turn, count in ((1, 6), (2, 18)):
        there = [[line for line in found if (line["batch"], line["turn"]) == (batch, turn)] for batch in (1, 2, 3)]
        for name, field in MEANS.items():
            means = [sum(line[field] for line in lines) / count for lines in there]
            assert means == pytest.approx(column(made, f"turn_{turn}/{name}"))


def test_message_lists_stay_lists(tmp_path: Path) -> None:
    tokenizer = word_tokenizer(template=TEMPLATE)
    messages = [{"role": "user", "content": "a b", "name": "ä"}]
    agents = [llama_model(len(tokenizer), seed=seed) for seed in range(2)]
    made = train(tmp_path, agents=(agents, tokenizer), rows=({"prompt": messages},), callbacks=[RolloutLog()])
    assert [line["prompt"] for line in rollouts(made)] == [messages] * 4
    table = read_rollouts(made.run_folder)
    assert [json.loads(text) for text in table["messages"]] == [messages] * 4
    assert table["prompt"][:] == [None] * 4


def test_the_documentation_names_every_field(tmp_path: Path) -> None:
    stated = set(first_cells((DOCS / "rollouts.md").read_text(encoding="utf-8")))
    aligned = rollouts(train(tmp_path, callbacks=[RolloutLog(ids=True)]))[0]
    cross = rollouts(train(tmp_path, lambda *texts: [0.0] * 4, joint_mode="cross", callbacks=[RolloutLog()]))[0]
    assert (aligned.keys() - cross.keys(), cross.keys() - aligned.keys()) == (ALIGNED | {"completion_ids"}, CROSS)
    assert stated == aligned.keys() | cross.keys()


def test_a_frozen_agent_is_logged_too(tmp_path: Path) -> None:
    made = train(
        tmp_path, rows=("go", "go"), trainable=[True, False], kind=MAREINFORCETrainer, callbacks=[RolloutLog()]
    )
    assert [(line["agent"], line["policy_version"]) for line in rollouts(made)[::2]] == [(0, 0), (1, 0), (0, 1), (1, 0)]
    assert [line["advantage"] for line in rollouts(made)] == rank("ab") * 4
