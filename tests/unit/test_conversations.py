"""Message rows over three turns: a formatter that adds to every prompt neither loses a turn nor adds twice."""

from __future__ import annotations

import pytest
import torch

from mareinforce.rewards.contract import Reward
from mareinforce.rollout.expand import Episode, Expansion
from mareinforce.rollout.prompts import Formatters
from mareinforce.rollout.transition import Transition
from mareinforce.rollout.tree import nodes_by_level
from mareinforce.types import Completion, Sampling

OWN = [{"role": "user", "content": "u1"}]
SYSTEM = {"role": "system", "content": "be brief"}


class Answering:
    """Says a1, a2, a3 by turn."""

    def encode(self, agent, prompt):
        return torch.tensor([len(prompt)])

    def sample(self, requests, sampling):
        texts = [f"a{len(request.keys[0].path) + 1}" for request in requests]
        one = torch.zeros(1)
        return [
            [Completion(one.long(), one, True, text) for _ in request.keys]
            for text, request in zip(texts, requests, strict=True)
        ]


def prompt_at_turn_3(formatter, passthrough: bool):
    play = Answering()
    expansion = Expansion(
        play, play, Reward(lambda texts: [0.0] * len(texts), 1), Formatters(formatter, 1, "prompt", passthrough),
        Transition(lambda turn: [f"u{turn + 2}"], 1), 1,
    )  # fmt: skip
    (root,) = expansion.grow([(0, {"prompt": OWN})], Episode(3, 2, Sampling(1), 0))
    last = next(node for node in nodes_by_level(root) if node.turn == 2)
    return [message["content"] for message in last.answers[0].prompt]


WHOLE = ["u1", "a1", "u2", "a2", "u3"]


@pytest.mark.parametrize(
    ("formatter", "passthrough", "expected"),
    [
        (None, False, WHOLE),
        (lambda row: row["prompt"], False, WHOLE),
        (lambda row: row["prompt"], True, WHOLE),
        (lambda row: [SYSTEM, *row["prompt"]], False, ["be brief", *WHOLE]),
        (lambda row: [SYSTEM, *row["prompt"]], True, ["be brief", *WHOLE]),
    ],
)
def test_the_whole_conversation_is_shown_once(formatter, passthrough, expected):
    assert prompt_at_turn_3(formatter, passthrough) == expected
