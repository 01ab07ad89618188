"""The written-down policy samples what it says, with the streams every engine uses."""

import math

import pytest
import torch

from mareinforce.agents.team import Team
from mareinforce.errors import PromptError
from mareinforce.rollout.engines.scripted import ScriptedEngine
from mareinforce.rollout.engines.transformers import TransformersEngine
from mareinforce.types import Request, Sampling, StreamKey
from tests.models import table_model, table_tokenizer

TEXTS = ["<eos>", "a", "b"]


def keys(count):
    return tuple(StreamKey("train", 0, 0, 0, (), 0, k) for k in range(count))


def request(count):
    return [Request(0, torch.tensor([1]), keys(count))]


def test_it_draws_the_given_distribution():
    asked = []

    def distribution(agent, prompt, said):
        asked.append((agent, prompt, said))
        return [0.0, 0.25, 0.75] if not said else [1.0, 0.0, 0.0]

    engine = ScriptedEngine(TEXTS, [0], distribution)
    (completions,) = engine.sample(request(4000), Sampling(5))
    assert {tuple(c.ids.tolist()) for c in completions} == {(1, 0), (2, 0)}
    share = sum(c.text == "b" for c in completions) / 4000
    assert abs(share - 0.75) < 0.025  # 3.6 standard deviations
    assert completions[0].logprobs.tolist() == pytest.approx(
        [math.log(0.25 if completions[0].text == "a" else 0.75), 0]
    )
    assert all(c.ended for c in completions)
    assert asked[0] == (0, (1,), ())
    assert asked[4000] == (0, (1,), (int(completions[0].ids[0]),))


def test_it_samples_what_a_table_model_of_the_same_policy_samples():
    table = torch.randn(3, 3)

    def distribution(agent, prompt, said):
        return torch.softmax(table[(*prompt, *said)[-1]].double(), -1).tolist()

    team = Team([table_model(table, 0)], [table_tokenizer(TEXTS)], 8)
    for sampling in (Sampling(6), Sampling(6, temperature=0.5, top_k=2), Sampling(6, min_new_tokens=2)):
        (scripted,) = ScriptedEngine(TEXTS, [0], distribution).sample(request(50), sampling)
        (sampled,) = TransformersEngine(team).sample(request(50), sampling)
        assert [c.ids.tolist() for c in scripted] == [c.ids.tolist() for c in sampled]
        assert [c.text for c in scripted] == [c.text for c in sampled]
        for one, other in zip(scripted, sampled, strict=True):
            torch.testing.assert_close(one.logprobs, other.logprobs, atol=1e-5, rtol=0)


@pytest.mark.parametrize("as_mapping", [True, False])
def test_forced_completions_are_given_as_they_are(as_mapping):
    mapping = {(0, (), 0): [1, 2, 0], (0, (), 1): [2, 2]}
    forced = mapping if as_mapping else lambda key: mapping[key.agent, key.path, key.k]
    (completions,) = ScriptedEngine(TEXTS, [0], forced=forced).sample(request(2), Sampling(3))
    assert [c.ids.tolist() for c in completions] == [[1, 2, 0], [2, 2]]
    assert [c.ended for c in completions] == [True, False]
    assert [c.text for c in completions] == ["a b", "b b"]
    assert completions[0].logprobs.tolist() == pytest.approx([-math.log(3)] * 3)


@pytest.mark.parametrize("ids", [[], [1, 1, 1, 1]])
def test_forced_completions_that_could_not_be_sampled_are_refused(ids):
    with pytest.raises(ValueError, match="must be 1 to max_new_tokens=3 ids"):
        ScriptedEngine(TEXTS, [0], forced=lambda key: ids).sample(request(1), Sampling(3))


@pytest.mark.parametrize("row", [[0.5, 0.5], [0.5, 0.6, 0.1], [1.5, -0.5, 0.0]])
def test_what_is_no_distribution_is_refused(row):
    with pytest.raises(ValueError, match="must be 3 probabilities that sum to 1"):
        ScriptedEngine(TEXTS, [0], lambda *_: row).sample(request(1), Sampling(3))


def test_prompts_are_encoded_word_by_word():
    engine = ScriptedEngine(TEXTS, [0])
    assert engine.encode(0, "a b a").tolist() == [1, 2, 1]
    assert engine.encode(0, [{"role": "user", "content": "a b"}]).tolist() == [1, 2]
    assert engine.decode([2, 1, 0]) == "b a"
    for prompt in ("a c", ""):
        with pytest.raises(PromptError, match="must be words of the scripted vocabulary"):
            engine.encode(1, prompt)
