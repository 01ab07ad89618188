"""One policy's optimizer: its learning rate over the run, and one step on a mini-batch of node samples."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor, nn
from torch.autograd.graph import increment_version

from mareinforce.agents.micro_batches import micro_batches
from mareinforce.agents.node_scoring import Told
from mareinforce.agents.scoring import Scored
from mareinforce.agents.team import Team
from mareinforce.algorithms.loss import importance_ratio, node_loss
from mareinforce.config import MAGRPOConfig
from mareinforce.errors import NonFiniteError
from mareinforce.metrics import MAXIMA
from mareinforce.phases import Phases
from mareinforce.types import NodeSample

FUSED_ON = ("cpu", "cuda", "mps", "xpu")
"""Devices on which torch's AdamW works in one pass."""

PROBED_WEIGHTS = 65536
"""Weights watched for `changed_weights_fraction`."""


def build_optimizer(weights: Iterable[nn.Parameter], learning_rate: float, config: MAGRPOConfig) -> torch.optim.AdamW:
    """AdamW over a policy's weights (Loshchilov & Hutter 2019)."""
    weights = list(weights)
    return torch.optim.AdamW(
        weights,
        lr=learning_rate,
        betas=config.adam_betas,
        eps=config.adam_eps,
        weight_decay=config.weight_decay,
        fused=all(weight.device.type in FUSED_ON for weight in weights),  # one pass over memory instead of many
    )


def keep_state_beside_weights(optimizer: torch.optim.Optimizer) -> None:
    """Move each weight's moments to the device of the weight. Step counters, which are scalars, stay where they are."""
    for weight, state in optimizer.state.items():
        for name, value in state.items():
            if isinstance(value, Tensor) and value.ndim > 0:
                state[name] = value.to(weight.device)


def learning_rate_factor(schedule: str, progress: float, update: int, warmup_updates: int) -> float:
    """Share of the full learning rate at one update.

    Args:
        schedule: constant, linear (1 - progress) or cosine ((1 + cos(pi * progress)) / 2).
        progress: share of the run that is done, 0 to 1.
        update: updates made before this one.
        warmup_updates: updates over which the rate rises linearly; the first one already moves.
    """
    warmup = min(1.0, (update + 1) / (warmup_updates + 1))
    progress = min(max(progress, 0.0), 1.0)
    decay = {"constant": 1.0, "linear": 1.0 - progress, "cosine": (1.0 + math.cos(math.pi * progress)) / 2}[schedule]
    return warmup * decay


@dataclass(slots=True)
class Update:
    """What one update of one policy did; every number a plain float."""

    stepped: bool = False
    losses: dict[int, float] = field(default_factory=dict)  # by agent; 0 where it had nothing to learn
    metrics: dict[int, dict[str, float]] = field(default_factory=dict)  # by agent


def sample_weights(batch: Sequence[NodeSample], config: MAGRPOConfig) -> list[float]:
    """Weight of each sample's loss in the optimizer step: 1 / samples of its agent, or its share of the step's trees.

    So the loss of agents that share their weights is the sum over agents of each one's mean.
    """
    if config.turn_weighting == "tree":
        return [sample.weight for sample in batch]
    sizes = Counter(sample.agent for sample in batch)
    return [1.0 / sizes[sample.agent] for sample in batch]


def kept_completions(sample: NodeSample, config: MAGRPOConfig) -> Tensor:
    """Which completions enter the loss, bool [K]: all, or with `mask_truncated` those that ended by themselves."""
    if not config.mask_truncated:
        return torch.ones(len(sample.completions), dtype=torch.bool)
    return torch.tensor([completion.ended for completion in sample.completions])


def has_gradient(sample: NodeSample, config: MAGRPOConfig) -> bool:
    """False if every advantage that enters the loss is exactly 0, so no forward pass is needed."""
    return bool((sample.advantages[kept_completions(sample, config)] != 0).any())


