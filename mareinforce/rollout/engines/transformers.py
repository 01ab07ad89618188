"""Sampling with a model's own ``generate``.

Dims: R rows of a batch (one completion each), P tokens of the longest prompt, L new tokens, V vocabulary.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from typing import Any, cast

import numpy as np
import torch
from peft import PeftModel
from torch import Tensor
from transformers import (
    GenerationConfig,
    LogitsProcessor,
    LogitsProcessorList,
    StoppingCriteria,
    StoppingCriteriaList,
)

from mareinforce.agents.adapters import BASE_ROWS, Network, can_mix, mixing
from mareinforce.agents.modes import dropout_off
from mareinforce.agents.scoring import aligned_right
from mareinforce.agents.team import Team
from mareinforce.agents.tokenization import Tokenization
from mareinforce.agents.workers import Job, Workers
from mareinforce.algorithms.masking import cut_at_end
from mareinforce.errors import NonFiniteError
from mareinforce.rollout.sampling import draw, uniforms
from mareinforce.types import Completion, Request, Sampling, StreamKey


@dataclass(frozen=True, slots=True)
class _Row:
    """One completion to sample, and where it belongs."""

    agent: int
    request: int
    position: int  # of its key within the request
    prompt_ids: Tensor
    key: StreamKey


_Batch = tuple[int, tuple[int, ...]]
"""What rows must have in common to be sampled together: the network, and the end tokens."""


class TransformersEngine:
    """Samples from the team's own models, on whatever device each is.

    Agents on one network are sampled together: rows of several adapters mix in one call of ``generate``.

    Args:
        team: the agents.
        token_budget: most tokens (rows x (longest prompt + max_new_tokens)) in one call of ``generate``.
        workers: who samples; default: the caller, one network after the other.
    """

    def __init__(self, team: Team, token_budget: int = 32768, workers: Workers | None = None) -> None:
        self.team = team
        self.token_budget = token_budget
        self.workers = workers or Workers()

    def sample(self, requests: Sequence[Request], sampling: Sampling) -> list[list[Completion]]:
        """Return, for each request, one completion per key, in the order of the requests and of their keys.

        Raises:
            NonFiniteError: if a model's logits stop being numbers.
        """
        batches: dict[_Batch, list[_Row]] = {}
        for index, request in enumerate(requests):
            for position, key in enumerate(request.keys):
                row = _Row(request.agent, index, position, request.prompt_ids, key)
                batches.setdefault(self._batch(request.agent), []).append(row)
        jobs = [
            Job(
                self.team.seats[rows[0].agent].network,
                tuple(sorted({row.agent for row in rows})),
                partial(self._sample_batch, rows, sampling),
            )
            for _, rows in sorted(batches.items())
        ]
        answers: dict[tuple[int, int], Completion] = {}
        for sampled in self.workers.run(jobs):
            answers |= cast("dict[tuple[int, int], Completion]", sampled)
        return [[answers[index, k] for k in range(len(request.keys))] for index, request in enumerate(requests)]

    def _batch(self, agent: int) -> _Batch:
        return self.team.seats[agent].network, self.team.end_ids(agent)

    def _sample_batch(self, rows: list[_Row], sampling: Sampling) -> dict[tuple[int, int], Completion]:
        """Completions by (request, position) of rows that may be sampled together."""
        answers = {}
        for alike in self._that_mix(rows):
            for chunk in self._chunks(alike, sampling.max_new_tokens):
                for row, completion in zip(chunk, self._generate(chunk, sampling), strict=True):
                    answers[row.request, row.position] = completion
        return answers

    def _that_mix(self, rows: list[_Row]) -> list[list[_Row]]:
        """All rows at once, or, where the network's adapters cannot mix in a batch, an adapter at a time."""
        network = self.team.network(rows[0].agent)
        names = sorted({self.team.seats[row.agent].adapter or "" for row in rows})
        if len(names) == 1 or (isinstance(network, PeftModel) and can_mix(network, [name for name in names if name])):
            return [rows]
        return [[row for row in rows if (self.team.seats[row.agent].adapter or "") == name] for name in names]

    def _chunks(self, rows: list[_Row], max_new_tokens: int) -> Iterator[list[_Row]]:
        """Rows of similar prompt length together, as many as the budget allows and at least one."""
        chunk: list[_Row] = []
        for row in sorted(rows, key=lambda row: len(row.prompt_ids)):
            if chunk and (len(chunk) + 1) * (len(row.prompt_ids) + max_new_tokens) > self.token_budget:
                yield chunk
                chunk = []
            chunk.append(row)
        if chunk:
            yield chunk

    @torch.no_grad()  # not inference_mode: buffers that a forward renews must stay usable in training
    def _generate(self, rows: list[_Row], sampling: Sampling) -> list[Completion]:
        network, end_ids = self.team.network(rows[0].agent), self.team.end_ids(rows[0].agent)
        device = next(network.parameters()).device
        prompt_ids, attended = (tensor.to(device) for tensor in aligned_right([row.prompt_ids for row in rows]))
        numbers = torch.from_numpy(np.stack([uniforms(row.key, sampling.max_new_tokens) for row in rows]))
        if device.type != "mps":  # which has no float64: there the drawing is done on the CPU
            numbers = numbers.to(device)
        drawing = _KeyedDraw(numbers, prompt_ids.shape[1], sampling, end_ids)
        inputs = {
            "input_ids": prompt_ids,
            "attention_mask": attended,
            "logits_processor": LogitsProcessorList([drawing]),
            "generation_config": _settings(
                max_new_tokens=sampling.max_new_tokens,
                do_sample=False,  # the processor leaves one token to choose
                eos_token_id=list(end_ids),
                pad_token_id=end_ids[0],
            ),
        }
        stopping = _StopStrings([self.team.tokenizations[row.agent] for row in rows], prompt_ids.shape[1], sampling)
        if stopping.needed:
            inputs["stopping_criteria"] = StoppingCriteriaList([stopping])
        names = [self.team.seats[row.agent].adapter for row in rows]
        with dropout_off(network), _neutral_generation_config(network):
            if len(set(names)) > 1:
                with mixing(network):
                    adapters = [name or BASE_ROWS for name in names]
                    sequences = cast(Any, network).generate(**inputs, adapter_names=adapters)
            else:
                with self.team.speaking(rows[0].agent) as model:
                    sequences = cast(Any, model).generate(**inputs)
        ids = sequences[:, prompt_ids.shape[1] :].cpu()
        logprobs = torch.stack(drawing.logprobs, dim=1).float().cpu()
        ends = stopping.lengths
        return [self._completion(row.agent, ids[i], logprobs[i], end_ids, ends[i]) for i, row in enumerate(rows)]

    def _completion(
        self, agent: int, ids: Tensor, logprobs: Tensor, end_ids: Sequence[int], stopped_at: int | None
    ) -> Completion:
        length, ended = cut_at_end(ids.tolist(), end_ids)
        if stopped_at is not None and stopped_at <= length:  # what follows is filler
            length, ended = stopped_at, True
        kept, kept_logprobs = ids[:length].clone(), logprobs[:length].clone()
        if not bool(torch.isfinite(kept_logprobs).all()):
            raise NonFiniteError(
                f"agent {agent}: the logits of its model are no numbers any more. Lower agent_learning_rate or set "
                "max_grad_norm"
            )
        return Completion(kept, kept_logprobs, ended, self.team.answer(agent, kept))


