"""Click logs from Python: write them, read them, and convert tables of one's own.

The format is described in docs/dlrm.md, schemas in docs/your_data.md. Nothing here needs a process group.

>>> import pathlib, tempfile
>>> from tessera.data import ClickFile, ClickWriter, Feature
>>> path = pathlib.Path(tempfile.mkdtemp()) / "clicks.click"
>>> features = [Feature("user", rows=100), Feature("tags", rows=10, bag_size=0, pooling="mean")]
>>> with ClickWriter(path, features, dense=["price"]) as writer:
...     writer.append(labels=[1, 0], dense=[[2.5], [7.0]], ids={"user": [3, 4], "tags": [[1, 2], []]})
>>> log = ClickFile(path)
>>> len(log), log.features[1].pooling
(2, 'mean')
>>> batch = log[0:2]
>>> batch.labels.tolist(), batch.ids["tags"].tolist(), batch.lengths["tags"].tolist()
([1.0, 0.0], [1, 2], [2, 0])
"""

from __future__ import annotations

import ctypes
import functools
import json
import os
import pathlib
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch

__all__ = ["Batch", "ClickFile", "ClickWriter", "Converted", "DataError", "Feature", "convert"]

_ROOM = 4096  # bytes of an error


class DataError(ValueError):
    """Data that cannot be used. The text names the file, the place and the reason."""


@dataclass(frozen=True)
class Feature:
    """A bag of ids per sample, each below ``rows``; ``bag_size`` is 0 if it varies.

    ``rows`` 0 is a table that grows: any ids. ``dim`` 0 is as many columns as the others have.
    """

    name: str
    rows: int
    bag_size: int = 1
    pooling: str = "sum"
    dim: int = 0

    def __post_init__(self) -> None:
        """Compare the pooling with those there are."""
        if self.pooling not in ("sum", "mean"):
            raise ValueError(f"Feature: pooling is 'sum' or 'mean', not {self.pooling!r}.")


@dataclass(frozen=True)
class Batch:
    """Samples: labels [samples], dense [samples, numbers]; per feature ids and lengths [samples]."""

    labels: torch.Tensor
    dense: torch.Tensor
    ids: dict[str, torch.Tensor]
    lengths: dict[str, torch.Tensor]


@dataclass(frozen=True)
class Converted:
    """What a conversion read, wrote and left out."""

    records: int
    samples: int
    bad: int


class _FeatureWords(ctypes.Structure):
    _fields_ = (
        ("name", ctypes.c_char_p),
        ("num_rows", ctypes.c_int64),
        ("bag_size", ctypes.c_int64),
        ("means", ctypes.c_int),
        ("dim", ctypes.c_int64),
    )


def _places() -> list[pathlib.Path]:
    """Where the library may lie: named, in the package, or beside libtessera.so."""
    if named := os.environ.get("TESSERA_DATA_LIBRARY"):
        return [pathlib.Path(named)]
    found = [pathlib.Path(__file__).parent / "lib"]
    import tessera._C  # noqa: F401  # loads libtessera.so

    for line in pathlib.Path("/proc/self/maps").read_text().splitlines():
        if "/libtessera.so" in line:
            found.append(pathlib.Path(line.split(maxsplit=5)[5]).parent)
    return [folder / "libtessera_data.so" for folder in dict.fromkeys(found)]


@functools.cache
def _library() -> ctypes.CDLL:
    places = _places()
    for place in places:
        if place.exists():
            library = ctypes.CDLL(str(place))
            library.tessera_click_file_description.restype = ctypes.c_char_p
            return library
    raise ImportError(f"tessera.data: libtessera_data.so is not in {', '.join(map(str, places))}.")


def _call(name: str, *words: Any) -> None:
    error = ctypes.create_string_buffer(_ROOM)
    if getattr(_library(), name)(*words, error, ctypes.c_size_t(_ROOM)) != 0:
        raise DataError(error.value.decode(errors="replace"))


def _pointer(tensor: torch.Tensor) -> ctypes.c_void_p:
    return ctypes.c_void_p(tensor.data_ptr())


