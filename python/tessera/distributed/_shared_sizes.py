"""Input dists of sharded tables that tell each other their sizes in one message."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Sequence
from contextvars import ContextVar
from typing import Any

from torch.distributed import ProcessGroup

from tessera import _C
from tessera.distributed.types import Awaitable
from tessera.sparse.jagged_tensor import KeyedJaggedTensor

Engine = _C.sharding.ShardedEmbeddingBagCollection | _C.sharding.ShardedEmbeddingCollection


class _PendingInputs(Awaitable[list]):
    def __init__(self, pending: Sequence[Any]) -> None:
        super().__init__()
        self._pending = pending

    def _wait_impl(self) -> list:
        return [pending.wait() for pending in self._pending]


class _PendingSplits(Awaitable[Awaitable[list]]):
    def __init__(self, inputs: Sequence[tuple[Engine, KeyedJaggedTensor]], group: ProcessGroup) -> None:
        super().__init__()
        self.inputs = inputs
        self.group = group
        self._pending: Sequence[Any] | None = None

    def start(self, pending: Sequence[Any]) -> None:
        self._pending = pending

    def _wait_impl(self) -> Awaitable[list]:
        if self._pending is None:
            raise ValueError("sharding.shared_sizes: what starts inside cannot be waited for inside.")
        return _PendingInputs([pending.wait() for pending in self._pending])


_gathering: ContextVar[list[_PendingSplits] | None] = ContextVar("_gathering", default=None)


def _start(sends: Sequence[_PendingSplits]) -> None:
    inputs = [(engine, features._engine()) for send in sends for engine, features in send.inputs]
    pending = iter(_C.sharding.fused_input_dist(inputs))
    for send in sends:
        send.start([next(pending) for _ in send.inputs])


@contextlib.contextmanager
def shared_sizes() -> Iterator[None]:
    """Let the input dists that start inside tell their sizes together, at the end: one message per group.

    Collective: the same modules in the same order on every rank. Nothing is sent if the body raises.
    """
    sends: list[_PendingSplits] = []
    token = _gathering.set(sends)
    try:
        yield
    finally:
        _gathering.reset(token)
    groups: dict[ProcessGroup, list[_PendingSplits]] = {}
    for send in sends:
        groups.setdefault(send.group, []).append(send)
    for members in groups.values():
        _start(members)


def start_input_dists(
    inputs: Sequence[tuple[Engine, KeyedJaggedTensor]], group: ProcessGroup
) -> Awaitable[Awaitable[list]]:
    """Start sending sizes and ids of these modules, inside `shared_sizes` at its end. Collective."""
    send = _PendingSplits(inputs, group)
    gathering = _gathering.get()
    if gathering is None:
        _start([send])
    else:
        gathering.append(send)
    return send
