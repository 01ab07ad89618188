"""Networks that sample in another precision than they are trained in: copies, renewed whenever the weights changed."""

from __future__ import annotations

import copy

import torch
from torch import nn

from mareinforce.agents.adapters import Network
from mareinforce.agents.team import Team


class RolloutNetworks:
    """What the agents sample with: the team's own networks, or a copy of each in another precision.

    Buffers, such as the frequencies of rotary positions, keep their precision. The copies are in no checkpoint.

    Args:
        team: the agents.
        dtype: precision of the copies' weights; None: no copies.
    """

    def __init__(self, team: Team, dtype: torch.dtype | None = None) -> None:
        self.team = team
        self.dtype = dtype
        self._copies: dict[int, Network] = {}
        self._versions: dict[nn.Parameter, int] = {}

    def network(self, agent: int) -> Network:
        """What the agent samples with, its weights those of now."""
        network = self.team.network(agent)
        if self.dtype is None:
            return network
        place = self.team.seats[agent].network
        if place not in self._copies:
            self._copies[place] = self._copy(network, self.dtype)
        self._renew(network, self._copies[place])
        return self._copies[place]

    def _copy(self, network: Network, dtype: torch.dtype) -> Network:
        # deepcopy takes these for copied: the weights are never there twice in the training precision
        cast = {
            id(weight): nn.Parameter(weight.detach().to(dtype, copy=True), requires_grad=False)
            for weight in network.parameters()
        }
        self._versions |= {weight: weight._version for weight in network.parameters()}
        return copy.deepcopy(network, cast)

    @torch.no_grad()
    def _renew(self, network: Network, twin: Network) -> None:
        """Copy what was written to since; optimizers and loaded checkpoints write in place, which torch counts."""
        for weight, copied in zip(network.parameters(), twin.parameters(), strict=True):
            if weight._version != self._versions[weight]:
                copied.copy_(weight)
                self._versions[weight] = weight._version
