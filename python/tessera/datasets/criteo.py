"""Criteo's logs of clicks: a label, 13 integers and 26 categories a line. Needs numpy.

>>> DEFAULT_INT_NAMES[0], DEFAULT_CAT_NAMES[-1], len(DEFAULT_COLUMN_NAMES)
('int_0', 'cat_25', 40)
"""

from __future__ import annotations

import csv
import math
import os
import shutil
from collections.abc import Callable, Iterable, Iterator
from typing import Any

import numpy as np
import torch
from torch.utils.data import IterableDataset

from tessera.datasets.utils import Batch, safe_cast
from tessera.sparse.jagged_tensor import KeyedJaggedTensor

__all__ = [
    "CAT_FEATURE_COUNT",
    "COLUMN_TYPE_CASTERS",
    "DAYS",
    "DEFAULT_CAT_NAMES",
    "DEFAULT_COLUMN_NAMES",
    "DEFAULT_INT_NAMES",
    "DEFAULT_LABEL_NAME",
    "FREQUENCY_THRESHOLD",
    "INT_FEATURE_COUNT",
    "TOTAL_TRAINING_SAMPLES",
    "BinaryCriteoUtils",
    "CriteoIterDataPipe",
    "InMemoryBinaryCriteoIterDataPipe",
    "criteo_kaggle",
    "criteo_terabyte",
]

INT_FEATURE_COUNT = 13
CAT_FEATURE_COUNT = 26
DAYS = 24
FREQUENCY_THRESHOLD = 3  # ids that come less often get the number 1
DEFAULT_LABEL_NAME = "label"
DEFAULT_INT_NAMES: list[str] = [f"int_{idx}" for idx in range(INT_FEATURE_COUNT)]
DEFAULT_CAT_NAMES: list[str] = [f"cat_{idx}" for idx in range(CAT_FEATURE_COUNT)]
DEFAULT_COLUMN_NAMES: list[str] = [DEFAULT_LABEL_NAME, *DEFAULT_INT_NAMES, *DEFAULT_CAT_NAMES]
TOTAL_TRAINING_SAMPLES = 4195197692  # of the first 23 days of the 1 TB logs


def _integer(text: int | str) -> int | str:
    return safe_cast(text, int, 0)


def _text(value: int | str) -> int | str:
    return safe_cast(value, str, "")


COLUMN_TYPE_CASTERS: list[Callable[[int | str], int | str]] = [
    *[_integer] * (1 + INT_FEATURE_COUNT),
    *[_text] * CAT_FEATURE_COUNT,
]


def _named_row(example: list[str]) -> dict[str, int | str]:
    """Return the columns of a line by name; missing numbers are 0, missing categories empty."""
    columns = zip(DEFAULT_COLUMN_NAMES, COLUMN_TYPE_CASTERS, example, strict=False)
    return {name: cast(text) for name, cast, text in columns}


class CriteoIterDataPipe(IterableDataset):
    """Give the lines of files as they come from Criteo, one after the other.

    `row_mapper` is called with the columns of a line; by default they get their names. Workers of a
    DataLoader share the files.
    """

    def __init__(
        self,
        paths: Iterable[str],
        *,
        row_mapper: Callable[[list[str]], Any] | None = _named_row,
        **open_kw: Any,
    ) -> None:
        super().__init__()
        self.paths = paths
        self.row_mapper = row_mapper
        self.open_kw = open_kw

    def __iter__(self) -> Iterator[Any]:
        worker = torch.utils.data.get_worker_info()
        paths = list(self.paths)
        if worker is not None:
            paths = paths[worker.id :: worker.num_workers]
        for path in paths:
            with open(path, newline="", **self.open_kw) as file:
                for row in csv.reader(file, delimiter="\t"):
                    yield row if self.row_mapper is None else self.row_mapper(row)


def criteo_terabyte(
    paths: Iterable[str], *, row_mapper: Callable[[list[str]], Any] | None = _named_row, **open_kw: Any
) -> CriteoIterDataPipe:
    """Give the lines of the 1 TB logs."""
    return CriteoIterDataPipe(paths, row_mapper=row_mapper, **open_kw)


def criteo_kaggle(
    path: str, *, row_mapper: Callable[[list[str]], Any] | None = _named_row, **open_kw: Any
) -> CriteoIterDataPipe:
    """Give the lines of the challenge's file."""
    return CriteoIterDataPipe((path,), row_mapper=row_mapper, **open_kw)


