"""Adapters mixed in one batch of a real language model: `pytest -m smollm2`."""

from __future__ import annotations

import pytest
import torch

from mareinforce.agents.team import Team
from mareinforce.rollout.engines.transformers import TransformersEngine
from mareinforce.types import Request, Sampling, StreamKey

TEXTS = ("Describe a city in the clouds:", "Invent a new holiday and explain how people celebrate it:")


@pytest.fixture(scope="module")
def team():
    """Three agents on one SmolLM2, whose adapters say different things."""
    made = Team.build("smollm2-135m-instruct", num_agents=3, lora={"r": 8}, max_new_tokens=12)
    generator = torch.Generator().manual_seed(0)
    with torch.no_grad():
        for policy in made.policies:
            for name, weight in made.weights(policy).items():
                if "lora_B" in name:
                    weight.copy_(0.005 * torch.randn(weight.shape, generator=generator))
    return made


@pytest.mark.smollm2
def test_logits_of_each_row_are_those_of_its_adapter_alone(team):
    network = team.network(0).eval()  # peft mixes adapters in evaluation mode only
    ids = team.encode(0, TEXTS[0]).repeat(3, 1)
    with torch.no_grad():
        mixed = network(input_ids=ids, adapter_names=[team.seats[agent].adapter for agent in range(3)]).logits
        alone = [team.model(agent)(input_ids=ids).logits[agent] for agent in range(3)]
    for agent in range(3):
        assert (mixed[agent] - alone[agent]).abs().max() < 1e-4
        assert (mixed[agent] - alone[agent - 1]).abs().max() > 0.1  # another agent's would be seen


@pytest.mark.smollm2
def test_samples_of_the_whole_team_are_those_of_each_agent_alone(team):
    requests = [
        Request(agent, team.encode(agent, text), tuple(StreamKey("train", 1, 0, row, (), agent, k) for k in range(2)))
        for row, text in enumerate(TEXTS)
        for agent in range(3)
    ]
    engine = TransformersEngine(team)
    together = engine.sample(requests, Sampling(12))
    agreeing = 0
    for request, said in zip(requests, together, strict=True):
        (alone,) = engine.sample([request], Sampling(12))
        for one, other in zip(said, alone, strict=True):
            # rounding moves a draw whose uniform number lies on a boundary, as it may among 49,152 tokens
            same = int((one.ids == other.ids).long().cumprod(0).sum())
            agreeing += same == 12
            gap = (one.logprobs[:same] - other.logprobs[:same]).abs()
            assert gap.numel() == 0 or gap.max() < 1e-4
    assert agreeing >= 10  # of 12
