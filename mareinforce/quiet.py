"""What other libraries say to everybody and no user of ours can act on, left out by name."""

from __future__ import annotations

import logging
import warnings
from collections.abc import Iterator
from contextlib import contextmanager

from mareinforce.errors import MareinforceWarning

_SILENCED = (
    r".*LeafSpec.*",  # Lightning 2.6 on torch 2.13
    r"(?s).*(JsonargparseDeprecationWarning|instantiate_classes|skip_none).*",  # Lightning 2.6 on jsonargparse 4.53
    r".*does not have many workers.*",  # rows are a few texts: workers only cost
    r".*in eval mode at the start of training.*",  # dropout stays off, both in sampling and in scoring
    r".*GPU available but not used.*",  # whoever sets accelerator: cpu means it
)
_TIPS = (
    "💡 Tip", "TPU available", "GPU available: False", "`Trainer.fit` stopped: `max_epochs",
    "Detected KeyboardInterrupt", "Restoring states", "Restored all states", "Seed set to",
)  # fmt: skip

_TALKERS = ("lightning.pytorch.utilities.rank_zero", "lightning.fabric.utilities.seed")


@contextmanager
def plain_warnings() -> Iterator[None]:
    """Print warnings of ours as one line without file and source while inside.

    What is shown, recorded or made an error is decided by whoever decided it before: only the text is another.
    Lightning words warnings in a way of its own from its import on, so it must have been imported.
    """
    others = warnings.formatwarning

    def worded(
        message: Warning | str, category: type[Warning], filename: str, lineno: int, line: str | None = None
    ) -> str:
        if issubclass(category, MareinforceWarning):
            return f"warning: {' '.join(str(message).split())}\n"
        return others(message, category, filename, lineno, line)

    warnings.formatwarning = worded
    try:
        yield
    finally:
        if warnings.formatwarning is worded:
            warnings.formatwarning = others


@contextmanager
def quiet() -> Iterator[None]:
    """Silence those while inside."""
    loggers = [logging.getLogger(name) for name in _TALKERS]
    with warnings.catch_warnings():
        for message in _SILENCED:
            warnings.filterwarnings("ignore", message=message)
        for logger in loggers:
            logger.addFilter(_not_a_tip)
        try:
            yield
        finally:
            for logger in loggers:
                logger.removeFilter(_not_a_tip)


def _not_a_tip(record: logging.LogRecord) -> bool:
    return not record.getMessage().lstrip().startswith(_TIPS)
