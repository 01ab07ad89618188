"""Sampling in a loop of our own: a prompt is read once for all of its samples, and rows that ended leave the batch.

Only for architectures that it fits, see `fits`; `generation.generate` serves all others. Both give the same samples.

Dims: R rows of a batch (one completion each), U different prompts, P tokens of the longest prompt, L new tokens.
"""

from __future__ import annotations

import inspect
from collections.abc import Sequence
from itertools import groupby
from typing import Any

import torch
from torch import Tensor, nn
from transformers import DynamicCache, PreTrainedModel
from transformers.cache_utils import DynamicLayer, DynamicSlidingWindowLayer

from mareinforce.agents.adapters import Network, inner_model
from mareinforce.agents.packed_weights import PackedWeights
from mareinforce.agents.scoring import aligned_right
from mareinforce.rollout.engines.batches import Batch, Sampled, StopStrings
from mareinforce.rollout.sampling import draw

LEAVE_SHARE = 8
"""Ended rows leave the batch once they are at least 1 in so many: each leaving copies what the others have cached."""


def fits(network: Network) -> bool:
    """Can this loop sample from the network?

    It can if the network is one of transformers' own decoders, whose memory of what was read is keys and values in
    every layer (no recurrent state, no encoder), and which takes position ids, so that a row's positions do not depend
    on the rows around it. Layers that look back through a window keep everything here, and their mask forgets.
    """
    model = inner_model(network)
    if not isinstance(model, PreTrainedModel) or not type(model).__module__.startswith("transformers.models."):
        return False
    if model.config.is_encoder_decoder or getattr(model, "_is_stateful", False):
        return False
    accepted = inspect.signature(model.forward).parameters.keys()
    if not {"position_ids", "attention_mask", "logits_to_keep"} <= accepted or _cache_name(model) is None:
        return False
    return all(
        type(layer) in (DynamicLayer, DynamicSlidingWindowLayer) for layer in DynamicCache(config=model.config).layers
    )


def _cache_name(model: nn.Module) -> str | None:
    """What the model calls its cache, which depends on the version of transformers; None: it takes none."""
    accepted = inspect.signature(model.forward).parameters.keys()
    return next((name for name in ("cache", "past_key_values") if name in accepted), None)


@torch.no_grad()  # not inference_mode: buffers that a forward renews must stay usable in training
def decode(batch: Batch) -> list[Sampled]:
    """Sample every row of the batch: one forward over its different prompts, then one a token over its open rows."""
    limit, end_ids = batch.sampling.max_new_tokens, frozenset(batch.end_ids)
    strings = StopStrings(batch)
    rows = list(range(len(batch.sources)))  # those in the batch
    answers: list[list[int]] = [[] for _ in rows]
    ended = [False] * len(rows)
    numbers = batch.uniforms
    scores: list[tuple[list[int], Tensor]] = []  # of every position: who was in the batch, and their log-probs
    with batch.speaking() as speakers, PackedWeights(batch.network, limit) as weights:
        reader = _Reader(batch, speakers)
        logits = reader.read_prompts()
        for position in range(limit):
            forbidden = batch.end_ids if position < batch.sampling.min_new_tokens else None
            drawn, logprobs = draw(logits.to(numbers.device), numbers[:, position], batch.sampling, forbidden)
            scores.append((rows, logprobs))
            for row, token in zip(rows, drawn.tolist(), strict=True):
                if ended[row]:
                    continue  # what it draws until it leaves is filler
                answers[row].append(token)
                ended[row] = token in end_ids or (strings.needed and strings.reached(row, answers[row]))
            open_places = [place for place, row in enumerate(rows) if not ended[row]]
            if not open_places or position + 1 == limit:
                break
            if (len(rows) - len(open_places)) * LEAVE_SHARE >= len(rows):
                rows = [rows[place] for place in open_places]
                drawn, numbers = drawn[open_places], numbers[open_places]
                reader.keep(open_places)
            weights.pack(len(rows))
            logits = reader.read(drawn)
    table = _by_row(scores, len(answers))
    return [Sampled(torch.tensor(ids), table[row, : len(ids)].clone(), ended[row]) for row, ids in enumerate(answers)]


def _by_row(scores: Sequence[tuple[list[int], Tensor]], count: int) -> Tensor:
    """Log-probs of each position's rows as one table on the CPU, float32 [R, L]; 0 where a row was gone."""
    table = torch.zeros(count, len(scores))
    position = 0
    for _, together in groupby(scores, key=lambda one: id(one[0])):  # positions with the same rows
        group = list(together)
        stacked = torch.stack([logprobs for _, logprobs in group], dim=1).float().cpu()
        table[group[0][0], position : position + len(group)] = stacked
        position += len(group)
    return table


