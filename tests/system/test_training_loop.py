"""Batches, updates and steps are counted as a user counts them, whatever the number of agents."""

from __future__ import annotations

import lightning as L
import pytest
import torch

from mareinforce import MAREINFORCETrainer, MAReMaxTrainer, MARLOOTrainer
from mareinforce.agents.team import Team
from mareinforce.checkpoint import TeamCheckpoint
from mareinforce.config import MAGRPOConfig
from mareinforce.optim import apply_gradient, compute_gradient
from mareinforce.trainers.reinforce import MAGRPOTrainer
from mareinforce.types import Completion, NodeSample
from tests.system.runs import ACTIONS, STATES, Recorder, column, metrics, table_team, train, trainer, unchanged, weights


class OptimizerSteps(L.Callback):
    """Keeps how often each agent's optimizer was stepped, as AdamW counts it."""

    steps: list[int]
    lightning_steps: int

    def on_train_end(self, trainer, pl_module):
        states = [[*optimizer.state.values()] for optimizer in trainer.optimizers]
        self.steps = [int(state[0]["step"]) if state else 0 for state in states]
        self.lightning_steps = trainer.global_step


@pytest.mark.parametrize("count", [1, 2, 3])
def test_six_prompts_are_six_updates_of_every_agent(tmp_path, count):
    reward, seen = Recorder(), OptimizerSteps()
    made = train(tmp_path, reward, table_team(count), STATES, max_updates=6, callbacks=[seen])
    assert sorted(reward.prompts) == sorted(STATES)
    assert seen.steps == made.module.updates == [6] * count
    assert column(made, "batch") == column(made, "updates") == [1, 2, 3, 4, 5, 6]
    assert column(made, "step") == [2, 4, 6, 8, 10, 12]
    assert made.module.env_step == 12
    assert seen.lightning_steps == 6 * count  # the counter that must not be used


@pytest.mark.parametrize("count", [2, 3])
def test_checkpoints_follow_the_batches(tmp_path, count):
    made = train(
        tmp_path, agents=table_team(count), rows=STATES, callbacks=[TeamCheckpoint(every_n_batches=3, keep_last=9)]
    )
    names = sorted(path.name for path in (made.run_folder / "checkpoints").iterdir())
    assert names == ["batch=3-updates=3.ckpt", "batch=6-updates=6.ckpt"]


@pytest.mark.parametrize(
    ("fields", "rows", "steps"),
    [
        ({}, 6, 6),
        ({"max_updates": 4}, 4, 4),
        ({"max_updates": 7, "num_train_epochs": 2}, 7, 7),
        ({"max_updates": 3, "rollout_buffer_size": 2, "train_batch_size": 1}, 4, 3),
        ({"max_updates": 2, "rollout_buffer_size": 2}, 4, 2),
        ({"rollout_buffer_size": 4}, 6, 2),  # the partial buffer is flushed at the end of the epoch
        ({"rollout_buffer_size": 4, "num_train_epochs": 2}, 12, 4),  # of every epoch
    ],
)
def test_training_ends_exactly_where_it_should(tmp_path, fields, rows, steps):
    reward, seen = Recorder(), OptimizerSteps()
    made = train(tmp_path, reward, rows=STATES, callbacks=[seen], **fields)
    assert len(reward.prompts) == rows == made.module.batches
    assert seen.steps == made.module.updates == [steps, steps]


def test_an_agent_that_never_speaks_does_not_keep_a_finished_run_going(tmp_path):
    reward = Recorder()
    made = train(tmp_path, reward, rows=STATES, max_updates=2, formatters=[lambda row: row["prompt"], lambda row: None])
    assert made.module.updates == [2, 0]
    assert len(reward.prompts) == 2


def test_rows_of_metrics_follow_the_environment_steps(tmp_path):
    made = train(tmp_path, rows=STATES, logging_steps=5)
    assert column(made, "step") == [6, 12]
    assert column(made, "batch") == [3, 6]
    made = train(tmp_path, rows=STATES, logging_steps=100)
    assert column(made, "step") == [12]  # the end is always written
    assert column(made, "turn_1/reward_mean") == [0.5]


def sample(agent: int, advantage: float, tokenizer) -> NodeSample:
    """Says both actions once; over a uniform policy its gradient's norm is advantage / sqrt(2)."""
    ids = [tokenizer.convert_tokens_to_ids(action) for action in ACTIONS]
    completions = tuple(Completion(torch.tensor([one]), torch.tensor([-0.6931472]), False, "") for one in ids)
    advantages = torch.tensor([advantage, -advantage], dtype=torch.float64)
    state = torch.tensor([tokenizer.convert_tokens_to_ids("go")])
    return NodeSample(agent, 0, 0, (), state, completions, advantages, advantages, False, 1.0, 2, 0)


def distance(before: dict[str, torch.Tensor], model) -> float:
    """How far an agent's table has moved."""
    return float((model.table.weight.detach() - before["table.weight"]).norm())


