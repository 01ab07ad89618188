"""`python -m tests.benchmarks W2 --model FOLDER`: seconds a prompt of one workload, and what they went into, as JSON.

Every completion has its full length, so that all who are compared do the same work; in W5, the quickstart, they end
where the models end them. With `--peer PYTHON SCRIPT` (a
Python with the peer installed, and a script that takes the peer's arguments and prints a JSON line with `per_prompt_s`)
and `--floor SCRIPT` (a bare loop, run by this Python), they are run in turn, each in a process of its own, and a last
line has the medians and the ratios to ours.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import resource
import statistics
import subprocess
import sys
import tempfile
import time
import warnings
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

from lightning.pytorch.callbacks import Callback

TEXTS = [
    "Describe a city in the clouds:", "Invent a new holiday and explain it:", "Write a bedtime story for a dragon:",
    "Explain how teleportation might work:", "Tell a joke about dinosaurs:", "Describe a world without electricity:",
    "Create a superhero with a unique power:", "Write a scene where the moon talks:",
]  # fmt: skip
SENTENCE = "The city floats above the sea and its towers are made of glass. "
KIB = 1024.0  # ru_maxrss is in KiB on Linux


@dataclass(frozen=True)
class Workload:
    """What is done for each prompt: N agents, T turns, K completions of `tokens` tokens."""

    agents: int
    turns: int
    generations: int
    tokens: int
    joint: str = "aligned"
    prompt_tokens: int = 0
    """Prompts are lengthened to about this many tokens."""
    quickstart: bool = False
    """Its prompts, learning rate and buffer, and answers that end where the models end them."""
    prompts: int = 2
    """As many as are rolled out if nothing else is asked for."""

    def arguments(self) -> list[str]:
        """As the scripts of others take it."""
        given = {
            "--agents": self.agents, "--turns": self.turns, "--generations": self.generations, "--tokens": self.tokens,
            "--joint": self.joint, "--prompt-tokens": self.prompt_tokens,
        }  # fmt: skip
        return [str(part) for pair in given.items() for part in pair]


WORKLOADS = {
    "W1": Workload(agents=2, turns=1, generations=8, tokens=64),
    "W1n1": Workload(agents=1, turns=1, generations=8, tokens=64),
    "W2": Workload(agents=2, turns=2, generations=4, tokens=32),
    "W3": Workload(agents=2, turns=2, generations=3, tokens=32, joint="cross"),
    "W4": Workload(agents=2, turns=1, generations=8, tokens=64, prompt_tokens=200),
    "W5": Workload(agents=2, turns=1, generations=16, tokens=96, quickstart=True, prompts=150),
    "W5full": Workload(agents=2, turns=1, generations=16, tokens=96, prompts=60),
}
"""W5 is meant for the tiny model: its 150 updates take 150 times `per_prompt_s`. In W5full all answers are whole."""


def without_own_loop() -> None:
    """Sample with the models' generate, which reads each prompt K times and keeps ended rows."""
    from mareinforce.rollout.engines import transformers

    transformers.fits = lambda network: False


def without_fast_products() -> None:
    """Float32 products on a CPU with the library that torch takes."""
    from mareinforce.agents import linear_products, packed_weights

    linear_products.onednn_is_faster = packed_weights.onednn_is_faster = lambda: False


def without_packed_weights() -> None:
    """Sample from the weights as they lie."""
    from mareinforce.agents import packed_weights

    packed_weights.available = lambda: False


def without_adapters_side_by_side() -> None:
    """Rows of several adapters as peft mixes them."""
    from mareinforce.rollout.engines import batches

    batches.fit_side_by_side = lambda network: False


def without_shared_prefixes() -> None:
    """Score a row a completion."""
    from mareinforce.agents import node_scoring

    node_scoring.can_share_prefixes = lambda model: False


def without_sparse_lookups() -> None:
    """A second dense gradient where the head is tied to the embeddings."""
    from mareinforce.agents import node_scoring, scoring

    node_scoring.sparse_lookups = scoring.sparse_lookups = contextlib.nullcontext


def without_fused_optimizer() -> None:
    """AdamW weight by weight."""
    from mareinforce import optim

    optim.FUSED_ON = ()


def without_chunked_scores() -> None:
    """Log-probs of all positions of a pass at once."""
    from mareinforce.algorithms import logprobs

    logprobs.CHUNK_SCORES = 2**40


def without_joint_passes() -> None:
    """A forward and backward pass a node."""
    from mareinforce import optim
    from mareinforce.agents.micro_batches import Piece

    optim.micro_batches = lambda nodes, budget: (
        [Piece(index, range(len(node.completion_ids)))] for index, node in enumerate(nodes)
    )


