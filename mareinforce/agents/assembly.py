"""From what a user says about a team to networks in memory: who shares which, and which weights are whose.

Agents with adapters on the same base, and agents that do not learn, share one network. Every other agent has a network
of its own.
"""

from __future__ import annotations

import copy
from collections.abc import Hashable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal, cast

import torch
from peft import PeftModel
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from mareinforce.agents import adapter_making
from mareinforce.agents.adapters import Network, inner_model
from mareinforce.agents.arguments import agent_adapters, check_agents, tokenizer_entries, trained_agents
from mareinforce.agents.bases import Wish, frozen_copy, load_base, load_tokenizers, make_wish, prepare
from mareinforce.agents.loading import (
    portable_name,
)
from mareinforce.agents.model_config import loading_options, special_tokens
from mareinforce.agents.vocabulary import fit_embeddings


@dataclass(frozen=True, slots=True)
class Seat:
    """Where an agent's weights are: a network of the team, and the adapter on it that is the agent's.

    Without an adapter the agent is the network as it is, its adapters off.
    """

    network: int
    adapter: str | None = None


@dataclass(frozen=True, slots=True)
class Policy:
    """One set of weights that learns, and the agents that speak with it (several only with `share_policy`)."""

    agents: tuple[int, ...]
    seat: Seat


@dataclass(slots=True)
class Parts:
    """What a team is made of."""

    networks: list[Network] = field(default_factory=list)
    seats: list[Seat] = field(default_factory=list)  # [N]
    policies: list[Policy] = field(default_factory=list)
    tokenizers: list[PreTrainedTokenizerBase] = field(default_factory=list)  # [N]
    frozen: list[PreTrainedModel] = field(default_factory=list)
    references: dict[int, Seat] = field(default_factory=dict)  # by agent; in `frozen`, or an adapter of its network
    notes: list[str] = field(default_factory=list)  # what its user should know


def assemble(
    agent_model: str | None = None,
    agents: Sequence[Any] | None = None,
    num_agents: int | None = None,
    tokenizer: Any = None,
    model_config: Mapping[str, Any] | None = None,
    *,
    lora: Any = None,
    share_policy: bool = False,
    trainable: Any = None,
    places: Sequence[torch.device] | None = None,
    reference_kl: bool = False,
    reference: Literal["start", "base"] | None = None,
    reference_places: Sequence[torch.device] | None = None,
    seed: int = 0,
) -> Parts:
    """Load and arrange the networks of a team; the arguments are those of `Team.build`.

    Raises:
        ConfigError, AgentError: what cannot be meant, loaded or combined.
    """
    count = check_agents(
        agent_model, agents, num_agents, tokenizer, model_config, lora=lora, share_policy=share_policy,
        trainable=trainable,
    )  # fmt: skip
    entries: list[Any] = list(agents) if agents is not None else [agent_model] * count
    settings = agent_adapters(lora, model_config, count)
    options = loading_options(model_config, count)
    trains = trained_agents(trainable, count, share_policy)
    wishes = [
        make_wish(
            agent, entries[agent], settings[agent], options[agent], trains[agent], places[agent] if places else None
        )
        for agent in range(1 if share_policy else count)
    ]
    parts = Parts()
    parts.tokenizers = load_tokenizers(
        entries, tokenizer_entries(tokenizer, count), options, wishes, model_config, parts.notes
    )
    seats: dict[int, Seat] = {}
    groups: dict[Hashable, list[Wish]] = {}
    for wish in wishes:
        groups.setdefault(wish.key, []).append(wish)
    for group in groups.values():
        _place_group(group, parts, seats, reference_kl, reference, reference_places, seed, special_tokens(model_config))
    parts.seats = [seats[0 if share_policy else agent] for agent in range(count)]
    if share_policy:
        parts.policies = [Policy(tuple(range(count)), seats[0])]
        parts.references = {agent: parts.references[0] for agent in range(count) if 0 in parts.references}
    else:
        parts.policies = [Policy((agent,), parts.seats[agent]) for agent in range(count) if trains[agent]]
    return parts


