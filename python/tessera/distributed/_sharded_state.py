"""Tables over ranks as entries of state dicts, and back from any other sharding."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch.distributed import ProcessGroup
from torch.distributed._shard.metadata import ShardMetadata
from torch.distributed._shard.sharded_tensor import Shard, ShardedTensor
from torch.distributed._shard.sharded_tensor.metadata import ShardedTensorMetadata, TensorProperties

from tessera import _C, _backend

_backend.leave_sharded_tensors_on_the_cpu()


def global_ranks(pg: ProcessGroup) -> list[int]:
    """Return the ranks of a group in the world, by which torch's sharded tensors go."""
    ranks = dist.distributed_c10d._world.pg_group_ranks.get(pg)
    return list(ranks) if ranks else list(range(pg.size()))


def with_global_ranks(shards: Sequence[ShardMetadata], pg: ProcessGroup) -> list[ShardMetadata]:
    """Return shards that are placed on ranks of a group, placed on the same ranks of the world."""
    ranks = global_ranks(pg)
    return [
        ShardMetadata(
            list(shard.shard_offsets),
            list(shard.shard_sizes),
            f"rank:{ranks[shard.placement.rank()]}/{shard.placement.device()}",
        )
        for shard in shards
    ]


@dataclass
class LocalPart:
    """One part of a table on this rank, and where it lies."""

    weight: torch.Tensor
    place: _C.sharding.Shard


def sharded_tensor(
    shape: tuple[int, int],
    shards: Sequence[ShardMetadata],
    parts: Sequence[LocalPart],
    pg: ProcessGroup,
    dtype: torch.dtype,
) -> ShardedTensor:
    """Return a table as torch's sharded tensor, which shares the rows. Nothing is communicated.

    `dtype` is the table's, also on a rank without a part of it.
    """
    by_place = {(part.place.row, part.place.column, part.place.rows): part.weight for part in parts}
    rank = global_ranks(pg)[pg.rank()]
    local = []
    for shard in shards:
        key = (*shard.shard_offsets, shard.shard_sizes[0])
        if shard.placement.rank() == rank and key in by_place:
            local.append(Shard(by_place[key].detach(), shard))
    properties = TensorProperties(dtype=dtype, requires_grad=False)
    metadata = ShardedTensorMetadata(list(shards), torch.Size(shape), properties)
    return ShardedTensor._init_from_local_shards_and_global_metadata(local, metadata, process_group=pg)


def sharded_row_state(
    rows: int, shards: Sequence[ShardMetadata], parts: Sequence[LocalPart], pg: ProcessGroup
) -> ShardedTensor:
    """Return one number per row as a sharded tensor; parts of one row's columns have one each.

    It is as long as the table is high, times the number of parts that its columns are cut into; those of
    the first columns come first.
    """
    columns = sorted({shard.shard_offsets[1] for shard in shards})
    placed = [
        ShardMetadata(
            [rows * columns.index(shard.shard_offsets[1]) + shard.shard_offsets[0]],
            [shard.shard_sizes[0]],
            shard.placement,
        )
        for shard in shards
    ]
    own = {(part.place.row, part.place.column, part.place.rows): part.weight for part in parts}
    rank = global_ranks(pg)[pg.rank()]
    local = [
        Shard(own[key], row_shard)
        for shard, row_shard in zip(shards, placed, strict=True)
        if shard.placement.rank() == rank and (key := (*shard.shard_offsets, shard.shard_sizes[0])) in own
    ]
    properties = TensorProperties(dtype=torch.float32, requires_grad=False)
    metadata = ShardedTensorMetadata(placed, torch.Size([rows * len(columns)]), properties)
    return ShardedTensor._init_from_local_shards_and_global_metadata(local, metadata, process_group=pg)


def _copy_overlap(part: LocalPart, offsets: Sequence[int], source: torch.Tensor) -> None:
    """Copy the rows and columns of `source`, which begins at `offsets` of the table, that are in `part`."""
    begins = (part.place.row, part.place.column)
    ends = (part.place.row + part.place.rows, part.place.column + part.place.columns)
    low = [max(a, b) for a, b in zip(begins, offsets, strict=True)]
    high = [min(a, b + size) for a, b, size in zip(ends, offsets, source.shape, strict=True)]
    if any(a >= b for a, b in zip(low, high, strict=True)):
        return
    target = part.weight[low[0] - begins[0] : high[0] - begins[0], low[1] - begins[1] : high[1] - begins[1]]
    target.copy_(
        source[low[0] - offsets[0] : high[0] - offsets[0], low[1] - offsets[1] : high[1] - offsets[1]]
    )


def _boxes(shards: Sequence[ShardMetadata]) -> list[tuple]:
    return [(tuple(s.shard_offsets), tuple(s.shard_sizes), s.placement.rank()) for s in shards]


def load_table(
    name: str,
    shape: tuple[int, int],
    shards: Sequence[ShardMetadata] | None,
    parts: Sequence[LocalPart],
    value: torch.Tensor,
    pg: ProcessGroup,
) -> None:
    """Fill the parts of a table from a whole tensor or a sharded one.

    A whole tensor is each rank's own business, and so is one that is sharded alike. If it is sharded
    otherwise, each of its shards is sent to all ranks: collective. `shards` is None for a table that is
    whole on every rank.
    """
    if tuple(value.shape) != shape:
        raise ValueError(
            f"sharding.load_state_dict: table {name!r} is {list(value.shape)} in the state and "
            f"{list(shape)} here."
        )
    with torch.no_grad():
        if not isinstance(value, ShardedTensor):
            for part in parts:
                _copy_overlap(part, (0, 0), value)
            return
        theirs = value.metadata().shards_metadata
        local = {tuple(shard.metadata.shard_offsets): shard.tensor for shard in value.local_shards()}
        if shards is not None and _boxes(theirs) == _boxes(shards):
            for part in parts:
                if part.place.rows:
                    _copy_overlap(
                        part, (part.place.row, part.place.column), local[part.place.row, part.place.column]
                    )
            return
        device = parts[0].weight.device if parts else torch.device("cpu")
        ranks = global_ranks(pg)
        for shard in theirs:
            if 0 in shard.shard_sizes:
                continue
            own = shard.placement.rank() == ranks[pg.rank()]
            rows = local[tuple(shard.shard_offsets)].to(device) if own else None
            if rows is None:
                rows = torch.empty(shard.shard_sizes, dtype=value.dtype, device=device)
            if pg.size() > 1:
                _C.broadcast_(rows.contiguous(), ranks.index(shard.placement.rank()), pg)
            for part in parts:
                _copy_overlap(part, shard.shard_offsets, rows)