TECHNIQUES = {
    "own_loop": without_own_loop, "fast_products": without_fast_products, "packed_weights": without_packed_weights,
    "adapters_side_by_side": without_adapters_side_by_side, "shared_prefixes": without_shared_prefixes,
    "joint_passes": without_joint_passes, "sparse_lookups": without_sparse_lookups,
    "chunked_scores": without_chunked_scores, "fused_optimizer": without_fused_optimizer,
}  # fmt: skip
"""What can be left out, to see what it is worth."""


class StepTimes(Callback):
    """Seconds in training steps."""

    def __init__(self) -> None:
        self.seconds = self._start = 0.0

    def on_train_batch_start(self, *_: Any) -> None:
        """Start the clock."""
        self._start = time.perf_counter()

    def on_train_batch_end(self, *_: Any) -> None:
        """Stop the clock."""
        self.seconds += time.perf_counter() - self._start


class Stopwatch:
    """Seconds inside of named calls; time in a call inside of another counts once, for the inner one."""

    def __init__(self) -> None:
        self.seconds: dict[str, float] = {}
        self._open: list[list[float]] = []  # seconds taken by inner calls

    def around(self, name: str, owner: Any, attribute: str) -> Callable[[], None]:
        """Time a function of a class or module from now on; returns what ends that."""
        plain = getattr(owner, attribute)

        def timed(*args: Any, **kwargs: Any) -> Any:
            start = time.perf_counter()
            self._open.append([0.0])
            try:
                return plain(*args, **kwargs)
            finally:
                took = time.perf_counter() - start
                (inner,) = self._open.pop()
                self.seconds[name] = self.seconds.get(name, 0.0) + took - inner
                if self._open:
                    self._open[-1][0] += took

        setattr(owner, attribute, timed)
        return lambda: setattr(owner, attribute, plain)


@contextlib.contextmanager
def timed_parts(watch: Stopwatch) -> Iterator[None]:
    """Time what a step is made of."""
    import torch

    from mareinforce.agents.team import Team
    from mareinforce.rewards.contract import Reward
    from mareinforce.rollout.engines.transformers import TransformersEngine

    parts = {
        "generation_s": (TransformersEngine, "sample"), "reward_s": (Reward, "score"),
        "reference_s": (Team, "reference_kl"), "scoring_s": (Team, "score_nodes"),
        "backward_s": (torch.Tensor, "backward"), "optimizer_s": (torch.optim.AdamW, "step"),
    }  # fmt: skip
    undo = [watch.around(name, *place) for name, place in parts.items()]
    try:
        yield
    finally:
        for put_back in undo:
            put_back()


def growing(*texts: list[str]) -> list[float]:
    """The length-ratio reward of the last agent's text to the first's; a single agent is to write long ones.

    It has to tell answers apart: without a signal there would be no update to measure.
    """
    import math

    if len(texts) == 1:
        return [float(len(text)) for text in texts[0]]
    ratios = [len(row[-1]) / max(len(row[0]), 1) for row in zip(*texts, strict=True)]
    return [math.exp(-max(2 - ratio, ratio - 3, 0.0)) for ratio in ratios]


def feedback(prompt: str, agent_completions: list[str]) -> list[str]:
    """Each agent hears how long its own answer was."""
    return [
        f"{prompt}\n\nYour last answer had {len(said)} characters. Please write an improved answer."
        for said in agent_completions
    ]


