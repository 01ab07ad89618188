"""One agent's text and ids. Each agent's ids are made and read only with its own tokenizer."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

import torch
from jinja2 import TemplateError
from torch import Tensor
from transformers import PreTrainedTokenizerBase

from mareinforce.agents.rendering import Rendering
from mareinforce.errors import AgentError, OverlongPrompt, PromptError
from mareinforce.types import Prompt

CONTEXT_FIELDS = ("max_position_embeddings", "n_positions")


class Tokenization:
    """Encodes prompts for one agent and decodes what it says. Never changes the tokenizer it is given.

    No pad token is needed: batches are filled by our own code, and masks come from positions.

    Attributes:
        end_ids: every id that ends a completion: those of the tokenizer, the generation config and the model config.
        context: the most tokens the model takes, prompt and completion together; None if it states no limit.
    """

    def __init__(
        self,
        tokenizer: PreTrainedTokenizerBase,
        model: Any,
        agent: int,
        max_new_tokens: int,
        rendering: Rendering | None = None,
    ) -> None:
        """Raises AgentError if the agent has no end token."""
        self.tokenizer = tokenizer
        self.rendering = rendering or Rendering()
        self.agent = agent
        self.max_new_tokens = max_new_tokens
        config = model.config.get_text_config()
        self.vocabulary = int(model.get_input_embeddings().weight.shape[0])
        self.context = next((int(limit) for f in CONTEXT_FIELDS if (limit := getattr(config, f, None))), None)
        sources = (tokenizer, getattr(model, "generation_config", None), config)
        ids = (token for source in sources for token in _as_ids(getattr(source, "eos_token_id", None)))
        self.end_ids = tuple(dict.fromkeys(token for token in ids if 0 <= token < self.vocabulary))
        if not self.end_ids:
            raise AgentError(
                f"agent {agent}: neither its tokenizer nor its model names an end token, so no completion could end. "
                "Set tokenizer.eos_token"
            )
        bos = tokenizer.bos_token_id
        self._bos: int | None = bos if isinstance(bos, int) else None
        self._adds_bos = self._bos is not None and self._ids("", special=True)[:1] == [self._bos]

    def encode(self, prompt: Prompt) -> Tensor:
        """The ids the agent is given for a prompt, int64 [L], L >= 1.

        Text gets the special tokens that the tokenizer adds. A conversation (see `Rendering`) goes through the
        tokenizer's chat template, with the generation prompt; keys whose value is None (data sets fill them in) are
        left out. The beginning of the answer that the rendering sets stands at the end. A beginning-of-sequence token
        stands there once, even where template, text and tokenizer would each write one.

        Raises:
            OverlongPrompt: it leaves no room for ``max_new_tokens`` in the model's context.
            PromptError: for another type, a list without a template, nothing to encode, or ids outside of the model's
                vocabulary.
        """
        is_list = isinstance(prompt, list) and prompt and all(isinstance(message, Mapping) for message in prompt)
        if not isinstance(prompt, str) and not is_list:
            raise PromptError(f"agent {self.agent}: a prompt must be text or a list of messages, not {prompt!r}")
        shown = self.rendering.shown(prompt)
        if isinstance(shown, str):
            ids = self._ids(shown + self.rendering.prefill, special=True)
            written_by_us = self._adds_bos
        else:
            ids = self._ids(self._render(shown) + self.rendering.prefill, special=False)
            if self._adds_bos and self._bos is not None and ids[:1] != [self._bos]:
                ids = [self._bos, *ids]
            written_by_us = True
        while written_by_us and self._bos is not None and ids[:2] == [self._bos, self._bos]:
            ids = ids[1:]
        if not ids:
            if self._bos is None:
                raise PromptError(
                    f"agent {self.agent}: the prompt {prompt!r} has no tokens, and its tokenizer has no "
                    "beginning-of-sequence token to start from. Give it some text"
                )
            ids = [self._bos]
        self._check(ids)
        return torch.tensor(ids, dtype=torch.int64)

    def decode(self, ids: Tensor) -> str:
        """The text of ids [L], special tokens left out."""
        text = self.tokenizer.decode(ids.tolist(), skip_special_tokens=True)
        assert isinstance(text, str)  # a list of ids is one text
        return text

    def answer(self, ids: Tensor) -> str:
        """What people and rewards read of sampled ids [L]: with the beginning that was set, without a stop string."""
        return self.rendering.prefill + self.rendering.before_stop(self.decode(ids))

    def stops(self, ids: list[int], *, before: int = 0) -> bool:
        """Has the text of sampled ids come to a stop string? ``before``: how many are known not to hold one."""
        if not self.rendering.stop:
            return False
        # a token is at least one character, but for bytes of one
        tail = ids[max(0, min(before, len(ids) - self.rendering.longest_stop())) :]
        return any(stop in self.tokenizer.decode(tail) for stop in self.rendering.stop)

    def _ids(self, text: str, *, special: bool) -> list[int]:
        # verbose=False: the length is checked here, in words, against the model's context.
        return list(self.tokenizer(text, add_special_tokens=special, verbose=False)["input_ids"])

    def _render(self, messages: list[dict[str, Any]]) -> str:
        if not self.tokenizer.chat_template:
            raise PromptError(
                f"agent {self.agent}: its prompt is a conversation, but its tokenizer has no chat template. Use text "
                "prompts (and no system_prompt or history), an instruction-tuned model, chat_template: false, or set "
                "tokenizer.chat_template"
            )
        try:
            rendered = self.tokenizer.apply_chat_template(
                [_without_none(message) for message in messages],
                tokenize=False,
                add_generation_prompt=True,
                **self.rendering.template_kwargs,
            )
        except TemplateError as error:
            raise PromptError(
                f"agent {self.agent}: the chat template refuses the messages {messages}: {error}"
            ) from error
        return str(rendered)

    def _check(self, ids: list[int]) -> None:
        if max(ids) >= self.vocabulary:
            raise PromptError(
                f"agent {self.agent}: its tokenizer gives the id {max(ids)}, but its model knows {self.vocabulary} "
                "tokens: the tokenizer is not this model's"
            )
        if self.context is not None and len(ids) + self.max_new_tokens > self.context:
            limit = max(self.context - self.max_new_tokens, 0)
            way_out = f"Shorten the prompt to {limit} tokens, lower max_new_tokens, or set prompt_overflow."
            raise OverlongPrompt(
                f"agent {self.agent}: the prompt has {len(ids)} tokens, which with "
                f"max_new_tokens={self.max_new_tokens} is more than the model's context of {self.context}. "
                f"{way_out if limit else 'That leaves no room for any prompt: lower max_new_tokens.'}",
                torch.tensor(ids, dtype=torch.int64),
                limit,
            )


def _as_ids(value: Any) -> Iterable[int]:
    if value is None:
        return ()
    return (value,) if isinstance(value, int) else tuple(int(token) for token in value)


def _without_none(value: Any) -> Any:
    """A copy without the keys whose value is None, at every depth."""
    if isinstance(value, Mapping):
        return {key: _without_none(item) for key, item in value.items() if item is not None}
    if isinstance(value, list):
        return [_without_none(item) for item in value]
    return value
