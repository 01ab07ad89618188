"""One policy's optimizer: its learning rate over the run, and one step on a mini-batch of node samples."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor, nn

from mareinforce.agents.team import Team
from mareinforce.algorithms.loss import importance_ratio, node_loss
from mareinforce.config import MAGRPOConfig
from mareinforce.errors import NonFiniteError
from mareinforce.metrics import MAXIMA
from mareinforce.types import NodeSample

PROBED_WEIGHTS = 65536
"""Weights watched for `changed_weights_fraction`."""


def build_optimizer(weights: Iterable[nn.Parameter], learning_rate: float, config: MAGRPOConfig) -> torch.optim.AdamW:
    """AdamW over a policy's weights (Loshchilov & Hutter 2019)."""
    return torch.optim.AdamW(
        list(weights), lr=learning_rate, betas=config.adam_betas, eps=config.adam_eps, weight_decay=config.weight_decay
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
) -> Update:
    """One optimizer step of one policy on a mini-batch: the mean loss of its agent's samples, or the sum of its
    agents' means. `policy_version` is how often its weights have changed so far.

    Samples without signal keep their place in the mean and cost nothing; a mini-batch of nothing else makes no step.
    Raises NonFiniteError, with weights and moments untouched, if a loss or a gradient is not finite.
    """
    weighted = zip(batch, sample_weights(batch, config), strict=True)
    learnable = [(sample, weight) for sample, weight in weighted if has_gradient(sample, config)]
    if not learnable:
        return Update(losses={sample.agent: 0.0 for sample in batch}, metrics={sample.agent: {} for sample in batch})
    optimizer.zero_grad(set_to_none=True)
    passes: dict[int, list[dict[str, float]]] = {sample.agent: [] for sample in batch}
    for sample, weight in learnable:
        loss, seen = sample_loss(team, sample, config, age=policy_version - sample.policy_version)
        loss = weight * loss
        if not torch.isfinite(loss):
            optimizer.zero_grad(set_to_none=True)
            raise NonFiniteError(_not_finite("loss", float(loss), sample))
        loss.backward()  # type: ignore[no-untyped-call]
        passes[sample.agent].append({"loss": float(loss.detach()), **seen})
    weights = [weight for group in optimizer.param_groups for weight in group["params"]]
    limit = math.inf if config.max_grad_norm is None else config.max_grad_norm
    grad_norm = float(nn.utils.clip_grad_norm_(weights, limit))
    if not math.isfinite(grad_norm):
        optimizer.zero_grad(set_to_none=True)
        raise NonFiniteError(_not_finite("gradient norm", grad_norm, learnable[0][0]))
    before = probe(weights)
    optimizer.step()
    optimizer.zero_grad(set_to_none=True)
    changed = float((probe(weights) != before).double().mean())
    common = {"grad_norm": grad_norm, "changed_weights_fraction": changed}
    return Update(
        stepped=True,
        losses={agent: sum(seen["loss"] for seen in own) for agent, own in passes.items()},
        metrics={agent: {**common, **_summary(own)} for agent, own in passes.items()},
    )


def _summary(passes: Sequence[dict[str, float]]) -> dict[str, float]:
    """Means (of `MAXIMA`: the largest) of what was seen in one agent's passes."""
    summary = {}
    for name in dict.fromkeys(name for seen in passes for name in seen if name != "loss"):
        values = [seen[name] for seen in passes if name in seen]
        summary[name] = max(values) if name in MAXIMA else sum(values) / len(values)
    return summary


def sample_loss(team: Team, sample: NodeSample, config: MAGRPOConfig, age: int) -> tuple[Tensor, dict[str, float]]:
    """Score one node sample anew and return its loss with what was seen on the way.

    `age` is how often the agent's weights have changed since it was sampled. At age 0 the importance ratio is exactly
    1, and the gap between behaviour and re-scored log-probs is nothing but rounding: it is reported as `sampling_gap`.
    """
    scored = team.score(sample.agent, sample.prompt_ids, [one.ids for one in sample.completions], config.temperature)
    counts, logprobs = scored.counts, scored.logprobs
    behaviour = torch.zeros_like(logprobs)
    behaviour[counts] = torch.cat([one.logprobs for one in sample.completions]).to(behaviour)
    assert scored.entropy is not None  # asked for
    seen = {"entropy": float(scored.entropy[counts].mean())}
    ratio = None
    if age == 0:
        seen["sampling_gap"] = float((logprobs.detach() - behaviour)[counts].abs().max())
    if config.importance_sampling != "none":
        ratio = torch.ones_like(behaviour)
        if age > 0:
            ratio = importance_ratio(logprobs, behaviour, counts, config.importance_sampling, config.importance_cap)
        per_token = ratio[counts].cpu().double()
        first = torch.cat([torch.zeros(1, dtype=torch.long), counts.sum(-1).cpu().cumsum(0)[:-1]])
        weights = per_token[first] if config.importance_sampling == "sequence" else per_token
        seen["importance_ratio_mean"] = float(weights.mean())
        seen["importance_ratio_max"] = float(weights.max())
        seen["effective_sample_size"] = float(weights.sum() ** 2 / weights.square().sum() / len(weights))
    loss = node_loss(
        logprobs,
        counts,
        sample.advantages.to(logprobs),
        aggregation=config.loss_aggregation,
        max_new_tokens=config.max_new_tokens,
        exclude_final_token=config.exclude_final_token,
        kept=kept_completions(sample, config).to(logprobs.device),
        ratio=ratio,
    )
    return loss, seen


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
