"""Batches that a thread reads ahead of the loop that uses them."""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Iterator
from typing import Generic, TypeVar

import torch

__all__ = ["DataLoadingThread"]

In = TypeVar("In")


class DataLoadingThread(threading.Thread, Generic[In]):
    """Read one batch ahead, and bring it to the device if it has `to`.

    `start` it, take batches with `get_next_batch`, `stop` it. An exception of the iterator is raised where
    the batch would have been taken; one that says `is_retryable`, itself or what caused it, leaves out a
    batch. With a `memcpy_stream` the copies run there, and who takes a batch waits for it. The priority is
    that of a stream of torchrec's own and is not used.

    >>> thread = DataLoadingThread(torch.device("cpu"), iter([torch.zeros(1), torch.ones(1)]), False)
    >>> thread.start()
    >>> [thread.get_next_batch() for _ in range(3)]
    [tensor([0.]), tensor([1.]), None]
    """

    def __init__(
        self,
        device: torch.device,
        dataloader_iter: Iterator[In],
        to_device_non_blocking: bool,
        memcpy_stream_priority: int = 0,
        memcpy_stream: torch.Stream | None = None,
    ) -> None:
        super().__init__(name="DataLoadingThread", daemon=True)
        self._device = torch.device(device)
        self._batches = dataloader_iter
        self._non_blocking = to_device_non_blocking
        self._stream = memcpy_stream
        self._changed = threading.Condition()
        self._waiting: list[In] = []  # at most one
        self._has_ended = False
        self._error: Exception | None = None

    def run(self) -> None:
        """Read until the iterator or somebody ends it."""
        if self._device.type == "cuda":
            torch.cuda.set_device(self._device)
        while self._wait_for_room():
            try:
                batch = next(self._batches)
            except StopIteration:
                self._end(None)
            except Exception as error:
                if not _is_retryable(error):
                    self._end(error)
            else:
                self._hold(self._copied(batch))

    def _wait_for_room(self) -> bool:
        with self._changed:
            self._changed.wait_for(lambda: self._has_ended or not self._waiting)
            return not self._has_ended

    def _copied(self, batch: In) -> In:
        if not hasattr(batch, "to"):
            return batch
        module = torch.get_device_module(self._device)
        with contextlib.nullcontext() if self._stream is None else module.stream(self._stream):
            return batch.to(self._device, non_blocking=self._non_blocking)

    def _hold(self, batch: In) -> None:
        with self._changed:
            self._waiting.append(batch)
            self._changed.notify_all()

    def _end(self, error: Exception | None) -> None:
        with self._changed:
            self._has_ended = True
            self._error = error
            self._changed.notify_all()

    def stop(self) -> None:
        """Read no more; what was read ahead can still be taken."""
        self._end(self._error)

    def get_next_batch(self, none_throws: bool = False) -> In | None:
        """Return the next batch. At the end return None, or raise StopIteration with `none_throws`."""
        with self._changed:
            self._changed.wait_for(lambda: self._has_ended or self._waiting)
            if self._waiting:
                batch = self._waiting.pop()
                self._changed.notify_all()
                return batch
            error, self._error = self._error, None
        if error is not None:
            raise error
        if none_throws:
            raise StopIteration
        return None


def _is_retryable(error: Exception) -> bool:
    """Tell whether an exception, or else its cause, says that reading may go on."""
    return bool(getattr(error, "is_retryable", getattr(error.__cause__, "is_retryable", False)))
