"""The rollout buffer of one agent: when it updates, and how its samples are cut into mini-batches."""

from __future__ import annotations

import hashlib
import random
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Literal

from mareinforce.types import NodeSample


@dataclass(slots=True)
class RolloutBuffer:
    """Holds one agent's node samples until there are `capacity` of them (None: until it is flushed)."""

    capacity: int | None
    samples: list[NodeSample] = field(default_factory=list)

    def add(self, sample: NodeSample) -> list[NodeSample]:
        """Add a sample; return the whole buffer, emptied, if that filled it, else an empty list."""
        self.samples.append(sample)
        return self.flush() if len(self.samples) == self.capacity else []

    def flush(self) -> list[NodeSample]:
        """Return what is left and forget it."""
        samples, self.samples = self.samples, []
        return samples


def mini_batches(
    samples: Sequence[NodeSample],
    *,
    batch_size: int | None,
    turn_weighting: Literal["sample", "tree"],
    seed: int,
    agent: int,
    update: int,
) -> list[list[NodeSample]]:
    """Cut a full buffer into the mini-batches of one optimizer step each.

    Lowest turn first, shuffled within the turn, never mixing turns; with ``turn_weighting="tree"`` all in one. The
    shuffle depends on nothing but (seed, agent, update), so resuming needs no saved random state.
    """
    if not samples:
        return []
    if turn_weighting == "tree":
        return [list(samples)]
    key = hashlib.blake2b(repr(("shuffle", seed, agent, update)).encode(), digest_size=8).digest()
    order = random.Random(int.from_bytes(key, "big"))
    batches = []
    for turn in sorted({sample.turn for sample in samples}):
        group = [sample for sample in samples if sample.turn == turn]
        order.shuffle(group)
        size = batch_size or len(samples)
        batches += [group[start : start + size] for start in range(0, len(group), size)]
    return batches
