"""Batches of clicks, and pipes of lines that are split, cut short or read from files.

>>> from torch.utils.data.datapipes.iter import IterableWrapper
>>> train, val = idx_split_train_val(IterableWrapper(range(10)), 0.8, decimal_places=1)
>>> list(train), list(val), list(Limit(val, 1))
([0, 1, 2, 3, 4, 5, 6, 7], [8, 9], [8])
"""

from __future__ import annotations

import csv
import random
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from typing import IO, Any, TypeVar

import torch
from torch.utils.data import IterDataPipe, get_worker_info

from tessera.sparse.jagged_tensor import KeyedJaggedTensor
from tessera.streamable import Pipelineable

__all__ = [
    "PATH_MANAGER_KEY",
    "Batch",
    "Limit",
    "LoadFiles",
    "ParallelReadConcat",
    "ReadLinesFromCSV",
    "idx_split_train_val",
    "rand_split_train_val",
    "safe_cast",
    "train_filter",
    "val_filter",
]

PATH_MANAGER_KEY = "torchrec"  # kept for programs that name it: files are opened as they are

T = TypeVar("T")


@dataclass
class Batch(Pipelineable):
    """Hold dense features [B, n], sparse features and labels [B].

    >>> ids = KeyedJaggedTensor.from_lengths_sync(["f"], torch.tensor([1]), torch.tensor([1]))
    >>> batch = Batch(torch.zeros(1, 2), ids, torch.ones(1))
    >>> batch.to(torch.device("meta")).labels.device
    device(type='meta')
    """

    dense_features: torch.Tensor
    sparse_features: KeyedJaggedTensor
    labels: torch.Tensor

    def to(self, device: torch.device, non_blocking: bool = False) -> Batch:
        """Return the batch on `device`."""
        return Batch(
            self.dense_features.to(device=device, non_blocking=non_blocking),
            self.sparse_features.to(device=device, non_blocking=non_blocking),
            self.labels.to(device=device, non_blocking=non_blocking),
        )

    def record_stream(self, stream: torch.Stream) -> None:
        """Keep the memory of the tensors until `stream` has used them."""
        self.dense_features.record_stream(stream)
        self.sparse_features.record_stream(stream)
        self.labels.record_stream(stream)

    def pin_memory(self) -> Batch:
        """Return the batch in pinned memory."""
        return Batch(
            self.dense_features.pin_memory(), self.sparse_features.pin_memory(), self.labels.pin_memory()
        )


def safe_cast(val: T, dest_type: Callable[[T], T], default: T) -> T:
    """Return the value as another type; the default where that is a ValueError.

    >>> safe_cast("7", int, 0), safe_cast("", int, 0)
    (7, 0)
    """
    try:
        return dest_type(val)
    except ValueError:
        return default


def train_filter(key_fn: Callable[[int], int], train_perc: float, decimal_places: int, idx: int) -> bool:
    """Tell whether the sample of this number is for training: the first of every 10 ** decimal_places."""
    parts = 10**decimal_places
    return key_fn(idx) % parts < round(train_perc * parts)


def val_filter(key_fn: Callable[[int], int], train_perc: float, decimal_places: int, idx: int) -> bool:
    """Tell whether the sample of this number is for validation."""
    return not train_filter(key_fn, train_perc, decimal_places, idx)


def _own_number(idx: int) -> int:
    return idx


class _Chosen(IterDataPipe):
    """Give the samples that `make_filter`, asked anew for every pass, chooses by their numbers."""

    def __init__(self, datapipe: Iterable[Any], make_filter: Callable[[], Callable[[int], bool]]) -> None:
        super().__init__()
        self.datapipe = datapipe
        self.make_filter = make_filter

    def __iter__(self) -> Iterator[Any]:
        chooses = self.make_filter()
        for idx, sample in enumerate(self.datapipe):
            if chooses(idx):
                yield sample


def _check_share(train_perc: float) -> None:
    if not 0.0 < train_perc < 1.0:
        raise ValueError(f"datasets: train_perc is {train_perc}; it has to lie between 0 and 1.")


