"""`python -m mareinforce.evaluate`: evaluate agents and print the metrics as JSON.

--config FILE [--ckpt_path PATH|last]     the agents of a configuration, or of a checkpoint
--run RUN                                 the agents that a run saved
--agents FOLDER FOLDER ...                agents from different places (with --run or --config)
--replace agent_1=NAME                    another agent in one place (with --run or --agents)
"""

from __future__ import annotations

import json
import sys
from collections.abc import Sequence


def main(argv: Sequence[str] | None = None) -> int:
    """Evaluate as the arguments say (default: those of the process) and return the exit status.

    With `eval:` in the configuration (or `--eval.rows ...`) the protocol is played too: its summary is printed, and its
    files are written into a new folder.
    """
    arguments = list(sys.argv[1:] if argv is None else argv)

    def command() -> None:
        if {"--help", "-h"} & set(arguments):
            print(__doc__)
        from mareinforce.cli import MareinforceCLI
        from mareinforce.eval_arguments import configuration_arguments

        cli = MareinforceCLI("validate", configuration_arguments(arguments))
        if cli.trainer.is_global_zero:
            print(json.dumps(cli.metrics, indent=2))
            if cli.run_folder is not None:
                print((cli.run_folder / "eval_summary.json").read_text(encoding="utf-8"))
                print(f"evaluation folder: {cli.run_folder}")

    from mareinforce.reporting import exit_status

    return exit_status(command)


if __name__ == "__main__":
    sys.exit(main())
