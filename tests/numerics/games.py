"""Small games that can be played out in every possible way, and what they are worth, exactly.

Two tokens, 0 and 1. A policy is one logit per (agent, prompt): the log-odds of token 1. Prompts spell the joint
history ("", "01", "01-10"), so every history has parameters of its own. Everything is float64.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor

from mareinforce.rewards.contract import Reward
from mareinforce.rollout.expand import Episode, Expansion
from mareinforce.rollout.prompts import Formatters
from mareinforce.rollout.transition import Transition
from mareinforce.rollout.tree import Node, nodes_by_level
from mareinforce.types import Completion, Request, Sampling

SPEAKERS = Callable[[str, int], bool]
"""(history, agent) -> does it speak there?"""


@dataclass
class Policy:
    """Logits of token 1, one parameter per (agent, history), made on first use; or a token forced with certainty."""

    forced: Callable[[str, int], int | None] = lambda history, agent: None
    logits: dict[tuple[int, str], Tensor] = field(default_factory=dict)

    def logprob(self, agent: int, history: str, token: int) -> Tensor:
        """Log-probability of a token; exactly 0 or -inf where the policy is forced."""
        only = self.forced(history, agent)
        if only is not None:
            return torch.tensor(0.0 if token == only else -torch.inf, dtype=torch.float64)
        key = (agent, history)
        if key not in self.logits:
            start = 0.9 * torch.sin(torch.tensor(float(len(self.logits)) * 1.7 + 0.3, dtype=torch.float64))
            self.logits[key] = start.requires_grad_()
        logit = self.logits[key]
        return torch.nn.functional.logsigmoid(logit if token else -logit)


@dataclass
class Game:
    """Rewards by (history, joint tokens), played for some turns by two agents."""

    reward: Callable[[str, str], float]
    num_turns: int
    policy: Policy
    speaks: SPEAKERS = lambda history, agent: True
    num_agents: int = 2

    def tokens(self, history: str) -> list[Sequence[int]]:
        """The tokens each agent may say at a history; [-1] where it is idle."""
        return [(0, 1) if self.speaks(history, agent) else (-1,) for agent in range(self.num_agents)]

    def value(self, history: str, turn: int, discount: float, threshold: float | None = None, hold: bool = False):
        """The objective at a history: the expected discounted sum of rewards; with per-joint-action stopping."""
        total = torch.zeros((), dtype=torch.float64)
        for joint in itertools.product(*self.tokens(history)):
            probability = torch.ones((), dtype=torch.float64)
            for agent, token in enumerate(joint):
                if token >= 0:
                    probability = probability * self.policy.logprob(agent, history, token).exp()
            said = spell(joint)
            reward = self.reward(history, said)
            later = torch.zeros((), dtype=torch.float64)
            last = turn == self.num_turns - 1
            if not last and threshold is not None and reward > threshold:
                skipped = range(1, self.num_turns - turn)
                later = later + (reward * sum(discount**step for step in skipped) if hold else 0.0)
            elif not last:
                later = discount * self.value(after(history, said), turn + 1, discount, threshold, hold)
            if float(probability.detach()) > 0:
                total = total + probability * (reward + later)
        return total


def spell(joint: Sequence[int]) -> str:
    """Tokens as text, one character an agent; "_" for silence."""
    return "".join("_" if token < 0 else str(token) for token in joint)


def after(history: str, said: str) -> str:
    """The history that follows a joint answer."""
    return f"{history}-{said}" if history else said


@dataclass
class Outcome:
    """One way a whole tree can come out."""

    root: Node
    logprob: Tensor  # of every completion in it, with a graph to the policy's logits


class _Choices:
    """Plays the engine and the encoder, making the choices it is told and recording those still open."""

    def __init__(self, policy: Policy) -> None:
        self.policy = policy
        self.made: list[int] = []
        self.prompts: dict[tuple[int, ...], str] = {}
        self.answers: dict[tuple[int, str, int], tuple[Completion, Tensor]] = {}

    def start(self, prefix: list[int]) -> None:
        self.prefix, self.made = prefix, []
        self.logprob = torch.zeros((), dtype=torch.float64)

    def encode(self, agent: int, prompt: str) -> Tensor:
        ids = tuple(ord(character) for character in prompt) or (0,)
        self.prompts[ids] = prompt
        return torch.tensor(ids)

    def sample(self, requests: Sequence[Request], sampling: Sampling) -> list[list[Completion]]:
        return [[self._one(request) for _ in request.keys] for request in requests]

    def _one(self, request: Request) -> Completion:
        history = self.prompts[tuple(request.prompt_ids.tolist())]
        token = self.policy.forced(history, request.agent)
        chosen = token is None
        if token is None:
            token = self.prefix[len(self.made)] if len(self.made) < len(self.prefix) else 0
            self.made.append(token)
        key = (request.agent, history, token)
        if key not in self.answers:
            logprob = self.policy.logprob(request.agent, history, token)
            answer = Completion(torch.tensor([token]), logprob.detach().float()[None], True, str(token))
            self.answers[key] = answer, logprob
        answer, logprob = self.answers[key]
        if chosen:
            self.logprob = self.logprob + logprob
        return answer


def all_outcomes(game: Game, episode: Episode) -> Iterator[Outcome]:
    """Every tree the game can grow into, each with its probability."""
    choices = _Choices(game.policy)

    def reward(*texts: list[str], prompt_history_per_agent: list[list[str | None]]) -> list[float]:
        history = next(prompts[-1] for prompts in prompt_history_per_agent if prompts[-1] is not None)
        return [game.reward(history, "".join(text or "_" for text in joint)) for joint in zip(*texts, strict=True)]

    def transition(agent_completions: list[str], prompt_history_per_agent: list[list[str | None]]) -> list[str | None]:
        history = next(prompts[-1] for prompts in prompt_history_per_agent if prompts[-1] is not None)
        following = after(history, "".join(text or "_" for text in agent_completions))
        return [following if game.speaks(following, agent) else None for agent in range(game.num_agents)]

    formatters = [(lambda row, agent=agent: "" if game.speaks("", agent) else None) for agent in range(game.num_agents)]
    expansion = Expansion(
        choices,
        choices,
        Reward(reward, game.num_agents),
        Formatters(formatters, game.num_agents, external_prompt_passthrough=True),
        Transition(transition, game.num_agents),
        game.num_agents,
    )
    prefix: list[int] = []
    while True:
        choices.start(prefix)
        (root,) = expansion.grow([(0, {"prompt": ""})], episode)
        yield Outcome(root, choices.logprob)
        made = choices.made
        while made and made[-1] == 1:
            made.pop()
        if not made:
            return
        prefix = [*made[:-1], 1]


def history_of(node: Node) -> str:
    """The joint history a node stands for."""
    return next(answers.prompt for answers in node.answers if answers is not None)


def nodes_with_history(root: Node) -> Iterator[tuple[Node, str]]:
    """The nodes of a tree with their histories."""
    return ((node, history_of(node)) for node in nodes_by_level(root))
