"""Joint actions: how the agents' completions at one node combine."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from typing import Literal

from mareinforce.rollout.tree import JointAction


def joint_actions(
    speaking: Sequence[bool], num_completions: int, joint_mode: Literal["aligned", "cross"]
) -> list[JointAction]:
    """The joint actions of a node, [J][N].

    aligned: K joint actions, the k-th completion of every speaking agent together. cross: all K^S combinations of the
    S speaking agents, the first agent's index moving slowest. An idle agent contributes None.
    """
    if joint_mode == "aligned":
        return [tuple(k if speaks else None for speaks in speaking) for k in range(num_completions)]
    choices: list[Sequence[int | None]] = [range(num_completions) if speaks else [None] for speaks in speaking]
    return list(itertools.product(*choices))
