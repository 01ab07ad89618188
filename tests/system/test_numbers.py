"""Numbers that are none stop a run before any agent has stepped, and say whose, where and on which prompt."""

from __future__ import annotations

import math

import pytest
import torch

from mareinforce import MAGRPOConfig, MAREINFORCETrainer
from mareinforce.errors import ConfigError, NonFiniteError
from mareinforce.optim import all_finite
from tests.system.runs import llama_team, rank, table_team, trainer, unchanged, weights

RAW = {"advantage_normalization": False, "kind": MAREINFORCETrainer}
LONG = " ".join(["go"] * 60)


def bad_gradient(agents, agent, row, value=math.nan):
    """From the given update on, a gradient of one agent is no number; everything before is as ever."""
    table, calls = agents[0][agent].table.weight, []

    def spoil(grad):
        calls.append(1)
        return grad * value if len(calls) > row else grad

    table.register_hook(spoil)


def times(size):
    """A reward of that size, with a signal."""
    return lambda *texts: [size * (1 + one) for one in rank(*texts)]


def moments(made):
    """Everything that the optimizers remember, copied."""
    return [
        {
            (index, name): value.clone()
            for index, state in one.state_dict()["state"].items()
            for name, value in state.items()
        }
        for one in made.module.optimizers()
    ]


def stopped(tmp_path, made, match):
    """Train until it stops; the weights and moments right before the last optimizer steps were asked for."""
    before = []
    learn = made.module.learn

    def watched(samples):
        before[:] = [weights([made.module.team.network(agent) for agent in range(2)]), moments(made)]
        return learn(samples)

    made.module.learn = watched
    with pytest.raises(NonFiniteError, match=match):
        made.train()
    return before


@pytest.mark.parametrize("agent", [0, 1])
@pytest.mark.parametrize("value", [math.nan, math.inf])
def test_a_gradient_that_is_no_number_leaves_every_agent_untouched(tmp_path, agent, value):
    agents = table_team()
    bad_gradient(agents, agent, row=2, value=value)
    made = trainer(tmp_path, agents=agents, rows=("go", "on", "up", "by"), shuffle=False)
    before, before_moments = stopped(
        tmp_path, made, rf"agent {agent}: the gradient norm is (nan|inf) at turn 1 of row 2, where it was shown 'up'; "
    )  # fmt: skip
    assert unchanged(before, agents[0]) == [True, True]
    for one, other in zip(before_moments, moments(made), strict=True):
        assert one.keys() == other.keys() != set()
        assert all(torch.equal(one[name], other[name]) for name in one)
    assert not list(tmp_path.glob("run_*/checkpoints/*.ckpt"))
    assert all(model.table.weight.grad is None for model in agents[0])


def test_with_concurrent_agents_too(tmp_path):
    agents = table_team()
    bad_gradient(agents, 1, row=1)
    made = trainer(tmp_path, agents=agents, rows=("go", "on"), parallel_training="mp", agent_devices="cpu")
    before, _ = stopped(tmp_path, made, "agent 1: the gradient norm is nan")
    assert unchanged(before, agents[0]) == [True, True]


def test_a_sound_run_changes_them(tmp_path):
    agents = table_team()
    before = weights(agents[0])
    trainer(tmp_path, agents=agents, num_generations=8).train()
    assert unchanged(before, agents[0]) == [False, False]


def test_the_sample_with_the_bad_gradient_is_the_one_that_is_named(tmp_path):
    agents = table_team()
    word = agents[1].convert_tokens_to_ids("on")

    def spoil(grad):
        rows = torch.zeros(len(grad), 1)
        rows[word] = 1.0
        return torch.where((grad.abs().sum(-1, keepdim=True) > 0) & (rows > 0), grad * math.inf, grad)

    agents[0][0].table.weight.register_hook(spoil)
    fields = {"shuffle": False, "rollout_buffer_size": 3, "num_generations": 8}
    made = trainer(tmp_path, agents=agents, rows=("go", "on", "up"), **fields)
    stopped(tmp_path, made, r"agent 0: the gradient norm is .* row 1, where it was shown 'on'")


