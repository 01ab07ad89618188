"""Rewards and transitions in workers, in a limited time, or skipped: what a whole run makes of them."""

from __future__ import annotations

import asyncio
import math
import os
import random
import signal
import threading
import time
from pathlib import Path

import pytest

from mareinforce.errors import CallTimeout, ConfigError, RewardError, UserCodeError
from tests import worker_functions
from tests.system.runs import Recorder, column, metrics, table_team, train, trainer, unchanged, weights

ROWS = ("go", "on", "up")
TREE = {"num_turns": 2, "num_generations": 3, "prompts_per_step": 3, "rollout_buffer_size": "rollout"}
IN_TIME, THREADS, PROCESSES = (
    {"reward_timeout": 60.0},
    {"reward_workers": 4},
    {"reward_workers": 2, "reward_worker_kind": "process"},
)


class Late:
    """A reward, and a transition, that take a while which nobody can foresee; each call is at work in a thread."""

    def __init__(self):
        self.inside = self.most = 0
        self.draw, self.lock = random.Random(), threading.Lock()

    def reward(self, first, second):
        with self.lock:
            self.inside += 1
            self.most = max(self.most, self.inside)
        time.sleep(self.draw.random() * 0.03)
        with self.lock:
            self.inside -= 1
        return [float(len(first)) * (a == "x") - (b == "x") + j / 8 for j, (a, b) in enumerate(zip(first, second))]  # noqa: B905

    async def reward_later(self, first, second):
        await asyncio.sleep(self.draw.random() * 0.03)
        return self.reward(first, second)

    def transition(self, prompt, agent_completions):
        time.sleep(self.draw.random() * 0.03)
        return ["by", "in"] if agent_completions[0] == "x" else ["at", "at"]

    async def transition_later(self, prompt, agent_completions):
        await asyncio.sleep(self.draw.random() * 0.03)
        return self.transition(prompt, agent_completions)


@pytest.fixture(scope="module")
def usual(tmp_path_factory):
    """What is logged and learned where everything happens one after the other."""
    agents, late = table_team(), Late()
    made = train(
        tmp_path_factory.mktemp("usual"), late.reward, agents, ROWS, external_transition=late.transition, **TREE
    )
    assert late.most == 1
    return metrics(made), weights(agents[0])


@pytest.mark.parametrize(
    ("options", "later", "at_once"),
    [(IN_TIME, False, False), (THREADS, False, True), (THREADS, True, False), ({}, True, False)],
    ids=str,
)
def test_what_is_done_first_decides_nothing(tmp_path, usual, options, later, at_once):
    agents, late = table_team(), Late()
    reward, transition = (late.reward_later, late.transition_later) if later else (late.reward, late.transition)
    made = train(tmp_path, reward, agents, ROWS, external_transition=transition, **TREE, **options)
    assert metrics(made) == usual[0]
    assert unchanged(usual[1], agents[0]) == [True, True]
    assert (late.most > 1) == at_once  # what is async computes in one thread, and waits together
    assert late.most <= 4


def test_in_processes_it_is_the_same(tmp_path):
    given = {"reward": worker_functions.rank, "rows": ROWS, "external_transition": worker_functions.onward}
    learned = []
    for options in ({}, PROCESSES):
        agents = table_team()
        made = train(tmp_path, agents=agents, **given, **TREE, **options)
        learned.append((metrics(made), weights(agents[0])))
    assert learned[0][0] == learned[1][0]
    assert unchanged(learned[0][1], agents[0]) == [True, True]


# Stopping


@pytest.mark.parametrize("options", [IN_TIME, THREADS, PROCESSES], ids=str)
def test_what_is_no_number_stops_the_run_wherever_it_was_made(tmp_path, options):
    agents = table_team()
    before = weights(agents[0])
    with pytest.raises(RewardError) as told:
        train(tmp_path, worker_functions.missing, agents, num_generations=4, **options)
    for words in ("worker_functions.missing", "joint actions 1 (None), 3 (nan)", "turn 1 of 1", "'go'"):
        assert words in str(told.value)
    assert unchanged(before, agents[0]) == [True, True]


