"""Samples from the team's own models: what is asked is put into batches, and given back in the order asked."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from typing import cast

import numpy as np
import torch
from peft import PeftModel
from torch import Tensor

from mareinforce.agents.adapters import can_mix
from mareinforce.agents.rollout_weights import RolloutNetworks
from mareinforce.agents.team import Team
from mareinforce.agents.workers import Job, Workers
from mareinforce.errors import NonFiniteError
from mareinforce.rollout.engines.batches import Batch, Sampled
from mareinforce.rollout.engines.decoding import decode, fits
from mareinforce.rollout.engines.generation import generate
from mareinforce.rollout.sampling import uniforms
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

    Agents on one network are sampled together: rows of several adapters mix in one batch.

    Args:
        team: the agents.
        token_budget: most tokens (rows x (longest prompt + max_new_tokens)) in one batch.
        rollout_dtype: precision of the weights while they sample; None: that of training.
        own_loop: sample with `decoding.decode` where it fits; False: always with the models' ``generate``.
        workers: who samples; default: the caller, one network after the other.
    """

    def __init__(
        self,
        team: Team,
        token_budget: int = 32768,
        workers: Workers | None = None,
        own_loop: bool = True,
        rollout_dtype: torch.dtype | None = None,
    ) -> None:
        self.team = team
        self.networks = RolloutNetworks(team, rollout_dtype)
        self.own_loop = own_loop
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

    def _generate(self, rows: list[_Row], sampling: Sampling) -> list[Completion]:
        batch = self._together(rows, sampling)
        sampled = decode(batch) if self.own_loop and fits(batch.network) else generate(batch)
        return [self._completion(row.agent, one) for row, one in zip(rows, sampled, strict=True)]

    def _together(self, rows: list[_Row], sampling: Sampling) -> Batch:
        network = self.networks.network(rows[0].agent)
        numbers = torch.from_numpy(np.stack([uniforms(row.key, sampling.max_new_tokens) for row in rows]))
        device = next(network.parameters()).device
        seats = [self.team.seats[row.agent] for row in rows]
        names = [(seat.adapter, tuple(row.prompt_ids.tolist())) for seat, row in zip(seats, rows, strict=True)]
        places = {name: place for place, name in enumerate(dict.fromkeys(names))}
        return Batch(
            network,
            prompts=[torch.tensor(ids, dtype=torch.int64) for _, ids in places],
            sources=[places[name] for name in names],
            adapters=[seat.adapter for seat in seats],
            tokenizations=[self.team.tokenizations[row.agent] for row in rows],
            # mps has no float64: there the drawing is done on the CPU
            uniforms=numbers if device.type == "mps" else numbers.to(device),
            end_ids=self.team.end_ids(rows[0].agent),
            sampling=sampling,
        )

    def _completion(self, agent: int, sampled: Sampled) -> Completion:
        if not bool(torch.isfinite(sampled.logprobs).all()):
            raise NonFiniteError(
                f"agent {agent}: the logits of its model are no numbers any more. Lower agent_learning_rate or set "
                "max_grad_norm"
            )
        return Completion(sampled.ids, sampled.logprobs, sampled.ended, self.team.answer(agent, sampled.ids))
