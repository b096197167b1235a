"""Tables that grow, from and to the state of multi-column hash tables."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from math import sqrt
from typing import Any

import torch

from tessera import _C
from tessera.modules._mc_base import LARGEST, MOST_SHARDS, slots_with_ids
from tessera.modules._mc_growing import GrowingManagedCollisionModule
from tessera.modules.embedding_configs import BaseEmbeddingConfig

_engine = _C.collision
State = dict[str, Any]
_IDS = "_mch_sorted_raw_ids"
_ROWS = "_mch_remapped_ids_mapping"
_COUNTS = "_mch_counts"
_LAST = "_mch_last_access_iter"
_NUM_IDS = "_tessera_num_ids"
_SEGMENTS = "_output_segments_tensor"
_WAITING = ("_tessera_history_ids", "_tessera_history_iter")
_MOST = 2**32 - 1  # of a count and of a step


def bounds_of(config: BaseEmbeddingConfig) -> tuple[float, float]:
    """Return between which numbers the first values of a row lie."""
    bound = sqrt(1 / config.embedding_dim)
    low = -bound if config.weight_init_min is None else config.weight_init_min
    high = bound if config.weight_init_max is None else config.weight_init_max
    return low, high


def _take(state: State, prefix: str, name: str) -> torch.Tensor | None:
    value = state.pop(prefix + name, None)
    return None if value is None else value.cpu()


def take_mch_state(
    state: State, ids_prefix: str, weight_key: str, ids: GrowingManagedCollisionModule
) -> bool:
    """Put the state of a growing table in the place of that of an MCH table; False if it is none.

    Every id keeps its row's weights, its count and when it was last seen; the row of all other ids becomes
    the row of unknown ids. Ids that wait for the end of an interval are left out.
    """
    sorted_ids = _take(state, ids_prefix, _IDS)
    if sorted_ids is None:
        return False
    size = sorted_ids.numel()
    weight = state.get(weight_key)
    if weight is not None and weight.size(0) != size:
        raise ValueError(
            f"collision.growing: table '{ids._name}' was saved with {size} slots and {weight.size(0)} rows; "
            "load the whole table, not a shard."
        )
    rows, counts, last = (_take(state, ids_prefix, name) for name in (_ROWS, _COUNTS, _LAST))
    num_ids, segments = (_take(state, ids_prefix, name) for name in (_NUM_IDS, _SEGMENTS))
    for name in _WAITING:
        state.pop(ids_prefix + name, None)
    bounds = [] if segments is None else segments[segments >= 0].tolist()
    by_part = None if num_ids is None else num_ids.flatten().tolist()
    is_id = slots_with_ids(sorted_ids, by_part, bounds, bounds[0] if bounds else 0)
    step = int(state[f"{ids_prefix}_current_iter_tensor"])
    own = sorted_ids[is_id]
    counts = torch.ones_like(own) if counts is None else counts[is_id].clamp(1, _MOST)
    last = torch.full_like(own, step) if last is None else last[is_id].clamp(0, step)
    sketch = torch.empty(0, dtype=torch.int64)
    values = (own, counts, last, sketch, sketch.to(torch.uint8), sketch)
    state.update({f"{ids_prefix}_{n}": v for n, v in zip(ids._STATE, values, strict=True)})
    state[f"{ids_prefix}_extra_state"] = ids.get_extra_state()
    if weight is not None:
        rows = torch.arange(size) if rows is None else rows
        order = torch.cat([torch.tensor([size - 1]), rows[is_id]])
        state[weight_key] = weight.detach()[order.to(weight.device)]
    return True


def put_mch_state(
    state: State,
    ids_prefix: str,
    weight_key: str,
    config: BaseEmbeddingConfig,
    ids: GrowingManagedCollisionModule,
    weight: torch.Tensor,
    metadata: Iterable[str],
) -> None:
    """Add the state of an MCH table with room for all ids of a growing table, and a row for unknown ones."""
    capacity = ids.output_size()
    listed = ids.export_ids()
    own, order = listed["ids"].sort()
    if capacity is None or own.numel() > capacity:
        limit = "no capacity" if capacity is None else f"a capacity of {capacity}"
        raise ValueError(
            f"collision.growing: table '{config.name}' has {own.numel()} ids and {limit}; an MCH table has a "
            "number of rows. Make the module with a capacity of at least as many."
        )
    if own.numel() > 0 and int(own[-1]) == LARGEST:
        raise ValueError(
            f"collision.growing: table '{config.name}' has id {LARGEST}, which marks empty slots of an MCH "
            "table."
        )
    size = capacity + 1
    padding = size - own.numel()

    def padded(values: torch.Tensor, filling: int) -> torch.Tensor:
        return torch.cat([values, torch.full((padding,), filling, dtype=torch.int64)])

    state[ids_prefix + _IDS] = padded(own, LARGEST)
    state[ids_prefix + _ROWS] = torch.arange(size)
    kept = {"counts": listed["counts"], "last_access_iter": listed["last_steps"]}
    for name in metadata:
        if name not in kept:
            raise ValueError(f"collision.growing: tables that grow do not keep '{name}' of their ids.")
        state[f"{ids_prefix}_mch_{name}"] = padded(kept[name][order], 0)
    segments: Sequence[int] = [0, size, *[-1] * (MOST_SHARDS - 1)]
    state[f"{ids_prefix}_output_segments_tensor"] = torch.tensor(segments)
    state[f"{ids_prefix}_current_iter_tensor"] = ids._current_iter_tensor.clone()
    # Rows that nobody has yet begin as those of a new table do.
    low, high = bounds_of(config)
    free = ids.first_values(torch.arange(padding - 1), config.embedding_dim, low, high)
    used = weight.detach()[listed["rows"][order].to(weight.device)]
    state[weight_key] = torch.cat([used, free.to(weight.device, weight.dtype), weight.detach()[:1]])
