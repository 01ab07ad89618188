"""The records that flow from a prompt row to an optimizer step, and the roles that pass them on.

Dims legend, used in every shape comment and name:

    B rows (prompts)      N agents      K completions of one agent at one node      J joint actions of a node
    T turns               M nodes       L tokens                                    V vocabulary

A *row* is one data set entry; its rollout is a tree of *nodes*. A node is one joint history: each speaking agent
samples K completions there, they combine into J joint actions, and every joint action may have one child node.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal, NamedTuple, Protocol, runtime_checkable

from torch import Tensor

Prompt = str | list[dict[str, Any]]
"""What an agent is shown: text, or a list of messages with ``role`` and ``content``."""

Row = Mapping[str, Any]
IndexedRow = tuple[int, Row]
"""A row with its position in the data set, which names its random streams."""

NodePath = tuple[int, ...]
"""Joint-action indices from the root to a node; ``()`` is the root."""

Purpose = Literal["train", "eval"]


class StreamKey(NamedTuple):
    """Names the stream of uniform numbers that decides one completion, whatever it is batched with."""

    purpose: Purpose
    seed: int
    epoch: int
    row: int
    path: NodePath
    agent: int
    k: int


@dataclass(frozen=True, slots=True)
class Sampling:
    """How tokens are drawn. ``temperature`` 0 takes the most probable token."""

    max_new_tokens: int
    min_new_tokens: int = 0
    temperature: float = 1.0
    top_p: float = 1.0
    top_k: int | None = None


@dataclass(frozen=True, slots=True)
class Request:
    """One agent's prompt at one node, and the streams of the completions wanted for it (one key each)."""

    agent: int
    prompt_ids: Tensor  # int64 [L], on the CPU
    keys: tuple[StreamKey, ...]


@dataclass(frozen=True, slots=True)
class Completion:
    """One sampled answer.

    ``ids`` are exactly the tokens sampled, the end token included where it was sampled and nothing after it.
    ``logprobs`` are those of the policy that sampled them, at the sampling temperature, before top-k and top-p.
    ``text`` is for people and rewards; it is never encoded again.
    """

    ids: Tensor  # int64 [L], on the CPU, L >= 1
    logprobs: Tensor  # float32 [L], on the CPU
    ended: bool  # an end token was sampled; False: cut at max_new_tokens
    text: str


@runtime_checkable
class Engine(Protocol):
    """Samples completions. How requests are batched is the engine's business; the order is the caller's."""

    def sample(self, requests: Sequence[Request], sampling: Sampling) -> list[list[Completion]]:
        """Return, for each request, one completion per key, in the order of the requests and of their keys."""
        ...


@runtime_checkable
class Encoder(Protocol):
    """Turns what an agent is shown into the ids it is given."""

    def encode(self, agent: int, prompt: Prompt) -> Tensor:
        """Return the prompt's ids, int64 [L] on the CPU. Raises PromptError if the agent cannot be given it."""
        ...


class ReferenceKL(NamedTuple):
    """How far an agent's K completions at one node are from its frozen reference, in nats."""

    charged: Tensor  # float64 [K], by `reference_kl_estimator`; times the coefficient it is what is subtracted
    k3: Tensor  # float64 [K], what is logged whichever is charged


@dataclass(slots=True)
class Answers:
    """What one speaking agent does at one node: the prompt it is shown and its K completions."""

    prompt: Prompt
    prompt_ids: Tensor  # int64 [L]
    completions: list[Completion] = field(default_factory=list)  # [K]
    conversation: Prompt | None = None  # what a next turn goes on from, where a formatter adds to what is shown
    kl: ReferenceKL | None = None


@dataclass(frozen=True, slots=True)
class NodeSample:
    """One agent's completions at one node with what they were worth: the unit of the rollout buffer.

    K is here the number of those that have a return: all that were sampled, unless rewards were skipped.
    """

    agent: int
    turn: int
    row: int
    path: NodePath
    prompt_ids: Tensor  # int64 [L]
    completions: tuple[Completion, ...]  # [K]
    returns: Tensor  # float64 [K], before any KL
    advantages: Tensor  # float64 [K]
    zero_signal: bool  # all returns equal
    weight: float  # of this sample within an optimizer step; 1 unless turn_weighting is "tree"
    env_step: int  # joint actions scored up to and including this node
    policy_version: int  # how often the agent's weights had changed when it was sampled
    kl: ReferenceKL | None = None
    kl_penalty: Tensor | None = None  # float64 [K], what was subtracted
    ks: tuple[int, ...] = ()  # [K], which of the node's completions they are; (): all, in their order