def measure(workload: Workload, options: argparse.Namespace) -> dict[str, Any]:
    """Train on a few prompts in this process. Only the steps count, not loading and the like (`start_s`)."""
    import torch
    from lightning.pytorch.callbacks import Checkpoint

    from mareinforce import MAGRPOConfig, MAGRPOTrainer
    from mareinforce.data.sources import Source, load_rows

    prompts = options.prompts or workload.prompts
    for name in options.without:
        TECHNIQUES[name]()
    if options.threads:
        torch.set_num_threads(options.threads)
    longer = SENTENCE * (workload.prompt_tokens // 14 + 1) if workload.prompt_tokens else ""
    rows: Any = [{"prompt": longer + TEXTS[index % len(TEXTS)]} for index in range(prompts)]
    work: dict[str, Any] = {
        "min_new_tokens": workload.tokens, "temperature": 0.6, "top_p": 0.6, "top_k": 50, "rollout_buffer_size": 2,
    }  # fmt: skip
    if workload.quickstart:
        rows = load_rows(Source(path="story-prompts", split=f"train[:{prompts}]"))
        work = {
            "rollout_buffer_size": 1, "agent_learning_rate": 1e-3, "lr_schedule": "linear", "warmup_updates": 30,
            "max_grad_norm": 0.5, "adam_betas": (0.9, 0.95),
        }  # fmt: skip
    fields: dict[str, Any] = {
        "num_agents": workload.agents, "num_turns": workload.turns, "num_train_epochs": 1,
        "num_generations": workload.generations, "max_new_tokens": workload.tokens, "joint_mode": workload.joint,
        "early_termination_threshold": None, "eval_interval": 0, "reference_kl_enabled": options.kl,
    }  # fmt: skip
    given = {name: json.loads(value) for name, value in (pair.split("=", 1) for pair in options.set)}
    config = MAGRPOConfig(**fields | work | given)
    lora = {"r": 16, "lora_alpha": 32, "target_modules": "all-linear"}
    watch, steps = Stopwatch(), StepTimes()
    with warnings.catch_warnings(), tempfile.TemporaryDirectory() as folder, contextlib.redirect_stdout(sys.stderr):
        warnings.simplefilter("ignore")
        trainer = MAGRPOTrainer(
            agent_model=options.model,
            num_agents=workload.agents,
            model_config={"lora": lora} if options.lora else None,
            reward_func=growing,
            external_transition=feedback if workload.turns > 1 else None,
            train_dataset=rows,
            args=config,
            default_root_dir=folder,
            accelerator=options.accelerator,
            callbacks=[steps, Checkpoint()],  # nobody else in the comparison writes checkpoints
        )
        with timed_parts(watch):
            start = time.perf_counter()
            trainer.train()
            wall = time.perf_counter() - start
    trained = steps.seconds
    tokens = (
        workload.agents
        * workload.tokens
        * sum(
            (workload.generations ** (workload.agents if workload.joint == "cross" else 1)) ** turn
            * workload.generations
            for turn in range(workload.turns)
        )
    )
    each = {name: round(seconds / prompts, 3) for name, seconds in watch.seconds.items()}
    return {
        "per_prompt_s": round(trained / prompts, 3),
        **each,
        "other_s": round((trained - sum(watch.seconds.values())) / prompts, 3),
        "tokens_per_s": None if workload.quickstart else round(tokens * prompts / trained, 1),
        "start_s": round(wall - trained, 2),
        "peak_gib": round(resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / KIB**2, 2),
        "prompts": prompts, "lora": options.lora, "kl": options.kl, "set": options.set,
        "without": options.without,
    }  # fmt: skip


def main() -> None:
    """Measure one workload here, or, with a peer or a floor, all in turn in processes of their own."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("workload", choices=WORKLOADS)
    parser.add_argument("--model", required=True, help="a folder of weights and tokenizer, or a model's name")
    parser.add_argument("--prompts", type=int)
    parser.add_argument("--lora", action="store_true")
    parser.add_argument("--kl", action="store_true")
    parser.add_argument("--set", action="append", default=[], metavar="FIELD=JSON", help="a field of the configuration")
    parser.add_argument("--without", action="append", default=[], choices=TECHNIQUES)
    parser.add_argument("--threads", type=int)
    parser.add_argument("--accelerator", default="cpu")
    parser.add_argument("--peer", nargs=2, metavar=("PYTHON", "SCRIPT"))
    parser.add_argument("--floor", metavar="SCRIPT")
    parser.add_argument("--repeat", type=int, default=3)
    options = parser.parse_args()
    workload = WORKLOADS[options.workload]
    if not options.peer and not options.floor:
        print(json.dumps({"workload": options.workload, **measure(workload, options)}))
        return
    given = iter(sys.argv[1:])
    skipped = {"--peer": 2, "--floor": 1, "--repeat": 1}
    own: list[str] = []
    for part in given:
        if part in skipped:
            for _ in range(skipped[part]):
                next(given)
        else:
            own.append(part)
    commands = {"ours": [sys.executable, "-m", "tests.benchmarks", *own]}
    if options.peer:
        prompts = ["--prompts", str(options.prompts or workload.prompts)]
        commands["peer"] = [*options.peer, options.model, *workload.arguments(), *prompts]
    if options.floor:
        lora = ["--lora"] if options.lora else []
        commands["floor"] = [sys.executable, options.floor, options.model, *workload.arguments(), *lora]
    seconds: dict[str, list[float]] = {name: [] for name in commands}
    for _ in range(options.repeat):
        for name, command in commands.items():
            line = subprocess.run(command, check=True, stdout=subprocess.PIPE, text=True).stdout.splitlines()[-1]
            print(json.dumps({"who": name, **json.loads(line)}), flush=True)
            seconds[name].append(json.loads(line)["per_prompt_s"])
    medians = {name: statistics.median(values) for name, values in seconds.items()}
    ratios = {f"{name}/ours": round(median / medians["ours"], 3) for name, median in medians.items() if name != "ours"}
    print(json.dumps({"workload": options.workload, "medians_s": medians, **ratios}))


if __name__ == "__main__":
    main()
