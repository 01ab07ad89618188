"""For models with a chat template: what a formatter writes, as a user's message."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True)
class AsMessages:
    """A formatter that shows another one's text as a list of messages, so that the chat template is applied.

    Args:
        formatter: one that takes `external_prompts`, such as those of the writing and the code task. What it returns
            that is no text is passed on: a list of messages, or None for an idle agent.
        system: a system message before it; None: none.
    """

    formatter: Callable[..., Any]
    system: str | None = None

    def __call__(self, row: Mapping[str, Any], external_prompts: Any = None) -> Any:
        prompt = self.formatter(row) if external_prompts is None else self.formatter(row, external_prompts)
        if not isinstance(prompt, str):
            return prompt
        before = [] if self.system is None else [{"role": "system", "content": self.system}]
        return [*before, {"role": "user", "content": prompt}]
