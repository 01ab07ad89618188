"""`python -m tests.campaigns.fuzz`: random configurations, rewards, transitions and prompts, on very small models.

Every run must either train, with finite weights and moments, or end in one of our own errors, with finite weights too.
"""

from __future__ import annotations

import argparse
import json
import logging
import math
import sys
import tempfile
import time
import warnings
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

import hypothesis
import torch
from hypothesis import HealthCheck
from hypothesis import strategies as st
from transformers.utils import logging as transformers_logging

from mareinforce import MAGRPOConfig, MAGRPOTrainer
from mareinforce.errors import MareinforceError
from mareinforce.optim import all_finite
from tests.campaigns.misbehaving import FORMATTERS, PROCESSORS, PROMPTS, REWARDS, TRANSITIONS, Reward, Transition
from tests.learning.games import table_agents
from tests.models import TEMPLATE, WORDS, llama_model, word_tokenizer

Case = dict[str, Any]
TRAINED = "trained"

# mostly what is legal: a run that is refused at once tries little
SOUND: dict[str, Any] = {
    "num_turns": [1, 2, 3],
    "num_generations": [2, 3],
    "max_new_tokens": [1, 3],
    "min_new_tokens": [0, 1],
    "num_train_epochs": [1, 2],
    "max_updates": [None, 1, 3],
    "agent_learning_rate": [1e-3, 0.1, 10.0, 1e6, "1e-3"],
    "lr_schedule": ["constant", "linear", "cosine"],
    "warmup_updates": [0, 2],
    "weight_decay": [0.0, 1e-7],
    "adam_betas": [(0.9, 0.999), (0.0, 0.0), (0.999, 0.5)],
    "adam_eps": [1e-8, 1e-3],
    "max_grad_norm": [None, 1.0, 1e-6, 1e30],
    "logging_steps": [1, 7],
    "temperature": [1.0, 0.3, 1e-3, 100.0],
    "top_p": [1.0, 0.5, 1e-6],
    "top_k": [None, 1, 3, 1000],
    "eval_temperature": [None, 0, 0.7],
    "discount": [1.0, 0.5, 0.0],
    "joint_mode": ["aligned", "cross", "align", "crossed"],
    "cross_reduction": ["sum", "mean"],
    "early_termination_threshold": [None, -0.2, 0.0, 1e30],
    "early_termination_on": ["node_mean", "joint_action"],
    "early_termination_value": ["zero", "hold"],
    "external_prompt_passthrough": [False, True],
    "prompt_overflow": ["error", "truncate_left", "stop_branch"],
    "history": [None, "none", "own", "all"],
    "chat_template": ["auto", True, False],
    "system_prompt": [None, "d e"],
    "assistant_prefill": [None, "e"],
    "stop": [None, "b", ["a", "b c"]],
    "advantage_mode": ["mean", "max", "rloo", "raw"],
    "advantage_normalization": [True, "scale", False],
    "loss_aggregation": ["sequence_sum", "token_mean", "constant"],
    "mask_truncated": [False, True],
    "exclude_final_token": [False, True],
    "importance_sampling": ["none", "token", "sequence"],
    "importance_cap": [1.0, 2.0, 1e30],
    "prompts_per_step": [1, 2, 9],
    "rollout_buffer_size": [1, 2, 5, "rollout"],
    "train_batch_size": [None, 1],
    "turn_weighting": ["sample", "tree"],
    "eval_interval": [0, 1, 3],
    "eval_num_samples": [0, 1, 9],
    "eval_batch_size": [1, 4],
    "reference_kl_enabled": [False, True],
    "reference_kl_coef": [0.1, 0.0, 1e30],
    "reference_kl_estimator": ["k1", "k3"],
    "reference_kl_placement": ["return", "advantage"],
    "reference": [None, "start", "base"],
    "on_reward_error": ["stop", "skip"],
    "reward_workers": [0, 2],
    "reward_timeout": [None, 60.0],
    "update_token_budget": [None, 1, 50],
    "rollout_token_budget": [None, 1, 50],
    "rollout_dtype": [None, "bfloat16"],
    "seed": [None, 0, 7],
}
UNSOUND: list[Any] = [0, -1, math.nan, math.inf, "no such word", [], None, True, 1e300, 2.5, {}]


