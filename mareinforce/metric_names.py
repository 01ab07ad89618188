"""Which metrics a run logs, known before it starts: see docs/metrics.md."""

from __future__ import annotations

import re
from collections.abc import Collection

from mareinforce.config import MAGRPOConfig
from mareinforce.errors import ConfigError, did_you_mean
from mareinforce.phases import PHASES

COUNTERS = ("step", "epoch", "batch", "updates")
TURN = (
    *("reward_mean", "expected_return", "raw_reward_mean", "coverage", "reward_mean_carried"),
    *("reward_std", "expected_return_std", "raw_reward_std", "zero_signal_fraction"),
    *("stopped_fraction", "stopped_reward_mean", "saved_joint_actions", "saved_tokens"),  # by a callback
)
EVAL_TURN = ("reward_mean", "expected_return")
SKIPPED = ("skipped_rewards", "skipped_returns")
EVAL_SKIPPED = ("skipped_rewards",)
KL = ("reference_kl_mean", "reference_kl_penalty_mean")
AGENT = (
    "updates",
    *(f"{length}{end}" for length in ("completion_length", "ended_length") for end in ("", "_min", "_max")),
    "advantage_std",
    "truncated_fraction",
    "zero_signal_fraction",
    "loss",
    "learning_rate",
    "grad_norm",
    "grad_norm_clipped",
    "changed_weights_fraction",
    "entropy",
    "sampling_gap",
    "sample_age",
    "stepped_fraction",
)
RATIO = ("importance_ratio_mean", "importance_ratio_max", "effective_sample_size")
MONITORED = (
    *("tokens", "seconds", "tokens_per_second", "generation_tokens_per_second", "reward_wait_fraction"),
    *(f"seconds/{phase}" for phase in (*PHASES, "other")),
    *("memory/process_gib", "memory/device_gib"),
)
"""What ThroughputMonitor adds."""
BEST = ("eval/best", "eval/best_step")

_COMPONENT = re.compile(r"turn_(\d+)/.+_(mean|std)")
_OURS = re.compile(r"(turn_\d+|agent_\d+|eval)/.*")


def known_metrics(config: MAGRPOConfig) -> list[str]:
    """Every metric that a run may log, but for the reward's components and what `eval_aggregator` returns."""
    turns = [f"turn_{turn + 1}" for turn in range(config.num_turns)]
    own = [*AGENT, *(RATIO if config.importance_sampling != "none" else ())]
    kl = KL if config.references else ()
    skips = config.on_reward_error == "skip"
    names = [*COUNTERS, *(["overlong_prompts"] if config.prompt_overflow != "error" else [])]
    names += [f"{turn}/{name}" for turn in turns for name in (*TURN, *kl, *(SKIPPED if skips else ()))]
    for agent in range(config.num_agents):
        names += [f"agent_{agent}/{name}" for name in (*own, *(f"{turn}/{name}" for turn in turns for name in kl))]
    if config.eval_interval and config.eval_num_samples:
        evaluated = (*EVAL_TURN, *(EVAL_SKIPPED if skips else ()))
        names += [f"eval/{turn}/{name}" for turn in turns for name in evaluated] + list(BEST)
    return names + list(MONITORED)


def check_before(
    name: str, config: MAGRPOConfig, *, what: str, evaluates: bool, aggregates: bool, others: bool
) -> None:
    """Refuse the name of a metric that this run cannot log, as far as that is known before it starts.

    Args:
        what: the field that names it.
        evaluates: are there rows to evaluate on?
        aggregates: does an `eval_aggregator` add metrics of its own?
        others: do the user's own callbacks log as well?

    Raises:
        ConfigError: with the metrics that are known.
    """
    evaluates = bool(evaluates and config.eval_interval and config.eval_num_samples)
    known = [one for one in known_metrics(config) if evaluates or not one.startswith("eval/")]
    component = _COMPONENT.fullmatch(name)
    if name in known or (component is not None and 1 <= int(component[1]) <= config.num_turns):
        return
    if name.startswith("eval/") and not evaluates:
        raise ConfigError(
            f"{what}={name!r}: nothing is evaluated while this run trains; set eval_interval, eval_num_samples and "
            "rows to evaluate on, or watch a metric of training."
        )
    if (name.startswith("eval/") and aggregates) or (others and _OURS.fullmatch(name) is None):
        return
    raise ConfigError(_unknown(name, known, what, "Those of this run"))


def check_after(name: str, logged: Collection[str], config: MAGRPOConfig, what: str) -> None:
    """Refuse the name of a metric that was not logged although others like it were.

    Names that a run logs only at times (an evaluation, a turn that few rows reach) are waited for.

    Raises:
        ConfigError: with the metrics that were logged.
    """
    if name in logged or name in known_metrics(config):
        return
    component = _COMPONENT.fullmatch(name)
    if component is not None:
        alike = "turn_1/"
        if name.replace(f"turn_{component[1]}/", alike, 1) in logged:
            return
    else:
        alike = "eval/" if name.startswith("eval/") else ""
    if any(one.startswith(alike) for one in logged):
        raise ConfigError(_unknown(name, logged, what, "Logged so far"))


def _unknown(name: str, known: Collection[str], what: str, whose: str) -> str:
    listed = ", ".join(known)
    return f"{what}={name!r}: there is no such metric.{did_you_mean(name, known)} {whose}: {listed}."
