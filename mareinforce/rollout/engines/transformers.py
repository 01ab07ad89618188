"""Sampling with a model's own ``generate``.

Dims: R rows of a batch (one completion each), P tokens of the longest prompt, L new tokens, V vocabulary.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, cast

import numpy as np
import torch
from torch import Tensor
from transformers import GenerationConfig, LogitsProcessor, LogitsProcessorList, PreTrainedModel

from mareinforce.agents.modes import dropout_off
from mareinforce.agents.scoring import aligned_right
from mareinforce.agents.team import Team
from mareinforce.algorithms.masking import cut_at_end
from mareinforce.errors import NonFiniteError
from mareinforce.rollout.sampling import draw, uniforms
from mareinforce.types import Completion, Request, Sampling, StreamKey


@dataclass(frozen=True, slots=True)
class _Row:
    """One completion to sample, and where it belongs."""

    request: int
    position: int  # of its key within the request
    prompt_ids: Tensor
    key: StreamKey


class TransformersEngine:
    """Samples from the team's own models, on whatever device each is.

    Args:
        team: the agents.
        token_budget: most tokens (rows x (longest prompt + max_new_tokens)) in one call of ``generate``.
    """

    def __init__(self, team: Team, token_budget: int = 32768) -> None:
        self.team = team
        self.token_budget = token_budget

    def sample(self, requests: Sequence[Request], sampling: Sampling) -> list[list[Completion]]:
        """Return, for each request, one completion per key, in the order of the requests and of their keys.

        Raises:
            NonFiniteError: if a model's logits stop being numbers.
        """
        answers: dict[tuple[int, int], Completion] = {}
        for agent in sorted({request.agent for request in requests}):
            rows = [
                _Row(index, position, request.prompt_ids, key)
                for index, request in enumerate(requests)
                if request.agent == agent
                for position, key in enumerate(request.keys)
            ]
            for chunk in self._chunks(rows, sampling.max_new_tokens):
                for row, completion in zip(chunk, self._generate(agent, chunk, sampling), strict=True):
                    answers[row.request, row.position] = completion
        return [[answers[index, k] for k in range(len(request.keys))] for index, request in enumerate(requests)]

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
    def _generate(self, agent: int, rows: list[_Row], sampling: Sampling) -> list[Completion]:
        model = self.team.model(agent)
        end_ids = self.team.end_ids(agent)
        device = next(model.parameters()).device
        prompt_ids, attended = (tensor.to(device) for tensor in aligned_right([row.prompt_ids for row in rows]))
        numbers = torch.from_numpy(np.stack([uniforms(row.key, sampling.max_new_tokens) for row in rows]))
        if device.type != "mps":  # which has no float64: there the drawing is done on the CPU
            numbers = numbers.to(device)
        drawing = _KeyedDraw(numbers, prompt_ids.shape[1], sampling, end_ids)
        with dropout_off(model), _neutral_generation_config(model):
            sequences = cast(Any, model).generate(
                input_ids=prompt_ids,
                attention_mask=attended,
                logits_processor=LogitsProcessorList([drawing]),
                generation_config=_settings(
                    max_new_tokens=sampling.max_new_tokens,
                    do_sample=False,  # the processor leaves one token to choose
                    eos_token_id=list(end_ids),
                    pad_token_id=end_ids[0],
                ),
            )
        ids = sequences[:, prompt_ids.shape[1] :].cpu()
        logprobs = torch.stack(drawing.logprobs, dim=1).float().cpu()
        return [self._completion(agent, ids[row], logprobs[row], end_ids) for row in range(len(rows))]

    def _completion(self, agent: int, ids: Tensor, logprobs: Tensor, end_ids: Sequence[int]) -> Completion:
        length, ended = cut_at_end(ids.tolist(), end_ids)
        kept, kept_logprobs = ids[:length].clone(), logprobs[:length].clone()
        if not bool(torch.isfinite(kept_logprobs).all()):
            raise NonFiniteError(
                f"agent {agent}: the logits of its model are no numbers any more. Lower agent_learning_rate or set "
                "max_grad_norm"
            )
        return Completion(kept, kept_logprobs, ended, self.team.decode(agent, kept))


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


def _settings(**fields: Any) -> GenerationConfig:
    return GenerationConfig(**fields)  # type: ignore[no-untyped-call]


@contextmanager
def _neutral_generation_config(model: PreTrainedModel) -> Iterator[None]:
    """Hide the settings that came with the model: ``generate`` fills in from them whatever it is not given."""
    shipped = model.generation_config
    model.generation_config = _settings()
    try:
        yield
    finally:
        model.generation_config = shipped