@st.composite
def configs(draw: st.DrawFn) -> dict[str, Any]:
    """Some fields of the configuration, now and then one that cannot be meant."""
    names = draw(st.lists(st.sampled_from(sorted(SOUND)), max_size=12, unique=True))
    fields = {name: draw(st.sampled_from(SOUND[name])) for name in names}
    if draw(st.integers(0, 19)) == 19:
        fields[draw(st.sampled_from(sorted(SOUND)))] = draw(st.sampled_from(UNSOUND))
    return fields


def mostly(usual: list[str], all_of_them: list[str]) -> st.SearchStrategy[str]:
    """The usual ways to behave four times in five."""
    return st.integers(0, 4).flatmap(lambda die: st.sampled_from(all_of_them if die == 4 else usual))


SOUND_REWARDS = list(REWARDS)[:16]
CASES = st.fixed_dictionaries(
    {
        "model": st.sampled_from(["table", "table", "llama", "lora"]),
        "agents": st.integers(1, 3),
        "share_policy": st.integers(0, 9).map(lambda die: die == 9),
        "learning": st.sampled_from([*["all"] * 12, *["one"] * 3, "none"]),
        "template": st.sampled_from([True, True, True, False]),
        "config": configs(),
        "reward": mostly(SOUND_REWARDS, [*REWARDS, "raises"]),
        "later": mostly(SOUND_REWARDS, [*REWARDS, "raises"]),
        "at": st.integers(0, 6),
        "asynchronous": st.booleans(),
        "processor": mostly(["none"], list(PROCESSORS)),
        "transition": mostly(list(TRANSITIONS)[:7], [*TRANSITIONS, "raises", "absent"]),
        "formatters": mostly(["none"], list(FORMATTERS)),
        "prompts": st.lists(mostly(["words", "one word"], list(PROMPTS)), min_size=1, max_size=3),
    }
)


def run_case(case: Case, folder: Path) -> str:
    """Train as the case says. Returns TRAINED or the name of our own error.

    Raises AssertionError if weights or moments are not finite, and whatever is no error of ours.
    """
    trainer: MAGRPOTrainer | None = None
    try:
        trainer = MAGRPOTrainer(
            **_team(case, folder),
            share_policy=case["share_policy"],
            trainable=LEARNING[case["learning"]](case["agents"]),
            reward_func=Reward(case["reward"], case["later"], case["at"], case["asynchronous"]),
            reward_processor=PROCESSORS[case["processor"]],
            formatters=FORMATTERS[case["formatters"]],
            external_transition=None if case["transition"] == "absent" else Transition(case["transition"]),
            train_dataset=[{"prompt": PROMPTS[name]} for name in case["prompts"]],
            eval_dataset=[{"prompt": "a"}],
            args=MAGRPOConfig(**{**SHORT, "num_agents": case["agents"], **case["config"]}),
            default_root_dir=folder,
            accelerator="cpu",
        )
        trainer.train()
        return TRAINED
    except MareinforceError as error:
        return type(error).__name__
    finally:
        if trainer is not None:
            _check_finite(trainer)


LEARNING: dict[str, Callable[[int], list[bool] | None]] = {
    "all": lambda count: None,
    "one": lambda count: [True, *[False] * (count - 1)],
    "none": lambda count: [False] * count,
}
SHORT = {
    "num_turns": 1, "num_train_epochs": 1, "num_generations": 2, "max_new_tokens": 2, "agent_learning_rate": 0.1,
    "logging_steps": 1, "eval_interval": 0,
}  # fmt: skip