def test_a_long_prompt_is_shortened(tmp_path):
    agents = table_team()
    bad_gradient(agents, 0, row=0)
    with pytest.raises(
        NonFiniteError, match=r"where it was shown 'go go go.{20,40} \.\.\. .{10,25}'; no agent's"
    ) as error:
        trainer(tmp_path, agents=agents, rows=(LONG,)).train()
    assert len(str(error.value)) < 400


@pytest.mark.parametrize("size", [1e30, 1e300])
def test_huge_rewards_stop_or_train_with_finite_weights(tmp_path, size):
    agents = llama_team()
    made = trainer(tmp_path, times(size), agents=agents, rows=("a", "b"), **RAW)
    before = weights(agents[0])
    largest = f"{2 * size:g}".replace("+", r"\+")
    with pytest.raises(NonFiniteError, match=rf"agent 0: .* is (inf|nan|-inf) .*largest return {largest}"):
        made.train()
    assert unchanged(before, agents[0]) == [True, True]


def test_large_rewards_that_can_be_learned_from_are(tmp_path):
    agents = llama_team()
    before = weights(agents[0])
    made = trainer(tmp_path, times(1e12), agents=agents, rows=("a", "b"), **RAW)
    made.train()
    assert unchanged(before, agents[0]) == [False, False]
    for optimizer, model in zip(made.module.optimizers(), agents[0], strict=True):
        assert all_finite(model.parameters())
        assert all_finite(state["exp_avg_sq"] for state in optimizer.state.values())


def test_normalised_huge_rewards_train(tmp_path):
    agents = table_team()
    trainer(tmp_path, times(1e30), agents=agents, advantage_normalization=True).train()
    assert all_finite(weight for model in agents[0] for weight in model.parameters())


def test_weights_that_are_none_are_refused_before_anything_is_sampled(tmp_path):
    agents = table_team()
    with torch.no_grad():
        agents[0][1].table.weight[3, 3] = math.nan
    calls = []
    with pytest.raises(NonFiniteError, match=r"agent 1: its weight table.weight is not finite before"):
        trainer(tmp_path, lambda *texts: calls.append(1), agents=agents).train()
    assert calls == []


def test_a_step_that_leaves_the_numbers_is_told_and_is_in_no_checkpoint(tmp_path, monkeypatch):
    monkeypatch.setattr(
        "mareinforce.team_module.build_optimizer", lambda own, rate, config: torch.optim.SGD(own, lr=1e38, momentum=0.5)
    )
    monkeypatch.setattr("mareinforce.learner.learning_rate_factor", lambda *args: 1e39)
    made = trainer(tmp_path, times(1e9), **RAW)
    with pytest.raises(
        NonFiniteError, match=r"agent 0: a weight is not finite any more .* row 0, where it was shown 'go'"
    ):
        made.train()
    assert not list(tmp_path.glob("run_*/checkpoints/*.ckpt"))


@pytest.mark.parametrize(
    ("fields", "words"),
    [
        ({"adam_eps": 1e-30, "agent_learning_rate": 0.1}, "adam_eps=1e-30: .*must be at least 5.42e-20"),
        ({"weight_decay": 0.5, "agent_learning_rate": 2.0}, "weight_decay=0.5: .*must be below 0.5"),
    ],
)
def test_settings_with_which_one_update_could_leave_the_numbers_are_refused(fields, words):
    with pytest.raises(ConfigError, match=words):
        MAGRPOConfig(**fields)
    MAGRPOConfig(**{**fields, "adam_eps": 1e-8, "weight_decay": 0.0})


@pytest.mark.parametrize(("value", "finite"), [(1e38, True), (math.inf, False), (-math.inf, False), (math.nan, False)])
def test_finite_is_finite(value, finite):
    assert all_finite([torch.zeros(3), torch.tensor([[0.0, value]]), torch.zeros(0)]) is finite
