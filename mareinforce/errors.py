"""What can go wrong, one class a boundary. Each message says the value, the rule and the way out."""

from __future__ import annotations

import difflib
from collections.abc import Iterable
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from torch import Tensor


class MareinforceError(Exception):
    """Base of every error that `python -m mareinforce.fit` tells in a sentence, without a traceback."""


class ConfigError(MareinforceError, ValueError):
    """A field, an argument or a combination of them is refused before any model loads."""


class DataError(MareinforceError, ValueError):
    """A data source cannot be read, is empty, or lacks a column."""


class AgentError(MareinforceError, ValueError):
    """A model or a tokenizer of an agent cannot be loaded or cannot be used."""


class PromptError(MareinforceError, ValueError):
    """A formatter, a transition or a prompt breaks its contract."""


class OverlongPrompt(PromptError):
    """A prompt that leaves no room for ``max_new_tokens`` in the model's context. ``ids`` are all of its tokens, and
    ``limit`` is how many of them there is room for."""

    def __init__(self, message: str, ids: Tensor, limit: int) -> None:
        super().__init__(message)
        self.ids = ids
        self.limit = limit


class RewardError(MareinforceError, ValueError):
    """A reward callable returned what no advantage can be made of."""


class UserCodeError(MareinforceError):
    """A user's own callable raised. The original error, with the user's traceback, is ``__cause__``."""


class CallTimeout(UserCodeError):
    """A user's own callable took longer than ``reward_timeout``."""


class NonFiniteError(MareinforceError, ArithmeticError):
    """A loss, a gradient or a weight stopped being a number."""


class RankError(MareinforceError):
    """Another process of the run failed, or trains something else."""


class StopRequested(KeyboardInterrupt):
    """Raised where a signal stops a run; no `except Exception` of a user's function takes it for an error.

    ``signal``: its number.
    """

    def __init__(self, signal: int) -> None:
        super().__init__(signal)
        self.signal = signal


class CheckpointError(MareinforceError, OSError):
    """A checkpoint cannot be written. Those that were written before are whole."""


class MareinforceWarning(UserWarning):
    """Something legal that will probably not do what its user hopes. Said once a run."""


def did_you_mean(word: str, known: Iterable[str]) -> str:
    """`` Did you mean 'x'?`` with the nearest known word, or an empty string."""
    near = difflib.get_close_matches(word, list(known), n=1, cutoff=0.6)
    return f" Did you mean {near[0]!r}?" if near else ""