def _team(case: Case, folder: Path) -> dict[str, Any]:
    """Tables, Llamas with weights of their own, or adapters on a Llama in a folder."""
    count = 1 if case["share_policy"] else case["agents"]
    if case["model"] == "table":
        models, words = table_agents(WORDS, WORDS[:4], count)
        words.chat_template = TEMPLATE.replace("{{ bos_token }}", "") if case["template"] else None
        return {"agents": models * (case["agents"] // count), "tokenizer": words}
    words = word_tokenizer(template=TEMPLATE if case["template"] else None)
    if case["model"] == "llama":
        llamas = [llama_model(len(words), seed=agent, positions=32) for agent in range(count)]
        return {"agents": llamas * (case["agents"] // count), "tokenizer": words}
    llama_model(len(words), positions=32).save_pretrained(folder / "base")
    words.save_pretrained(folder / "base")
    lora = {"r": 2, "target_modules": "all-linear"}
    return {"agent_model": str(folder / "base"), "num_agents": case["agents"], "model_config": {"lora": lora}}


def _check_finite(trainer: MAGRPOTrainer) -> None:
    if trainer.module.team is None:
        return
    assert all_finite(trainer.module.team.parameters()), "weights that are not finite"
    if trainer.module._trainer is not None:
        states = [state for one in trainer.module.trainer.optimizers for state in one.state.values()]
        moments = [value for state in states for value in state.values() if isinstance(value, torch.Tensor)]
        assert all_finite([torch.zeros(1), *moments]), "moments that are not finite"


def campaign(folder: Path, count: int, seed: int, report: Callable[[str], None] = print) -> dict[str, Any]:
    """Try so many combinations; return how they ended. Raises what no run may raise, with the case that raised it."""
    outcomes: Counter[str] = Counter()
    began = time.monotonic()

    @hypothesis.seed(seed)
    @hypothesis.settings(
        max_examples=count, deadline=None, database=None, print_blob=False, derandomize=False,
        suppress_health_check=list(HealthCheck), phases=[hypothesis.Phase.generate, hypothesis.Phase.shrink],
    )  # fmt: skip
    @hypothesis.given(CASES)
    def attempt(case: Case) -> None:
        with tempfile.TemporaryDirectory(dir=folder) as place:
            outcomes[run_case(case, Path(place))] += 1
        if sum(outcomes.values()) % 100 == 0:
            report(f"{sum(outcomes.values()):>5} combinations, {time.monotonic() - began:>5.0f} s: {dict(outcomes)}")

    attempt()
    return {"campaign": "fuzz", "seed": seed, "combinations": sum(outcomes.values()), **dict(outcomes.most_common())}


def quietly() -> None:
    """Let nobody draw progress bars or warn a thousand times."""
    for name in ("lightning.pytorch", "lightning.fabric", "lightning"):
        logging.getLogger(name).setLevel(logging.ERROR)
    warnings.simplefilter("ignore")
    transformers_logging.disable_progress_bar()


def main() -> int:
    """Run the campaign and say how it went; a traceback with the case if any run was not as it should be."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--count", type=int, default=1000)
    parser.add_argument("--seed", type=int, default=0)
    options = parser.parse_args()
    torch.set_num_threads(1)
    quietly()
    began = time.monotonic()
    out = sys.stdout
    with tempfile.TemporaryDirectory() as folder, open("/dev/null", "w") as nowhere:
        sys.stdout = nowhere  # Lightning's progress bars
        try:
            found = campaign(Path(folder), options.count, options.seed, lambda text: print(text, file=out, flush=True))
        finally:
            sys.stdout = out
    print(f"{'outcome':<24} runs")
    for name, number in list(found.items())[3:]:
        print(f"{name:<24} {number}")
    print(json.dumps({**found, "seconds": round(time.monotonic() - began)}))
    return 0


if __name__ == "__main__":
    sys.exit(main())
