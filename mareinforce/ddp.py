"""`trainer.strategy: ddp` here: Lightning's processes and their connection, with gradients that policies add up."""

from __future__ import annotations

import os
import subprocess
import time
from collections.abc import Callable
from typing import Any

from lightning.fabric.strategies.launchers.subprocess_script import _ChildProcessObserver
from lightning.fabric.utilities.distributed import _set_num_threads_if_needed
from lightning.pytorch.strategies import DDPStrategy
from lightning.pytorch.strategies.launchers import _SubprocessScriptLauncher

GRACE = 10.0
"""Seconds that processes have to end by themselves after one of them has failed."""


class TeamDDP(DDPStrategy):
    """One process a device, each with the whole team.

    Nothing is wrapped and nothing is synchronised by backward, which runs a different number of times on every rank:
    policies add up their gradients when they step (`mareinforce.ranks.Ranks.add_up_gradients`). When one process fails,
    all end.
    """

    def configure_ddp(self) -> None:
        """Leave the module as it is."""

    def on_exception(self, exception: BaseException) -> None:
        """The process that has started others ends them, if they do not end by themselves."""
        if isinstance(self._launcher, TeamLauncher):
            end(self._launcher.procs, GRACE)

    def _configure_launcher(self) -> None:
        assert self.cluster_environment is not None
        self._launcher = TeamLauncher(self.cluster_environment, self.num_processes, self.num_nodes)


class TeamLauncher(_SubprocessScriptLauncher):
    """Runs the command again for every further process of this machine, as Lightning does, with another observer."""

    def launch(self, function: Callable[..., Any], *args: Any, trainer: Any = None, **kwargs: Any) -> Any:
        """Start the processes, and call the function in this one."""
        self.cluster_environment.validate_settings(num_devices=self.num_processes, num_nodes=self.num_nodes)
        if not self.cluster_environment.creates_processes_externally:
            self._call_children_scripts()
            Observer(os.getpid(), self.procs).start()
        _set_num_threads_if_needed(num_processes=self.num_processes)
        return function(*args, **kwargs)


class Observer(_ChildProcessObserver):
    """Ends everything when a process has failed and the others have had the time to say why and to save."""

    def _terminate_all(self) -> None:
        time.sleep(GRACE)
        end(self._child_processes, 0.0)
        os._exit(1)  # Lightning's kills this process, which shows as another exit status


def end(processes: list[subprocess.Popen[Any]], grace: float) -> None:
    """Wait for processes to end, and kill those that have not after `grace` seconds."""
    deadline = time.monotonic() + grace
    for process in processes:
        try:
            process.wait(max(0.0, deadline - time.monotonic()))
        except subprocess.TimeoutExpired:
            process.kill()
