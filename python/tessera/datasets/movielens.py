"""MovieLens' ratings: user, film, rating and time a line, and the films' titles and genres beside them.

>>> DEFAULT_COLUMN_NAMES
['userId', 'movieId', 'rating', 'timestamp', 'title', 'genres']
"""

from __future__ import annotations

import os
from collections.abc import Callable
from functools import partial
from typing import Any

from torch.utils.data import IterDataPipe

from tessera.datasets.utils import LoadFiles, ReadLinesFromCSV, safe_cast

__all__ = [
    "COLUMN_TYPE_CASTERS",
    "DEFAULT_COLUMN_NAMES",
    "DEFAULT_MOVIES_COLUMN_NAMES",
    "DEFAULT_RATINGS_COLUMN_NAMES",
    "MOVIES_FILENAME",
    "RATINGS_FILENAME",
    "movielens_20m",
    "movielens_25m",
]

RATINGS_FILENAME = "ratings.csv"
MOVIES_FILENAME = "movies.csv"
DEFAULT_RATINGS_COLUMN_NAMES: list[str] = ["userId", "movieId", "rating", "timestamp"]
DEFAULT_MOVIES_COLUMN_NAMES: list[str] = ["movieId", "title", "genres"]
DEFAULT_COLUMN_NAMES: list[str] = DEFAULT_RATINGS_COLUMN_NAMES + DEFAULT_MOVIES_COLUMN_NAMES[1:]


def _caster(kind: Callable[..., Any], default: Any) -> Callable[[Any], Any]:
    return partial(safe_cast, dest_type=kind, default=default)


COLUMN_TYPE_CASTERS: list[Callable[[Any], Any]] = [
    *[_caster(int, 0), _caster(int, 0), _caster(float, 0.0), _caster(int, 0)],
    *[_caster(str, ""), _caster(str, "")],
]


def _named_row(example: list[str]) -> dict[str, float | int | str]:
    """Return the columns of a line by name; what is no number is 0."""
    columns = zip(DEFAULT_COLUMN_NAMES, COLUMN_TYPE_CASTERS, example, strict=False)
    return {name: cast(text) for name, cast, text in columns}


def _lines(folder: str, file: str, **open_kw: Any) -> IterDataPipe:
    files = LoadFiles((os.path.join(folder, file),), mode="r", **open_kw)
    return ReadLinesFromCSV(files, skip_first_line=True, delimiter=",")


def _movielens(
    root: str,
    include_movies_data: bool,
    row_mapper: Callable[[list[str]], Any] | None,
    open_kw: dict[str, Any],
) -> IterDataPipe:
    lines = _lines(root, RATINGS_FILENAME, **open_kw)
    if include_movies_data:
        films = {film: rest for film, *rest in _lines(root, MOVIES_FILENAME)}
        lines = lines.map(lambda row: row + films[row[1]])
    return lines if row_mapper is None else lines.map(row_mapper)


def movielens_20m(
    root: str,
    *,
    include_movies_data: bool = False,
    row_mapper: Callable[[list[str]], Any] | None = _named_row,
    **open_kw: Any,
) -> IterDataPipe:
    """Give the ratings in a folder, with titles and genres if asked for; by default columns by name."""
    return _movielens(root, include_movies_data, row_mapper, open_kw)


def movielens_25m(
    root: str,
    *,
    include_movies_data: bool = False,
    row_mapper: Callable[[list[str]], Any] | None = _named_row,
    **open_kw: Any,
) -> IterDataPipe:
    """Give the ratings in a folder, with titles and genres if asked for; by default columns by name."""
    return _movielens(root, include_movies_data, row_mapper, open_kw)