def _ids_and_lengths(feature: Feature, bags: Any, count: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Bags as one list of ids: a tensor [samples] or [samples, n], a list of lists, or (ids, lengths)."""
    if isinstance(bags, tuple):
        ids, lengths = (torch.as_tensor(part) for part in bags)
        return ids.to(torch.int64).flatten(), lengths.to(torch.int32)
    if not isinstance(bags, torch.Tensor):
        bags = list(bags)
        if any(isinstance(bag, Iterable) for bag in bags):
            lengths = torch.tensor([len(bag) for bag in bags], dtype=torch.int32)
            return torch.tensor([i for bag in bags for i in bag], dtype=torch.int64), lengths
        bags = torch.tensor(bags, dtype=torch.int64)
    if bags.dim() not in (1, 2) or bags.size(0) != count:
        raise ValueError(
            f"ClickWriter.append: ids of '{feature.name}' have shape {list(bags.shape)}; there are "
            f"{count} labels."
        )
    width = 1 if bags.dim() == 1 else bags.size(1)
    return bags.to(torch.int64).flatten(), torch.full((count,), width, dtype=torch.int32)


class ClickWriter:
    """Writes a log. It appears under its name when the ``with`` block ends without an exception."""

    def __init__(
        self,
        path: str | os.PathLike,
        features: Sequence[Feature],
        dense: int | Sequence[str] = 0,
        *,
        half_dense: bool = False,
    ) -> None:
        """``dense`` is how many dense numbers a sample has, or their names."""
        self._features = list(features)
        names = [] if isinstance(dense, int) else [name.encode() for name in dense]
        self._num_dense = dense if isinstance(dense, int) else len(names)
        words = (_FeatureWords * max(1, len(self._features)))()
        for word, one in zip(words, self._features, strict=False):
            word.name, word.num_rows, word.bag_size = one.name.encode(), one.rows, one.bag_size
            word.means = one.pooling == "mean"
            word.dim = one.dim
        self._writer = ctypes.c_void_p()
        _call(
            "tessera_click_writer_open",
            os.fsencode(path),
            ctypes.c_int64(self._num_dense),
            (ctypes.c_char_p * len(names))(*names) if names else None,
            words,
            ctypes.c_int64(len(self._features)),
            int(half_dense),
            ctypes.byref(self._writer),
        )

    def append(self, labels: Any, ids: Mapping[str, Any], dense: Any = None) -> None:
        """Append samples: labels [samples], dense [samples, numbers], and the bags of every feature.

        Bags are a tensor or list of one id per sample, one of [samples, n] ids, a list of lists, or a
        tuple of all ids and the length of each bag.
        """
        if not self._writer:
            raise DataError("ClickWriter.append: the log is finished.")
        labels = torch.as_tensor(labels, dtype=torch.float32).contiguous()
        count = labels.numel()
        numbers = torch.zeros(count, 0) if dense is None else torch.as_tensor(dense, dtype=torch.float32)
        numbers = numbers.contiguous()
        if numbers.numel() != count * self._num_dense:
            raise ValueError(
                f"ClickWriter.append: dense has shape {list(numbers.shape)}; {count} samples of "
                f"{self._num_dense} numbers were expected."
            )
        known = [feature.name for feature in self._features]
        if sorted(ids) != sorted(known):
            raise ValueError(f"ClickWriter.append: ids are of {sorted(ids)}, the features {sorted(known)}.")
        parts = [_ids_and_lengths(feature, ids[feature.name], count) for feature in self._features]
        for feature, (_, lengths) in zip(self._features, parts, strict=True):
            if lengths.numel() != count:
                raise ValueError(
                    f"ClickWriter.append: '{feature.name}' has {lengths.numel()} bags; there are {count} "
                    "labels."
                )
        all_ids = torch.cat([torch.empty(0, dtype=torch.int64), *(part[0] for part in parts)])
        lengths = torch.cat([torch.empty(0, dtype=torch.int32), *(part[1] for part in parts)])
        _call(
            "tessera_click_writer_append",
            self._writer,
            ctypes.c_int64(count),
            _pointer(labels),
            _pointer(numbers),
            _pointer(lengths),
            _pointer(all_ids),
            ctypes.c_int64(all_ids.numel()),
        )

    def finish(self) -> None:
        """Put the log under its name. Without it, or without samples, nothing is left behind."""
        if self._writer:
            _call("tessera_click_writer_finish", self._writer)
            self.close()

    def close(self) -> None:
        """Give it up, if it is not finished."""
        if self._writer:
            _library().tessera_click_writer_close(self._writer)
            self._writer = ctypes.c_void_p()

    def __enter__(self) -> ClickWriter:
        """Return itself."""
        return self

    def __exit__(self, kind: type | None, *rest: object) -> None:
        """Finish it, or give it up if something was raised."""
        try:
            if kind is None:
                self.finish()
        finally:
            self.close()

    def __del__(self) -> None:
        """Give it up."""
        if getattr(self, "_writer", None):
            self.close()


class ClickFile:
    """A log, mapped into memory. A slice of it is a :class:`Batch`."""

    def __init__(self, path: str | os.PathLike) -> None:
        """Check header, directory and lengths."""
        self._file = ctypes.c_void_p()
        _call("tessera_click_file_open", os.fsencode(path), ctypes.byref(self._file))
        told = json.loads(_library().tessera_click_file_description(self._file))
        self.features = [
            Feature(one["name"], one["rows"], one["bag_size"], one["pooling"], one["dim"])
            for one in told["features"]
        ]
        self.dense_names: list[str] = told["dense_names"]
        self.num_dense: int = told["dense"]
        self.schema: str = told["schema"]  # in TOML, or empty
        self._num_samples: int = told["samples"]

    def __len__(self) -> int:
        """How many samples there are."""
        return self._num_samples

    def __getitem__(self, part: slice) -> Batch:
        """Samples in a row, as copies."""
        first, end, step = part.indices(len(self))
        if step != 1:
            raise ValueError("ClickFile: samples are read in a row; the step is 1.")
        count = max(0, end - first)
        pointers = [ctypes.c_void_p() for _ in range(4)]
        num_ids = ctypes.c_int64()
        _call(
            "tessera_click_file_read",
            self._file,
            ctypes.c_int64(first),
            ctypes.c_int64(count),
            *(ctypes.byref(pointer) for pointer in pointers),
            ctypes.byref(num_ids),
        )

        def copied(pointer: ctypes.c_void_p, kind: Any, dtype: torch.dtype, size: int) -> torch.Tensor:
            if size == 0:
                return torch.empty(0, dtype=dtype)
            return torch.frombuffer((kind * size).from_address(pointer.value), dtype=dtype).clone()

        labels = copied(pointers[0], ctypes.c_float, torch.float32, count)
        dense = copied(pointers[1], ctypes.c_float, torch.float32, count * self.num_dense)
        lengths = copied(pointers[2], ctypes.c_int32, torch.int32, count * len(self.features))
        ids = copied(pointers[3], ctypes.c_int64, torch.int64, num_ids.value)
        all_lengths = lengths.view(len(self.features), count)
        parts = ids.split(all_lengths.sum(1).tolist()) if self.features else []
        names = [feature.name for feature in self.features]
        return Batch(
            labels,
            dense.view(count, self.num_dense),
            dict(zip(names, parts, strict=True)),
            dict(zip(names, all_lengths, strict=True)),
        )

    def verify(self) -> None:
        """Read every byte and compare every sum."""
        _call("tessera_click_file_verify", self._file)

    def __del__(self) -> None:
        """Give the memory back."""
        if getattr(self, "_file", None):
            _library().tessera_click_file_close(self._file)


def convert(
    table: Any,
    schema: str | os.PathLike,
    path: str | os.PathLike,
    *,
    skip_bad: bool = False,
    no_label: bool = False,
    half_dense: bool = False,
) -> Converted:
    """Write the log of a table: of pyarrow, pandas, polars, or whatever has ``__arrow_c_stream__``.

    ``schema`` is a TOML file, or its text. The log is the one that `tessera data convert` makes of the
    same records.
    """
    if not hasattr(table, "__arrow_c_stream__"):
        raise TypeError(f"tessera.data.convert: {type(table).__name__} has no __arrow_c_stream__.")
    is_text = "\n" in str(schema)
    if not is_text and os.path.exists(path) and os.path.samefile(schema, path):
        raise DataError(f"{path}: is read and cannot be written too. Name another file to write.")
    text = str(schema) if is_text else pathlib.Path(schema).read_text()
    capsule = table.__arrow_c_stream__()
    pointer = ctypes.pythonapi.PyCapsule_GetPointer
    pointer.restype, pointer.argtypes = ctypes.c_void_p, [ctypes.py_object, ctypes.c_char_p]
    stream = ctypes.c_void_p(pointer(capsule, b"arrow_array_stream"))
    counts = (ctypes.c_int64 * 3)()
    _call(
        "tessera_click_convert",
        stream,
        text.encode(),
        os.fsencode(path),
        int(skip_bad),
        int(no_label),
        int(half_dense),
        counts,
    )
    return Converted(*counts)
