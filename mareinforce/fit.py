"""`python -m mareinforce.fit --config FILE`: train, save, and say how it went."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from importlib import import_module


def main(argv: Sequence[str] | None = None) -> int:
    """Train as the arguments say (default: those of the process) and return the exit status."""
    arguments = list(sys.argv[1:] if argv is None else argv)

    def command() -> None:
        with importing(BEFORE_TRAINING):
            if any(argument.startswith("--wandb") for argument in arguments):
                # its classes are built from their source, which Python seeks through all modules: 1 s if it is last
                import_module("wandb.apis.public")

            from mareinforce.cli import MareinforceCLI
            from mareinforce.quiet import plain_warnings
            from mareinforce.run_summary import print_summary

        with plain_warnings():
            cli = MareinforceCLI("fit", arguments)
        if cli.trainer.is_global_zero and cli.run_folder is not None:
            print_summary(cli.run_folder)

    from mareinforce.reporting import BEFORE_TRAINING, exit_status, importing

    return exit_status(command)


if __name__ == "__main__":
    from mareinforce.reporting import leave

    leave(main())