def _place_group(
    group: Sequence[Wish],
    parts: Parts,
    seats: dict[int, Seat],
    reference_kl: bool,
    reference: Literal["start", "base"] | None,
    reference_places: Sequence[torch.device] | None,
    seed: int,
    added_tokens: Mapping[str, Any],
) -> None:
    """Seat the agents that have one base: load it once, copy it for each that trains it whole, share it else."""
    first = group[0]
    if isinstance(first.base, PeftModel):
        _seat_wrapped(first, parts, seats)
        _add_adapter_reference(first, parts, seats[first.agent], reference_kl, reference, fresh=False)
        return
    model = load_base(first, parts.notes)
    if added_tokens:
        shared = any(wish.shares for wish in group)
        tokenizers = [parts.tokenizers[wish.agent] for wish in group]
        fit_embeddings(model, tokenizers, first.agent, shared, parts.notes)
    owners, sharers = [wish for wish in group if not wish.shares], [wish for wish in group if wish.shares]
    frozen: dict[Any, int] = {}
    for wish in owners:
        if reference_kl:
            place = reference_places[wish.agent] if reference_places else wish.place
            if place not in frozen:
                frozen[place] = len(parts.frozen)
                parts.frozen.append(frozen_copy(model, place))
            parts.references[wish.agent] = Seat(frozen[place])
        own = model if wish is owners[-1] and not sharers else copy.deepcopy(model)
        seats[wish.agent] = Seat(len(parts.networks))
        parts.networks.append(own)
    if not sharers:
        return
    index = len(parts.networks)
    parts.networks.append(model)
    for wish in sharers:
        name = None if wish.folder is None and wish.setting is None else f"agent_{wish.agent}"
        seats[wish.agent] = Seat(index, name)
        if name is None:
            continue
        network = parts.networks[index]
        if wish.folder is not None:
            adapted = adapter_making.add_saved_adapter(network, name, wish.folder, wish.agent)
        else:
            assert wish.setting is not None
            adapted = adapter_making.add_fresh_adapter(network, name, wish.setting, wish.agent, seed + wish.agent)
        config = adapted.peft_config[name]
        if isinstance(wish.base, str):
            config.base_model_name_or_path = portable_name(wish.base)
            config.revision = wish.options["revision"]
        parts.networks[index] = adapted
        _add_adapter_reference(wish, parts, seats[wish.agent], reference_kl, reference, fresh=wish.folder is None)


def _seat_wrapped(wish: Wish, parts: Parts, seats: dict[int, Seat]) -> None:
    """A model that came with its adapter: on the network of another such model where the bases are equal."""
    wrapped = cast(PeftModel, wish.base)
    adapter = adapter_making.own_adapter(wrapped, wish.agent)
    if wish.trains:
        wrapped.set_adapter(adapter)  # peft loads adapters for inference, with weights that take no gradient
    prepare(inner_model(wrapped), wish, wish.options["gradient_checkpointing"])
    for index, network in enumerate(parts.networks):
        if isinstance(network, PeftModel) and adapter_making.same_base(network, wrapped):
            name = adapter_making.adopt_adapter(network, wrapped, adapter, f"agent_{wish.agent}")
            seats[wish.agent] = Seat(index, name)
            parts.notes.append(f"agent {wish.agent}: its base equals another's, so they share one in memory.")
            return
    seats[wish.agent] = Seat(len(parts.networks), adapter)
    parts.networks.append(wrapped)


def _add_adapter_reference(
    wish: Wish,
    parts: Parts,
    seat: Seat,
    reference_kl: bool,
    reference: Literal["start", "base"] | None,
    fresh: bool,
) -> None:
    """The reference of an adapter costs no second model: its base, or a copy of the adapter as it starts."""
    if not reference_kl or not wish.trains:
        return
    if (reference or ("base" if fresh else "start")) == "base" or fresh:  # a fresh adapter starts as its base
        parts.references[wish.agent] = Seat(seat.network, None)
        return
    assert seat.adapter is not None
    network = cast(PeftModel, parts.networks[seat.network])
    name = adapter_making.copy_adapter(network, seat.adapter, f"{seat.adapter}_reference")
    parts.references[wish.agent] = Seat(seat.network, name)
