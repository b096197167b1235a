"""Tables in host memory with a cache of rows in the GPU's: what a plan asks for, and what a cache did.

>>> from tessera.distributed._row_cache import MeasuredCacheStatistics
>>> found = MeasuredCacheStatistics(1000, cached_rows=250, num_calls=10, num_found=750, num_loaded=250)
>>> found.expected_lookups, found.expected_miss_rate(0.25), found.expected_miss_rate(0.0)
(100.0, 0.25, 1.0)
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from tessera import _C
from tessera.distributed.types import CacheStatistics

_UVM, _CACHED = "fused_uvm", "fused_uvm_caching"
# What the reference takes if nobody says.
DEFAULT_LOAD_FACTOR = 0.2


class MeasuredCacheStatistics(CacheStatistics):
    """Say how the ids of a table used its cache on this rank.

    One size of cache was seen; the share that other sizes would miss lies on the lines between it, no cache
    and a whole one.
    """

    def __init__(
        self, num_rows: int, cached_rows: int, num_calls: int, num_found: int, num_loaded: int
    ) -> None:
        self.num_rows, self.cached_rows, self.num_calls = num_rows, cached_rows, num_calls
        self.num_found, self.num_loaded = num_found, num_loaded

    @property
    def expected_lookups(self) -> float:
        """Return the number of different ids of a step."""
        return (self.num_found + self.num_loaded) / max(1, self.num_calls)

    @property
    def miss_rate(self) -> float:
        """Return the share of different ids that were not in the cache."""
        return self.num_loaded / max(1, self.num_found + self.num_loaded)

    def expected_miss_rate(self, clf: float) -> float:
        """Return the share of lookups that miss a cache of `clf` times the table: 1 at 0, 0 at 1."""
        seen = self.cached_rows / max(1, self.num_rows)
        if clf <= seen:
            return 1 + (self.miss_rate - 1) * clf / seen if seen else 1.0
        return self.miss_rate * (1 - clf) / (1 - seen) if clf < 1 else 0.0

    @property
    def cacheability(self) -> float:
        """Return how hard the ids are to cache whatever the size: the area below the misses."""
        seen = self.cached_rows / max(1, self.num_rows)
        return (1 + self.miss_rate) / 2 * seen + self.miss_rate / 2 * (1 - seen)


def host_rows(kernels: Mapping[str, str], params: Mapping[str, Any]) -> dict[str, float]:
    """Return the tables that lie in host memory, each with the share of its rows that is cached.

    `kernels` are the compute kernels by table, `params` what is said about their cache.
    """
    factor = params.get("cache_load_factor", DEFAULT_LOAD_FACTOR)
    if not 0 < factor <= 1:
        raise ValueError(
            f"sharding.fused_params: cache_load_factor is {factor}; it must be above 0, at most 1."
        )
    shares = {_UVM: 0.0, _CACHED: factor}
    return {name: shares[kernel] for name, kernel in kernels.items() if kernel in shares}


def policy_of(params: Mapping[str, Any]) -> _C.embedding.CachePolicy:
    """Return which rows leave first. Raises ValueError for another word than LRU or LFU."""
    algorithm = params.get("cache_algorithm")
    name = "LRU" if algorithm is None else getattr(algorithm, "name", str(algorithm)).upper()
    if name not in ("LRU", "LFU"):
        raise ValueError(f"sharding.fused_params: cache_algorithm {name!r} is not LRU or LFU.")
    return getattr(_C.embedding.CachePolicy, name)
