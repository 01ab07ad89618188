"""A programming problem in HumanEval's format, answers to it, and a sandbox that is none, for trusted code."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

PROBLEM = {
    "task_id": "Test/0",
    "prompt": '''from typing import List


def above(numbers: List[int], limit: int) -> List[int]:
    """ Return the numbers above the limit, in ascending order.
    >>> above([3, 1, 2], 1)
    [2, 3]
    above([], 5) ==> []
    For example, above(x, 1) == [2] would need an x.
    """
''',
    "entry_point": "above",
    "canonical_solution": "    return sorted(number for number in numbers if number > limit)\n",
    "test": """

METADATA = {'author': 'nobody'}


def check(candidate):
    # simple ones
    assert candidate([3, 1, 2], 1) == [2, 3]
    assert candidate([917, 4], 500) == [917], "a message"
    assert True, "not a test of anything"
    numbers = [5, 5]
    assert candidate(numbers, 4) == [5, 5]
    for limit in range(3):
        assert candidate([limit], limit) == []
""",
}

HELPER = """```python
def aux(numbers, limit):
    return [number for number in numbers if number > limit]
```"""

MAIN = f"""Here is my solution:

```python
{PROBLEM["prompt"]}    found = aux(numbers, limit)
    return sorted(found)
```
It sorts what the helper returns."""

CANONICAL = PROBLEM["prompt"] + PROBLEM["canonical_solution"]


class Trusting:
    """Runs checks in this process."""

    def __init__(self) -> None:
        self.calls: list[tuple[str, list[str], Any]] = []

    def Limits(self, wall_seconds: float, cpu_seconds: float) -> float:
        assert cpu_seconds == wall_seconds
        return wall_seconds

    def run_checks(self, source: str, checks: Sequence[str], limits: Any) -> list[bool]:
        self.calls.append((source, list(checks), limits))
        names: dict[str, Any] = {"__name__": "__main__"}
        return [self._runs(source, names) and self._runs(check, names) for check in checks]

    @staticmethod
    def _runs(code: str, names: dict[str, Any]) -> bool:
        try:
            exec(code, names)
        except Exception:
            return False
        return True


def problems_file(folder: Path, count: int = 3) -> Path:
    """A file of `count` problems."""
    path = folder / "problems.jsonl"
    path.write_text("".join(json.dumps({**PROBLEM, "task_id": f"Test/{index}"}) + "\n" for index in range(count)))
    return path
