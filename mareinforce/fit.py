"""`python -m mareinforce.fit --config FILE`: train, save, and say how it went."""

from __future__ import annotations

import os
import re
import sys
from collections.abc import Sequence
from importlib import import_module
from pathlib import Path
from threading import Thread

_SWITCHED_ON = re.compile(r"^wandb:\s*(true|yes|on)\b", re.IGNORECASE | re.MULTILINE)


def main(argv: Sequence[str] | None = None) -> int:
    """Train as the arguments say (default: those of the process) and return the exit status."""
    arguments = list(sys.argv[1:] if argv is None else argv)

    def command() -> None:
        with importing(BEFORE_TRAINING):
            if asks_for_wandb(arguments):
                begin_wandb()

            from mareinforce.cli import MareinforceCLI
            from mareinforce.quiet import plain_warnings
            from mareinforce.run_summary import print_summary

        with plain_warnings():
            cli = MareinforceCLI("fit", arguments)
        if cli.trainer.is_global_zero and cli.run_folder is not None:
            print_summary(cli.run_folder)

    from mareinforce.reporting import BEFORE_TRAINING, exit_status, importing

    return exit_status(command)


def asks_for_wandb(arguments: Sequence[str]) -> bool:
    """Do the arguments, or the files they name, look as if W&B were on? They are read as plain text: nothing that could
    parse them is imported yet."""
    if any(argument.startswith("--wandb") for argument in arguments):
        return True
    names = [argument.removeprefix("--config=") for argument in arguments if argument.endswith((".yaml", ".yml"))]
    # what is no file, or cannot be read, is the parser's to refuse
    files = [Path(name) for name in names if os.path.isfile(name) and os.access(name, os.R_OK)]
    return any(_SWITCHED_ON.search(file.read_text(errors="replace")) for file in files)


def begin_wandb() -> None:
    """Do early what takes long when W&B's client begins later.

    Its classes are built from their source, which Python seeks through all modules: 1 s once the others are imported.
    Its process starts while they are.
    """
    import_module("wandb.apis.public")
    setup = import_module("wandb").setup
    if os.environ.get("LOCAL_RANK", "0") == "0":
        Thread(target=setup, name="wandb-setup", daemon=True).start()


if __name__ == "__main__":
    from mareinforce.reporting import leave

    leave(main())