@pytest.mark.parametrize("options", [{}, THREADS, PROCESSES], ids=str)
def test_a_reward_that_takes_too_long_stops_the_run(tmp_path, options):
    agents = table_team()
    before, began = weights(agents[0]), time.monotonic()
    says = r"reward_func .*worker_functions.slow took longer than reward_timeout=1 seconds \(turn 1 of 1, .* 0 to 1\)"
    with pytest.raises(CallTimeout, match=says):
        train(tmp_path, worker_functions.slow, agents, reward_timeout=1.0, **options)
    assert time.monotonic() - began < 60
    assert unchanged(before, agents[0]) == [True, True]


def test_a_transition_that_takes_too_long_stops_the_run_also_where_rewards_are_skipped(tmp_path):
    says = r"external_transition .*slow_onward took longer .*\(after turn 1, row with prompt 'go', joint action 0\)"
    for options in ({}, PROCESSES, {"on_reward_error": "skip"}):
        with pytest.raises(CallTimeout, match=says):
            train(
                tmp_path, worker_functions.rank, num_turns=2, reward_timeout=1.0,
                external_transition=worker_functions.slow_onward, **options,
            )  # fmt: skip


def test_an_error_at_the_second_turn_names_the_branch(tmp_path):
    def reward(first, second, turn, response_history_per_agent):
        if turn == 1 and len(seen) == 1:
            raise ValueError("bad json")
        seen.extend([turn] * turn)
        return [0.0, 1.0]

    seen = []
    with pytest.raises(
        UserCodeError, match=r"turn 2 of 2, after joint action 1, row with prompt 'go', joint actions 0"
    ):
        train(tmp_path, reward, num_turns=2, external_transition=lambda prompt: ["on", "up"])


def test_what_processes_cannot_be_sent_is_refused_before_anything_is_loaded(tmp_path):
    with pytest.raises(ConfigError, match=r"reward_worker_kind='process': reward_func .*<lambda>"):
        trainer(tmp_path, lambda first, second: [], **PROCESSES)
    with pytest.raises(ConfigError, match=r"reward_worker_kind='process': external_transition .*<lambda>"):
        trainer(
            tmp_path, worker_functions.rank, num_turns=2, external_transition=lambda prompt: ["on", "up"], **PROCESSES
        )
    with pytest.raises(ConfigError, match="reward_workers=0"):
        trainer(tmp_path, worker_functions.rank, reward_worker_kind="process")


# Skipping


@pytest.mark.parametrize("options", [{}, IN_TIME, THREADS], ids=str)
def test_what_fails_is_skipped_counted_and_not_gone_on_from(tmp_path, options):
    """Three joint actions a node: at turn 1 the second has no number; below the first of them everything fails."""
    asked = []

    def score(first, second, turn, response_history_per_agent):
        if turn == 0:
            return [1.0, math.nan, 3.0]
        if response_history_per_agent[0][0] == "fails":
            raise ValueError("bad json")
        return [0.0, 1.0, 5.0]

    def reward(first, second, turn, response_history_per_agent):
        with lock:
            first_below = turn == 1 and turns.count(1) == 0 and not options.get("reward_workers")
            turns.append(turn)
        return score(first, second, turn, [["fails"]] if first_below else response_history_per_agent)

    def transition(prompt, reward):
        asked.append(reward)
        return ["on", "up"]

    turns, lock, agents = [], threading.Lock(), table_team()
    before = weights(agents[0])
    with pytest.warns(match=r"reward_func .*not a finite number for joint action 1 \(nan\).*metrics"):
        made = train(
            tmp_path, reward, agents, num_turns=2, num_generations=3, external_transition=transition,
            on_reward_error="skip", **options,
        )  # fmt: skip
    assert sorted(asked) == [1.0, 3.0]
    in_order = not options.get("reward_workers")
    (row,) = [row for row in metrics(made) if "turn_1/skipped_rewards" in row]
    assert row["step"] == 9
    assert (row["turn_1/skipped_rewards"], row["turn_2/skipped_rewards"]) == (1, 3 if in_order else 0)
    assert (row["turn_1/skipped_returns"], row["turn_2/skipped_returns"]) == (1 if in_order else 0, 0)
    assert (row["turn_1/reward_mean"], row["turn_2/reward_mean"]) == (2.0, 2.0)
    assert row["turn_1/expected_return"] == (5.0 if in_order else 4.0)
    # turn 1 has one joint action left, or two; turn 2 has one node that can be learned from, or two
    assert made.module.updates == ([1, 1] if in_order else [3, 3])
    assert not all(unchanged(before, agents[0]))
    assert all(weight.isfinite().all() for model in agents[0] for weight in model.state_dict().values())