class _Reader:
    """A batch as its network has read it so far: the cache, and where each row is."""

    def __init__(self, batch: Batch, speakers: Any) -> None:
        self.batch, self.speakers = batch, speakers
        self.rows: Sequence[int] = range(len(batch.sources))
        prompt_ids, attended = aligned_right(batch.prompts)
        self.device = batch.device
        self.prompt_ids, self.attended = prompt_ids.to(self.device), attended.to(self.device)
        self.filled = bool((attended == 0).any())  # else all is attended to, and no mask needed
        self.positions = self.attended.sum(dim=1)  # [U], then [R]: the next one
        model = inner_model(batch.network)
        self.cache_name = _cache_name(model) or ""
        layers = DynamicCache(config=model.config).layers
        room = prompt_ids.shape[1] + batch.sampling.max_new_tokens
        self.cache = DynamicCache()
        self.cache.layers = [RoomyLayer(room) for _ in layers]

    def read_prompts(self) -> Tensor:
        """Read each prompt once. Logits of every row's first token, [R, V]; from here on there is a cache a row."""
        sources = torch.tensor(self.batch.sources, device=self.device)
        first_rows = [self.batch.sources.index(prompt) for prompt in range(len(self.batch.prompts))]
        positions = (self.attended.cumsum(dim=1) - 1).clamp(min=0)
        logits = self._forward(self.prompt_ids, positions, first_rows)
        self._select(sources)
        return logits[sources]

    def read(self, ids: Tensor) -> Tensor:
        """Read the rows' next token, int64 [R]. Logits of the one after it, [R, V]."""
        if self.filled:
            grown = self.attended.new_ones(len(self.attended), 1)
            self.attended = torch.cat([self.attended, grown], dim=1)
        logits = self._forward(ids.to(self.device).unsqueeze(1), self.positions.unsqueeze(1), self.rows)
        self.positions = self.positions + 1
        return logits

    def keep(self, places: Sequence[int]) -> None:
        """Go on with these rows alone."""
        self.rows = [self.rows[place] for place in places]
        self._select(torch.tensor(places, device=self.device))

    def _select(self, indices: Tensor) -> None:
        self.cache.batch_select_indices(indices)
        self.attended, self.positions = self.attended[indices], self.positions[indices]

    def _forward(self, ids: Tensor, positions: Tensor, rows: Sequence[int]) -> Tensor:
        model, options = self.speakers(rows)
        found: Tensor = model(
            input_ids=ids,
            position_ids=positions,
            attention_mask=self.attended if self.filled else None,
            use_cache=True,
            logits_to_keep=1,
            **{self.cache_name: self.cache},
            **options,
        ).logits
        return found[:, -1].float()  # as `generate` does: the draw is not to be as coarse as the weights


class RoomyLayer(DynamicLayer):  # type: ignore[no-untyped-call]
    """A layer's keys and values [R, heads, L, width] in memory that is taken once: appending a token copies no other.

    Args:
        room: positions there will be.
    """

    def __init__(self, room: int) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.room = room
        self._homes: dict[str, Tensor] = {}

    def update(self, key_states: Tensor, value_states: Tensor, *args: Any, **kwargs: Any) -> tuple[Tensor, Tensor]:
        """Append keys and values; returns all of them."""
        if not self.is_initialized:
            self.lazy_initialization(key_states, value_states)
        self.keys, self.values = self._append("keys", key_states), self._append("values", value_states)
        return self.keys, self.values

    def batch_select_indices(self, indices: Tensor) -> None:
        """Only keep these rows, each as often as it is listed."""
        for name in list(self._homes):
            used: Tensor = getattr(self, name)
            home = used.new_empty(len(indices), used.shape[1], self.room, used.shape[3])
            self._homes[name] = home
            setattr(self, name, home[:, :, : used.shape[2]].copy_(used[indices]))

    def _append(self, name: str, new: Tensor) -> Tensor:
        used: Tensor = getattr(self, name)
        if name not in self._homes:  # prompts are read once, and then selected from: no room is needed yet
            self._homes[name] = new
            return new
        before = used.shape[2]
        home = self._homes[name]
        if home.shape[2] < before + new.shape[2]:
            raise RuntimeError(f"a cache of {home.shape[2]} positions cannot take {before + new.shape[2]}")
        home[:, :, before : before + new.shape[2]] = new
        return home[:, :, : before + new.shape[2]]
