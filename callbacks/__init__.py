"""Lightning callbacks for runs of mareinforce; each one works alone, in any order, from any YAML."""

from mareinforce.callbacks.completion_table import CompletionTable
from mareinforce.callbacks.early_termination import EarlyTerminationLogger
from mareinforce.callbacks.evaluation_callback import EvaluationCallback
from mareinforce.callbacks.rollout_log import RolloutLog
from mareinforce.callbacks.throughput_monitor import ThroughputMonitor
from mareinforce.callbacks.tree_view import TreeView
from mareinforce.callbacks.turn_reward_curves import TurnRewardCurves

__all__ = [
    "CompletionTable",
    "EarlyTerminationLogger",
    "EvaluationCallback",
    "RolloutLog",
    "ThroughputMonitor",
    "TreeView",
    "TurnRewardCurves",
]
