"""Make the tiny story model, its tokenizer and its prompts: ``python -m mareinforce.assets.make_tiny_story --out DIR``.

Two runs on one machine write identical weights. The last line printed is JSON: the loss in nats a token over the last
steps, and the bytes of every file written.
"""

from __future__ import annotations

import argparse
import json
import random
from pathlib import Path

import torch
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, processors
from torch import Tensor
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

from mareinforce.assets.story_grammar import BOS, EOS, PAD, UNK, VOCABULARY, draw_prompts, draw_story, draw_subject

TRAIN_PROMPTS, TEST_PROMPTS = 200, 40
IGNORED = -100  # the label that the cross-entropy leaves out


def build_tokenizer() -> PreTrainedTokenizerFast:
    """One id a word or full stop. Encoding puts ``<bos>`` in front; decoding sets no space before a full stop."""
    ids = {word: i for i, word in enumerate(VOCABULARY)}
    tokenizer = Tokenizer(models.WordLevel(ids, unk_token=UNK))
    tokenizer.pre_tokenizer = pre_tokenizers.Whitespace()
    tokenizer.decoder = decoders.WordPiece(prefix="##", cleanup=True)
    tokenizer.post_processor = processors.TemplateProcessing(single=f"{BOS} $A", special_tokens=[(BOS, ids[BOS])])
    return PreTrainedTokenizerFast(  # type: ignore[no-untyped-call]
        tokenizer_object=tokenizer,
        pad_token=PAD,
        bos_token=BOS,
        eos_token=EOS,
        unk_token=UNK,
        padding_side="left",
        model_max_length=256,
        clean_up_tokenization_spaces=False,
    )


def build_model(tokenizer: PreTrainedTokenizerFast) -> LlamaForCausalLM:
    """A Llama of 2 layers and width 64 with random weights (about 115,000 of them)."""
    config = LlamaConfig(
        vocab_size=len(VOCABULARY),
        hidden_size=64,
        intermediate_size=128,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=4,
        max_position_embeddings=256,
        tie_word_embeddings=False,
        initializer_range=0.1,
        pad_token_id=tokenizer.pad_token_id,
        bos_token_id=tokenizer.bos_token_id,
        eos_token_id=tokenizer.eos_token_id,
    )
    return LlamaForCausalLM(config)


def draw_batch(tokenizer: PreTrainedTokenizerFast, size: int, rng: random.Random) -> tuple[Tensor, Tensor]:
    """Prompts with their stories and end tokens: ids and labels, int64 [size, L], filled up on the right."""
    texts = []
    for _ in range(size):
        subject = draw_subject(rng)
        texts.append(f"{subject.prompt(rng.choice(('Tell', 'Write')))} {draw_story(subject, rng)}")
    rows = [torch.tensor([*tokenizer(text)["input_ids"], tokenizer.eos_token_id]) for text in texts]
    ids = torch.nn.utils.rnn.pad_sequence(rows, batch_first=True, padding_value=tokenizer.pad_token_id)
    labels = torch.nn.utils.rnn.pad_sequence(rows, batch_first=True, padding_value=IGNORED)
    return ids, labels


def pretrain(
    model: LlamaForCausalLM, tokenizer: PreTrainedTokenizerFast, steps: int, batch_size: int, seed: int
) -> float:
    """Teach the grammar. Returns the mean loss in nats a token over the last tenth of the steps."""
    rng = random.Random(seed)
    optimizer = torch.optim.AdamW(model.parameters(), lr=5e-3, weight_decay=0.01, betas=(0.9, 0.95))
    schedule = torch.optim.lr_scheduler.OneCycleLR(optimizer, max_lr=5e-3, total_steps=max(steps, 2), pct_start=0.1)
    model.train()
    losses = []
    for _ in range(steps):
        ids, labels = draw_batch(tokenizer, batch_size, rng)
        loss = model(input_ids=ids, labels=labels).loss  # rows are filled up on the right: causality hides the filling
        optimizer.zero_grad()
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        schedule.step()
        losses.append(float(loss.detach()))
    model.eval()  # type: ignore[no-untyped-call]
    tail = losses[-max(1, steps // 10) :]
    return sum(tail) / len(tail)


def write_prompts(out: Path, seed: int) -> None:
    """``story_prompts_train.jsonl`` and ``story_prompts_test.jsonl``, no prompt in both."""
    prompts = draw_prompts(TRAIN_PROMPTS + TEST_PROMPTS, random.Random(seed + 1))
    for split, chosen in (("train", prompts[:TRAIN_PROMPTS]), ("test", prompts[TRAIN_PROMPTS:])):
        lines = "".join(json.dumps({"prompt": prompt}) + "\n" for prompt in chosen)
        (out / f"story_prompts_{split}.jsonl").write_text(lines, encoding="utf-8")


def make(out: Path, steps: int, batch_size: int, seed: int) -> dict[str, object]:
    """Write ``tiny_story/`` and the prompt files below ``out`` and return the loss and the bytes of each file."""
    out.mkdir(parents=True, exist_ok=True)
    threads = torch.get_num_threads()
    torch.set_num_threads(1)  # sums are then always taken in the same order
    try:
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(seed)
            tokenizer = build_tokenizer()
            model = build_model(tokenizer)
            loss = pretrain(model, tokenizer, steps, batch_size, seed)
    finally:
        torch.set_num_threads(threads)
    model.save_pretrained(out / "tiny_story")
    tokenizer.save_pretrained(out / "tiny_story")
    write_prompts(out, seed)
    written = sorted([*(out / "tiny_story").iterdir(), *out.glob("story_prompts_*.jsonl")])
    return {"loss": round(loss, 4), "bytes": {str(path.relative_to(out)): path.stat().st_size for path in written}}


def main(argv: list[str] | None = None) -> None:
    """Read the command line, make everything, print one JSON line."""
    parser = argparse.ArgumentParser(description="Make the tiny story model, its tokenizer and its prompts.")
    parser.add_argument("--out", type=Path, required=True, help="folder to write into")
    parser.add_argument("--steps", type=int, default=250, help="optimizer steps (default 250)")
    parser.add_argument("--batch_size", type=int, default=32, help="stories a step (default 32)")
    parser.add_argument("--seed", type=int, default=0, help="of the weights, the stories and the prompts (default 0)")
    args = parser.parse_args(argv)
    print(json.dumps(make(args.out, args.steps, args.batch_size, args.seed)))


if __name__ == "__main__":
    main()
