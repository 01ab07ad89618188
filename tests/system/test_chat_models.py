"""Chat models in training: what rewards receive of either kind of row, and that the ids scored are the ids sampled."""

from __future__ import annotations

import pytest
import torch
from datasets import Dataset

import mareinforce.learner
from tests.models import BOS, TEMPLATE, gpt2_model, word_tokenizer
from tests.system.runs import Recorder, train

WORDS = ("go", "on", "x", "y", "user", "assistant", "system", "named", "think", "answer")
STRIPS_THINKING = (
    "{{ bos_token }}{% for m in messages %} {{ m['role'] }}"
    "{% if m['role'] == 'assistant' %} {{ m['content'].split('answer')[-1] }}{% else %} {{ m['content'] }}{% endif %}"
    "{% endfor %}{% if add_generation_prompt %} assistant think{% endif %}"
)


def team(template=TEMPLATE, count=2):
    words = word_tokenizer(WORDS, template=template, adds_bos=True)
    return [gpt2_model(len(words), seed=seed) for seed in range(count)], words


class TestWhatRewardsReceive:
    @pytest.mark.parametrize("kind", ["text", "messages", "messages filled with None"])
    def test_answers_are_texts_and_prompts_are_the_rows_own(self, tmp_path, kind):
        plain = ["go", "on"]
        messages = [[{"role": "user", "content": text}] for text in plain]
        if kind == "messages filled with None":
            messages[1].insert(0, {"role": "system", "content": "x", "name": "y"})
            messages = Dataset.from_dict({"prompt": messages})["prompt"]  # the library fills in what is missing
            assert messages[0][0]["name"] is None
        prompts = plain if kind == "text" else messages
        reward = Recorder()
        train(tmp_path, reward, agents=team(), rows=[{"prompt": p} for p in prompts], max_new_tokens=3)
        for texts, known in zip(reward.texts, reward.known, strict=True):
            assert all(isinstance(text, str) for column in texts for text in column)
            assert all(prompt in list(prompts) for prompt in known["prompts"])
            assert type(known["prompts"][0]) is type(prompts[0])

    def test_what_is_filled_in_is_not_shown_to_the_model(self, tmp_path, monkeypatch):
        samples = kept_samples(monkeypatch)
        rows = [{"prompt": [{"role": "user", "content": "go", "name": None}]}]
        agents = team()
        train(tmp_path, agents=agents, rows=rows, max_new_tokens=3)
        assert agents[1].decode(samples[0].prompt_ids) == "<bos> user go assistant"


def kept_samples(monkeypatch):
    """Every node sample that an update is made of."""
    samples, update = [], mareinforce.learner.compute_gradient

    def keeping(team, optimizer, batch, *rest):
        samples.extend(batch)
        return update(team, optimizer, batch, *rest)

    monkeypatch.setattr(mareinforce.learner, "compute_gradient", keeping)
    return samples


@pytest.mark.parametrize("history", [None, "own", "all"])
def test_the_ids_scored_are_those_sampled_after_the_prompt_that_was_shown(tmp_path, monkeypatch, history):
    samples, scored = kept_samples(monkeypatch), []
    whole = mareinforce.agents.team.score_nodes

    def watching(model, nodes, temperature, **options):
        scored.extend((node.prompt_ids, list(node.completion_ids)) for node in nodes)
        return whole(model, nodes, temperature, **options)

    monkeypatch.setattr(mareinforce.agents.team, "score_nodes", watching)
    agents = team(STRIPS_THINKING)
    rows = [{"prompt": [{"role": "user", "content": "go"}]}]
    train(
        tmp_path,
        agents=agents,
        rows=rows,
        num_turns=2,
        max_new_tokens=4,
        external_transition=lambda prompt: ["on", "on"],
        history=history,
    )
    assert len(samples) == len(scored) == 2 * (1 + 2)
    for sample, (prompt, completions) in zip(samples, scored, strict=True):
        assert torch.equal(prompt, sample.prompt_ids)
        assert all(torch.equal(a, b.ids) for a, b in zip(completions, sample.completions, strict=True))
        assert prompt.tolist().count(BOS) == 1
    second = [sample for sample in samples if sample.turn == 1]
    said = agents[1].decode(second[0].prompt_ids)
    assert said.startswith("<bos> user go assistant")
    assert said.endswith("on assistant think")
    # the template leaves out what was thought: encoding the conversation again gives other ids than were sampled
    first = next(sample for sample in samples if sample.turn == 0)
    assert not any("think" in agents[1].decode(sample.prompt_ids).split("assistant")[1] for sample in second)
    assert agents[1].decode(first.prompt_ids).endswith("assistant think")