class _KeyedDraw(LogitsProcessor):
    """Draws each row's next token by its uniform number, and leaves only that one for ``generate`` to choose."""

    def __init__(self, numbers: Tensor, prompt_width: int, sampling: Sampling, end_ids: Sequence[int]) -> None:
        self.numbers = numbers  # float64 [R, L]
        self.prompt_width = prompt_width
        self.sampling = sampling
        self.end_ids = end_ids
        self.logprobs: list[Tensor] = []  # [R] a position

    def __call__(self, input_ids: Tensor, scores: Tensor) -> Tensor:
        position = input_ids.shape[1] - self.prompt_width
        forbidden = self.end_ids if position < self.sampling.min_new_tokens else None
        ids, logprobs = draw(scores.to(self.numbers.device), self.numbers[:, position], self.sampling, forbidden)
        self.logprobs.append(logprobs)
        return torch.full_like(scores, -torch.inf).scatter_(1, ids.unsqueeze(1).to(scores.device), 0.0)


class _StopStrings(StoppingCriteria):
    """Ends the rows whose answer has come to a stop string, and keeps how long each was then."""

    def __init__(self, tokenizations: Sequence[Tokenization], prompt_width: int, sampling: Sampling) -> None:
        self.needed = any(one.rendering.stop for one in tokenizations)
        self.lengths: list[int | None] = [None] * len(tokenizations)
        self._tokenizations = tokenizations
        self._prompt_width = prompt_width
        self._min_new_tokens = sampling.min_new_tokens

    def __call__(self, input_ids: Tensor, scores: Any, **_: Any) -> Tensor:
        length = input_ids.shape[1] - self._prompt_width
        if length >= self._min_new_tokens:
            answers = input_ids[:, self._prompt_width :].tolist()
            before = length - 1 if length > self._min_new_tokens else 0  # until then nobody has looked
            for row, (tokenization, ids) in enumerate(zip(self._tokenizations, answers, strict=True)):
                if self.lengths[row] is None and tokenization.stops(ids, before=before):
                    self.lengths[row] = length
        return torch.tensor([length is not None for length in self.lengths], device=input_ids.device)


def _settings(**fields: Any) -> GenerationConfig:
    return GenerationConfig(**fields)  # type: ignore[no-untyped-call]


@contextmanager
def _neutral_generation_config(network: Network) -> Iterator[None]:
    """Hide the settings that came with the model: ``generate`` fills in from them whatever it is not given."""
    holders = cast(Any, [network, network.get_base_model()] if isinstance(network, PeftModel) else [network])
    shipped = [getattr(holder, "generation_config", None) for holder in holders]
    for holder in holders:
        holder.generation_config = _settings()
    try:
        yield
    finally:
        for holder, config in zip(holders, shipped, strict=True):
            holder.generation_config = config
