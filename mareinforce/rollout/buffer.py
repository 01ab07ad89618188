"""The rollout buffer of one policy: when it updates, and how its samples are cut into mini-batches."""

from __future__ import annotations

import dataclasses
import hashlib
import random
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal

from mareinforce.types import Completion, NodeSample, ReferenceKL

NodeSamples = tuple[NodeSample, ...]
"""The samples of one node by the agents of one policy: one, unless agents share their weights."""


@dataclass(slots=True)
class RolloutBuffer:
    """Holds what a policy learns from until there are `capacity` nodes of it (None: until it is flushed)."""

    capacity: int | None
    nodes: list[NodeSamples] = field(default_factory=list)

    def add(self, node: NodeSamples) -> list[NodeSamples]:
        """Add a node's samples; return the whole buffer, emptied, if that filled it, else an empty list."""
        self.nodes.append(node)
        # a resumed run may have fewer places than what waits already
        return self.flush() if self.capacity is not None and len(self.nodes) >= self.capacity else []

    def flush(self) -> list[NodeSamples]:
        """Return what is left and forget it."""
        nodes, self.nodes = self.nodes, []
        return nodes

    def state_dict(self) -> list[list[dict[str, Any]]]:
        """What waits in the buffer."""
        return [[sample_state(sample) for sample in node] for node in self.nodes]

    def load_state_dict(self, state: Sequence[Sequence[Mapping[str, Any]]]) -> None:
        """Wait with what a checkpoint held."""
        self.nodes = [tuple(sample_of_state(sample) for sample in node) for node in state]


def sample_state(sample: NodeSample) -> dict[str, Any]:
    """A node sample in plain values and tensors, as a checkpoint may hold them."""
    state = {field.name: getattr(sample, field.name) for field in dataclasses.fields(sample)}
    state["completions"] = [(one.ids, one.logprobs, one.ended, one.text) for one in sample.completions]
    state["kl"] = None if sample.kl is None else tuple(sample.kl)
    return state


def sample_of_state(state: Mapping[str, Any]) -> NodeSample:
    """The node sample again."""
    completions = tuple(Completion(*one) for one in state["completions"])
    kl = None if state["kl"] is None else ReferenceKL(*state["kl"])
    return NodeSample(
        **{
            **state,
            "completions": completions,
            "kl": kl,
            "path": tuple(state["path"]),
            "ks": tuple(state.get("ks", ())),
        }
    )


def by_node(samples: Sequence[NodeSample]) -> list[NodeSamples]:
    """Samples, in their order, with those of one node together."""
    nodes: dict[tuple[int, tuple[int, ...]], list[NodeSample]] = {}
    for sample in samples:
        nodes.setdefault((sample.env_step, sample.path), []).append(sample)
    return [tuple(node) for node in nodes.values()]


def mini_batches(
    nodes: Sequence[NodeSamples],
    *,
    batch_size: int | None,
    turn_weighting: Literal["sample", "tree"],
    seed: int,
    agent: int,
    update: int,
) -> list[list[NodeSample]]:
    """Cut a full buffer into the mini-batches of one optimizer step each.

    ``batch_size`` counts nodes. Lowest turn first, shuffled within the turn, never mixing turns; with
    ``turn_weighting="tree"`` all in one. The shuffle depends on nothing but (seed, agent, update), so resuming needs no
    saved random state.
    """
    if not nodes:
        return []
    if turn_weighting == "tree":
        return [[sample for node in nodes for sample in node]]
    key = hashlib.blake2b(repr(("shuffle", seed, agent, update)).encode(), digest_size=8).digest()
    order = random.Random(int.from_bytes(key, "big"))
    batches = []
    for turn in sorted({node[0].turn for node in nodes}):
        group = [node for node in nodes if node[0].turn == turn]
        order.shuffle(group)
        size = batch_size or len(nodes)
        for start in range(0, len(group), size):
            batches.append([sample for node in group[start : start + size] for sample in node])
    return batches


def side_by_side(
    batches: Sequence[list[NodeSample]], turns: Sequence[Sequence[int]], rank: int
) -> list[list[NodeSample]]:
    """One rank's mini-batches for the optimizer steps of all ranks: empty where others have more of a turn.

    ``turns``: the turn of every rank's mini-batches, by rank, lowest first. Steps never mix turns.
    """
    waiting = list(batches)
    steps = []
    for turn in sorted({turn for own in turns for turn in own}):
        counts = [list(own).count(turn) for own in turns]
        steps += [waiting.pop(0) if step < counts[rank] else [] for step in range(max(counts))]
    return steps