class BinaryCriteoUtils:
    """Write and read numpy files of Criteo's logs."""

    @staticmethod
    def tsv_to_npys(
        in_file: str,
        out_dense_file: str,
        out_sparse_file: str,
        out_labels_file: str,
        dataset_name: str = "criteo_1tb",
        path_manager_key: str = "torchrec",
    ) -> None:
        """Turn one file of lines into three: dense (float32), sparse (int64) and labels (int32).

        Dense values become log(x - smallest + 2). A file without labels (the challenge's test set) gets -1.
        """
        if dataset_name not in ("criteo_1tb", "criteo_kaggle"):
            raise ValueError(f"criteo: {dataset_name!r} is neither criteo_1tb nor criteo_kaggle.")
        labels, dense, sparse = [], [], []
        for row in CriteoIterDataPipe([in_file], row_mapper=None):
            has_label = len(row) == len(DEFAULT_COLUMN_NAMES)
            columns = row[1:] if has_label else row
            labels.append(_integer(row[0]) if has_label else -1)
            dense.append([_integer(text) for text in columns[:INT_FEATURE_COUNT]])
            sparse.append([int(text or "0", 16) for text in columns[INT_FEATURE_COUNT:]])
        numbers = np.array(dense, dtype=np.float32).reshape(-1, INT_FEATURE_COUNT)
        if numbers.size:
            numbers = np.log(numbers - (numbers.min() - 2))
        np.save(out_dense_file, numbers)
        np.save(out_sparse_file, np.array(sparse, dtype=np.int64).reshape(-1, CAT_FEATURE_COUNT))
        np.save(out_labels_file, np.array(labels, dtype=np.int32).reshape(-1, 1))

    @staticmethod
    def get_shape_from_npy(path: str, path_manager_key: str = "torchrec") -> tuple[int, ...]:
        """Return the shape of the array in a file, without reading it."""
        return np.load(path, mmap_mode="r").shape

    @staticmethod
    def get_file_row_ranges_and_remainder(
        lengths: list[int],
        rank: int,
        world_size: int,
        start_row: int = 0,
        last_row: int | None = None,
    ) -> tuple[dict[int, tuple[int, int]], int]:
        """Return a rank's first and last row of each file, and how many ranks have one row more.

        Rows from `start_row` to `last_row`, of all files one after the other, go to ranks in large pieces.

        >>> BinaryCriteoUtils.get_file_row_ranges_and_remainder([10, 10], 1, 3)
        ({0: (7, 9), 1: (0, 3)}, 2)
        """
        end = sum(lengths) if last_row is None else last_row + 1
        size, rest = divmod(end - start_row, world_size)
        first = start_row + rank * size + min(rank, rest)
        behind = first + size + (1 if rank < rest else 0)
        ranges, begin = {}, 0
        for file, length in enumerate(lengths):
            low, high = max(first, begin), min(behind, begin + length)
            if low < high:
                ranges[file] = (low - begin, high - begin - 1)
            begin += length
        return ranges, rest

    @staticmethod
    def load_npy_range(
        fname: str,
        start_row: int,
        num_rows: int,
        path_manager_key: str = "torchrec",
        mmap_mode: bool = False,
    ) -> np.ndarray:
        """Return some rows of the array of two dimensions in a file, read or mapped."""
        whole = np.load(fname, mmap_mode="r")
        if whole.ndim != 2:
            raise ValueError(f"criteo: the array in {fname} has {whole.ndim} dimensions, not 2.")
        if start_row < 0 or num_rows < 0 or start_row + num_rows > whole.shape[0]:
            raise ValueError(
                f"criteo: rows {start_row} to {start_row + num_rows} of {fname}, which has {whole.shape[0]}."
            )
        part = whole[start_row : start_row + num_rows]
        return part if mmap_mode else np.array(part)

    @staticmethod
    def sparse_to_contiguous(
        in_files: list[str],
        output_dir: str,
        frequency_threshold: int = FREQUENCY_THRESHOLD,
        columns: int = CAT_FEATURE_COUNT,
        path_manager_key: str = "torchrec",
        output_file_suffix: str = "_contig_freq.npy",
    ) -> None:
        """Number the ids of each column from 2 on, in the order in which they come in all files together.

        Ids that come less often than the threshold get the number 1. The numbers of `day_0.npy` are written
        to `day_0<suffix>` in the folder.
        """
        files = {os.path.basename(path).split(".")[0]: np.load(path) for path in in_files}
        ends = np.cumsum([len(rows) for rows in files.values()])[:-1]
        for column in range(columns):
            ids = np.concatenate([rows[:, column] for rows in files.values()])
            _, first, places, counts = np.unique(
                ids, return_index=True, return_inverse=True, return_counts=True
            )
            frequent = np.flatnonzero(counts >= frequency_threshold)
            numbers = np.ones(len(first), dtype=np.int64)
            numbers[frequent[np.argsort(first[frequent])]] = np.arange(2, 2 + len(frequent))
            for rows, own in zip(files.values(), np.split(numbers[places], ends), strict=True):
                rows[:, column] = own
        for name, rows in files.items():
            np.save(os.path.join(output_dir, name + output_file_suffix), rows)

    @staticmethod
    def shuffle(
        input_dir_labels_and_dense: str,
        input_dir_sparse: str,
        output_dir_shuffled: str,
        rows_per_day: dict[int, int],
        output_dir_full_set: str | None = None,
        days: int = DAYS,
        int_columns: int = INT_FEATURE_COUNT,
        sparse_columns: int = CAT_FEATURE_COUNT,
        path_manager_key: str = "torchrec",
        random_seed: int = 0,
    ) -> None:
        """Deal the rows of all days but the last anew: `day_0_dense.npy`, `_sparse` and `_labels`, and so on.

        Each day keeps its number of rows; the last day's files are copied. `output_dir_full_set` gets all
        columns of the others side by side in one file of float32, `full.npy`, in the order before.
        """
        folders = {
            "dense": (input_dir_labels_and_dense, np.float32),
            "sparse": (input_dir_sparse, np.int32),
            "labels": (input_dir_labels_and_dense, np.int32),
        }
        sizes = [rows_per_day[day] for day in range(days - 1)]
        order = np.arange(sum(sizes))
        np.random.RandomState(random_seed).shuffle(order)
        whole = []
        for kind, (folder, dtype) in folders.items():
            names = [f"day_{day}_{kind}.npy" for day in range(days - 1)]
            parts = [np.load(os.path.join(folder, name)) for name in names]
            wrong = [name for name, part, size in zip(names, parts, sizes, strict=True) if len(part) != size]
            if wrong:
                raise ValueError(f"criteo: {wrong[0]} has another number of rows than rows_per_day says.")
            rows = np.concatenate(parts)
            width = {"dense": int_columns, "sparse": sparse_columns, "labels": 1}[kind]
            if rows.shape[1] != width:
                raise ValueError(f"criteo: files of {kind} rows have {rows.shape[1]} columns, not {width}.")
            if output_dir_full_set is not None:
                whole.append(rows.astype(np.float32))
            dealt = np.split(rows[order], np.cumsum(sizes)[:-1])
            for name, part in zip(names, dealt, strict=True):
                np.save(os.path.join(output_dir_shuffled, name), part.astype(dtype))
            last = f"day_{days - 1}_{kind}.npy"
            shutil.copyfile(os.path.join(folder, last), os.path.join(output_dir_shuffled, last))
        if output_dir_full_set is not None:
            np.save(os.path.join(output_dir_full_set, "full.npy"), np.concatenate(whole, axis=1))


