"""One policy's optimizer: its learning rate over the run, its gradient on a mini-batch of node samples, its step."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TypeVar

import torch
from torch import Tensor, nn
from torch.autograd.graph import increment_version

from mareinforce.agents.micro_batches import micro_batches
from mareinforce.agents.node_scoring import Told
from mareinforce.agents.scoring import Scored
from mareinforce.agents.team import Team
from mareinforce.algorithms.loss import importance_ratio, node_loss
from mareinforce.calling import brief
from mareinforce.config import MAGRPOConfig
from mareinforce.config_rules import LARGEST_GRADIENT
from mareinforce.errors import NonFiniteError
from mareinforce.metrics import MAXIMA
from mareinforce.phases import Phases
from mareinforce.ranks import ALONE, Ranks
from mareinforce.types import NodeSample

T = TypeVar("T")

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
    """One update of one policy: first its gradient, then the step; every number a plain float."""

    has_gradient: bool = False  # False: nobody has anything to learn, so there is no step
    stepped: bool = False
    losses: dict[int, float] = field(default_factory=dict)  # by agent; 0 where it had nothing to learn
    sample_ages: dict[int, float] = field(default_factory=dict)  # by agent; mean
    metrics: dict[int, dict[str, float]] = field(default_factory=dict)  # by agent
    sample: NodeSample | None = None  # the first of this rank's there is something to learn from


def sample_weights(
    batch: Sequence[NodeSample], config: MAGRPOConfig, sizes: Mapping[int, int] | None = None
) -> list[float]:
    """Weight of each sample's loss in the optimizer step: 1 / samples of its agent, or its share of the step's trees.

    So the loss of agents that share their weights is the sum over agents of each one's mean. ``sizes``: samples of each
    agent in the step, on all ranks; default: in the batch.
    """
    if config.turn_weighting == "tree":
        return [sample.weight for sample in batch]
    sizes = Counter(sample.agent for sample in batch) if sizes is None else sizes
    return [1.0 / sizes[sample.agent] for sample in batch]


def kept_completions(sample: NodeSample, config: MAGRPOConfig) -> Tensor:
    """Which completions enter the loss, bool [K]: all, or with `mask_truncated` those that ended by themselves."""
    if not config.mask_truncated:
        return torch.ones(len(sample.completions), dtype=torch.bool)
    return torch.tensor([completion.ended for completion in sample.completions])


def has_gradient(sample: NodeSample, config: MAGRPOConfig) -> bool:
    """False if every advantage that enters the loss is exactly 0, so no forward pass is needed."""
    return bool((sample.advantages[kept_completions(sample, config)] != 0).any())


def compute_gradient(
    team: Team,
    optimizer: torch.optim.Optimizer,
    batch: Sequence[NodeSample],
    config: MAGRPOConfig,
    policy_version: int,
    ranks: Ranks = ALONE,
    phases: Phases | None = None,
) -> Update:
    """The gradient of one policy on a mini-batch, clipped, left beside its weights: of the mean loss of its agent's
    samples, or of the sum of its agents' means. `policy_version` is how often its weights have changed so far. With
    several `ranks` it is that of all their batches together; one that has an empty batch adds nothing to it.
    `phases` is told when it scores.

    Samples without signal keep their place in the mean and cost nothing; a mini-batch of nothing else has no gradient.
    Raises NonFiniteError if a loss or the gradient is not finite, or is too large for an optimizer to square.
    """
    step = ranks.gather(
        (
            [(sample.agent, policy_version - sample.policy_version) for sample in batch],
            any(has_gradient(sample, config) for sample in batch),
        )
    )
    ages = _by_agent([own for own, _ in step])
    sizes = {agent: len(own) for agent, own in ages.items()}
    weighted = zip(batch, sample_weights(batch, config, sizes), strict=True)
    learnable = [(sample, weight) for sample, weight in weighted if has_gradient(sample, config)]
    update = Update(
        has_gradient=any(signal for _, signal in step),
        losses=dict.fromkeys(ages, 0.0),
        sample_ages={agent: sum(own) / len(own) for agent, own in ages.items()},
        metrics={agent: {} for agent in ages},
        sample=learnable[0][0] if learnable else None,
    )
    if not update.has_gradient:
        return update
    with ranks.together():
        seen = _backward(team, optimizer, learnable, config, policy_version, phases or Phases())
    own = [(sample.agent, (one.loss, one.metrics())) for (sample, _), one in zip(learnable, seen, strict=True)]
    passes: dict[int, list[tuple[float, dict[str, float]]]] = {agent: [] for agent in ages}
    passes |= _by_agent(ranks.gather(own))
    weights = trained_by(optimizer)
    ranks.add_up_gradients(weights)
    limit = math.inf if config.max_grad_norm is None else config.max_grad_norm
    grad_norm = float(nn.utils.clip_grad_norm_(weights, limit))
    if not _can_be_squared(grad_norm, limit):
        worst = _largest_gradient(team, optimizer, learnable, config, policy_version)
        raise NonFiniteError(_not_finite(team, "the gradient norm", grad_norm, worst))
    clipped = grad_norm * min(1.0, limit / (grad_norm + 1e-6))  # as clip_grad_norm_ scales it
    common = {"grad_norm": grad_norm, "grad_norm_clipped": clipped, "changed_weights_fraction": 0.0}
    update.losses = {agent: sum(loss for loss, _ in found) for agent, found in passes.items()}
    update.metrics = {agent: {**common, **_summary([one for _, one in found])} for agent, found in passes.items()}
    return update


def apply_gradient(team: Team, optimizer: torch.optim.Optimizer, update: Update) -> None:
    """One optimizer step with the gradient that was computed, which is then forgotten; no step without one.

    Raises NonFiniteError if a weight is not finite afterwards, which the rules of the configuration leave next to no
    room for; then the last checkpoint is what there is.
    """
    if not update.has_gradient:
        return
    weights = trained_by(optimizer)
    before = probe(weights)
    optimizer.step()
    increment_version(weights)  # a fused step writes in place without torch counting it
    optimizer.zero_grad(set_to_none=True)
    if not all_finite(weights):
        raise NonFiniteError(
            f"agent {min(update.losses)}: a weight is not finite any more after an update"
            f"{_place(team, update.sample)}. The checkpoints are of before: go on from one with a lower "
            f"agent_learning_rate."
        )
    changed = float((probe(weights) != before).double().mean())
    update.stepped = True
    for metrics in update.metrics.values():
        metrics["changed_weights_fraction"] = changed


def all_finite(weights: Iterable[Tensor]) -> bool:
    """Is every number of every weight finite? In one pass, without a copy."""
    ends = [torch.aminmax(weight.detach()) for weight in weights if weight.numel()]
    return bool(torch.stack([torch.isfinite(end.min) & torch.isfinite(end.max) for end in ends]).all())


def _backward(
    team: Team,
    optimizer: torch.optim.Optimizer,
    learnable: Sequence[tuple[NodeSample, float]],
    config: MAGRPOConfig,
    policy_version: int,
    phases: Phases,
) -> list[Seen]:
    """Leave the gradient of the weighted losses beside the weights; return what was seen of each sample."""
    optimizer.zero_grad(set_to_none=True)
    seen = [Seen(policy_version - sample.policy_version) for sample, _ in learnable]
    told = [Told(sample.prompt_ids, [one.ids for one in sample.completions]) for sample, _ in learnable]
    for pieces in micro_batches(told, config.update_token_budget):
        losses = []
        with phases.measure("scoring"):
            # the agents of a policy share its weights: any of them can speak for all
            parts = [piece.of(told) for piece in pieces]
            scores = team.score_nodes(learnable[0][0].agent, parts, config.temperature, once=True)
            for piece, scored in zip(pieces, scores, strict=True):
                sample, weight = learnable[piece.node]
                losses.append(weight * piece_loss(sample, piece.completions, scored, config, seen[piece.node]))
                loss = float(losses[-1].detach())
                if not math.isfinite(loss):
                    raise NonFiniteError(_not_finite(team, "the loss", loss, sample))
                seen[piece.node].loss += loss
        torch.stack(losses).sum().backward()  # type: ignore[no-untyped-call]
    return seen


def _largest_gradient(
    team: Team,
    optimizer: torch.optim.Optimizer,
    learnable: Sequence[tuple[NodeSample, float]],
    config: MAGRPOConfig,
    policy_version: int,
) -> NodeSample | None:
    """Which of this rank's samples has the largest gradient, or the first one that is not finite? None: it has none."""
    norms = []
    for one in learnable:
        _backward(team, optimizer, [one], config, policy_version, Phases())
        grads = [weight.grad for weight in trained_by(optimizer) if weight.grad is not None]
        norm = float(nn.utils.get_total_norm(grads))
        norms.append(norm if math.isfinite(norm) else math.inf)
    return learnable[norms.index(max(norms))][0] if norms else None