def idx_split_train_val(
    datapipe: Iterable[Any],
    train_perc: float,
    decimal_places: int = 2,
    key_fn: Callable[[int], int] = _own_number,
) -> tuple[IterDataPipe, IterDataPipe]:
    """Return the samples for training and those for validation, by the numbers that `key_fn` gives them."""
    _check_share(train_perc)

    def half(chooses: Callable[..., bool]) -> IterDataPipe:
        return _Chosen(datapipe, partial(partial, chooses, key_fn, train_perc, decimal_places))

    return half(train_filter), half(val_filter)


def _drawn(train_perc: float, random_seed: int, is_train: bool) -> Callable[[int], bool]:
    draws = random.Random(random_seed)
    return lambda idx: (draws.random() < train_perc) == is_train


def rand_split_train_val(
    datapipe: Iterable[Any], train_perc: float, random_seed: int = 0
) -> tuple[IterDataPipe, IterDataPipe]:
    """Return two parts of the samples, drawn at random; the same seed draws the same parts in every pass."""
    _check_share(train_perc)
    halves = [partial(_drawn, train_perc, random_seed, is_train) for is_train in (True, False)]
    return _Chosen(datapipe, halves[0]), _Chosen(datapipe, halves[1])


class Limit(IterDataPipe):
    """Give the first `limit` samples."""

    def __init__(self, datapipe: Iterable[Any], limit: int) -> None:
        super().__init__()
        self.datapipe = datapipe
        self.limit = limit

    def __iter__(self) -> Iterator[Any]:
        for idx, sample in enumerate(self.datapipe):
            if idx >= self.limit:
                return
            yield sample


class LoadFiles(IterDataPipe):
    """Give every path with its open file: `mode` is "r", "t", "b", "rt" or "rb"."""

    def __init__(
        self,
        datapipe: Iterable[str],
        mode: str = "b",
        length: int = -1,
        path_manager_key: str = PATH_MANAGER_KEY,
        **open_kw: Any,
    ) -> None:
        super().__init__()
        if mode not in ("b", "t", "rb", "rt", "r"):
            raise ValueError(f"datasets: files cannot be read in mode {mode!r}.")
        self.datapipe = datapipe
        self.mode = mode if mode.startswith("r") else f"r{mode}"
        self.length = length
        self.open_kw = open_kw

    def __iter__(self) -> Iterator[tuple[str, IO[Any]]]:
        for path in self.datapipe:
            if not isinstance(path, str):
                raise TypeError(f"datasets: a path is a text, not a {type(path).__name__}.")
            yield path, open(path, self.mode, **self.open_kw)  # noqa: SIM115  # who reads it closes it

    def __len__(self) -> int:
        if self.length == -1:
            raise NotImplementedError("datasets: LoadFiles was not told its length.")
        return self.length


class ReadLinesFromCSV(IterDataPipe):
    """Give the lines of open files, cut into columns; `kw` is for `csv.reader`."""

    def __init__(
        self, datapipe: Iterable[tuple[str, IO[str]]], skip_first_line: bool = False, **kw: Any
    ) -> None:
        super().__init__()
        self.datapipe = datapipe
        self.skip_first_line = skip_first_line
        self.kw = kw

    def __iter__(self) -> Iterator[list[str]]:
        for _, file in self.datapipe:
            lines = csv.reader(file, **self.kw)
            if self.skip_first_line:
                next(lines, None)
            yield from lines


def _share_of_worker(datapipes: Sequence[T]) -> Sequence[T]:
    """Return the pipes of this worker of a DataLoader: as many each, the first workers one more."""
    worker = get_worker_info()
    if worker is None:
        return datapipes
    if worker.num_workers > len(datapipes):
        raise ValueError(f"datasets: {worker.num_workers} workers share {len(datapipes)} pipes. Take fewer.")
    each, more = divmod(len(datapipes), worker.num_workers)
    begin = worker.id * each + min(worker.id, more)
    return datapipes[begin : begin + each + (worker.id < more)]


class ParallelReadConcat(IterDataPipe):
    """Give the samples of several pipes, one after the other; workers of a DataLoader share the pipes."""

    def __init__(
        self,
        *datapipes: IterDataPipe,
        dp_selector: Callable[[Sequence[IterDataPipe]], Sequence[IterDataPipe]] = _share_of_worker,
    ) -> None:
        super().__init__()
        self.datapipes = datapipes
        self.dp_selector = dp_selector

    def __iter__(self) -> Iterator[Any]:
        for datapipe in self.dp_selector(self.datapipes):
            yield from datapipe
