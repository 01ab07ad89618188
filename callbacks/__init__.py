"""Lightning callbacks for runs of mareinforce; each one works alone, in any order, from any YAML."""

from mareinforce.callbacks.rollout_log import RolloutLog
from mareinforce.callbacks.turn_reward_curves import TurnRewardCurves

__all__ = ["RolloutLog", "TurnRewardCurves"]
