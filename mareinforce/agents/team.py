"""The N agents of a team: their weights, their tokenizers, and what is asked of each of them."""

from __future__ import annotations

import os
import shutil
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager
from pathlib import Path
from typing import Any, Literal, cast

import torch
from peft import PeftModel
from torch import Tensor, nn
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from mareinforce.agents import adapter_making, adapters
from mareinforce.agents.adapters import Network, inner_model
from mareinforce.agents.arguments import check_agents
from mareinforce.agents.assembly import Policy, Seat, assemble
from mareinforce.agents.loading import no_progress_bars
from mareinforce.agents.model_config import FLOAT32_REASON
from mareinforce.agents.node_scoring import Told, score_nodes
from mareinforce.agents.rendering import Rendering
from mareinforce.agents.scoring import Scored
from mareinforce.agents.tokenization import Tokenization
from mareinforce.algorithms.kl import Estimator, sequence_kl
from mareinforce.errors import AgentError
from mareinforce.types import Prompt, ReferenceKL

__all__ = ["Policy", "Seat", "Team", "check_agents"]


class Networks(nn.ModuleList):
    """Networks that stay on the devices they were placed on, whatever device the module around them is moved to."""

    placed = False

    def _apply(self, fn: Callable[..., Any], recurse: bool = True) -> Networks:
        return self if self.placed else super()._apply(fn, recurse)  # type: ignore[no-untyped-call]