def test_where_nothing_fails_skipping_changes_nothing(tmp_path, usual):
    agents, late = table_team(), Late()
    made = train(
        tmp_path, late.reward, agents, ROWS, external_transition=late.transition, on_reward_error="skip", **TREE
    )
    counted = {name for row in metrics(made) for name in row if "skipped" in name}
    assert counted == {f"turn_{turn}/skipped_{what}" for turn in (1, 2) for what in ("rewards", "returns")}
    assert [{name: value for name, value in row.items() if name not in counted} for row in metrics(made)] == usual[0]
    assert unchanged(usual[1], agents[0]) == [True, True]


def test_a_run_in_which_everything_fails_learns_nothing_and_says_so(tmp_path):
    agents, reward = table_team(), Recorder(lambda *texts: 1 / 0)
    before = weights(agents[0])
    with pytest.warns(match=r"raised ZeroDivisionError.*on_reward_error: skip") as said:
        made = train(tmp_path, reward, agents, ROWS, on_reward_error="skip")
    assert len([warning for warning in said if "on_reward_error" in str(warning.message)]) == 1
    assert unchanged(before, agents[0]) == [True, True]
    assert column(made, "turn_1/skipped_rewards") == [2.0, 2.0, 2.0]
    assert column(made, "step") == [2.0, 4.0, 6.0]


def test_in_an_evaluation_skipped_rewards_are_counted_and_in_no_mean(tmp_path):
    def reward(first, second, prompts):
        return [{"go": 1.0, "on": None, "up": 3.0}[prompt] for prompt in prompts]

    made = trainer(
        tmp_path, reward, on_reward_error="skip", num_turns=2, eval_dataset=list(ROWS), eval_num_samples=3,
        external_transition=lambda prompt: [prompt, prompt],
    )  # fmt: skip
    with pytest.warns(match="skip"):
        found = made.evaluate()
    assert found["eval/turn_1/reward_mean"] == 2.0
    assert found["eval/turn_1/expected_return"] == 4.0
    assert found["eval/turn_1/skipped_rewards"] == 1.0
    assert found["eval/turn_2/skipped_rewards"] == 0.0  # the row ended with its first turn


# Signals


async def slow_later(first, second):
    Path(os.environ["SLOW_REWARD_BEGAN"]).touch()
    await asyncio.sleep(300)


@pytest.mark.parametrize(
    ("reward", "options"),
    [
        (worker_functions.slow, IN_TIME),
        (worker_functions.slow, THREADS),
        (worker_functions.slow, PROCESSES),
        (slow_later, {}),
    ],
    ids=["in time", "threads", "processes", "async"],
)
@pytest.mark.parametrize(("number", "stop"), [(signal.SIGINT, KeyboardInterrupt), (signal.SIGTERM, SystemExit)])
def test_a_signal_does_not_wait_for_what_workers_do(tmp_path, monkeypatch, reward, options, number, stop):
    monkeypatch.setenv("SLOW_REWARD_BEGAN", str(tmp_path / "began"))
    made, sent = trainer(tmp_path, reward, **options), []

    def send():
        while not (tmp_path / "began").exists():
            time.sleep(0.02)
        sent.append(time.monotonic())
        os.kill(os.getpid(), number)

    threading.Thread(target=send, daemon=True).start()
    with pytest.raises(stop):
        made.train()
    assert time.monotonic() - sent[0] < 20
    assert not made.module.calls.processes


def test_no_process_is_left_after_a_run(tmp_path):
    made = train(tmp_path, worker_functions.rank, **PROCESSES)
    assert not made.module.calls.processes
    made.data.eval = made.data.train
    made.evaluate()
    assert not made.module.calls.processes
