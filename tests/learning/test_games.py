"""Agents on tables learn what is known to be best, and fail where the settings make it impossible."""

from __future__ import annotations

import pytest

from tests.learning.games import policy, table_agents, train

# Claus & Boutilier 1998; the climbing and the penalty game. Rows: agent 0's action, columns: agent 1's.
CLIMBING = {
    "a": {"a": 11.0, "b": -30.0, "c": 0.0},
    "b": {"a": -30.0, "b": 7.0, "c": 6.0},
    "c": {"a": 0.0, "b": 0.0, "c": 5.0},
}
PENALTY = {
    "a": {"a": 10.0, "b": 0.0, "c": -5.0},
    "b": {"a": 0.0, "b": 2.0, "c": 0.0},
    "c": {"a": -5.0, "b": 0.0, "c": 10.0},
}


def matrix_reward(payoff):
    return lambda first, second: [payoff[one][other] for one, other in zip(first, second, strict=True)]


def expected_payoff(payoff, agents, tokenizer) -> float:
    first, second = (policy(agent, tokenizer, "go") for agent in agents)
    return sum(first[one] * second[other] * payoff[one][other] for one in payoff for other in payoff)


@pytest.mark.parametrize("joint_mode", ["aligned", "cross"])
@pytest.mark.parametrize(
    ("payoff", "start", "good"), [(CLIMBING, -31 / 9, 5.0), (PENALTY, 12 / 9, 9.0)], ids=["climbing", "penalty"]
)
def test_two_agents_coordinate_in_a_matrix_game(payoff, start, good, joint_mode, tmp_path):
    agents, tokenizer = table_agents(["go", "a", "b", "c"], ["a", "b", "c"])
    assert expected_payoff(payoff, agents, tokenizer) == pytest.approx(start, abs=1e-3)
    generations = 16 if joint_mode == "aligned" else 6
    train(agents, tokenizer, "go", matrix_reward(payoff), tmp_path, steps=150, joint_mode=joint_mode,
          num_generations=generations)  # fmt: skip
    found = expected_payoff(payoff, agents, tokenizer)
    # an equilibrium: better than what either agent could get by leaving it alone, and better than safe play
    assert found > good - 0.3


def test_the_negated_reward_is_learned_the_other_way(tmp_path):
    agents, tokenizer = table_agents(["go", "a", "b", "c"], ["a", "b", "c"])
    worst = {one: {other: -value for other, value in row.items()} for one, row in PENALTY.items()}
    train(agents, tokenizer, "go", matrix_reward(worst), tmp_path, steps=150)
    assert expected_payoff(PENALTY, agents, tokenizer) < -3.0


class TestALossThatPaysLater:
    """Turn 1: "low" earns 0.5 less than "high", and only after "low" can turn 2 earn 2. Best: low, then win."""

    @staticmethod
    def play(tmp_path, **fields):
        agents, tokenizer = table_agents(["go", "poor", "rich", "high", "low"], ["high", "low"])

        def reward(first, second, turn, prompt_history_per_agent):
            both_low = [one == other == "low" for one, other in zip(first, second, strict=True)]
            if turn == 0:
                return [0.0 if low else 0.5 for low in both_low]
            both_high = [one == other == "high" for one, other in zip(first, second, strict=True)]
            rich = prompt_history_per_agent[0][-1] == "rich"
            return [2.0 if rich and high else 0.0 for high in both_high]

        def transition(agent_completions):
            return ["rich" if agent_completions == ["low", "low"] else "poor"] * 2

        train(agents, tokenizer, "go", reward, tmp_path, num_turns=2, steps=150, num_generations=6,
              external_prompt_passthrough=True, external_transition=transition, **fields)  # fmt: skip
        return [policy(agent, tokenizer, "go")["low"] for agent in agents]

    def test_is_learned_with_the_future_counted(self, tmp_path):
        assert min(self.play(tmp_path, discount=1.0)) > 0.9

    def test_is_lost_without_it(self, tmp_path):
        low = self.play(tmp_path, discount=0.0)
        assert low[0] * low[1] < 0.1
