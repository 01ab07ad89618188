"""A policy that is written down: for tests, and for games small enough to enumerate."""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence

import numpy as np
import torch
from torch import Tensor

from mareinforce.algorithms.logprobs import tempered_logprobs
from mareinforce.algorithms.masking import cut_at_end
from mareinforce.errors import PromptError
from mareinforce.rollout.sampling import draw, uniforms
from mareinforce.types import Completion, NodePath, Prompt, Request, Sampling, StreamKey

Distribution = Callable[[int, tuple[int, ...], tuple[int, ...]], Sequence[float]]
"""(agent, prompt ids, ids said so far) -> the probability of each of the V tokens."""

Forced = Mapping[tuple[int, NodePath, int], Sequence[int]] | Callable[[StreamKey], Sequence[int]]
"""(agent, node path, k) -> the ids of that completion, as a mapping or as a callable of the stream key."""


class ScriptedEngine:
    """Samples from a known distribution with the same streams as every engine, and encodes word by word.

    Args:
        texts: the V words; a token's id is its place here.
        end_ids: the ids that end a completion.
        distribution: the policy; uniform over ``texts`` if left out.
        forced: completions that are given rather than sampled. Their log-probs are those of ``distribution``.
    """

    def __init__(
        self,
        texts: Sequence[str],
        end_ids: Collection[int],
        distribution: Distribution | None = None,
        forced: Forced | None = None,
    ) -> None:
        self.texts = list(texts)
        self.end_ids = tuple(end_ids)
        self.distribution = distribution
        self.forced = forced

    def encode(self, agent: int, prompt: Prompt) -> Tensor:
        """The ids of the prompt's words (of all its messages), int64 [L]."""
        text = prompt if isinstance(prompt, str) else " ".join(str(message["content"]) for message in prompt)
        words = text.split()
        unknown = [word for word in words if word not in self.texts]
        if unknown or not words:
            raise PromptError(
                f"agent {agent}: the prompt {text!r} must be words of the scripted vocabulary {self.texts}"
            )
        return torch.tensor([self.texts.index(word) for word in words], dtype=torch.int64)

    def decode(self, ids: Sequence[int]) -> str:
        """The words of the ids, end tokens left out."""
        return " ".join(self.texts[token] for token in ids if token not in self.end_ids)

    def sample(self, requests: Sequence[Request], sampling: Sampling) -> list[list[Completion]]:
        """Return, for each request, one completion per key, in the order of the requests and of their keys."""
        return [self._answer(request, sampling) for request in requests]

    def _answer(self, request: Request, sampling: Sampling) -> list[Completion]:
        """The K completions of one prompt, drawn position by position."""
        prompt = tuple(request.prompt_ids.tolist())
        limit = sampling.max_new_tokens
        numbers = np.array([uniforms(key, limit) for key in request.keys])
        forced = [self._given(key, limit) for key in request.keys]
        ids: list[list[int]] = [[] for _ in request.keys]
        logprobs: list[list[float]] = [[] for _ in request.keys]
        speaking = list(range(len(request.keys)))
        for position in range(limit):
            if not speaking:
                break
            logits = torch.stack([self._logits(request.agent, prompt, tuple(ids[k])) for k in speaking])
            forbidden = self.end_ids if position < sampling.min_new_tokens else None
            drawn, _ = draw(logits, torch.from_numpy(numbers[speaking, position]), sampling, forbidden)
            # What is forced takes the place of what was drawn.
            given = [forced[k] for k in speaking]
            tokens = [int(drawn[i]) if row is None else row[position] for i, row in enumerate(given)]
            scores = tempered_logprobs(logits, torch.tensor(tokens), sampling.temperature or 1.0)
            for k, token, score in zip(speaking, tokens, scores.tolist(), strict=True):
                ids[k].append(token)
                logprobs[k].append(score)
            speaking = [k for k in speaking if not self._is_over(ids[k], forced[k])]
        return [self._completion(*both) for both in zip(ids, logprobs, strict=True)]

    def _is_over(self, ids: list[int], forced: list[int] | None) -> bool:
        return ids[-1] in self.end_ids or (forced is not None and len(ids) == len(forced))

    def _completion(self, ids: list[int], logprobs: list[float]) -> Completion:
        _, ended = cut_at_end(ids, self.end_ids)
        return Completion(
            torch.tensor(ids, dtype=torch.int64), torch.tensor(logprobs, dtype=torch.float32), ended, self.decode(ids)
        )

    def _given(self, key: StreamKey, limit: int) -> list[int] | None:
        if self.forced is None:
            return None
        ids = self.forced(key) if callable(self.forced) else self.forced[key.agent, key.path, key.k]
        if not 1 <= len(ids) <= limit:
            raise ValueError(f"{key}: forced {list(ids)}, must be 1 to max_new_tokens={limit} ids")
        return [int(token) for token in ids]

    def _logits(self, agent: int, prompt: tuple[int, ...], said: tuple[int, ...]) -> Tensor:
        """Log-probabilities, float64 [V]."""
        size = len(self.texts)
        probabilities = self.distribution(agent, prompt, said) if self.distribution else [1.0 / size] * size
        row = np.asarray(probabilities, dtype=np.float64)
        if row.shape != (size,) or (row < 0).any() or abs(row.sum() - 1.0) > 1e-6:
            raise ValueError(
                f"distribution{(agent, prompt, said)} gave {row}, must be {size} probabilities that sum to 1"
            )
        return torch.from_numpy(row).log()
