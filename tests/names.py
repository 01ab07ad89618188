"""How cases are named."""

from __future__ import annotations

import re


def shown(value: object) -> str:
    """What Python writes of a value, without addresses: every process must give a case the same name."""
    return re.sub(r" at 0x[0-9a-f]+", "", repr(value))
