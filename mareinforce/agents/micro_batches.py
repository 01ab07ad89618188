"""Cuts what is to be scored into parts that are scored one after the other, within a budget of tokens."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import NamedTuple

from mareinforce.agents.node_scoring import Told


class Piece(NamedTuple):
    """Some of a node's completions: all of them, unless the node is larger than the budget."""

    node: int
    completions: range

    def of(self, nodes: Sequence[Told]) -> Told:
        """What is scored."""
        told = nodes[self.node]
        return Told(told.prompt_ids, [told.completion_ids[k] for k in self.completions])


def micro_batches(nodes: Sequence[Told], budget: int) -> Iterator[list[Piece]]:
    """Pieces of at most ``budget`` tokens together, or of one completion where even that is more.

    A prompt counts once a piece. A node is cut only if it does not fit into a micro-batch of its own: every piece reads
    the prompt again.
    """
    part: list[Piece] = []
    filled = 0
    for node, told in enumerate(nodes):
        for piece in _pieces(node, told, budget):
            size = _tokens(told, piece.completions)
            if part and filled + size > budget:
                yield part
                part, filled = [], 0
            part.append(piece)
            filled += size
    if part:
        yield part


def _pieces(node: int, told: Told, budget: int) -> Iterator[Piece]:
    start = 0
    for k in range(len(told.completion_ids)):
        if k > start and _tokens(told, range(start, k + 1)) > budget:
            yield Piece(node, range(start, k))
            start = k
    yield Piece(node, range(start, len(told.completion_ids)))


def _tokens(told: Told, completions: range) -> int:
    return len(told.prompt_ids) + sum(len(told.completion_ids[k]) for k in completions)
