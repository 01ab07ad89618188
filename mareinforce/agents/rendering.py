"""How one agent's prompts become what its model reads: chat template, system prompt, set beginning, stop strings."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Literal

from mareinforce.types import Prompt

if TYPE_CHECKING:
    from mareinforce.config import MAGRPOConfig


@dataclass(frozen=True, slots=True)
class Rendering:
    """One agent's rules.

    ``chat_template``: auto renders conversations, and text only where there is a system prompt; True renders text too,
    as a user's message; False renders nothing: the contents of a conversation are joined by empty lines.
    """

    chat_template: Literal["auto"] | bool = "auto"
    system_prompt: str | None = None
    template_kwargs: Mapping[str, Any] = field(default_factory=dict)
    prefill: str = ""
    stop: tuple[str, ...] = ()

    def shown(self, prompt: Prompt) -> Prompt:
        """The conversation that the template is given, or the text where it is not used.

        A system prompt stands first, unless the conversation brings one of its own.
        """
        if isinstance(prompt, str) and (
            self.chat_template is False or (self.chat_template == "auto" and self.system_prompt is None)
        ):
            return prompt if self.system_prompt is None else f"{self.system_prompt}\n\n{prompt}"
        messages: list[dict[str, Any]] = [{"role": "user", "content": prompt}] if isinstance(prompt, str) else prompt
        if self.system_prompt is not None and messages[0].get("role") != "system":
            messages = [{"role": "system", "content": self.system_prompt}, *messages]
        if self.chat_template is False:
            return "\n\n".join(str(message["content"]) for message in messages)
        return messages

    def before_stop(self, text: str) -> str:
        """The text up to the first stop string."""
        ends = [place for stop in self.stop if (place := text.find(stop)) >= 0]
        return text[: min(ends)] if ends else text

    def longest_stop(self) -> int:
        """Tokens at the end of an answer that can hold a stop string which the last of them completes."""
        return max(len(stop.encode()) for stop in self.stop) + 1


def renderings(config: MAGRPOConfig) -> list[Rendering]:
    """One an agent, from the configuration."""
    return [
        Rendering(
            config.chat_template,
            _of_agent(config.system_prompt, agent),
            dict(config.chat_template_kwargs or {}),
            _of_agent(config.assistant_prefill, agent) or "",
            tuple([config.stop] if isinstance(config.stop, str) else config.stop or ()),
        )
        for agent in range(config.num_agents)
    ]


def _of_agent(value: str | list[str | None] | None, agent: int) -> str | None:
    return value[agent] if isinstance(value, list) else value
