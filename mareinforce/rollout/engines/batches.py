"""What is sampled together, and what comes of it: the records between an engine and its ways of sampling.

Dims: R rows of a batch (one completion each), U different prompts, P tokens of the longest prompt, L new tokens.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, NamedTuple, cast

import torch
from peft import PeftModel
from torch import Tensor, nn

from mareinforce.agents.adapters import BASE_ROWS, Network, mixing, speaking
from mareinforce.agents.mixed_rows import Mixture, fit_side_by_side, side_by_side
from mareinforce.agents.modes import dropout_off
from mareinforce.agents.tokenization import Tokenization
from mareinforce.types import Sampling


class Sampled(NamedTuple):
    """One row's completion: its ids int64 [L] and log-probs float32 [L], on the CPU, and whether it ended by itself."""

    ids: Tensor
    logprobs: Tensor
    ended: bool


@dataclass(frozen=True, slots=True)
class Batch:
    """Rows that are sampled together: those of one network, with the same end tokens."""

    network: Network
    prompts: Sequence[Tensor]  # int64 [U] x [P_u]
    sources: Sequence[int]  # [R], each row's prompt
    adapters: Sequence[str | None]  # [R], each row's adapter; None: the base
    tokenizations: Sequence[Tokenization]  # [R]
    uniforms: Tensor  # float64 [R, L], where the drawing is done
    end_ids: Sequence[int]
    sampling: Sampling

    def row_prompts(self) -> list[Tensor]:
        """Each row's prompt ids, [R] x [P_r]."""
        return [self.prompts[source] for source in self.sources]

    @property
    def device(self) -> torch.device:
        """Where the network is."""
        return next(self.network.parameters()).device

    @contextmanager
    def speaking(self) -> Iterator[Callable[[Sequence[int]], tuple[nn.Module, dict[str, Any]]]]:
        """Each row's own adapter, dropout off: gives a function, rows -> the model and what else it must be given."""
        with dropout_off(self.network):
            if len(set(self.adapters)) > 1 and fit_side_by_side(cast(PeftModel, self.network)):
                with side_by_side(cast(PeftModel, self.network), mixture := Mixture()) as model:

                    def speakers(rows: Sequence[int]) -> tuple[nn.Module, dict[str, Any]]:
                        mixture.tell([self.adapters[row] for row in rows])
                        return model, {}

                    yield speakers
            elif len(set(self.adapters)) > 1:
                with mixing(self.network):
                    yield lambda rows: (
                        self.network,
                        {"adapter_names": [self.adapters[row] or BASE_ROWS for row in rows]},
                    )
            else:
                with speaking(self.network, self.adapters[0]) as model:
                    yield lambda rows: (cast(nn.Module, model), {})


class StopStrings:
    """Says which rows have come to a stop string."""

    def __init__(self, batch: Batch) -> None:
        self._tokenizations = batch.tokenizations
        self._min_new_tokens = batch.sampling.min_new_tokens
        self.needed = any(one.rendering.stop for one in batch.tokenizations)

    def reached(self, row: int, ids: list[int]) -> bool:
        """Has the row's answer so far come to one? Asked after every token from ``min_new_tokens`` on."""
        if len(ids) < self._min_new_tokens:
            return False
        before = len(ids) - 1 if len(ids) > self._min_new_tokens else 0  # until then nobody has looked
        return self._tokenizations[row].stops(ids, before=before)
