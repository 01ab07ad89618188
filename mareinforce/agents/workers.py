"""Who does the agents' work: the caller, one agent after the other, or a long-lived worker a network, all at once."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor, wait
from contextlib import ExitStack
from typing import NamedTuple, TypeVar

import torch

from mareinforce.errors import AgentError, MareinforceError

T = TypeVar("T")


class Job(NamedTuple):
    """Work on one network of the team."""

    network: int
    agents: tuple[int, ...]
    work: Callable[[], object]


class Workers:
    """Runs jobs and returns their results in the order of the jobs, whichever was done first.

    With ``concurrent`` every network has a worker of its own, a thread that lives as long as this object: torch lets
    go of the interpreter while it computes, so networks on different devices compute at the same time. Jobs on one
    network are done in their order, because agents that share a network switch its adapters.
    """

    def __init__(self, concurrent: bool = False) -> None:
        self.concurrent = concurrent
        self._threads: dict[int, ThreadPoolExecutor] = {}

    def run(self, jobs: Sequence[Job]) -> list[object]:
        """The result of each job. If jobs fail, all others are ended first; then the first failure is raised.

        Raises:
            AgentError: an unforeseen failure of a concurrent job, naming its agents; ours are raised as they are.
        """
        if not self.concurrent:
            return [job.work() for job in jobs]
        autocast = _autocast_here()
        futures: list[Future[object]] = [self._thread(job.network).submit(_under, autocast, job.work) for job in jobs]
        wait(futures)
        for job, future in zip(jobs, futures, strict=True):
            error = future.exception()
            if isinstance(error, MareinforceError):
                raise error
            if error is not None:
                names = " and ".join(f"agent {agent}" for agent in job.agents)
                raise AgentError(f"{names}: its worker failed: {type(error).__name__}: {error}") from error
        return [future.result() for future in futures]

    def close(self) -> None:
        """Let the workers go."""
        for thread in self._threads.values():
            thread.shutdown()
        self._threads = {}

    def _thread(self, network: int) -> ThreadPoolExecutor:
        if network not in self._threads:
            self._threads[network] = ThreadPoolExecutor(max_workers=1, thread_name_prefix=f"network-{network}")
        return self._threads[network]


def _autocast_here() -> list[tuple[str, torch.dtype]]:
    """Device types that compute in another precision in this thread: a new thread does not know of it."""
    kinds = ["cpu"]
    if torch.accelerator.is_available() and (accelerator := torch.accelerator.current_accelerator()) is not None:
        kinds.append(accelerator.type)
    return [(kind, torch.get_autocast_dtype(kind)) for kind in kinds if torch.is_autocast_enabled(kind)]


def _under(autocast: Sequence[tuple[str, torch.dtype]], work: Callable[[], T]) -> T:
    with ExitStack() as stack:
        for kind, dtype in autocast:
            stack.enter_context(torch.autocast(kind, dtype))
        return work()
