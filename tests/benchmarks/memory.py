"""`python -m tests.benchmarks.memory --model FOLDER`: peak memory of whole processes for several teams, as JSON lines.

Every team is trained in a process of its own on the same work: one turn, K completions of a fixed number of tokens. The
last line holds the ratios that matter.
"""

from __future__ import annotations

import argparse
import json
import resource
import subprocess
import sys
import tempfile
import time
import warnings

TEAMS = {
    "lora_1": {"num_agents": 1, "lora": True},
    "lora_2": {"num_agents": 2, "lora": True},
    "lora_2_kl": {"num_agents": 2, "lora": True, "kl": True},
    "lora_4": {"num_agents": 4, "lora": True},
    "full_2": {"num_agents": 2, "lora": False},
}
RATIOS = (("lora_4", "lora_1"), ("lora_2", "full_2"), ("lora_2_kl", "lora_2"))
MIB = 1024.0  # ru_maxrss is in KiB on Linux


def measure(team: str, model: str, generations: int, tokens: int, prompts: int) -> dict[str, object]:
    """Train one team in this process; return its peak resident memory and seconds a prompt."""
    from mareinforce import MAGRPOConfig, MAGRPOTrainer
    from mareinforce.tasks.story import growing_lengths_reward

    what = TEAMS[team]
    lora = {"r": 16, "lora_alpha": 32, "target_modules": "all-linear"}
    config = MAGRPOConfig(
        num_agents=what["num_agents"],
        num_turns=1,
        num_train_epochs=1,
        num_generations=generations,
        max_new_tokens=tokens,
        min_new_tokens=tokens,
        rollout_buffer_size=1,
        eval_interval=0,
        reference_kl_enabled=bool(what.get("kl")),
    )
    texts = ["Describe a city in the clouds:", "Invent a new holiday and explain it:", "Write a bedtime story:"]
    with warnings.catch_warnings(), tempfile.TemporaryDirectory() as folder:
        warnings.simplefilter("ignore")
        trainer = MAGRPOTrainer(
            agent_model=model,
            num_agents=what["num_agents"],
            model_config={"lora": lora} if what["lora"] else None,
            reward_func=growing_lengths_reward if what["num_agents"] > 1 else lambda texts: [len(t) for t in texts],
            train_dataset=[{"prompt": texts[index % len(texts)]} for index in range(prompts)],
            args=config,
            default_root_dir=folder,
            accelerator="cpu",
        )
        start = time.perf_counter()
        trainer.train()
        seconds = time.perf_counter() - start
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / MIB
    return {"team": team, "peak_mib": round(peak), "per_prompt_s": round(seconds / prompts, 2)}


def main() -> None:
    """Measure one team (``--team``), or each in a process of its own and print their ratios."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--model", required=True)
    parser.add_argument("--team", choices=TEAMS)
    parser.add_argument("--generations", type=int, default=4)
    parser.add_argument("--tokens", type=int, default=32)
    parser.add_argument("--prompts", type=int, default=3)
    options = parser.parse_args()
    if options.team:
        found = measure(options.team, options.model, options.generations, options.tokens, options.prompts)
        print(json.dumps(found))
        return
    peaks = {}
    for team in TEAMS:
        command = [sys.executable, "-m", "tests.benchmarks.memory", *sys.argv[1:], "--team", team]
        line = subprocess.run(command, check=True, capture_output=True, text=True).stdout.splitlines()[-1]
        print(line, flush=True)
        peaks[team] = json.loads(line)["peak_mib"]
    print(json.dumps({f"{a}/{b}": round(peaks[a] / peaks[b], 3) for a, b in RATIOS}))


if __name__ == "__main__":
    main()
