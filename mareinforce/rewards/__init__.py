"""Rewards: the contract with the user's reward function, and ready-made processors."""

from mareinforce.rewards.contract import Reward, Scores
from mareinforce.rewards.processors import Chain, RewardProcessors, Scale, Shift

__all__ = ["Chain", "Reward", "RewardProcessors", "Scale", "Scores", "Shift"]
