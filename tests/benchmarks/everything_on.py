"""`python -m tests.benchmarks.everything_on`: what callbacks, the log of rollouts and W&B cost a run, as JSON lines.

The command is run twice at a time, with nothing and with everything on. The two take turns batch by batch, so that
whatever else the machine does hits both alike; each counts its own turns, from before its imports to its end. Which of
them begins matters a little, so they begin in turn, and the pairs should be an even number.
"""

from __future__ import annotations

import argparse
import gc
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from tests.benchmarks.turns import OF_THIS_PROCESS, Turns

REPOSITORY = Path(__file__).parents[2]
RECIPE = REPOSITORY / "configs" / "quickstart.yaml"
CALLBACKS = (
    "EarlyTerminationLogger", "EvaluationCallback", "TurnRewardCurves", "CompletionTable", "TreeView",
    "ThroughputMonitor", "RolloutLog",
)  # fmt: skip
VARIANTS: dict[str, tuple[tuple[str, ...], tuple[str, ...]]] = {
    "everything": (CALLBACKS, ("--wandb",)), "callbacks": (CALLBACKS, ()), "wandb": ((), ("--wandb",)),
    "nothing": ((), ()),
}  # fmt: skip
"""Callbacks and arguments that are compared with none; "nothing" shows what the measure itself is good for."""


def take_turns(read: int, write: int, found: Path, arguments: Sequence[str]) -> int:
    """Run the command in this process and write down its turns. Nothing heavy may be imported before it."""
    turns = Turns(read, write)
    OF_THIS_PROCESS.append(turns)
    turns.take()
    from mareinforce.fit import main as fit

    status = fit(arguments)
    gc.freeze()  # as the command does when it ends
    turns.leave()
    if status:
        return status
    start, *batches, end = turns.seconds
    figures = {
        "whole_s": sum(turns.seconds), "start_s": start, "batches_s": sum(batches), "last_batch_and_end_s": end,
        "cpu_s": time.process_time(),
    }  # fmt: skip
    found.write_text(json.dumps({name: round(value, 3) for name, value in figures.items()}))
    return status


def pair(variant: str, recipe: Path, epochs: int, rows: int | None, plain_first: bool) -> dict[str, dict[str, float]]:
    """Run with nothing and with a variant, in turns; what each of them found."""
    import yaml

    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        (to_plain, from_variant), (to_variant, from_plain) = os.pipe(), os.pipe()
        sides = {"plain": ("nothing", to_plain, from_plain), variant: (variant, to_variant, from_variant)}
        runs = {}
        for side, (what, read, write) in sides.items():
            callbacks, arguments = VARIANTS[what]
            made = yaml.safe_load(recipe.read_text())
            made["model"]["config"]["num_train_epochs"] = epochs
            if rows is not None:
                made["data"]["train"]["split"] = f"train[:{rows}]"
            made["trainer"]["callbacks"] = [
                *({"class_path": f"mareinforce.callbacks.{callback}"} for callback in callbacks),
                {"class_path": "tests.benchmarks.baton.Baton"},
            ]
            (folder / side).mkdir()
            (folder / side / "recipe.yaml").write_text(yaml.safe_dump(made))
            words = ["--config", "recipe.yaml", *arguments]
            command = [sys.executable, "-m", "tests.benchmarks.everything_on", "--turns", str(read), str(write), *words]
            with (folder / side / "said.txt").open("w") as said:
                runs[side] = subprocess.Popen(
                    command,
                    cwd=folder / side,
                    env=os.environ | {"PYTHONPATH": str(REPOSITORY), "WANDB_MODE": "offline"},
                    pass_fds=(read, write),
                    stdout=said,
                    stderr=subprocess.STDOUT,
                )
        os.write(from_variant if plain_first else from_plain, b".")  # what the one reads is what the other writes
        for side, run in runs.items():
            if run.wait():
                print((folder / side / "said.txt").read_text(), file=sys.stderr)
                raise SystemExit(f"the run with {side} ended with {run.returncode}")
        return {side: json.loads((folder / side / "turns.json").read_text()) for side in runs}


def main() -> None:
    """Compare a variant with nothing, or be one of the two runs (``--turns``)."""
    if sys.argv[1:2] == ["--turns"]:
        read, write, *arguments = sys.argv[2:]
        sys.exit(take_turns(int(read), int(write), Path("turns.json"), arguments))
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--variant", choices=VARIANTS, default="everything")
    parser.add_argument("--recipe", type=Path, default=RECIPE)
    parser.add_argument("--epochs", type=int, default=3, help="of the recipe's prompts (the quickstart has 150)")
    parser.add_argument("--rows", type=int, help="so many prompts instead")
    parser.add_argument("--pairs", type=int, default=4)
    options = parser.parse_args()
    ratios: dict[str, list[Any]] = {}
    for index in range(options.pairs):
        found = pair(options.variant, options.recipe, options.epochs, options.rows, plain_first=index % 2 == 0)
        of_pair = {name: found[options.variant][name] / plain for name, plain in found["plain"].items()}
        for name, ratio in of_pair.items():
            ratios.setdefault(name, []).append(ratio)
        print(json.dumps({**found, "ratios": {name: round(ratio, 4) for name, ratio in of_pair.items()}}), flush=True)
    medians = {name: round(statistics.median(values), 4) for name, values in ratios.items()}
    print(json.dumps({"variant": options.variant, "medians": medians}))


if __name__ == "__main__":
    main()