class Team(nn.Module):
    """N agents. Each has its own tokenizer and end tokens, and its own weights or adapter.

    Attributes:
        networks: the models in memory; agents with adapters on one base share one.
        seats: where each agent's weights are, [N].
        policies: the sets of weights that learn, each with its agents.
        notes: what the user should know of how the team was made.
    """

    def __init__(
        self,
        networks: Sequence[Network],
        tokenizers: Sequence[PreTrainedTokenizerBase],
        max_new_tokens: int,
        *,
        seats: Sequence[Seat] | None = None,
        policies: Sequence[Policy] | None = None,
        frozen: Sequence[PreTrainedModel] = (),
        references: Mapping[int, Seat] | None = None,
        notes: Sequence[str] = (),
        placed: bool = False,
        reference_placed: bool = False,
        renderings: Sequence[Rendering] | None = None,
    ) -> None:
        """Without ``seats`` every network is one agent, and learns.

        Raises AgentError if two agents would learn the same weights unasked, if weights to train are not float32, or
        if an agent has no end token.
        """
        super().__init__()
        self.networks, self.frozen = Networks(networks), Networks(frozen)
        self.networks.placed, self.frozen.placed = placed, placed or reference_placed
        self.seats = list(seats) if seats is not None else [Seat(index) for index in range(len(networks))]
        if len(self.seats) != len(tokenizers):
            raise AgentError(f"{len(self.seats)} models with {len(tokenizers)} tokenizers: each agent needs one")
        self.policies = (
            list(policies) if policies is not None else [Policy((a,), seat) for a, seat in enumerate(self.seats)]
        )
        self.references = dict(references or {})
        self.notes = list(notes)
        _check_weights(self)
        self.tokenizations = [
            Tokenization(
                tokenizer,
                inner_model(self.network(agent)),
                agent,
                max_new_tokens,
                renderings[agent] if renderings is not None else None,
            )
            for agent, tokenizer in enumerate(tokenizers)
        ]

    @classmethod
    def build(
        cls,
        agent_model: str | None = None,
        agents: Sequence[Any] | None = None,
        num_agents: int | None = None,
        tokenizer: Any = None,
        model_config: Mapping[str, Any] | None = None,
        *,
        max_new_tokens: int,
        lora: Any = None,
        share_policy: bool = False,
        trainable: Any = None,
        places: Sequence[torch.device] | None = None,
        reference_kl: bool = False,
        reference: Literal["start", "base"] | None = None,
        reference_places: Sequence[torch.device] | None = None,
        seed: int = 0,
        renderings: Sequence[Rendering] | None = None,
    ) -> Team:
        """A team of one base (``agent_model``, by name) or of a list of names and loaded models (``agents``).

        A base is loaded once. Agents with LoRA (``lora``, or the folder of an adapter) share it; agents that are
        trained whole get a copy each. Loaded models are trained as they are, not copied.

        Args:
            lora: settings of `mareinforce.agents.lora.LoRA`, one for all agents or one an agent.
            share_policy: one set of weights for all agents.
            trainable: which agents learn; default all.
            places: the device of each agent; default: where the whole module is.
            reference_kl: keep what the KL is measured against.
            reference: the base, or a copy of each agent as it starts; default: start for saved adapters, else base.
            reference_places: the devices of the references of agents that are trained whole.
            seed: decides how fresh adapters begin.
            renderings: how each agent's prompts become what its model reads.
        """
        parts = assemble(
            agent_model, agents, num_agents, tokenizer, model_config, lora=lora, share_policy=share_policy,
            trainable=trainable, places=places, reference_kl=reference_kl, reference=reference,
            reference_places=reference_places, seed=seed,
        )  # fmt: skip
        return cls(
            parts.networks, parts.tokenizers, max_new_tokens, seats=parts.seats, policies=parts.policies,
            frozen=parts.frozen, references=parts.references, notes=parts.notes, placed=places is not None,
            reference_placed=reference_places is not None, renderings=renderings,
        )  # fmt: skip

    def __len__(self) -> int:
        return len(self.seats)

    def network(self, agent: int) -> Network:
        """The network the agent's weights are on: a transformers model, or a peft model if agents have adapters."""
        return cast(Network, self.networks[self.seats[agent].network])

    def model(self, agent: int) -> PreTrainedModel:
        """The agent's transformers model. With an adapter: as the agent until another agent of its network speaks."""
        with self.speaking(agent) as model:
            return model

    def speaking(self, agent: int) -> AbstractContextManager[PreTrainedModel]:
        """The agent's model while the agent speaks: its adapter on, or all off if it has none."""
        return adapters.speaking(self.network(agent), self.seats[agent].adapter)

    def rest(self) -> None:
        """Let every network speak as the first agent on it, so that a wrapped model of a user answers as itself."""
        for index, network in enumerate(self.networks):
            first = next(seat for seat in self.seats if seat.network == index)
            if isinstance(network, PeftModel) and first.adapter not in (None, network.active_adapter):
                network.set_adapter(first.adapter)

    def weights(self, policy: Policy) -> dict[str, nn.Parameter]:
        """The weights that a policy trains, by their names in the team."""
        network = self.networks[policy.seat.network]
        if policy.seat.adapter is None:
            found = {name: weight for name, weight in network.named_parameters() if weight.requires_grad}
        else:
            found = adapters.adapter_weights(network, policy.seat.adapter)
        return {f"networks.{policy.seat.network}.{name}": weight for name, weight in found.items()}

    def trained_state(self) -> Iterator[str]:
        """Names, in the team's state dict, of everything that training changes."""
        for policy in self.policies:
            prefix = f"networks.{policy.seat.network}."
            for name in self.networks[policy.seat.network].state_dict():
                if policy.seat.adapter is None or adapters.belongs_to(name, policy.seat.adapter):
                    yield prefix + name

    def encode(self, agent: int, prompt: Prompt) -> Tensor:
        """The prompt's ids, int64 [L] on the CPU. Raises PromptError if the agent cannot be given it."""
        return self.tokenizations[agent].encode(prompt)

    def decode(self, agent: int, ids: Tensor) -> str:
        """The text of the agent's ids, special tokens left out."""
        return self.tokenizations[agent].decode(ids)

    def answer(self, agent: int, ids: Tensor) -> str:
        """What people and rewards read of what the agent sampled: see `Tokenization.answer`."""
        return self.tokenizations[agent].answer(ids)

    def end_ids(self, agent: int) -> tuple[int, ...]:
        """Every id that ends a completion of the agent."""
        return self.tokenizations[agent].end_ids

    def score(self, agent: int, prompt_ids: Tensor, completion_ids: Sequence[Tensor], temperature: float) -> Scored:
        """Log-probs, with gradient, of K completions of one prompt under the agent's current weights.

        Args:
            prompt_ids: int64 [P], the ids the completions were sampled after.
            completion_ids: K tensors int64 [L_k], the ids sampled, each at least one.
            temperature: the sampling temperature.
        """
        (scored,) = self.score_nodes(agent, [Told(prompt_ids, completion_ids)], temperature)
        return scored

    def score_nodes(self, agent: int, nodes: Sequence[Told], temperature: float, *, once: bool = False) -> list[Scored]:
        """As `score`, of several prompts in one forward; one `Scored` a prompt.

        ``once``: there will be one backward pass at most, which takes less memory and time then.
        """
        with self.speaking(agent) as model:
            return score_nodes(model, nodes, temperature, once=once)

    @torch.no_grad()
    def reference_kl(
        self, agent: int, nodes: Sequence[Told], temperature: float, estimator: Estimator
    ) -> list[ReferenceKL]:
        """KL of sampled completions to the agent's frozen reference; exactly 0 where both policies are the same.

        Both are scored in the same batch, so that rounding cannot tell them apart. Arguments as for `score_nodes`.
        """
        found = []
        policies = self.score_nodes(agent, nodes, temperature)
        for policy, reference in zip(policies, self.score_reference(agent, nodes, temperature), strict=True):
            logprobs, counts = policy.logprobs.cpu(), policy.counts.cpu()
            k1, k3 = (sequence_kl(logprobs, reference.logprobs.cpu(), counts, kind) for kind in ("k1", "k3"))
            found.append(ReferenceKL(k1 if estimator == "k1" else k3, k3))
        return found

    @torch.no_grad()
    def score_reference(self, agent: int, nodes: Sequence[Told], temperature: float) -> list[Scored]:
        """As `score_nodes`, under the agent's frozen reference, without gradient. Adapters are on again afterwards."""
        seat = self.references[agent]
        if seat.adapter is None and self.seats[agent].adapter is None:
            network = cast(Network, self.frozen[seat.network])
        else:
            network = cast(Network, self.networks[seat.network])
        before = network.active_adapter if isinstance(network, PeftModel) else ""
        try:
            with adapters.speaking(network, seat.adapter) as model:
                return score_nodes(model, nodes, temperature)
        finally:
            if isinstance(network, PeftModel) and network.active_adapter != before:
                network.set_adapter(before)

    def save(self, directory: str | os.PathLike[str]) -> None:
        """Write ``agent_0``, ``agent_1`` ...: each a plain model, or a plain peft adapter, with its tokenizer.

        Each folder is written aside and then renamed: it is there whole or not at all.
        """
        root = Path(directory)
        root.mkdir(parents=True, exist_ok=True)
        for agent, tokenization in enumerate(self.tokenizations):
            target, fresh, old = (root / f"{prefix}agent_{agent}" for prefix in ("", ".writing-", ".replaced-"))
            for left_over in (fresh, old):
                shutil.rmtree(left_over, ignore_errors=True)
            network, adapter = self.network(agent), self.seats[agent].adapter
            with no_progress_bars():
                if not isinstance(network, PeftModel):
                    network.save_pretrained(fresh)
                elif adapter is None:
                    adapter_making.save_base(network, fresh)
                else:
                    adapter_making.save_adapter(network, adapter, fresh)
            tokenization.tokenizer.save_pretrained(fresh)
            if target.exists():
                target.rename(old)
            fresh.rename(target)
            shutil.rmtree(old, ignore_errors=True)


def _check_weights(team: Team) -> None:
    owner: dict[int, int] = {}
    for policy in team.policies:
        agent, weights = policy.agents[0], team.weights(policy)
        if not weights:
            raise AgentError(f"agent {agent}: none of its weights takes a gradient; call requires_grad_() on its model")
        for name, weight in weights.items():
            if weight.is_floating_point() and weight.dtype != torch.float32:
                raise AgentError(
                    f"agent {agent}: its weight {name.split('.', 2)[-1]} is {weight.dtype}, but {FLOAT32_REASON}. Load "
                    "it with dtype=torch.float32"
                )
            if owner.setdefault(id(weight), agent) != agent:
                raise AgentError(
                    f"agents {owner[id(weight)]} and {agent} share the weight {name.split('.', 2)[-1]}, so two "
                    "optimizers would step it: pass a copy.deepcopy of the model"
                )
