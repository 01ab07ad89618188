"""The processes that train one team together: what they tell each other, and the gradients they add up."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from datetime import timedelta
from typing import Any, TypeVar

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.distributed_c10d import _set_pg_timeout

from mareinforce.errors import RankError, StopRequested

T = TypeVar("T")

PATIENCE = timedelta(days=7)
"""How long a rank waits for another's rollout. One that ends is noticed at once: its connections close."""
LAST_WORDS = timedelta(seconds=10)
"""How long a rank that has failed waits for the others, to tell them why."""
PART = 2**24
"""Gradients added up in one go, in numbers."""
_FINE, _STOPPED, _FAILED = range(3)


class Ranks:
    """The processes of a run, of which this one is number `rank` of `size`.

    All of them call every method at the same place of the run, in the same order. Alone, nothing is waited for.
    """

    def __init__(self, rank: int = 0, size: int = 1, group: Any = None) -> None:
        self.rank, self.size, self._group = rank, size, group

    @classmethod
    def here(cls) -> Ranks:
        """Those of the process group that Lightning has set up. They talk by CPU, whatever they train on."""
        if not (dist.is_available() and dist.is_initialized()) or dist.get_world_size() == 1:
            return cls()
        return cls(dist.get_rank(), dist.get_world_size(), dist.new_group(backend="gloo", timeout=PATIENCE))

    def gather(self, value: T) -> list[T]:
        """Everybody's value, by rank. Raises RankError if a rank has ended."""
        if self.size == 1:
            return [value]
        values: list[Any] = [None] * self.size
        with _noticing_who_is_gone():
            dist.all_gather_object(values, value, group=self._group)
        return values

    def gather_on_first(self, value: T) -> list[T]:
        """Everybody's value, by rank, on rank 0; its own on every other."""
        if self.size == 1:
            return [value]
        values: list[Any] | None = [None] * self.size if self.rank == 0 else None
        with _noticing_who_is_gone():
            dist.gather_object(value, values, dst=0, group=self._group)
        return [value] if values is None else values

    def of_first(self, value: T) -> T:
        """Rank 0's value."""
        return self.gather(value)[0]

    @contextmanager
    def together(self) -> Iterator[None]:
        """What is done inside succeeds on every rank or ends on every rank: all wait here for the last.

        Raises:
            StopRequested: a signal has stopped one of them.
            RankError: another has failed; it names the rank and says what that rank said. The rank itself raises its
                own error, at the latest `LAST_WORDS` after it.
        """
        if self.size == 1:
            yield
            return
        try:
            yield
        except StopRequested as stop:
            self._tell(_STOPPED, stop.signal, stop)
            raise
        except BaseException as error:
            self._tell(_FAILED, f"{type(error).__name__}: {error}", error)
            raise
        self._tell(_FINE, None, None)

    def _tell(self, kind: int, what: Any, own: BaseException | None) -> None:
        """Say how it went here, and raise what is to be raised because of how it went elsewhere."""
        if kind == _FAILED:
            # the others may be busy or gone: then our own error, which is about to be raised, is all there is to say
            _set_pg_timeout(LAST_WORDS, self._group)
            with suppress(RuntimeError, RankError):
                self._worst(kind)
                self.gather((kind, what))
            _set_pg_timeout(PATIENCE, self._group)
            return
        if self._worst(kind) == _FINE:
            return
        told = self.gather((kind, what))
        for rank, (how, said) in enumerate(told):
            if how == _FAILED:
                raise RankError(f"rank {rank} failed, so the others end too: {said}") from own
        if kind == _FINE:
            raise StopRequested(next(said for how, said in told if how == _STOPPED))

    def _worst(self, kind: int) -> int:
        worst = torch.tensor([kind])
        with _noticing_who_is_gone():
            dist.all_reduce(worst, op=dist.ReduceOp.MAX, group=self._group)
        return int(worst)

    def add_up_gradients(self, weights: Sequence[nn.Parameter]) -> None:
        """Let every gradient be the sum over the ranks.

        A rank without one adds zeros; where none has one it stays None. Ranks give the same weights in the same order.
        """
        if self.size == 1:
            return
        for part in _parts(weights):
            has = torch.tensor([weight.grad is not None for weight in part], dtype=part[0].dtype)
            grads = [torch.zeros_like(weight) if weight.grad is None else weight.grad for weight in part]
            flat = torch.cat([has.to(part[0].device), *(grad.flatten() for grad in grads)])
            group = self._group if flat.device.type == "cpu" else None
            with _noticing_who_is_gone():
                dist.all_reduce(flat, group=group)
            sums = torch.split(flat[len(part) :], [weight.numel() for weight in part])
            for weight, ranks_with_one, total in zip(part, flat[: len(part)].tolist(), sums, strict=True):
                weight.grad = total.view_as(weight) if ranks_with_one else None

    def check_same(self, values: Mapping[str, object]) -> None:
        """Raise RankError, by name, for the first of `values` that is not the same on every rank."""
        told = self.gather({name: repr(value) for name, value in values.items()})
        for name, first in told[0].items():
            for rank, own in enumerate(told):
                if own[name] != first:
                    raise RankError(
                        f"rank {rank} begins with other {name} than rank 0 ({own[name]} and {first}). All machines "
                        f"need the same configuration, rows and models, and the same checkpoint if the run is resumed."
                    )


ALONE = Ranks()
"""One process."""


def _parts(weights: Sequence[nn.Parameter]) -> Iterator[list[nn.Parameter]]:
    """Neighbours on one device, about `PART` numbers together."""
    part: list[nn.Parameter] = []
    for weight in weights:
        if part and (weight.device != part[0].device or sum(one.numel() for one in part) + weight.numel() > PART):
            yield part
            part = []
        part.append(weight)
    if part:
        yield part


@contextmanager
def _noticing_who_is_gone() -> Iterator[None]:
    try:
        yield
    except RuntimeError as error:
        raise RankError(
            f"another rank has ended without a word, see what it or its launcher has written ({error})"
        ) from error
