"""`eval:`: which rows are evaluated how often and when, and the files that say how it went."""

from __future__ import annotations

import dataclasses
import json
import math
import os
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any, Literal

import lightning as L
from lightning.pytorch.utilities import rank_zero_warn

from mareinforce.errors import ConfigError, MareinforceWarning
from mareinforce.eval_summary import PASSED, summarise
from mareinforce.evaluation import Evaluation
from mareinforce.rollout.credit import assign_returns
from mareinforce.rollout.expand import Episode, Expansion
from mareinforce.rollout.tree import Node, nodes_by_level
from mareinforce.types import IndexedRow
from mareinforce.whole_files import write_whole

SAMPLES_FILE, SUMMARY_FILE = "eval.jsonl", "eval_summary.json"


@dataclass
class EvalProtocol:
    """How a run is evaluated. Raises ConfigError for a field that cannot be meant."""

    rows: int | Literal["all"] = "all"
    """Rows of `data.eval`: all, or the first n."""
    samples_per_row: int = 1
    """Times that each row is played."""
    temperature: float | None = None
    """Sampling temperature; None: `eval_temperature` of the configuration, else as in training; 0: greedy."""
    top_p: float | None = None
    """Nucleus mass; None: as in training."""
    seed: int | None = None
    """Decides what is sampled; None: the seed of the run."""
    k: list[int] = field(default_factory=lambda: [1])
    """pass@k is reported for these, if the reward has a component named passed."""
    at_start: bool = False
    """Before the first batch trains."""
    at_end: bool = True
    """After the last batch."""
    batch_size: int = 8
    """Rows rolled out together."""

    def __post_init__(self) -> None:
        for name in ("samples_per_row", "batch_size"):
            if not _whole(getattr(self, name), 1):
                raise ConfigError(f"eval.{name}={getattr(self, name)!r}: must be a whole number of at least 1.")
        if self.rows != "all" and not _whole(self.rows, 1):
            raise ConfigError(f"eval.rows={self.rows!r}: must be all, or a whole number of at least 1.")
        if self.temperature is not None and not (math.isfinite(self.temperature) and self.temperature >= 0):
            raise ConfigError(f"eval.temperature={self.temperature!r}: must be a finite number of at least 0.")
        if self.top_p is not None and not 0 < self.top_p <= 1:
            raise ConfigError(f"eval.top_p={self.top_p!r}: must be above 0 and at most 1.")
        if self.seed is not None and not _whole(self.seed, 0):
            raise ConfigError(f"eval.seed={self.seed!r}: must be a whole number of at least 0.")
        if not isinstance(self.k, list) or not all(_whole(k, 1) and k <= self.samples_per_row for k in self.k):
            raise ConfigError(
                f"eval.k={self.k!r}: must be a list of whole numbers from 1 to samples_per_row={self.samples_per_row}."
            )


@dataclass(frozen=True, slots=True)
class PlayedSample:
    """One row played once: its nodes from turn 1 on, one a turn."""

    row: int
    sample: int
    path: list[Node]


