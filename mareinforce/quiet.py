"""What other libraries say to everybody and no user of ours can act on, left out by name."""

from __future__ import annotations

import logging
import warnings
from collections.abc import Iterator
from contextlib import contextmanager

_SILENCED = (
    r".*LeafSpec.*",  # Lightning 2.6 on torch 2.13
    r"(?s).*(JsonargparseDeprecationWarning|instantiate_classes|skip_none).*",  # Lightning 2.6 on jsonargparse 4.53
    r".*does not have many workers.*",  # rows are a few texts: workers only cost
    r".*in eval mode at the start of training.*",  # dropout stays off, both in sampling and in scoring
    r".*GPU available but not used.*",  # whoever sets accelerator: cpu means it
)
_TIPS = ("💡 Tip", "TPU available", "GPU available: False", "`Trainer.fit` stopped: `max_epochs")


@contextmanager
def quiet() -> Iterator[None]:
    """Silence those while inside."""
    logger = logging.getLogger("lightning.pytorch.utilities.rank_zero")
    with warnings.catch_warnings():
        for message in _SILENCED:
            warnings.filterwarnings("ignore", message=message)
        logger.addFilter(_not_a_tip)
        try:
            yield
        finally:
            logger.removeFilter(_not_a_tip)


def _not_a_tip(record: logging.LogRecord) -> bool:
    return not record.getMessage().startswith(_TIPS)
