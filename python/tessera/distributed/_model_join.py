"""Models over ranks that have different numbers of batches."""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Callable, Iterator
from typing import Any

from torch import nn
from torch.distributed.algorithms.join import JoinHook

from tessera.distributed.types import Awaitable, ShardedModule


class Calls:
    """Know in which order the last iteration used the sharded modules; a rank without batches keeps to it."""

    def __init__(self) -> None:
        self.last: list[ShardedModule] = []
        self._now: list[ShardedModule] | None = None
        self._waits = False

    def watch(self, module: ShardedModule) -> None:
        """Note the calls of a module, for this and no other."""
        hooks = module._forward_hooks
        for key in [key for key, hook in hooks.items() if isinstance(hook, Calls)]:
            del hooks[key]  # of the model that this one is a copy of
        module.register_forward_hook(self)

    def __call__(self, module: nn.Module, args: Any, output: Any) -> None:
        if self._now is not None:
            self._now.append(module)
            # Backward runs in the reverse order of the waits: let it be that of the calls.
            if self._waits and isinstance(output, Awaitable):
                output.wait()

    def __deepcopy__(self, memo: dict) -> Calls:
        return self

    @contextlib.contextmanager
    def recorded(self, waits: bool) -> Iterator[None]:
        """Within it, an iteration runs; with `waits`, rows are waited for when they are asked for."""
        self._now = []
        self._waits = waits
        try:
            yield
            self.last = self._now or self.last
        finally:
            self._now = None


class ModelJoinHook(JoinHook):
    """Take part in the passes of ranks that still have batches, without samples.

    `shadow_tables` answers the exchanges of the tables, `dense` those of data parallelism, if there is any.
    """

    def __init__(self, shadow_tables: Callable[[], None], dense: JoinHook | None) -> None:
        self._shadow_tables = shadow_tables
        self._dense = dense

    # Active ranks reduce buckets before, between and after the exchanges of the tables; answering both at
    # once fits every order.
    def main_hook(self) -> None:
        failures: list[BaseException] = []

        def answer_buckets() -> None:
            try:
                self._dense.main_hook()
            except BaseException as error:  # raised by the caller
                failures.append(error)

        thread = threading.Thread(target=answer_buckets) if self._dense is not None else None
        if thread is not None:
            thread.start()
        try:
            self._shadow_tables()
        finally:
            if thread is not None:
                thread.join()
        if failures:
            raise failures[0]

    def post_hook(self, is_last_joiner: bool) -> None:
        if self._dense is not None:
            self._dense.post_hook(is_last_joiner)
