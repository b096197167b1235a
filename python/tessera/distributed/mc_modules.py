"""Ids of many tables onto rows, where the ids of a table are dealt over ranks.

    sharder = ManagedCollisionEmbeddingBagCollectionSharder(EmbeddingBagCollectionSharder(fused_params))
    plan = construct_module_sharding_plan(module, {"users": row_wise(), "items": table_wise(0)}, sharder)
    sharded = sharder.shard(module, plan, ShardingEnv.from_process_group(dist.group.WORLD))
    pooled, remapped = sharded(features)  # this rank's own samples; all ranks call it

>>> ManagedCollisionCollectionSharder().sharding_types("cpu")
['table_wise', 'column_wise', 'row_wise', 'table_row_wise', 'table_column_wise', 'grid_shard']
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import nn
from torch.distributed._shard.metadata import ShardMetadata
from torch.distributed._shard.sharded_tensor import Shard, ShardedTensor
from torch.distributed._shard.sharded_tensor.metadata import ShardedTensorMetadata, TensorProperties

from tessera import _C
from tessera.distributed._sharded_state import global_ranks
from tessera.distributed.embedding_sharding import EmbeddingShardingInfo
from tessera.distributed.types import (
    Awaitable,
    LazyAwaitable,
    ModuleSharder,
    ParameterSharding,
    QuantizedCommCodecs,
    ShardedModule,
    ShardingEnv,
    ShardingType,
)
from tessera.modules._mc_base import LARGEST, MOST_SHARDS
from tessera.modules.embedding_configs import BaseEmbeddingConfig
from tessera.modules.embedding_modules import TableDict
from tessera.modules.mc_modules import (
    _HISTORY_IDS,
    _HISTORY_ITER,
    _NUM_IDS,
    ManagedCollisionCollection,
    MCHManagedCollisionModule,
    _renamed,
)
from tessera.sparse.jagged_tensor import JaggedTensor, KeyedJaggedTensor
from tessera.streamable import Multistreamable

__all__ = [
    "ManagedCollisionCollectionAwaitable",
    "ManagedCollisionCollectionContext",
    "ManagedCollisionCollectionSharder",
    "ShardedManagedCollisionCollection",
    "create_mc_sharding",
]

_TYPES = tuple(kind.value for kind in ShardingType if kind != ShardingType.DATA_PARALLEL)


@dataclass
class ManagedCollisionCollectionContext(Multistreamable):
    """Carry one batch from the input dist to the output dist."""

    sharding_contexts: list[Any] = field(default_factory=list)
    input_features: list[KeyedJaggedTensor] = field(default_factory=list)
    reverse_indices: list[torch.Tensor] = field(default_factory=list)

    def record_stream(self, stream: torch.Stream) -> None:
        """Keep the memory of the tensors until `stream` has used them."""
        for part in (*self.sharding_contexts, *self.input_features, *self.reverse_indices):
            part.record_stream(stream)


class ManagedCollisionCollectionAwaitable(LazyAwaitable[KeyedJaggedTensor]):
    """Hold rows on their way home; waiting gives the features with rows in place of ids, in their order."""

    def __init__(
        self,
        awaitables_per_sharding: list[Awaitable[torch.Tensor]],
        features_per_sharding: list[KeyedJaggedTensor],
        embedding_names_per_sharding: list[list[str]],
        need_indices: bool = False,
        features_to_permute_indices: dict[str, list[int]] | None = None,
        reverse_indices: list[torch.Tensor] | None = None,
    ) -> None:
        super().__init__()
        self._awaitables = awaitables_per_sharding
        self._features = features_per_sharding
        self._names = embedding_names_per_sharding
        self._reverse = reverse_indices or []

    def _wait_impl(self) -> KeyedJaggedTensor:
        parts = []
        for place, pending in enumerate(self._awaitables):
            rows = pending.wait()
            if self._reverse:
                rows = rows[self._reverse[place]]
            parts.append(_renamed(self._features[place], self._names[place], rows, self._features[place]))
        return parts[0] if len(parts) == 1 else KeyedJaggedTensor.concat(parts)


@dataclass
class _Owners:
    """Say which rank has an id of a table: ranks with rows, their rows, and their first buckets.

    Where columns are cut, the owner of a run of rows has its first columns.
    """

    ranks: list[int]
    bounds: list[int]  # of rows: one more than ranks
    has_others: bool  # ranks with other columns of the rows
    by_range: bool
    input_size: int

    def of(self, ids: torch.Tensor) -> torch.Tensor:
        """Return the owner of every id."""
        ranks = torch.tensor(self.ranks)
        if len(self.ranks) == 1:
            return ranks.expand(ids.numel())
        if self.by_range:
            size = -(-self.input_size // len(self.ranks))
            return ranks[(ids // size).clamp(0, len(self.ranks) - 1)]
        # Buckets in contiguous runs, as many as a rank has rows.
        first = [_C.collision.NUM_BUCKETS * bound // self.bounds[-1] for bound in self.bounds[1:-1]]
        return ranks[torch.bucketize(_C.collision.buckets_of(ids), torch.tensor(first), right=True)]


class _McSharding:
    """Know the owners of the ids of some tables that are cut in one way."""

    def __init__(self, sharding_type: str, infos: Sequence[EmbeddingShardingInfo], env: ShardingEnv) -> None:
        self.sharding_type = sharding_type
        self._infos = list(infos)
        self._env = env

    def table_names(self) -> list[str]:
        """Return the tables."""
        return [info.embedding_config.name for info in self._infos]

    def owners(self, table: str, module: MCHManagedCollisionModule) -> _Owners:
        """Return who owns the ids of a table."""
        info = next(info for info in self._infos if info.embedding_config.name == table)
        return _owners(table, info.param_sharding, module)


def _owners(table: str, sharding: ParameterSharding, module: MCHManagedCollisionModule) -> _Owners:
    shards = [shard for shard in sharding.sharding_spec.shards if shard.shard_sizes[0] > 0]
    shards.sort(key=lambda shard: shard.shard_offsets)
    first = [shard for shard in shards if shard.shard_offsets[1] == 0]
    begins = [shard.shard_offsets[0] for shard in first]
    if {shard.shard_offsets[0] for shard in shards} != set(begins) or len(set(begins)) < len(begins):
        raise ValueError(
            f"collision.sharded: the columns of table '{table}' are not all cut at the same rows."
        )
    by_range = module._input_hash_func is not None and module.input_size() != LARGEST
    ranks = [shard.placement.rank() for shard in first]
    bounds = [*begins, module.output_size()]
    return _Owners(ranks, bounds, len(first) < len(shards), by_range, module.input_size())


def create_mc_sharding(
    sharding_type: str,
    sharding_infos: list[EmbeddingShardingInfo],
    env: ShardingEnv,
    device: torch.device | None = None,
) -> _McSharding:
    """Return how the ids of tables of one type of sharding are dealt: any but `data_parallel`."""
    if sharding_type not in _TYPES:
        raise ValueError(f"Sharding not supported {sharding_type}: ids are dealt {', '.join(_TYPES)}.")
    return _McSharding(sharding_type, sharding_infos, env)


@dataclass
class _Sent(Multistreamable):
    """Say how many ids of each table went to each rank, and came from each."""

    sent: torch.Tensor  # [ranks, tables]
    received: torch.Tensor | None = None
    order: torch.Tensor | None = None  # from the order of the tables to the order of the ranks

    def record_stream(self, stream: torch.Stream) -> None:
        for tensor in (self.sent, self.received, self.order):
            if tensor is not None and tensor.is_cuda:
                tensor.record_stream(stream)


class _PendingIds(Awaitable[list]):
    def __init__(self, pending: _C.Pending, context: _Sent) -> None:
        super().__init__()
        self._pending = pending
        self._context = context

    def _wait_impl(self) -> list:
        ids = self._pending.wait()
        sizes = self._context.received.flatten().tolist()
        return list(ids.split(sizes))  # rank by rank, table by table; [ids, 2]: id and count


class _PendingSizes(Awaitable[Awaitable[list]]):
    def __init__(self, group: Any, context: _Sent, ids: torch.Tensor, problem: str) -> None:
        super().__init__()
        self._group, self._context, self._ids, self._problem = group, context, ids, problem
        flags = torch.full((context.sent.size(0), 1), int(bool(problem)))
        self._pending = _C.all_to_all_async(torch.cat([context.sent, flags], dim=1), group)

    def _wait_impl(self) -> Awaitable[list]:
        received = self._pending.wait()
        wrong = received[:, -1].nonzero().flatten().tolist()
        if wrong:
            text = _C.broadcast_bytes(self._problem.encode(), wrong[0], self._group).decode()
            raise ValueError(f"{text} (on rank {wrong[0]})")
        self._context.received = received[:, :-1]
        send, receive = self._context.sent.sum(1).tolist(), self._context.received.sum(1).tolist()
        return _PendingIds(_C.all_to_all_v_async(self._ids, send, self._group, receive), self._context)


class ShardedManagedCollisionCollection(
    ShardedModule[list, list, KeyedJaggedTensor, ManagedCollisionCollectionContext]
):
    """Map ids where they belong: each rank decides on the ids it owns, and sends their rows back.

    Ids of a row-wise table belong to ranks by bits of their hash, those of a table-wise one to one rank;
    with an `input_hash_func` and an `input_hash_size`, to ranks by ranges of the hashed ids. Where columns
    are cut, the rank with the first columns of some rows has their ids too, and tells the others which rows
    got another id. A rank sends each id once, with how often it came. Admission and eviction happen in
    `compute`, in the order of the batches, each among the ids of one rank. Unknown ids all have the table's
    last row.

    Collective: construction, forward, loading. What is wrong with one rank's ids is raised on all.
    """

    def __init__(
        self,
        module: ManagedCollisionCollection,
        table_name_to_parameter_sharding: Mapping[str, ParameterSharding],
        env: ShardingEnv,
        device: torch.device | None = None,
        sharding_type_to_sharding: Mapping[str, Any] | None = None,
        qcomm_codecs_registry: dict[str, QuantizedCommCodecs] | None = None,
        *,
        embedding_shardings: Sequence[Any] | None = None,
        use_index_dedup: bool = False,
    ) -> None:
        super().__init__(qcomm_codecs_registry)
        if env.process_group is None:
            raise ValueError("collision.sharded: the environment has no process group.")
        self._env = env
        self._device = torch.device(device or "cpu")
        self._collection = [module]  # in a list: its modules are not this one's children
        self._table_names: list[str] = []
        self._owners: dict[str, _Owners] = {}
        self._masks: dict[str, MCHManagedCollisionModule] = {}
        local = {}
        for config in module.embedding_configs():
            name = config.name
            if name not in table_name_to_parameter_sharding:
                raise ValueError(f"collision.sharded: the plan has no table '{name}'.")
            sharding = table_name_to_parameter_sharding[name]
            create_mc_sharding(sharding.sharding_type, [], env)
            whole = module._managed_collision_modules[name]
            if not isinstance(whole, MCHManagedCollisionModule):
                raise ValueError(
                    f"collision.sharded: table '{name}' has a {type(whole).__name__}; a "
                    "MCHManagedCollisionModule is what can be sharded."
                )
            self._table_names.append(name)
            self._owners[name] = _owners(name, sharding, whole)
            self._masks[name] = whole  # for its preprocess
            part = self._own_part(name, whole)
            if part is not None:
                local[name] = part
        self._managed_collision_modules = TableDict(local)
        self._register_state_dict_hook(ShardedManagedCollisionCollection._replace_state)
        self._register_load_state_dict_pre_hook(
            ShardedManagedCollisionCollection._take_state, with_module=True
        )

    def _own_part(self, name: str, whole: MCHManagedCollisionModule) -> MCHManagedCollisionModule | None:
        owners = self._owners[name]
        if whole._num_ids > 0 and len(owners.ranks) > 1:
            raise ValueError(
                f"collision.sharded: table '{name}' has {whole._num_ids} ids already; their rows cannot be "
                "dealt over ranks. Shard it before it is trained, or table-wise."
            )
        if self._env.rank not in owners.ranks:
            return None
        place = owners.ranks.index(self._env.rank)
        rows = (owners.bounds[place], owners.bounds[place + 1])
        part = whole.rebuild_with_output_id_range(rows, owners.bounds, self._device)
        part._unknown_row = whole.output_size() - 1
        if whole._num_ids > 0:
            part.load_state_dict(whole.state_dict())
        part.train(whole.training)
        return part

    # ---- one batch ----

    def create_context(self) -> ManagedCollisionCollectionContext:
        """Return the context of one batch."""
        return ManagedCollisionCollectionContext()

    def input_dist(
        self, ctx: ManagedCollisionCollectionContext, features: KeyedJaggedTensor
    ) -> Awaitable[Awaitable[list]]:
        """Start sending every different id to its owner. Collective."""
        collection, world = self._collection[0], self._env.world_size
        sent = torch.zeros(world, len(self._table_names), dtype=torch.int64)
        pieces, owners, tables, reverse, problem = [], [], [], [], ""
        try:
            wanted = collection._inputs(features)
            keys = features.keys()
            arranged = features.permute([keys.index(feature) for _, feature, _ in wanted])
            names = [name for _, _, name in wanted]
            sizes = arranged.length_per_key()
            by_table: dict[str, list[torch.Tensor]] = {}
            for (table, _, _), values in zip(wanted, arranged.values().split(sizes), strict=True):
                by_table.setdefault(table, []).append(values)
            first = 0
            for number, table in enumerate(self._table_names):
                values = torch.cat(by_table[table]).cpu()
                feature = JaggedTensor(values, lengths=torch.tensor([values.numel()]))
                values = self._masks[table].preprocess({table: feature})[table].values().to(torch.int64)
                ids, places, counts = torch.unique(values, return_inverse=True, return_counts=True)
                owner = self._owners[table].of(ids)
                sent[:, number] = torch.bincount(owner, minlength=world)
                pieces.append(torch.stack([ids, counts], dim=1))
                owners.append(owner)
                tables.append(torch.full_like(owner, number))
                reverse.append(places + first)
                first += ids.numel()
        except ValueError as error:  # told to all ranks with the sizes
            problem = str(error)
            sent.zero_()
            context, ids = _Sent(sent), torch.empty(0, 2, dtype=torch.int64)
        else:
            order = torch.argsort(torch.cat(owners), stable=True)  # by rank; tables stay in order
            context, ids = _Sent(sent, order=order), torch.cat(pieces)[order]
            place_of = torch.empty_like(order)
            place_of[order] = torch.arange(order.numel())
            ctx.reverse_indices = [place_of[torch.cat(reverse)]]
            ctx.input_features = [_renamed(arranged, names, arranged.values(), features)]
        ctx.sharding_contexts = [context]
        return _PendingSizes(self._env.process_group, context, ids, problem)

    @torch.no_grad()
    def compute(self, ctx: ManagedCollisionCollectionContext, dist_input: list) -> list:
        """Count, admit and evict on the owners, and find the rows; one tensor per rank and table."""
        world, num_tables = self._env.world_size, len(self._table_names)
        rows: list[torch.Tensor] = [torch.empty(0, dtype=torch.int64)] * (world * num_tables)
        for number, table in enumerate(self._table_names):
            if table not in self._managed_collision_modules:
                continue
            module = self._managed_collision_modules[table]
            parts = dist_input[number::num_tables]
            ids, counts = torch.cat(parts).unbind(1)
            seen = ids.repeat_interleave(counts)
            module.profile({table: JaggedTensor(seen, lengths=torch.tensor([seen.numel()]))})
            feature = JaggedTensor(ids.contiguous(), lengths=torch.tensor([ids.numel()]))
            found = module.remap({table: feature})[table].values()
            for rank, part in enumerate(found.split([part.size(0) for part in parts])):
                rows[rank * num_tables + number] = part
        return rows

    def output_dist(
        self, ctx: ManagedCollisionCollectionContext, output: list
    ) -> ManagedCollisionCollectionAwaitable:
        """Start sending the rows back. Collective."""
        context = ctx.sharding_contexts[0]
        send, receive = context.received.sum(1).tolist(), context.sent.sum(1).tolist()
        pending = _C.all_to_all_v_async(torch.cat(output).cpu(), send, self._env.process_group, receive)
        names = [list(ctx.input_features[0].keys())]
        return ManagedCollisionCollectionAwaitable(
            [pending], ctx.input_features, names, reverse_indices=ctx.reverse_indices
        )

    # ---- what others ask ----

    def embedding_configs(self) -> Sequence[BaseEmbeddingConfig]:
        """Return the configs of the tables."""
        return self._collection[0].embedding_configs()

    def evict(self) -> dict[str, torch.Tensor | None]:
        """Return the rows that got another id, to be reset, by table.

        Those whose ids this rank owns; of a table whose columns are cut, all of them on every rank, and all
        ranks must call.
        """
        modules = self._managed_collision_modules
        evicted = {name: modules[name].evict() if name in modules else None for name in self._table_names}
        cut = [name for name in self._table_names if self._owners[name].has_others]
        if not cut:
            return evicted
        own = [torch.empty(0, 2, dtype=torch.int64)]
        for number, name in enumerate(cut):
            if evicted[name] is not None:
                rows = evicted[name].cpu()
                own.append(torch.stack([torch.full_like(rows, number), rows], dim=1))
        every = _C.all_gather_v(torch.cat(own), self._env.process_group, None)
        for number, name in enumerate(cut):
            rows = every[every[:, 0] == number, 1]
            evicted[name] = rows.to(self._device) if rows.numel() > 0 else None
        return evicted

    def open_slots(self) -> dict[str, torch.Tensor]:
        """Return how many ids every table has room for on this rank."""
        return {name: module.open_slots() for name, module in self._managed_collision_modules.items()}

    def sharded_parameter_names(self, prefix: str = "") -> Iterator[str]:
        """Return nothing: there are buffers only."""
        yield from ()

    @property
    def unsharded_module_type(self) -> type[ManagedCollisionCollection]:
        """Return ManagedCollisionCollection."""
        return ManagedCollisionCollection

    # ---- state: buffers with an element per row are sharded like the rows ----

    def _row_buffers(self, table: str) -> list[str]:
        infos = self._masks[table]._eviction_policy.metadata_info
        kept = [f"_mch_{info.metadata_name}" for info in infos if info.is_mch_metadata]
        return ["_mch_sorted_raw_ids", "_mch_remapped_ids_mapping", *kept]

    def _shards(self, table: str) -> list[ShardMetadata]:
        owners, ranks = self._owners[table], global_ranks(self._env.process_group)
        return [
            ShardMetadata([begin], [end - begin], f"rank:{ranks[rank]}/cpu")
            for rank, begin, end in zip(owners.ranks, owners.bounds[:-1], owners.bounds[1:], strict=True)
        ]

    def _replace_state(self, state_dict, prefix, local_metadata) -> None:
        """Give the state the same names on every rank, and the ids that wait on any. Collective."""
        rank = global_ranks(self._env.process_group)[self._env.rank]
        bases = [f"{prefix}_managed_collision_modules.{table}." for table in self._table_names]
        parts = [
            {
                name.removeprefix(base): state_dict.pop(name)
                for name in list(state_dict)
                if name.startswith(base)
            }
            for base in bases
        ]
        every = _C.all_gather_v(self._told(parts), self._env.process_group, None)
        for number, (table, base) in enumerate(zip(self._table_names, bases, strict=True)):
            shards, bounds = self._shards(table), self._owners[table].bounds
            for name in self._row_buffers(table):
                own = [Shard(parts[number][name], s) for s in shards if s.placement.rank() == rank]
                properties = TensorProperties(dtype=torch.int64, requires_grad=False)
                metadata = ShardedTensorMetadata(shards, torch.Size([bounds[-1]]), properties)
                state_dict[base + name] = ShardedTensor._init_from_local_shards_and_global_metadata(
                    own, metadata, process_group=self._env.process_group
                )
            told = every[every[:, 0] == number]
            iterations, num_ids, waiting = (told[told[:, 1] == kind, 2:] for kind in range(3))
            state_dict[base + "_output_segments_tensor"] = torch.tensor(
                [*bounds, *[-1] * (MOST_SHARDS + 1 - len(bounds))]
            )
            state_dict[base + "_current_iter_tensor"] = iterations[:1, 0].clone()
            if waiting.size(0) > 0:
                state_dict[base + _HISTORY_IDS] = waiting[:, 0].clone()
                state_dict[base + _HISTORY_ITER] = waiting[:, 1].clone()
            if bool(num_ids[:, 1].any()):  # some part has 2**63 - 1
                by_part = [self._owners[table].ranks.index(int(one)) for one in told[told[:, 1] == 0, 3]]
                counts = torch.empty(len(by_part), dtype=torch.int64)
                counts[by_part] = num_ids[:, 0]
                state_dict[base + _NUM_IDS] = counts

    def _told(self, parts: list[dict[str, torch.Tensor]]) -> torch.Tensor:
        """Return what others must know of this rank's parts: rows of table, kind, and two numbers."""
        rows = [torch.empty(0, 4, dtype=torch.int64)]
        for number, (table, part) in enumerate(zip(self._table_names, parts, strict=True)):
            if not part:
                continue
            module = self._managed_collision_modules[table]
            iteration = int(part["_current_iter_tensor"])
            rows.append(torch.tensor([[number, 0, iteration, self._env.rank]]))
            rows.append(torch.tensor([[number, 1, module._num_ids, int(_NUM_IDS in part)]]))
            if _HISTORY_IDS in part:
                waiting = torch.stack([part[_HISTORY_IDS], part[_HISTORY_ITER]], 1).cpu()
                head = torch.tensor([[number, 2]]).expand(waiting.size(0), 2)
                rows.append(torch.cat([head, waiting], 1))
        return torch.cat(rows)

    def _take_state(self, state_dict, prefix, *unused) -> None:
        for table in self._table_names:
            base = f"{prefix}_managed_collision_modules.{table}."
            bounds = self._owners[table].bounds
            is_here = table in self._managed_collision_modules
            for name in self._row_buffers(table):
                value = state_dict.pop(base + name, None)
                if value is None:
                    continue
                theirs = self._saved_bounds(value, state_dict.get(base + "_output_segments_tensor"))
                is_whole = not isinstance(value, ShardedTensor)
                is_cut_alike = is_whole or self._shard_bounds(value) == bounds
                if value.size(0) != bounds[-1] or not is_cut_alike or not set(bounds) <= set(theirs):
                    raise ValueError(
                        f"collision.sharded: the ids of table '{table}' were saved in shards that begin at "
                        f"rows {theirs[:-1]}; here they begin at {bounds[:-1]}. Load with as many ranks."
                    )
                if not is_here:
                    continue
                first = self._managed_collision_modules[table]._output_global_offset
                size = self._managed_collision_modules[table].output_size()
                own = value[first : first + size] if is_whole else value.local_shards()[0].tensor
                state_dict[base + name] = own
                if name == "_mch_sorted_raw_ids":
                    self._check_owner(table, own[own != LARGEST])
            self._take_waiting(state_dict, base, table)
            if not is_here:
                for key in [key for key in state_dict if key.startswith(base)]:
                    del state_dict[key]

    def _take_waiting(self, state_dict, base: str, table: str) -> None:
        """Leave, of the ids that wait, those of this rank."""
        own = f".rank{self._env.rank}"  # as they were saved when every rank had its own
        for key in [key for key in state_dict if key.startswith(base + "_tessera_")]:
            if key.endswith(own):
                state_dict[key.removesuffix(own)] = state_dict[key]
            if ".rank" in key.removeprefix(base):
                del state_dict[key]
        ids, iterations = (state_dict.get(base + name) for name in (_HISTORY_IDS, _HISTORY_ITER))
        if ids is not None and iterations is not None:
            is_own = self._owners[table].of(ids) == self._env.rank
            state_dict[base + _HISTORY_IDS] = ids[is_own]
            state_dict[base + _HISTORY_ITER] = iterations[is_own]

    def _check_owner(self, table: str, ids: torch.Tensor) -> None:
        owners = self._owners[table].of(ids)
        others = (owners != self._env.rank).nonzero().flatten()
        if others.numel() > 0:
            raise ValueError(
                f"collision.sharded: id {int(ids[others[0]])} of table '{table}' has a row of rank "
                f"{self._env.rank}, but belongs to rank {int(owners[others[0]])} here. Load with as many "
                "ranks."
            )

    @staticmethod
    def _shard_bounds(value: ShardedTensor) -> list[int]:
        shards = value.metadata().shards_metadata
        return [*sorted(shard.shard_offsets[0] for shard in shards), value.size(0)]

    def _saved_bounds(self, value: torch.Tensor, segments: torch.Tensor | None) -> list[int]:
        """Return the rows at which saved parts begin, and the end of the last."""
        if segments is not None:
            return segments[segments >= 0].tolist()
        return self._shard_bounds(value) if isinstance(value, ShardedTensor) else [0, value.numel()]


