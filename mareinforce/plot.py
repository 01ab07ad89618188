"""`python -m mareinforce.plot RUN... [--out FILE] [--smooth ROWS]`: draw the learning curves of runs.

RUN            a run folder, or a metrics.csv; several, such as one a seed, are drawn as mean and band
--out FILE     the picture; default: reward_curves.png in the run folder, or in the current one for several runs
--smooth ROWS  rows in the running mean; default: a tenth of a run's, 10 at most
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, NoReturn

if TYPE_CHECKING:
    from mareinforce.curves import Curves

PICTURE = "reward_curves.png"


class _Parser(argparse.ArgumentParser):
    """Says what is wrong as everything else here does."""

    def error(self, message: str) -> NoReturn:
        from mareinforce.errors import ConfigError

        raise ConfigError(f"{message}. Usage: python -m mareinforce.plot RUN... [--out FILE] [--smooth ROWS]")


def main(argv: Sequence[str] | None = None) -> int:
    """Draw as the arguments say (default: those of the process) and return the exit status."""
    arguments = list(sys.argv[1:] if argv is None else argv)

    def command() -> None:
        from mareinforce.curves import draw
        from mareinforce.errors import ConfigError

        if {"--help", "-h"} & set(arguments):
            print(__doc__)
            return
        parser = _Parser(add_help=False, allow_abbrev=False)
        parser.add_argument("runs", nargs="+", metavar="RUN", type=Path)
        parser.add_argument("--out", type=Path)
        parser.add_argument("--smooth", type=int, default=None)
        given = parser.parse_args(arguments)
        if given.smooth is not None and given.smooth < 1:
            raise ConfigError(f"--smooth {given.smooth}: must be at least 1.")
        files = [metrics_file(run) for run in given.runs]
        out = given.out or (files[0].parent if len(files) == 1 else Path()) / PICTURE
        if out.suffix != ".png":
            raise ConfigError(f"--out {out}: must end with .png.")
        curves = [curves_of(file) for file in files]
        out.parent.mkdir(parents=True, exist_ok=True)
        draw(curves, out, given.smooth, [str(run) for run in given.runs])
        print(out)

    from mareinforce.reporting import exit_status

    return exit_status(command)


def metrics_file(run: Path) -> Path:
    """The `metrics.csv` of a run folder, or the file itself. Raises DataError if there is none."""
    from mareinforce.csv_log import FILE_NAME
    from mareinforce.errors import DataError

    file = run / FILE_NAME if run.is_dir() else run
    if not file.is_file():
        raise DataError(f"{run}: there is no {FILE_NAME}; give the folder of a run, such as runs/run_0001.")
    return file


def curves_of(file: Path) -> Curves:
    """The curves in a `metrics.csv`. Raises DataError if it has none."""
    from mareinforce.csv_log import read_metrics
    from mareinforce.curves import read_curves
    from mareinforce.errors import DataError

    curves = read_curves(read_metrics(file))
    if not curves.get("reward_mean"):
        raise DataError(f"{file}: has no row with a turn_1/reward_mean yet; the run has not logged any training.")
    return curves


if __name__ == "__main__":
    from mareinforce.reporting import leave

    leave(main())