def update_policy(
    team: Team,
    optimizer: torch.optim.Optimizer,
    batch: Sequence[NodeSample],
    config: MAGRPOConfig,
    policy_version: int,
    phases: Phases | None = None,
) -> Update:
    """One optimizer step of one policy on a mini-batch: the mean loss of its agent's samples, or the sum of its
    agents' means. `policy_version` is how often its weights have changed so far; `phases` is told when it scores.

    Samples without signal keep their place in the mean and cost nothing; a mini-batch of nothing else makes no step.
    Raises NonFiniteError, with weights and moments untouched, if a loss or a gradient is not finite.
    """
    weighted = zip(batch, sample_weights(batch, config), strict=True)
    learnable = [(sample, weight) for sample, weight in weighted if has_gradient(sample, config)]
    if not learnable:
        return Update(losses={sample.agent: 0.0 for sample in batch}, metrics={sample.agent: {} for sample in batch})
    phases = phases or Phases()
    optimizer.zero_grad(set_to_none=True)
    seen = [Seen(policy_version - sample.policy_version) for sample, _ in learnable]
    told = [Told(sample.prompt_ids, [one.ids for one in sample.completions]) for sample, _ in learnable]
    for pieces in micro_batches(told, config.update_token_budget):
        losses = []
        with phases.measure("scoring"):
            # the agents of a policy share its weights: any of them can speak for all
            scores = team.score_nodes(batch[0].agent, [piece.of(told) for piece in pieces], config.temperature)
            for piece, scored in zip(pieces, scores, strict=True):
                sample, weight = learnable[piece.node]
                losses.append(weight * piece_loss(sample, piece.completions, scored, config, seen[piece.node]))
                if not torch.isfinite(losses[-1]):
                    optimizer.zero_grad(set_to_none=True)
                    raise NonFiniteError(_not_finite("loss", float(losses[-1].detach()), sample))
                seen[piece.node].loss += float(losses[-1].detach())
        torch.stack(losses).sum().backward()  # type: ignore[no-untyped-call]
    weights = [weight for group in optimizer.param_groups for weight in group["params"]]
    limit = math.inf if config.max_grad_norm is None else config.max_grad_norm
    grad_norm = float(nn.utils.clip_grad_norm_(weights, limit))
    if not math.isfinite(grad_norm):
        optimizer.zero_grad(set_to_none=True)
        raise NonFiniteError(_not_finite("gradient norm", grad_norm, learnable[0][0]))
    before = probe(weights)
    optimizer.step()
    increment_version(weights)  # a fused step writes in place without torch counting it
    optimizer.zero_grad(set_to_none=True)
    changed = float((probe(weights) != before).double().mean())
    clipped = grad_norm * min(1.0, limit / (grad_norm + 1e-6))  # as clip_grad_norm_ scales it
    common = {"grad_norm": grad_norm, "grad_norm_clipped": clipped, "changed_weights_fraction": changed}
    passes: dict[int, list[Seen]] = {sample.agent: [] for sample in batch}
    for (sample, _), one in zip(learnable, seen, strict=True):
        passes[sample.agent].append(one)
    return Update(
        stepped=True,
        losses={agent: sum(one.loss for one in own) for agent, own in passes.items()},
        metrics={agent: {**common, **_summary([one.metrics() for one in own])} for agent, own in passes.items()},
    )


def _summary(passes: Sequence[dict[str, float]]) -> dict[str, float]:
    """Means (of `MAXIMA`: the largest) of what was seen of one agent's samples."""
    summary = {}
    for name in dict.fromkeys(name for seen in passes for name in seen):
        values = [seen[name] for seen in passes if name in seen]
        summary[name] = max(values) if name in MAXIMA else sum(values) / len(values)
    return summary


