"""Callbacks that the command line adds where they are not listed. They are named by path: the core imports none."""

from __future__ import annotations

import importlib
import warnings
from collections.abc import Sequence

from lightning.pytorch import Callback

from mareinforce.errors import MareinforceWarning

PACKAGE = "mareinforce.callbacks"
DEFAULTS = ("EarlyTerminationLogger", "EvaluationCallback", "TurnRewardCurves")


def default_callbacks(listed: Sequence[Callback]) -> list[Callback]:
    """One of each of `DEFAULTS` of which there is none in a list yet.

    None, with a warning, where the callbacks cannot be imported: a package that was installed without ``-e`` is hidden
    by the sources in the folder of a clone.
    """
    try:
        package = importlib.import_module(PACKAGE)
    except ModuleNotFoundError as error:
        if error.name != PACKAGE:
            raise
        warnings.warn(
            f"{PACKAGE} cannot be imported from here, so {', '.join(DEFAULTS)} are left out. Install with pip install "
            f"-e, or start in another folder than that of the sources.",
            MareinforceWarning,
            stacklevel=2,
        )
        return []
    kinds = [getattr(package, name) for name in DEFAULTS]
    return [kind() for kind in kinds if not any(isinstance(one, kind) for one in listed)]
