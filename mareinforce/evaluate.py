"""`python -m mareinforce.evaluate`: evaluate agents on all rows of data.eval, and print one JSON object.

--config FILE [--ckpt_path PATH|last]     the agents of a configuration, or of a checkpoint
--run RUN                                 the agents that a run saved
--agents FOLDER FOLDER ...                agents from different places (with --run or --config)
--replace agent_1=NAME                    another agent in one place (with --run or --agents)
--model.config.eval_num_samples N         the first N rows only
"""

from __future__ import annotations

import contextlib
import json
import sys
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from mareinforce.cli import MareinforceCLI


def main(argv: Sequence[str] | None = None) -> int:
    """Evaluate as the arguments say (default: those of the process) and return the exit status.

    stdout is the JSON object alone; what is said besides, also by the user's functions, goes to stderr. With `eval:` in
    the configuration (or `--eval.rows ...`) the protocol is played too: its summary is in the object, and its files are
    written into a new folder.
    """
    arguments = list(sys.argv[1:] if argv is None else argv)
    asks = any(argument.startswith(("--help", "--print_config")) or argument == "-h" for argument in arguments)

    def command() -> None:
        if {"--help", "-h"} & set(arguments):
            print(__doc__)
        with importing():
            from mareinforce.cli import MareinforceCLI
            from mareinforce.eval_arguments import configuration_arguments
            from mareinforce.quiet import plain_warnings

        to_stderr = contextlib.nullcontext() if asks else contextlib.redirect_stdout(sys.stderr)
        with plain_warnings(), to_stderr:
            cli = MareinforceCLI("validate", configuration_arguments(arguments))
        if cli.trainer.is_global_zero:
            print(json.dumps(found(cli), indent=2))

    from mareinforce.reporting import exit_status, importing

    return exit_status(command)


def found(cli: MareinforceCLI) -> dict[str, Any]:
    """What is printed: the metrics, of how many rows of how many; with a protocol its summary and its folder."""
    result: dict[str, Any] = {**cli.metrics, "rows": cli.eval_rows, "rows_available": len(cli.datamodule.eval_rows())}
    if cli.run_folder is not None:
        summary = json.loads((cli.run_folder / "eval_summary.json").read_text(encoding="utf-8"))
        result |= {"eval_summary": summary["evaluation"], "evaluation_folder": str(cli.run_folder)}
    return result


if __name__ == "__main__":
    from mareinforce.reporting import leave

    leave(main())
