"""The models and tokenizers that agents stand on: what each agent is to be, and how its base is loaded and prepared."""

from __future__ import annotations

import copy
from collections.abc import Hashable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, cast

import torch
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from mareinforce.agents.adapters import inner_model
from mareinforce.agents.loading import adapter_folder, base_of_adapter, has_tokenizer, load_model, load_tokenizer
from mareinforce.agents.lora import LoRA
from mareinforce.agents.model_config import special_tokens
from mareinforce.agents.modes import drops_by_itself, recompute_alike
from mareinforce.agents.vocabulary import add_special_tokens
from mareinforce.errors import AgentError


@dataclass(slots=True)
class Wish:
    """What one agent is to be."""

    agent: int
    entry: Any
    source: str  # how messages call it
    base: Any  # a name, or a loaded model
    folder: str | None  # of a saved adapter
    setting: LoRA | None
    options: dict[str, Any]
    trains: bool
    place: torch.device | None

    @property
    def shares(self) -> bool:
        return self.folder is not None or self.setting is not None or not self.trains

    @property
    def key(self) -> Hashable:
        """Equal for agents whose base is the same."""
        base = self.base if isinstance(self.base, str) else id(self.base)
        return (base, str(self.place), *sorted((key, str(value)) for key, value in self.options.items()))


def make_wish(
    agent: int, entry: Any, setting: LoRA | None, options: dict[str, Any], trains: bool, place: torch.device | None
) -> Wish:
    """What an agent is to be, with the base of a saved adapter looked up. Raises AgentError if it names none."""
    folder = adapter_folder(entry) if isinstance(entry, str) else None
    base = base_of_adapter(folder, agent) if folder is not None else entry
    source = entry if isinstance(entry, str) else f"a loaded {type(inner_model(entry)).__name__}"
    return Wish(agent, entry, source, base, folder, setting, options, trains, place)


def load_tokenizers(
    entries: Sequence[Any],
    given: Sequence[Any],
    options: Sequence[dict[str, Any]],
    wishes: Sequence[Wish],
    model_config: Mapping[str, Any] | None,
    notes: list[str],
) -> list[PreTrainedTokenizerBase]:
    """One an agent: the given one, or that of its model; with the special tokens added to a copy."""
    read: dict[Any, PreTrainedTokenizerBase] = {}
    found = []
    for agent, wanted in enumerate(given):
        wish = wishes[min(agent, len(wishes) - 1)]
        source = wanted
        if source is None:
            source = wish.folder if wish.folder is not None and has_tokenizer(wish.folder) else wish.base
        if isinstance(source, str):
            picked = {key: options[agent][key] for key in ("revision", "trust_remote_code", "gguf_file")}
            if source != wish.base:
                picked |= {"revision": None, "gguf_file": None}  # those of the model, not of another's tokenizer
            key = (source, *picked.values())
            if key not in read:
                read[key] = load_tokenizer(source, agent=agent, **picked)
            tokenizer = read[key]
        else:
            tokenizer = cast(PreTrainedTokenizerBase, source)
        found.append(add_special_tokens(tokenizer, special_tokens(model_config), agent, notes))
    return found


def load_base(wish: Wish, notes: list[str]) -> PreTrainedModel:
    """The model under an agent, loaded if it was named, on its device. Raises AgentError if it cannot be had."""
    options = dict(wish.options)
    checkpointing = options.pop("gradient_checkpointing")
    if isinstance(wish.base, str):
        model = load_model(wish.base, agent=wish.agent, **options)
        _note_generation_config(model, wish, notes)
    else:
        model = cast(PreTrainedModel, wish.base)
    prepare(model, wish, checkpointing)
    return model


def prepare(model: PreTrainedModel, wish: Wish, checkpointing: bool) -> None:
    """Put a model on its device, and let it recompute activations if that is wanted. Raises AgentError if it cannot."""
    if wish.place is not None:
        model.to(wish.place)  # type: ignore[arg-type]
    if checkpointing:
        if not model.supports_gradient_checkpointing:
            raise AgentError(
                f"agent {wish.agent}: {wish.source} has no gradient checkpointing; set "
                "model_config.gradient_checkpointing: false"
            )
        typed: Any = model
        enable = getattr(typed, "activation_checkpointing_enable", None) or typed.gradient_checkpointing_enable
        enable({"use_reentrant": False})
    if (layer := drops_by_itself(model)) is not None:
        raise AgentError(
            f"agent {wish.agent}: {wish.source} applies dropout in its layer {layer} itself, so with gradient "
            "checkpointing it could not be switched off; set its dropout to 0, or gradient_checkpointing: false"
        )
    recompute_alike(model)


def frozen_copy(model: PreTrainedModel, place: torch.device | None) -> PreTrainedModel:
    """A copy to be kept as it is."""
    frozen = copy.deepcopy(model).requires_grad_(False)
    frozen.train(False)
    return frozen if place is None else frozen.to(place)  # type: ignore[arg-type]


def _note_generation_config(model: PreTrainedModel, wish: Wish, notes: list[str]) -> None:
    """Say which settings that came with a model do not change how it is sampled."""
    shipped = model.generation_config.to_diff_dict() if model.generation_config is not None else {}
    ignored = {
        key: value
        for key, value in shipped.items()
        if not key.endswith("_token_id") and not key.startswith(("_", "output_", "use_cache", "transformers_version"))
    }
    if ignored:
        listed = ", ".join(f"{key}={value}" for key, value in sorted(ignored.items()))
        notes.append(
            f"agent {wish.agent}: the generation config of {wish.source} ({listed}) is ignored: sampling follows "
            "model.config. Its end tokens count."
        )
