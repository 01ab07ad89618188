"""What the command line has besides the groups of the YAML: its help, the keys of tracking, how things are spelt."""

from __future__ import annotations

import re
from argparse import SUPPRESS
from collections.abc import Sequence
from itertools import islice
from pathlib import Path

from jsonargparse import ActionYesNo, ArgumentParser, Namespace

from mareinforce.eval_protocol import EvalProtocol
from mareinforce.parse_errors import NUMBER
from mareinforce.run_folder import CONFIG_FILE, run_number
from mareinforce.tracking import WandbSettings

_CONFIG = ("--config", "-c")
_AS_IN_YAML = re.compile(r"^--wandb_[a-z_]+")
DESCRIPTION = "Keys are those of the YAML files. A later file overrides an earlier one, and arguments override files."
USAGE = {
    "fit": """\
python -m mareinforce.fit --config FILE [--config OVERLAY ...] [--KEY VALUE ...]

  python -m mareinforce.fit --config configs/quickstart.yaml
  python -m mareinforce.fit --config configs/quickstart.yaml --config configs/overlays/debug.yaml
  python -m mareinforce.fit --config configs/quickstart.yaml --model.config.num_generations 8 --wandb
  python -m mareinforce.fit --config configs/quickstart.yaml --print_config    (everything that can be set)
  python -m mareinforce.fit --config runs/run_0001/config.yaml --ckpt_path last    (go on with a run)""",
    "validate": "python -m mareinforce.evaluate [--run RUN | --config FILE ...] [--KEY VALUE ...]",
}
_TITLES = {
    "model": "Agents, rewards and functions",
    "model.config": "The learning loop",
    "data": "Rows to train on and to evaluate on",
    "ckpt_path": "From a checkpoint",
    "trainer": "Arguments of Lightning's Trainer",
}
"""What groups are called in the help, by their first key, which takes a file with the rest."""
_QUOTED_NUMBER = re.compile(rf"(?P<key>--[^=]+=)?(?P<quote>[\"'])(?P<number>{NUMBER})(?P=quote)")


def spelt(arguments: Sequence[str]) -> list[str]:
    """Arguments as the parser takes them: numbers without quotes, and `--wandb_name` (as in YAML) as `--wandb-name`."""
    unquoted = [_QUOTED_NUMBER.sub(r"\g<key>\g<number>", argument) for argument in arguments]
    return [_AS_IN_YAML.sub(lambda key: key[0].replace("_", "-"), argument) for argument in unquoted]


def files_first(arguments: Sequence[str]) -> list[str]:
    """The configuration files, in their order, before all other arguments: those override files wherever they stand."""
    files, others = _files_and_others(arguments)
    return files + others


def run_given(arguments: Sequence[str]) -> Path | None:
    """The run folder whose own configuration is the last of those files that are a run's; None: none is."""
    files, _ = _files_and_others(arguments)
    places = [Path(file.removeprefix("--config=")) for file in files if file not in _CONFIG]
    runs = [file.parent for file in places if file.name == CONFIG_FILE and run_number(file.absolute().parent)]
    return runs[-1] if runs else None


def _files_and_others(arguments: Sequence[str]) -> tuple[list[str], list[str]]:
    files: list[str] = []
    others: list[str] = []
    rest = iter(arguments)
    for argument in rest:
        if argument in _CONFIG:
            files += [argument, *islice(rest, 1)]
        elif argument.startswith("--config="):
            files.append(argument)
        else:
            others.append(argument)
    return files, others


def gives(arguments: Sequence[str], key: str) -> bool:
    """Is a key given on the command line itself, by its name or within a group (`--model.config '{...}'`)?"""
    name, values = "", []
    for argument in arguments:
        if argument.startswith("--"):
            name, _, value = argument[2:].partition("=")
            values.append((name, value))
        else:
            values.append((name, argument))
    leaf = key.rpartition(".")[2]
    return any(
        name == key or (key.startswith(f"{name}.") and re.search(rf"\b{leaf}\b", value)) for name, value in values
    )


def add_own_arguments(parser: ArgumentParser) -> None:
    """The keys that are neither model nor data nor trainer."""
    parser.add_argument("--eval", type=EvalProtocol | None, default=None, help="what is evaluated how often, and when")
    tracking = parser.add_argument_group("Weights & Biases")
    tracking.add_argument(
        "--wandb",
        action=ActionYesNo(no_prefix="no-"),
        nargs="?",
        default=False,
        help="log to W&B; offline where there is no key",
    )
    for name, meaning in {
        "project": "the project (default: WANDB_PROJECT, else mareinforce)",
        "entity": "the account or team (default: that of the key)",
        "name": "what the run is called there (default: its run folder)",
    }.items():
        tracking.add_argument(f"--wandb-{name}", type=str | None, default=None, help=meaning)
    tracking.add_argument(
        "--wandb-save-models",
        action=ActionYesNo(no_prefix="no-"),
        nargs="?",
        default=False,
        help="upload every agent at the end",
    )


def arrange_help(parser: ArgumentParser) -> None:
    """Say of every group what its keys are for, and of Lightning's Trainer their names alone, at the end.

    Files for single groups, and help on single classes, are taken as ever, but not listed.
    """
    lightnings = []
    for group in parser._action_groups:
        keys = [action.dest for action in group._group_actions]
        first = keys[0] if keys else ""
        group.title = _TITLES.get(first, group.title)
        for action in group._group_actions:
            if action.dest == "ckpt_path":
                action.help = 'what a run or an evaluation goes on from: a file, or "last": the newest of the runs'
            elif first == "trainer" or action.dest in _TITLES or action.dest.endswith(".help"):
                action.help = SUPPRESS
        if first == "trainer":
            names = [f"--{key}" for key in keys[1:] if not key.endswith(".help")]
            group.description = f"As Lightning documents them: {', '.join(names)}."
            lightnings.append(group)
    parser._action_groups = [group for group in parser._action_groups if group not in lightnings] + lightnings


def wandb_settings(settings: Namespace) -> WandbSettings:
    """What was said about W&B."""
    return WandbSettings(
        project=settings.wandb_project,
        entity=settings.wandb_entity,
        name=settings.wandb_name,
        save_models=settings.wandb_save_models,
    )