@pytest.mark.parametrize(("limit", "moved"), [(1.0, (1.0, 0.1)), (None, (10.0, 0.1)), (0.05, (0.05, 0.05))])
def test_each_agent_is_clipped_by_itself(limit, moved):
    models, tokenizer = table_team()
    team = Team(models, [tokenizer] * 2, 1)
    config = MAGRPOConfig(num_turns=1, max_new_tokens=1, max_grad_norm=limit)
    before = weights(models)
    for agent, norm in enumerate((10.0, 0.1)):
        optimizer = torch.optim.SGD(models[agent].parameters(), lr=1.0)  # moves by the gradient itself
        batch = [sample(agent, norm * 2**0.5, tokenizer)]
        update = compute_gradient(team, optimizer, batch, config, 0)
        apply_gradient(team, optimizer, update)
        assert update.metrics[agent]["grad_norm"] == pytest.approx(norm, rel=1e-5)  # before clipping
        assert update.metrics[agent]["grad_norm_clipped"] == pytest.approx(moved[agent], rel=2e-5)
        # clipped as one vector with the other agent's they would be 0.99995 and 0.0099995
        assert distance(before[agent], models[agent]) == pytest.approx(moved[agent], rel=2e-5)


@pytest.mark.parametrize("limit", [None, 0.01])
def test_gradient_norms_before_clipping_are_logged_for_every_agent(tmp_path, monkeypatch, limit):
    def build_optimizer(agent_weights, rate, config):
        return torch.optim.SGD(agent_weights, lr=rate)  # moves by the gradient itself

    monkeypatch.setattr("mareinforce.team_module.build_optimizer", build_optimizer)
    agents = table_team()
    with torch.no_grad():
        agents[0][1].table.weight[:, 7] += 3.0  # the second agent says x most of the time
    before = weights(agents[0])
    made = train(
        tmp_path,
        agents=agents,
        kind=MAREINFORCETrainer,
        agent_learning_rate=1.0,
        max_grad_norm=limit,
        num_generations=8,
    )
    norms = [column(made, f"agent_{agent}/grad_norm")[0] for agent in range(2)]
    moved = [distance(old, model) for old, model in zip(before, agents[0], strict=True)]
    assert norms[0] != pytest.approx(norms[1], rel=0.01)
    assert moved == pytest.approx(norms if limit is None else [limit] * 2, rel=1e-3)
    assert min(norms) > 0.05


@pytest.mark.parametrize("kind", [MAGRPOTrainer, MARLOOTrainer, MAReMaxTrainer, MAREINFORCETrainer])
@pytest.mark.parametrize("normalization", [True, False, "scale"])
def test_equal_rewards_teach_nothing_but_to_a_method_without_baseline(tmp_path, kind, normalization):
    agents, seen = table_team(), OptimizerSteps()
    before = weights(agents[0])
    options = {"rows": STATES[:2], "kind": kind, "num_generations": 4, "advantage_normalization": normalization}
    made = train(tmp_path, lambda *texts: [1.0] * 4, agents, callbacks=[seen], **options)
    learns = kind is MAREINFORCETrainer and normalization is not True
    assert unchanged(before, agents[0]) == [not learns] * 2
    assert seen.steps == [2 * learns] * 2
    for agent in range(2):
        assert column(made, f"agent_{agent}/zero_signal_fraction") == [1.0] * 2
        assert column(made, f"agent_{agent}/stepped_fraction") == [float(learns)] * 2
        assert (column(made, f"agent_{agent}/loss") == [0.0] * 2) is not learns
        assert bool(column(made, f"agent_{agent}/grad_norm")) is learns
    made = train(tmp_path, agents=agents, **options)  # with a signal all of them learn
    assert unchanged(before, agents[0]) == [False] * 2
    assert column(made, "agent_0/zero_signal_fraction") == [0.0] * 2


@pytest.mark.parametrize(("kind", "loss"), [(MAGRPOTrainer, 0.0), (MAREINFORCETrainer, 3.0 * 0.6931472)])
def test_prompts_rolled_out_together_are_never_compared(tmp_path, kind, loss):
    agents = table_team()
    before = weights(agents[0])

    def reward(first, second, prompts):
        return [{"go": 1.0, "on": 5.0}[prompt] for prompt in prompts]

    made = train(tmp_path, reward, agents, ("go", "on"), kind, prompts_per_step=2, rollout_buffer_size="rollout")
    assert [row["agent_0/zero_signal_fraction"] for row in metrics(made)] == [1.0]
    # raw: (1 + 5) / 2 times ln 2; pooled over the prompts the advantages would be -2 and +2 and the weights would move
    assert column(made, "agent_0/loss") == pytest.approx([loss], abs=1e-5)
    assert unchanged(before, agents[0]) == [loss == 0.0] * 2


def test_the_trainer_needs_rows_to_train_on(tmp_path):
    made = trainer(tmp_path, rows=None)
    with pytest.raises(ValueError, match="train_dataset is missing"):
        made.train()
    assert not list(tmp_path.iterdir())
