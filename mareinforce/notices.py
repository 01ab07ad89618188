"""What a run should say in words before or while it goes: legal settings that surprise people."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from lightning.pytorch.utilities import rank_zero_info, rank_zero_warn

from mareinforce.config import ALGORITHMS, MAGRPOConfig
from mareinforce.errors import MareinforceWarning
from mareinforce.rollout.tree import Node, nodes_by_level, valid


def startup_information(config: MAGRPOConfig) -> Iterator[str]:
    """Facts worth a line at the start, nothing wrong with them."""
    if config.advantage_normalization is True and config.advantage_mode != MAGRPOConfig.advantage_mode:
        algorithm = next(name for name, mode in ALGORITHMS.items() if mode == config.advantage_mode)
        yield (
            f"advantage_normalization is on: it re-centres each group, so {algorithm} gives the same advantages as "
            f"magrpo. Set it to false to keep them apart; scale keeps all but magrpo and marloo apart."
        )


def startup_warnings(config: MAGRPOConfig) -> Iterator[str]:
    """Combinations that are allowed and probably not meant."""
    if config.top_p < 1.0 or config.top_k is not None or config.min_new_tokens > 0:
        yield (
            f"top_p={config.top_p}, top_k={config.top_k}, min_new_tokens={config.min_new_tokens} keep some tokens from "
            f"being sampled, but the log-probabilities that are trained are those of the whole policy: the gradient is "
            f"biased. top_p: 1.0 with top_k: null and min_new_tokens: 0 is exact."
        )
    if config.turn_weighting == "tree" and config.rollout_buffer_size != "rollout":
        yield (
            f"turn_weighting=tree with rollout_buffer_size={config.rollout_buffer_size} spreads a tree over several "
            f"optimizer steps. Set rollout_buffer_size: rollout for one step on whole trees."
        )
    if config.references and config.reference_kl_placement == "return" and config.advantage_normalization:
        yield (
            f"advantage_normalization={config.advantage_normalization} with reference_kl_placement=return: where all "
            f"rewards of a group are equal, the KL alone is scaled up to a full-size advantage. Set "
            f"reference_kl_placement: advantage, or advantage_normalization: false, to keep it at its own size."
        )
    stale = config.rollout_buffer_size != "rollout" and config.importance_sampling == "none"
    if config.prompts_per_step > 1 and stale:
        yield (
            f"prompts_per_step={config.prompts_per_step} with rollout_buffer_size={config.rollout_buffer_size}: later "
            f"updates of a step use answers of older weights. Set rollout_buffer_size: rollout, or "
            f"importance_sampling: token."
        )


class RunNotices:
    """Says each thing once a run."""

    def __init__(self, config: MAGRPOConfig) -> None:
        self._config = config
        self._said: set[str] = set()
        self._first_step = True

    def at_start(self, team_notes: Sequence[str] = ()) -> None:
        """Say what the configuration alone shows, and how the team was made."""
        for sentence in team_notes:
            rank_zero_info(sentence)
        for sentence in startup_information(self._config):
            rank_zero_info(sentence)
        for sentence in startup_warnings(self._config):
            self._warn(sentence, sentence)

    def after_rollout(self, trees: Sequence[Node]) -> None:
        """Say what only the rewards show: a threshold that stops everything, or that teaches to miss the target."""
        config, first_step = self._config, self._first_step
        self._first_step = False
        threshold = config.early_termination_threshold
        if threshold is None or config.num_turns == 1:
            return
        rewards = [reward for root in trees for reward in valid(root.rewards)]
        stopped = sum(sum(root.stopped) for root in trees)
        if first_step and threshold < 0 and rewards and stopped == len(rewards):
            lowest, last = min(rewards), config.num_turns
            if lowest >= 0:
                never = "turn 2 never happens" if last == 2 else f"turns 2 to {last} never happen"
                self._warn(
                    "everything stops",
                    f"early_termination_threshold={threshold} stops every branch after turn 1, because no reward is "
                    f"negative (lowest seen: {lowest:g}): {never}. Set it to null to play all turns, or to a reward "
                    f"that counts as solved.",
                )
        if config.early_termination_value == "zero" and any(_teaches_to_miss(root, config) for root in trees):
            self._warn(
                "zero teaches to miss",
                "a branch that is stopped early earns nothing for the turns it skips, so with positive rewards agents "
                "learn to avoid being stopped. Set early_termination_value: hold.",
            )

    def _warn(self, key: str, sentence: str) -> None:
        if key not in self._said:
            self._said.add(key)
            rank_zero_warn(sentence, category=MareinforceWarning, stacklevel=3)


def _teaches_to_miss(root: Node, config: MAGRPOConfig) -> bool:
    """Was a joint action stopped with a positive reward, in competition with others that went on?

    Stopped by its own reward, it competes with its siblings. Stopped with its whole node, only the parent's joint
    actions compete, so that a parent is needed.
    """
    alone = config.early_termination_on == "joint_action"
    return any(
        stopped and reward is not None and reward > 0 and (alone or node.parent is not None)
        for node in nodes_by_level(root)
        for stopped, reward in zip(node.stopped, node.rewards, strict=True)
    )
