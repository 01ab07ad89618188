"""What the next step of a run depends on, besides Lightning's own state: kept in checkpoints as plain values."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from lightning.pytorch.utilities import rank_zero_info

from mareinforce.agents.identity import check_same_team, check_weights_are_there, describe
from mareinforce.csv_log import MetricsCSV
from mareinforce.errors import ConfigError
from mareinforce.random_states import random_states
from mareinforce.tracking import WandbTracker

if TYPE_CHECKING:
    from lightning.pytorch import Trainer

    from mareinforce.team_module import TeamModule

PREFIX = "team."
"""Of the team's weights in a checkpoint."""


def save(module: TeamModule, checkpoint: dict[str, Any]) -> None:
    """Add the run's own state to a checkpoint, and take everything out of it that is never trained.

    Of several processes all save at the same time, since each has a state of its own.
    """
    team = module.loaded_team()
    trained = {f"{PREFIX}{name}" for name in team.trained_state()}
    checkpoint["state_dict"] = {key: value for key, value in checkpoint["state_dict"].items() if key in trained}
    own = {
        "learners": [learner.state_dict() for learner in module.learners],
        "means": module.means.state_dict(),
        **(module.boundary or boundary(module)),  # the last: what comes before may draw random numbers
    }
    checkpoint["mareinforce"] = {
        "team": describe(team),
        "env_step": module.env_step,
        "batches": module.batches,
        "batches_in_epoch": module.batches_in_epoch,
        "logged_env_step": module.logged_env_step,
        "config": dataclasses.asdict(module.config),
        "wandb": next((logger.record() for logger in module.loggers if isinstance(logger, WandbTracker)), None),
        **own,
        "other_ranks": module.ranks.gather_on_first(own)[1:],
    }


def boundary(module: TeamModule) -> dict[str, Any]:
    """What a step that is given up in the middle may have changed already, as it is between two steps."""
    return {
        "overlong": dict(module.loaded_expansion().overlong),
        "metrics_rows": [logger.rows() for logger in tables(module)],
        "random": random_states(),
    }


def load(module: TeamModule, checkpoint: dict[str, Any]) -> dict[str, Any] | None:
    """Go on from a checkpoint. Returns the random states to take up when the first batch starts; None: not training.

    Raises ConfigError if it is of another team or of another number of processes, or not whole.
    """
    state = checkpoint["mareinforce"]
    if module.trainer.training:
        _check_epochs(checkpoint["epoch"], module.trainer.max_epochs)
        _tell_changes(state["config"], dataclasses.asdict(module.config))
    check_same_team(state["team"], describe(module.loaded_team()))
    check_weights_are_there(module.loaded_team(), checkpoint["state_dict"], prefix=PREFIX)
    module.env_step, module.batches = state["env_step"], state["batches"]
    module.batches_in_epoch = state["batches_in_epoch"]
    module.logged_env_step = state["logged_env_step"]
    by_rank = [state, *state.get("other_ranks", [])]
    module.overlong_prompts = sum(each["overlong"].get("train", 0) for each in by_rank)
    if module.trainer.training:
        _check_ranks(len(by_rank), module.ranks.size)
        own = by_rank[module.ranks.rank]
    else:
        own = state
    for learner, saved in zip(module.learners, own["learners"], strict=True):
        learner.load_state_dict(saved)
    module.means.load_state_dict(own["means"])
    overlong = module.loaded_expansion().overlong
    overlong.clear()  # a trainer that goes on by itself has counted already
    overlong.update(own["overlong"])
    if not module.trainer.training:
        return None
    for logger, rows in zip(tables(module), state["metrics_rows"], strict=False):
        logger.keep_rows(rows)
    return dict(own["random"])


def count_epoch(trainer: Trainer) -> None:
    """In a resumed run's first batch: count the epoch that has begun with it.

    Lightning, which resumes at an epoch's last batch as in its middle, begins the next one without counting it, and
    what it then saved would be read as the end of an epoch: the next resume would go on in a wrong one.
    """
    progress = trainer.fit_loop.epoch_progress
    if progress.current.ready == trainer.current_epoch:
        progress.increment_ready()
        progress.increment_started()


def _check_epochs(done: int, most: int | None) -> None:
    if most is not None and 0 <= most < done:
        raise ConfigError(
            f"num_train_epochs={most}: the checkpoint is of epoch {done + 1}. Give what the run was given: its own "
            f"config.yaml, or the same arguments; or more epochs."
        )


def _tell_changes(saved: Mapping[str, Any], here: Mapping[str, Any]) -> None:
    """What is set otherwise than in the run so far, in a line: nobody should find out afterwards."""
    changed = [f"{name} {saved[name]} -> {here[name]}" for name in here if name in saved and saved[name] != here[name]]
    if changed:
        rank_zero_info(f"changed since the checkpoint: {', '.join(changed)}")


def _check_ranks(saved: int, here: int) -> None:
    if saved != here:
        raise ConfigError(
            f"the checkpoint is of a run in {saved} process{'es' * (saved > 1)}, each with rows, answers that wait and "
            f"random numbers of its own, and here there {'are' if here > 1 else 'is'} {here}: set trainer.devices and "
            f"trainer.num_nodes as they were."
        )


def tables(module: TeamModule) -> list[MetricsCSV]:
    """The loggers that write `metrics.csv`."""
    return [logger for logger in module.loggers if isinstance(logger, MetricsCSV)]