class ManagedCollisionCollectionSharder(ModuleSharder[ManagedCollisionCollection]):
    """Shard ManagedCollisionCollection as its tables are: by table, rows, columns or both."""

    def __init__(self, qcomm_codecs_registry: dict[str, QuantizedCommCodecs] | None = None) -> None:
        super().__init__(qcomm_codecs_registry)

    def shard(
        self,
        module: ManagedCollisionCollection,
        params: Mapping[str, ParameterSharding],
        env: ShardingEnv,
        sharding_type_to_sharding: Mapping[str, Any] | None = None,
        device: torch.device | None = None,
        *,
        embedding_shardings: Sequence[Any] | None = None,
        use_index_dedup: bool = False,
    ) -> ShardedManagedCollisionCollection:
        """Return the collection over the ranks of `env`. Collective."""
        return ShardedManagedCollisionCollection(
            module, params, env, device, sharding_type_to_sharding, self.qcomm_codecs_registry
        )

    def shardable_parameters(self, module: ManagedCollisionCollection) -> dict[str, nn.Parameter]:
        """Return nothing: there are buffers only."""
        return {}

    def sharding_types(self, compute_device_type: str) -> list[str]:
        """Return the types of sharding: all but `data_parallel`."""
        return list(_TYPES)

    @property
    def module_type(self) -> type[ManagedCollisionCollection]:
        """Return ManagedCollisionCollection."""
        return ManagedCollisionCollection