@dataclass(slots=True)
class Seen:
    """What was seen of one node sample while it was scored anew, in all of its pieces."""

    age: int
    """How often the agent's weights have changed since it was sampled."""
    loss: float = 0.0  # weighted
    entropy: list[Tensor] = field(default_factory=list)  # float [tokens] a piece
    gaps: list[Tensor] = field(default_factory=list)  # re-scored minus behaviour log-prob, float [tokens] a piece
    ratios: list[Tensor] = field(default_factory=list)  # float64 [tokens] or [completions] a piece

    def metrics(self) -> dict[str, float]:
        """Its numbers for the log.

        At age 0 the gap between behaviour and re-scored log-probs is nothing but rounding, that of `rollout_dtype`
        included: `sampling_gap`.
        """
        found = {"entropy": float(torch.cat(self.entropy).mean())}
        if self.age == 0:
            found["sampling_gap"] = float(torch.cat(self.gaps).abs().max())
        if self.ratios:
            weights = torch.cat(self.ratios)
            found["importance_ratio_mean"] = float(weights.mean())
            found["importance_ratio_max"] = float(weights.max())
            found["effective_sample_size"] = float(weights.sum() ** 2 / weights.square().sum() / len(weights))
        return found


def sample_loss(team: Team, sample: NodeSample, config: MAGRPOConfig, age: int) -> tuple[Tensor, dict[str, float]]:
    """Score one node sample anew and return its loss with what was seen on the way."""
    completions = [one.ids for one in sample.completions]
    scored, seen = team.score(sample.agent, sample.prompt_ids, completions, config.temperature), Seen(age)
    return piece_loss(sample, range(len(completions)), scored, config, seen), seen.metrics()


def piece_loss(sample: NodeSample, completions: range, scored: Scored, config: MAGRPOConfig, seen: Seen) -> Tensor:
    """The part of a node sample's loss that some of its completions have, as they were scored anew.

    The parts add up to the node's loss. At age 0 the importance ratio is exactly 1, unless weights in another precision
    sampled.
    """
    counts, logprobs = scored.counts, scored.logprobs
    behaviour = torch.zeros_like(logprobs)
    behaviour[counts] = torch.cat([sample.completions[k].logprobs for k in completions]).to(behaviour)
    seen.entropy.append(scored.entropy[counts].cpu())
    seen.gaps.append((logprobs.detach() - behaviour)[counts].cpu())
    ratio = None
    if config.importance_sampling != "none":
        ratio = torch.ones_like(behaviour)
        if seen.age > 0 or config.rollout_dtype is not None:
            ratio = importance_ratio(logprobs, behaviour, counts, config.importance_sampling, config.importance_cap)
        per_token = ratio[counts].cpu().double()
        first = torch.cat([torch.zeros(1, dtype=torch.long), counts.sum(-1).cpu().cumsum(0)[:-1]])
        seen.ratios.append(per_token[first] if config.importance_sampling == "sequence" else per_token)
    kept = kept_completions(sample, config)
    dropped = 1 if config.exclude_final_token else 0
    return node_loss(
        logprobs,
        counts,
        sample.advantages[list(completions)].to(logprobs),
        aggregation=config.loss_aggregation,
        max_new_tokens=config.max_new_tokens,
        exclude_final_token=config.exclude_final_token,
        kept=kept[list(completions)].to(logprobs.device),
        ratio=ratio,
        num_completions=len(sample.completions),
        num_tokens=sum(
            len(one.ids) - dropped for one, keep in zip(sample.completions, kept.tolist(), strict=True) if keep
        ),
    )


def probe(weights: Sequence[Tensor]) -> Tensor:
    """A copy of evenly spaced weights, at most about `PROBED_WEIGHTS` of them, to see which an update changed."""
    stride = max(1, sum(weight.numel() for weight in weights) // PROBED_WEIGHTS)
    return torch.cat([weight.detach().flatten()[::stride].cpu() for weight in weights])


def _not_finite(what: str, value: float, sample: NodeSample) -> str:
    return (
        f"agent {sample.agent}: the {what} is {value} at turn {sample.turn + 1} of row {sample.row}; no weight was "
        f"changed. Lower agent_learning_rate, set max_grad_norm, or look at the rewards (largest return "
        f"{float(sample.returns.abs().max()):g})."
    )
