"""The quickstart's work with CoMLRL: `PYTHON tests/benchmarks/quickstart_comlrl.py FOLDER`, that of the tiny model.

For `python -m tests.benchmarks W5 --model tiny-story --peer PYTHON tests/benchmarks/quickstart_comlrl.py`, where PYTHON
has comlrl installed. Same prompts, sampling, completions a prompt, lengths, learning rate and buffer; CoMLRL has no
warm-up and no clipping. Prints one JSON line.
"""

import argparse
import json
import math
import random
import time
from pathlib import Path

import torch
from comlrl.trainers.reinforce import MAGRPOConfig, MAGRPOTrainer
from datasets import Dataset
from transformers import AutoModelForCausalLM, AutoTokenizer

ROWS = Path(__file__).parents[2] / "mareinforce" / "assets" / "story_prompts_train.jsonl"
MODEL = ROWS.parent / "tiny_story"


def main() -> None:
    """Train, and say how long it took and what was earned at first and in the end."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("model", help="a folder, or tiny-story")
    parser.add_argument("--prompts", type=int, default=150)
    options, _ = parser.parse_known_args()
    folder = MODEL if options.model == "tiny-story" else options.model
    torch.manual_seed(0)
    random.seed(0)
    rewards: list[float] = []

    def reward(*texts: list[str]) -> list[float]:
        ratios = [len(row[-1]) / max(len(row[0]), 1) for row in zip(*texts, strict=True)]
        rewards.extend(math.exp(-max(2 - ratio, ratio - 3, 0.0)) for ratio in ratios)
        return rewards[-len(ratios) :]

    lines = ROWS.read_text(encoding="utf-8").splitlines()[: options.prompts]
    trainer = MAGRPOTrainer(
        agents=[AutoModelForCausalLM.from_pretrained(folder) for _ in range(2)],
        num_agents=2,
        reward_func=reward,
        args=MAGRPOConfig(
            num_agents=2, num_turns=1, num_train_epochs=1, num_generations=16, max_new_tokens=96, rollout_buffer_size=1,
            train_batch_size=1, agent_learning_rate=1e-3, eval_interval=0, early_termination_threshold=None,
            agent_devices="cpu", temperature=1.0, top_p=1.0, top_k=None,
        ),
        train_dataset=Dataset.from_list([json.loads(line) for line in lines]),
        tokenizer=AutoTokenizer.from_pretrained(folder),
    )  # fmt: skip
    start = time.perf_counter()
    trainer.train()
    took = time.perf_counter() - start
    first, last = (sum(part) / len(part) for part in (rewards[:240], rewards[-240:]))
    print(
        json.dumps(
            {"wall_s": round(took, 2), "per_prompt_s": round(took / options.prompts, 3), "first": first, "last": last}
        )
    )


if __name__ == "__main__":
    main()
