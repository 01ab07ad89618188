"""The expected gradient, over every way a tree can come out, against the gradient of the objective itself."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from mareinforce.algorithms.loss import node_loss
from mareinforce.config import MAGRPOConfig
from mareinforce.rollout.credit import assign_returns, node_samples
from mareinforce.rollout.expand import Episode
from mareinforce.rollout.tree import Node
from mareinforce.types import Sampling
from tests.numerics.games import Game, Outcome, Policy, all_outcomes, nodes_with_history

K = 2
Gradient = dict[tuple[int, str], float]


def reward(history: str, said: str) -> float:
    """No symmetry, no zeros, positive and negative."""
    number = sum((position + 2) * (3 if symbol == "1" else 1) for position, symbol in enumerate(history + said))
    return ((number * 37) % 11) / 4.0 - 1.0


def outcomes_of(game: Game, joint_mode: str = "aligned", threshold: float | None = None, on: str = "node_mean"):
    episode = Episode(
        num_turns=game.num_turns,
        num_completions=K,
        sampling=Sampling(max_new_tokens=1),
        seed=0,
        joint_mode=joint_mode,
        early_termination_threshold=threshold,
        early_termination_on=on,
    )
    outcomes = list(all_outcomes(game, episode))
    total = float(sum(outcome.logprob.detach().exp() for outcome in outcomes))
    assert total == pytest.approx(1.0, abs=1e-12)  # every outcome once, none forgotten
    return outcomes


def config_for(game: Game, **fields) -> MAGRPOConfig:
    defaults = {"advantage_normalization": False, "early_termination_threshold": None, "turn_weighting": "tree"}
    return MAGRPOConfig(num_turns=game.num_turns, num_generations=K, **{**defaults, **fields})


def gradients(game: Game, objective: torch.Tensor) -> Gradient:
    keys = list(game.policy.logits)
    logits = [game.policy.logits[key] for key in keys]
    found = torch.autograd.grad(objective, logits, allow_unused=True, retain_graph=True)
    return {key: 0.0 if one is None else float(one) for key, one in zip(keys, found, strict=True)}


def expected_update(game: Game, outcomes: list[Outcome], config: MAGRPOConfig) -> Gradient:
    """Minus the gradient of the expected loss: the direction that the agents move in, on average."""
    alike: dict[tuple, tuple[Node, float]] = {}  # the same node with the same returns turns up in many outcomes
    for outcome in outcomes:
        hold = config.early_termination_value == "hold"
        assign_returns(outcome.root, num_turns=config.num_turns, discount=config.discount, hold=hold)
        probability = float(outcome.logprob.detach().exp())
        for node, history in nodes_with_history(outcome.root):
            said = tuple(spoken(answers) for answers in node.answers)
            key = (history, said, tuple(node.returns))
            alike[key] = (node, alike.get(key, (node, 0.0))[1] + probability)
    loss = torch.zeros((), dtype=torch.float64)
    for (history, said, returns), (node, probability) in alike.items():
        node.returns = list(returns)  # a tree's nodes are re-used between configurations
        for sample in node_samples(node, config, [0, 0]):
            if game.policy.forced(history, sample.agent) is not None:
                continue
            tokens = said[sample.agent]
            logprobs = torch.stack([game.policy.logprob(sample.agent, history, token) for token in tokens])
            counts = torch.ones(K, 1, dtype=torch.bool)
            loss = loss + probability * sample.weight * node_loss(logprobs[:, None], counts, sample.advantages)
    return {key: -value for key, value in gradients(game, loss).items()}


def spoken(answers) -> tuple[int, ...]:
    return () if answers is None else tuple(int(completion.text) for completion in answers.completions)


def agree(found: Gradient, wanted: Gradient, factor: float = 1.0, tolerance: float = 1e-9) -> bool:
    assert any(abs(value) > 1e-3 for value in wanted.values())  # nothing is proven by agreeing on zeros
    return all(abs(found[key] - factor * wanted[key]) <= tolerance for key in wanted)


def middle_is_forced(history: str, agent: int) -> int | None:
    """Agent 0 chooses in turns 1 and 3, agent 1 never: what is forced is known from the history."""
    return len(history) % 2 if agent == 1 or len(history) == 2 else None


def end_is_forced(history: str, agent: int) -> int | None:
    """Both choose in turn 1, agent 0 in turn 2, nobody in turn 3."""
    return int(history[-1]) if len(history) == 5 or (agent == 1 and history) else None


GAMES = {
    "1 turn": Game(reward, 1, Policy()),
    "2 turns": Game(reward, 2, Policy()),
    "3 turns, first and last": Game(reward, 3, Policy(middle_is_forced)),
    "3 turns, first two": Game(reward, 3, Policy(end_is_forced)),
}


@pytest.fixture(scope="module", params=GAMES)
def played(request):
    game = GAMES[request.param]
    return game, outcomes_of(game)


class TestAligned:
    @pytest.mark.parametrize("discount", [1.0, 0.5])
    @pytest.mark.parametrize(("mode", "factor"), [("raw", 1.0), ("rloo", 1.0), ("mean", 1 - 1 / K)])
    def test_a_whole_trees_expected_update_is_the_objectives_gradient(self, played, mode, factor, discount):
        game, outcomes = played
        wanted = gradients(game, game.value("", 0, discount))
        found = expected_update(game, outcomes, config_for(game, advantage_mode=mode, discount=discount))
        assert agree(found, wanted, factor)
        assert not agree(found, wanted, factor * 1.001)
        assert not agree(found, wanted, -factor)
        if game.num_turns > 1:
            assert not agree(found, gradients(game, game.value("", 0, 1.5 - discount)), factor)

    @pytest.mark.parametrize("discount", [1.0, 0.5])
    def test_max_baseline_expects_the_gradient_of_return_minus_a_share_of_the_largest(self, played, discount):
        game, outcomes = played
        found = expected_update(game, outcomes, config_for(game, advantage_mode="max", discount=discount))
        largest = torch.zeros((), dtype=torch.float64)
        for outcome in outcomes:
            returns = assign_returns(outcome.root, num_turns=game.num_turns, discount=discount, hold=False)
            largest = largest + outcome.logprob.exp() * max(returns)
        value = game.value("", 0, discount)
        wanted = gradients(game, value - largest / K)
        at_root = [key for key in wanted if key[1] == ""]  # later turns' parameters held fixed
        assert agree({key: found[key] for key in at_root}, {key: wanted[key] for key in at_root})
        plain = gradients(game, value)
        assert not agree({key: found[key] for key in at_root}, {key: plain[key] for key in at_root})

    def test_equal_weights_are_off_by_the_nodes_of_the_turn_and_its_discount(self):
        game, discount = GAMES["2 turns"], 0.5
        outcomes = outcomes_of(game)
        wanted = gradients(game, game.value("", 0, discount))
        found = expected_update(game, outcomes, config_for(
            game, advantage_mode="raw", discount=discount, turn_weighting="sample"
        ))  # fmt: skip
        first = {key: value for key, value in wanted.items() if key[1] == ""}
        second = {key: value for key, value in wanted.items() if key[1] != ""}
        assert agree(found, first, 1.0)
        assert agree(found, second, K / discount)
        assert not agree(found, second, 1.0)

    def test_normalisation_changes_the_expectation(self):
        game = GAMES["1 turn"]
        wanted = gradients(game, game.value("", 0, 1.0))
        found = expected_update(game, outcomes_of(game), config_for(game, advantage_normalization=True))
        assert not any(agree(found, wanted, factor, 1e-3) for factor in (1.0, 0.5, 2.0))


class TestCross:
    @pytest.mark.parametrize(("mode", "factor"), [("raw", 1.0), ("rloo", 1.0), ("mean", 1 - 1 / K)])
    @pytest.mark.parametrize(("reduction", "scale"), [("sum", K), ("mean", 1.0)])
    def test_one_turn(self, mode, factor, reduction, scale):
        game = GAMES["1 turn"]
        outcomes = outcomes_of(game, "cross")
        config = config_for(game, advantage_mode=mode, joint_mode="cross", cross_reduction=reduction)
        wanted = gradients(game, game.value("", 0, 1.0))
        found = expected_update(game, outcomes, config)
        assert agree(found, wanted, factor * scale)
        assert not agree(found, wanted, factor * scale * K)

    @pytest.mark.parametrize("discount", [1.0, 0.5])
    def test_two_turns_with_an_agent_that_is_idle_in_the_second(self, discount):
        game = Game(reward, 2, Policy(), speaks=lambda history, agent: history == "" or agent == 0)
        outcomes = outcomes_of(game, "cross")
        wanted = gradients(game, game.value("", 0, discount))
        config = config_for(game, advantage_mode="rloo", joint_mode="cross", discount=discount)
        found = expected_update(game, outcomes, config)
        alone = {key: value for key, value in wanted.items() if key[1] != ""}
        together = {key: value for key, value in wanted.items() if key[1] == ""}
        assert {agent for agent, _ in alone} == {0}
        assert agree(found, together, K)  # two speakers: K ** (2 - 1)
        assert agree(found, alone, 1.0)  # one speaker: K ** 0
        assert not agree(found, alone, K)


class TestEarlyTermination:
    def test_stopping_each_joint_action_by_its_own_reward_and_holding_it_is_exact(self):
        game = Game(reward, 2, Policy())
        outcomes = outcomes_of(game, threshold=0.4, on="joint_action")
        counts = {sum(child is not None for child in outcome.root.children) for outcome in outcomes}
        assert counts == {0, 1, 2}  # some trees stop entirely, some in part, some not at all
        for value in ("hold", "zero"):
            config = config_for(game, advantage_mode="rloo", discount=0.5, early_termination_value=value)
            objective = game.value("", 0, 0.5, threshold=0.4, hold=value == "hold")
            assert agree(expected_update(game, outcomes, config), gradients(game, objective))
            other = game.value("", 0, 0.5, threshold=0.4, hold=value == "zero")
            assert not agree(expected_update(game, outcomes, config), gradients(game, other))

    def test_stopping_a_whole_node_by_its_mean_is_not(self):
        game = Game(reward, 2, Policy())
        outcomes = outcomes_of(game, threshold=0.4, on="node_mean")
        config = config_for(game, advantage_mode="rloo", discount=0.5, early_termination_value="hold")
        found = expected_update(game, outcomes, config)
        at_root = {key: found[key] for key in found if key[1] == ""}
        for hold in (True, False):
            wanted = gradients(game, game.value("", 0, 0.5, threshold=0.4, hold=hold))
            assert not agree(at_root, {key: wanted[key] for key in at_root}, tolerance=1e-3)


def takes_turns(history: str, agent: int) -> bool:
    """Agent 0 speaks in turns 1 and 3, agent 1 in turn 2."""
    return len(history.split("-") if history else []) % 2 == agent


class TestIdleAgents:
    @pytest.mark.parametrize("mode", ["raw", "rloo"])
    @pytest.mark.parametrize(
        ("num_turns", "forced", "chosen"),
        [
            (2, lambda history, agent: None, {(0, 0), (1, 2)}),
            (3, lambda history, agent: 1 if agent == 1 else None, {(0, 0), (0, 5)}),
        ],
        ids=["two turns", "three turns, the middle one forced"],
    )
    def test_a_pipeline_in_which_the_agents_take_turns(self, num_turns, forced, chosen, mode):
        game = Game(reward, num_turns, Policy(forced), speaks=takes_turns)
        outcomes = outcomes_of(game)
        wanted = gradients(game, game.value("", 0, 0.5))
        found = expected_update(game, outcomes, config_for(game, advantage_mode=mode, discount=0.5))
        assert {(agent, len(history)) for agent, history in wanted} == chosen
        assert agree(found, wanted)
        assert not agree(found, gradients(game, replace(game, reward=lambda h, s: -reward(h, s)).value("", 0, 0.5)))