def trained_by(optimizer: torch.optim.Optimizer) -> list[nn.Parameter]:
    """Its weights."""
    return [weight for group in optimizer.param_groups for weight in group["params"]]


def _can_be_squared(grad_norm: float, limit: float) -> bool:
    return math.isfinite(grad_norm) and min(grad_norm, limit) <= LARGEST_GRADIENT


def _by_agent(told: Sequence[Sequence[tuple[int, T]]]) -> dict[int, list[T]]:
    """What each rank has told of its agents' samples, (agent, value) each, gathered by agent."""
    found: dict[int, list[T]] = {}
    for agent, value in (one for own in told for one in own):
        found.setdefault(agent, []).append(value)
    return found


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


def _not_finite(team: Team, what: str, value: float, sample: NodeSample | None) -> str:
    if sample is None:
        return f"{what} is {value:g}, by what another rank has added to it; no agent's weights were changed."
    return (
        f"agent {sample.agent}: {what} is {value:g}{_place(team, sample)}; no agent's weights were changed. Lower "
        f"agent_learning_rate, set max_grad_norm, or look at the rewards (largest return "
        f"{float(sample.returns.abs().max()):g})."
    )


def _place(team: Team, sample: NodeSample | None) -> str:
    if sample is None:
        return ""
    shown = brief(team.decode(sample.agent, sample.prompt_ids))
    return f" at turn {sample.turn + 1} of row {sample.row}, where it was shown {shown}"
