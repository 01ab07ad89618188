"""`python -m mareinforce.evaluate --config FILE [--ckpt_path PATH|last]`: print the evaluation metrics as JSON."""

from __future__ import annotations

import json
import sys
from collections.abc import Sequence


def main(argv: Sequence[str] | None = None) -> int:
    """Evaluate as the arguments say (default: those of the process) and return the exit status. Writes no file."""
    arguments = list(sys.argv[1:] if argv is None else argv)

    def command() -> None:
        from mareinforce.cli import MareinforceCLI

        cli = MareinforceCLI("validate", arguments)
        if cli.trainer.is_global_zero:
            print(json.dumps(cli.metrics, indent=2))

    from mareinforce.reporting import exit_status

    return exit_status(command)


if __name__ == "__main__":
    sys.exit(main())