class ProtocolEvaluation(L.Callback):
    """Plays the protocol at the start and the end of training, or when `evaluate` asks for it.

    Writes into the run folder `eval.jsonl`, a line for each turn of each sample, and `eval_summary.json`; both hold
    what was evaluated `at` the start and the end side by side. Evaluation changes neither weights nor counters nor
    what training samples.
    """

    def __init__(self, protocol: EvalProtocol, folder: str | os.PathLike[str] | None = None) -> None:
        self.protocol = protocol
        self.folder = folder
        self.summaries: dict[str, Any] = {}

    def setup(self, trainer: L.Trainer, pl_module: L.LightningModule, stage: str) -> None:
        """Refuse to train towards an evaluation that has no rows. Raises ConfigError, before a model loads."""
        data: Any = getattr(trainer, "datamodule", None)
        if data is None or not data.eval_rows(1):
            raise ConfigError("eval: there is nothing to evaluate on; name rows in data.eval.")

    def on_train_start(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        """A run that goes on keeps what its start was like; its agents are others by now."""
        written = self._folder(trainer) / SUMMARY_FILE
        resumed = trainer.ckpt_path is not None
        self.summaries = json.loads(written.read_text(encoding="utf-8")) if resumed and written.exists() else {}
        if self.protocol.at_start and not resumed:
            self._evaluate(trainer, pl_module, "start")

    def on_train_end(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        if self.protocol.at_end:
            self._evaluate(trainer, pl_module, "end")

    def on_validation_start(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        if not trainer.training and not trainer.sanity_checking:
            self._evaluate(trainer, pl_module, "evaluation")

    def _folder(self, trainer: L.Trainer) -> Path:
        return Path(self.folder or trainer.log_dir or trainer.default_root_dir)

    def _evaluate(self, trainer: Any, module: Any, at: str) -> None:
        """Rank 0 plays, and the others wait; at the start a signal may end it."""
        folder = self._folder(trainer)  # asked on every rank: it is rank 0's
        with module.ranks.together():
            if module.ranks.rank == 0:
                work = partial(self._evaluate_here, trainer, module, at, folder)
                module.interruptible(work) if at == "start" else work()

    def _evaluate_here(self, trainer: Any, module: Any, at: str, folder: Path) -> None:
        count = None if self.protocol.rows == "all" else self.protocol.rows
        rows = trainer.datamodule.eval_rows(count)
        start = time.perf_counter()
        seed = module.seed if self.protocol.seed is None else self.protocol.seed
        episode = Episode.evaluation(module.config, seed)
        with module.phases.measure("evaluation", whole=True):
            played = play(module.expansion, rows, self.protocol, episode, module.config.discount)
            module.team.rest()
        seconds = time.perf_counter() - start
        summary = summarise([one.path for one in played], [one.row for one in played], self.protocol.k, seed)
        summary |= {"samples_per_row": self.protocol.samples_per_row, "seconds_per_row": seconds / len(rows)}
        roots = [one.path[0] for one in played]
        users = Evaluation(module.expansion, episode, module.config.discount, module.evaluators, roots).users_metrics()
        summary |= {"env_step": module.env_step, "metrics": users}
        summary |= {"agents": module.agent_names(), "protocol": dataclasses.asdict(self.protocol)}
        if self.protocol.k != [1] and not any(name.startswith("pass@") for name in summary["final"]):
            rank_zero_warn(
                f"eval.k={self.protocol.k}: nothing says whether an answer passed, so there is no pass@k. Let the "
                f'reward return a dictionary with a list {PASSED!r} beside "reward".',
                category=MareinforceWarning,
            )
        self.summaries[at] = summary
        _append(folder / SAMPLES_FILE, [_line(at, one, turn) for one in played for turn in range(len(one.path))])
        write_whole(folder / SUMMARY_FILE, json.dumps(self.summaries, indent=2))


def play(
    expansion: Expansion, rows: Sequence[IndexedRow], protocol: EvalProtocol, episode: Episode, discount: float
) -> list[PlayedSample]:
    """Play every row `samples_per_row` times, each time with random streams of its own, row by row."""
    sampling = episode.sampling
    if protocol.temperature is not None:
        sampling = dataclasses.replace(sampling, temperature=protocol.temperature)
    if protocol.top_p is not None:
        sampling = dataclasses.replace(sampling, top_p=protocol.top_p)
    played = []
    for sample in range(protocol.samples_per_row):
        streams = dataclasses.replace(episode, sampling=sampling, epoch=sample)
        for start in range(0, len(rows), protocol.batch_size):
            for root in expansion.grow(rows[start : start + protocol.batch_size], streams):
                assign_returns(root, num_turns=episode.num_turns, discount=discount, hold=False)
                played.append(PlayedSample(root.row_index, sample, list(nodes_by_level(root))))
    return sorted(played, key=lambda one: (one.row, one.sample))


def _line(at: str, one: PlayedSample, turn: int) -> dict[str, Any]:
    node = one.path[turn]
    agents = [
        None
        if answers is None
        else {
            "prompt": answers.prompt,
            "completion": answers.completions[0].text,
            "tokens": len(answers.completions[0].ids),
            "ended": answers.completions[0].ended,
        }
        for answers in node.answers
    ]
    return {
        "at": at,
        "row": one.row,
        "sample": one.sample,
        "turn": turn + 1,
        "raw_reward": node.raw_rewards[0],
        "reward": node.rewards[0],
        "return": node.returns[0],
        "components": {name: values[0] for name, values in node.components.items()},
        "agents": agents,
    }


def _append(path: Path, lines: Sequence[dict[str, Any]]) -> None:
    """Add whole lines; what another evaluation at the same point left there is replaced."""
    at = lines[0]["at"]
    kept = []
    if path.exists():
        kept = [line for line in path.read_text(encoding="utf-8").split("\n") if line and json.loads(line)["at"] != at]
    write_whole(path, "\n".join([*kept, *(json.dumps(line, ensure_ascii=False) for line in lines)]) + "\n")


def _whole(value: Any, least: int) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and value >= least