class InMemoryBinaryCriteoIterDataPipe(IterableDataset):
    """Give batches of numpy files, each rank its own.

    Rows go to ranks batch by batch: the first `batch_size` to rank 0, the next to rank 1, and so on. What
    is left over is one smaller batch on every rank, or lies in the last whole ones if there is less than a
    row for each; with `drop_last` it is left out. `stage` "val" takes the first half of the first file,
    "test" the second. `hashes` says, column by column, below what ids are brought by a remainder.
    `shuffle_training_set` deals all rows anew, `shuffle_batches` orders the rows of each batch anew. With
    `mmap_mode` rows stay in their files until they are asked for.
    """

    def __init__(
        self,
        stage: str,
        dense_paths: list[str],
        sparse_paths: list[str],
        labels_paths: list[str],
        batch_size: int,
        rank: int,
        world_size: int,
        drop_last: bool | None = False,
        shuffle_batches: bool = False,
        shuffle_training_set: bool = False,
        shuffle_training_set_random_seed: int = 0,
        mmap_mode: bool = False,
        hashes: list[int] | None = None,
        path_manager_key: str = "torchrec",
    ) -> None:
        super().__init__()
        if stage not in ("train", "val", "test"):
            raise ValueError(f"criteo: the stage {stage!r} is not one of train, val, test.")
        if hashes is not None and len(hashes) != CAT_FEATURE_COUNT:
            raise ValueError(f"criteo: there are {len(hashes)} hashes for {CAT_FEATURE_COUNT} categories.")
        self._paths = list(zip(dense_paths, sparse_paths, labels_paths, strict=True))
        self._hashes = None if hashes is None else np.array(hashes).reshape(1, -1)
        self._shuffles = shuffle_batches
        self.batch_size = batch_size
        rows = self._rows_of(stage)
        if shuffle_training_set and stage == "train":
            rows = np.random.default_rng(shuffle_training_set_random_seed).permutation(rows)
        self._batches = self._deal(rows, rank, world_size, bool(drop_last))
        mapped = [[np.load(path, mmap_mode="r") for path in paths] for paths in self._paths]
        self._kept = None if mmap_mode else [self._read(mapped, batch) for batch in self._batches]
        self._mapped = mapped if mmap_mode else None
        self.keys = DEFAULT_CAT_NAMES

    def _rows_of(self, stage: str) -> np.ndarray:
        """Return the numbers of the rows, over all files."""
        sizes = [BinaryCriteoUtils.get_shape_from_npy(dense)[0] for dense, _, _ in self._paths]
        self._begins = np.cumsum([0, *sizes])
        half = math.ceil(sizes[0] / 2)
        everything = np.arange(sum(sizes))
        if stage == "val":
            return np.concatenate([everything[:half], everything[sizes[0] :]])
        return everything[half:] if stage == "test" else everything

    def _deal(self, rows: np.ndarray, rank: int, world_size: int, drop_last: bool) -> list[np.ndarray]:
        """Return this rank's batches."""
        step = self.batch_size * world_size
        whole, rest = divmod(len(rows), step)
        if drop_last:
            rest = 0
        ends = [step * number for number in range(1, whole + 1)]
        if rest >= world_size or (rest and not ends):
            ends.append(len(rows))
        elif rest:
            ends[-1] = len(rows)  # less than a row for every rank
        found, begin = [], 0
        for end in ends:
            found.append(np.array_split(rows[begin:end], world_size)[rank])
            begin = end
        return found

    def _read(self, mapped: list[list[np.ndarray]], rows: np.ndarray) -> list[np.ndarray]:
        """Return dense, sparse and labels of some rows, in their order."""
        file_of = np.searchsorted(self._begins, rows, side="right") - 1
        found = []
        for kind in range(3):
            parts = np.empty((len(rows), mapped[0][kind].shape[1]), dtype=mapped[0][kind].dtype)
            for file in np.unique(file_of):
                chosen = file_of == file
                parts[chosen] = mapped[file][kind][rows[chosen] - self._begins[file]]
            found.append(parts)
        if self._hashes is not None:
            found[1] = (found[1] % self._hashes).astype(found[1].dtype)
        return found

    def _batch(self, dense: np.ndarray, sparse: np.ndarray, labels: np.ndarray) -> Batch:
        if self._shuffles:
            order = np.random.permutation(len(dense))
            dense, sparse, labels = dense[order], sparse[order], labels[order]
        count = len(dense)
        ones = torch.ones(CAT_FEATURE_COUNT * count, dtype=torch.int32)
        offsets = torch.arange(CAT_FEATURE_COUNT * count + 1, dtype=torch.int32)
        features = KeyedJaggedTensor(
            self.keys,
            torch.from_numpy(np.ascontiguousarray(sparse.T).reshape(-1)),
            lengths=ones,
            offsets=offsets,
            stride=count,
            length_per_key=[count] * CAT_FEATURE_COUNT,
        )
        return Batch(torch.from_numpy(dense.copy()), features, torch.from_numpy(labels.reshape(-1).copy()))

    def __iter__(self) -> Iterator[Batch]:
        for place, rows in enumerate(self._batches):
            parts = self._read(self._mapped, rows) if self._kept is None else self._kept[place]
            yield self._batch(*parts)

    def __len__(self) -> int:
        return len(self._batches)
