"""What is measured: means since the last row, and the turn-wise rewards and returns of grown trees."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from mareinforce.rollout.tree import Node, nodes_by_level, valid
from mareinforce.types import NodeSample

MAXIMA = ("importance_ratio_max", "sampling_gap")
"""Metrics of which the largest counts, not the mean."""
SUMS = ("skipped_rewards", "skipped_returns")
"""Metrics that are counted, not averaged."""


class RunningMeans:
    """Means (of `MAXIMA`: the largest; of `SUMS`: the sum), by name, of what was added since they were last taken."""

    def __init__(self) -> None:
        self._totals: dict[str, tuple[float, float]] = {}

    def add(self, values: Mapping[str, float], weight: float = 1.0) -> None:
        """Add one value a name, counted `weight` times."""
        for name, value in values.items():
            total, count = self._totals.get(name, (0.0, 0.0))
            if name.endswith(MAXIMA):
                self._totals[name] = (max(value, total) if count else value, 1.0)
            elif name.endswith(SUMS):
                self._totals[name] = (total + value, 1.0)
            else:
                self._totals[name] = (total + weight * value, count + weight)

    def add_trees(self, trees: Sequence[Node], num_turns: int, *, skips: bool = False) -> None:
        """Add the turn-wise values of trees whose returns are assigned. ``skips``: and how much was skipped."""
        for root in trees:
            self.add(row_metrics(root, num_turns))
            for node in nodes_by_level(root):
                self.add({**node_metrics(node), **(skipped_metrics(node) if skips else {})})

    def add_agent(self, agent: int, values: Mapping[str, float]) -> None:
        """Add values of one agent, under `agent_i/...`."""
        self.add({f"agent_{agent}/{name}": value for name, value in values.items()})

    def take(self) -> dict[str, float]:
        """Return the means and start afresh."""
        means = {name: total / count for name, (total, count) in self._totals.items() if count}
        self._totals = {}
        return means

    def merge(self, state: Mapping[str, tuple[float, float]]) -> None:
        """Add what another process has added up, from its `state_dict`."""
        for name, (total, count) in state.items():
            own, weight = self._totals.get(name, (0.0, 0.0))
            if name.endswith(MAXIMA):
                self._totals[name] = (max(total, own) if weight else total, 1.0)
            elif name.endswith(SUMS):
                self._totals[name] = (own + total, 1.0)
            else:
                self._totals[name] = (own + total, weight + count)

    def state_dict(self) -> dict[str, tuple[float, float]]:
        """The sums and counts since the last row."""
        return dict(self._totals)

    def load_state_dict(self, state: Mapping[str, tuple[float, float]]) -> None:
        """Go on from saved sums and counts."""
        self._totals = {name: (total, count) for name, (total, count) in state.items()}


def mean(values: Sequence[float]) -> float:
    """The arithmetic mean of at least one number."""
    return sum(values) / len(values)


def carried_reward(node: Node, turn: int) -> float | None:
    """Mean reward of a row at a turn (0-based), where a branch that ended earlier counts with its last reward.

    A branch that ended because its reward was skipped does not count; None if no other is left.
    """
    if node.turn == turn:
        found = valid(node.rewards)
    else:
        found = valid(
            [
                reward if child is None else carried_reward(child, turn)
                for reward, child in zip(node.rewards, node.children, strict=True)
            ]
        )
    return mean(found) if found else None


def node_metrics(node: Node) -> dict[str, float]:
    """Turn-wise means of one node whose returns are assigned; each node counts alike in the mean of a turn.

    What was skipped does not count, and a mean of nothing is left out.
    """
    turn = f"turn_{node.turn + 1}"
    values = {
        **{f"{turn}/{name}_mean": valid(values) for name, values in node.components.items()},
        f"{turn}/reward_mean": valid(node.rewards),
        f"{turn}/expected_return": valid(node.returns),
        f"{turn}/raw_reward_mean": valid(node.raw_rewards),
    }
    return {name: mean(found) for name, found in values.items() if found}


def skipped_metrics(node: Node) -> dict[str, float]:
    """How many of a node's rewards were skipped, and how many others have no return because all below them were."""
    turn, skipped = f"turn_{node.turn + 1}", node.rewards.count(None)
    return {f"{turn}/skipped_rewards": skipped, f"{turn}/skipped_returns": node.returns.count(None) - skipped}


def row_metrics(root: Node, num_turns: int) -> dict[str, float]:
    """Turn-wise values of one row: had it still a node at that turn, and its carried reward, if there is one."""
    reached = {node.turn for node in nodes_by_level(root)}
    values = {}
    for turn in range(num_turns):
        values[f"turn_{turn + 1}/coverage"] = float(turn in reached)
        carried = carried_reward(root, turn)
        if carried is not None:
            values[f"turn_{turn + 1}/reward_mean_carried"] = carried
    return values


def kl_metrics(sample: NodeSample) -> dict[str, float]:
    """Turn-wise means of one agent's KL to its reference (k3), and of what it was charged; nothing without one."""
    if sample.kl is None or sample.kl_penalty is None:
        return {}
    turn = f"turn_{sample.turn + 1}"
    return {
        f"{turn}/reference_kl_mean": float(sample.kl.k3.mean()),
        f"{turn}/reference_kl_penalty_mean": float(sample.kl_penalty.mean()),
    }


def completion_metrics(sample: NodeSample) -> dict[str, float]:
    """Means over one agent's K completions at one node: tokens (the end token included), share cut, no signal."""
    lengths = [float(len(completion.ids)) for completion in sample.completions]
    return {
        "completion_length": mean(lengths),
        "truncated_fraction": mean([float(not completion.ended) for completion in sample.completions]),
        "zero_signal_fraction": float(sample.zero_signal),
    }
