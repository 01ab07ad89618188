"""The embedded model: small, readable, reproducible, and varied in length."""

from __future__ import annotations

import json
from pathlib import Path

import torch
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM, AutoTokenizer

from mareinforce.assets import ASSETS, EMBEDDED_DATA, embedded_data, embedded_model
from mareinforce.assets.make_tiny_story import make
from mareinforce.rollout.sampling import draw
from mareinforce.types import Sampling

FOLDER = embedded_model("tiny-story")


def embedded_prompts(name: str) -> list[str]:
    lines = [line for file in embedded_data(name).values() for line in file.read_text(encoding="utf-8").splitlines()]
    return [json.loads(line)["prompt"] for line in lines]


def test_it_is_under_two_megabytes_with_its_tokenizer():
    size = sum(file.stat().st_size for file in FOLDER.iterdir())
    assert 100_000 < size < 2_000_000
    assert (FOLDER / "model.safetensors").exists()


def test_its_tokenizer_knows_every_word_of_the_story_prompts():
    tokenizer = AutoTokenizer.from_pretrained(FOLDER)
    for prompt in embedded_prompts("story-prompts"):
        ids = tokenizer(prompt)["input_ids"]
        assert tokenizer.unk_token_id not in ids
        assert tokenizer.decode(ids, skip_special_tokens=True) == prompt
    assert tokenizer.unk_token_id in tokenizer("Tell a joke about dinosaurs.")["input_ids"]


def test_every_embedded_set_is_there_with_prompts_that_differ():
    assert {file.name for name in EMBEDDED_DATA for file in embedded_data(name).values()} == {
        file.name for file in ASSETS.glob("*.jsonl")
    }
    for name in EMBEDDED_DATA:
        prompts = embedded_prompts(name)
        assert len(prompts) == len(set(prompts)) >= 10


def test_its_stories_end_after_a_sentence_and_differ_in_length():
    model, tokenizer = AutoModelForCausalLM.from_pretrained(FOLDER), AutoTokenizer.from_pretrained(FOLDER)
    generator = torch.Generator().manual_seed(0)
    prompt = tokenizer(embedded_prompts("story-prompts")[0], return_tensors="pt")["input_ids"]
    ids, ended = prompt.expand(64, -1), torch.zeros(64, dtype=torch.bool)
    with torch.no_grad():
        for _ in range(96):
            numbers = torch.rand(64, generator=generator, dtype=torch.float64)
            drawn, _ = draw(model(input_ids=ids).logits[:, -1], numbers, Sampling(96))
            drawn = torch.where(ended, torch.tensor(tokenizer.eos_token_id), drawn)
            ended |= drawn == tokenizer.eos_token_id
            ids = torch.cat([ids, drawn[:, None]], dim=1)
    texts = tokenizer.batch_decode(ids[:, prompt.shape[1] :], skip_special_tokens=True)
    whole = [text for text, done in zip(texts, ended.tolist(), strict=True) if done]
    assert len(whole) >= 60
    assert sum(text.endswith(".") for text in whole) >= 0.95 * len(whole)
    lengths = sorted(len(text) for text in whole)
    assert lengths[-len(lengths) // 10] >= 3 * lengths[len(lengths) // 10]  # nine tenths against one tenth


def test_its_maker_writes_the_same_weights_twice_and_others_for_another_seed(tmp_path: Path):
    for name, seed in (("one", 0), ("two", 0), ("other", 1)):
        make(tmp_path / name, steps=3, batch_size=4, seed=seed)
    one, two, other = (
        load_file(tmp_path / name / "tiny_story" / "model.safetensors") for name in ("one", "two", "other")
    )
    assert all(torch.equal(one[key], two[key]) for key in one)
    assert not all(torch.equal(one[key], other[key]) for key in one)
    prompts = (tmp_path / "one" / "story_prompts_train.jsonl").read_text()
    assert prompts == (ASSETS / "story_prompts_train.jsonl").read_text()
