"""Lookups of quantised tables on the devices of one process; `embedding_lookup` has their names."""

from __future__ import annotations

import functools
import os
from collections.abc import Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor, wait
from typing import Any

import torch
from torch import nn
from torch.nn.modules.module import _IncompatibleKeys

from tessera.distributed.embedding_types import (
    BaseEmbeddingLookup,
    BaseGroupedFeatureProcessor,
    GroupedEmbeddingConfig,
    KJTList,
)
from tessera.modules.embedding_configs import PoolingType
from tessera.quant._tables import IntNBitTableBatchedEmbeddingBagsCodegen, output_dtype_of
from tessera.sparse.jagged_tensor import KeyedJaggedTensor

FUSED_PARAM_QUANT_STATE_DICT_SPLIT_SCALE_BIAS = "__register_quant_state_dict_split_scale_bias"
FUSED_PARAM_ROW_ALIGNMENT = "__register_row_alignment_in_named_modules"


def _check_device(device: torch.device | str | None) -> torch.device:
    device = torch.device(device or "cpu")
    if device.type not in ("cpu", "cuda"):
        raise ValueError(
            f"sharding.quant: tables with few bits lie on the CPU or on CUDA; there is no kernel on {device}."
        )
    return device


def device_of_rank(device: torch.device | str | None, rank: int) -> torch.device:
    """Return where shard `rank` of this process lies: `cuda` without a number is `cuda:rank`.

    >>> device_of_rank(None, 1), device_of_rank("cuda", 1), device_of_rank("cuda:0", 1)
    (device(type='cpu'), device(type='cuda', index=1), device(type='cuda', index=0))
    """
    device = _check_device(device)
    return torch.device("cuda", rank) if device.type == "cuda" and device.index is None else device


@functools.cache
def _threads(process: int, count: int) -> ThreadPoolExecutor:
    """Threads of this process; a fork makes its own."""
    return ThreadPoolExecutor(count, thread_name_prefix="tessera-lookup")


def look_up_beside_each_other(lookups, features) -> list[torch.Tensor]:
    """Return what each lookup finds. Several GPUs work at the same time, each on its current stream.

    A lookup waits for its device, which says whether all ids are rows. On the CPU one lookup after the
    other has all cores.
    """
    devices = [lookup.device for lookup in lookups]
    if len({device for device in devices if device.type == "cuda"}) < 2:
        return [lookup(own) for lookup, own in zip(lookups, features, strict=True)]
    streams = [torch.cuda.current_stream(device) for device in devices]
    is_inference = torch.is_inference_mode_enabled()

    def look_up(lookup, own, stream):
        with torch.inference_mode(is_inference), torch.cuda.stream(stream):
            return lookup(own)

    threads = _threads(os.getpid(), len(lookups))
    begun = [threads.submit(look_up, *one) for one in zip(lookups, features, streams, strict=True)]
    wait(begun)  # also of one that fails, so that nothing is used any more
    return [one.result() for one in begun]


class _QuantGroup(nn.Module):
    """The tables of one group, in one object of the engine."""

    def __init__(
        self,
        config: GroupedEmbeddingConfig,
        is_pooled: bool,
        fused_params: dict[str, Any] | None,
        device: torch.device,
    ) -> None:
        super().__init__()
        params = fused_params or {}
        tables = config.embedding_tables
        dims = {table.local_cols for table in tables}
        if not is_pooled and len(dims) > 1:
            raise ValueError(f"sharding.quant: tables of one group have one width, not {sorted(dims)}.")
        self.config = config
        self.splits_state = bool(params.get(FUSED_PARAM_QUANT_STATE_DICT_SPLIT_SCALE_BIAS))
        self.tbe = IntNBitTableBatchedEmbeddingBagsCodegen(
            [(t.name, t.local_rows, t.local_cols, t.data_type, None) for t in tables],
            [place for place, t in enumerate(tables) for _ in t.feature_names],
            config.pooling if is_pooled else PoolingType.NONE,
            device,
            output_dtype_of(params.get("output_dtype", torch.float16)),
            params.get(FUSED_PARAM_ROW_ALIGNMENT),
            config.feature_names(),
        )

    def state(self) -> Iterator[tuple[str, torch.Tensor]]:
        parts = self.tbe.split_embedding_weights_with_scale_bias(2 if self.splits_state else 0)
        for table, (weight, scale, bias) in zip(self.config.embedding_tables, parts, strict=True):
            yield f"{table.name}.weight", weight
            if scale is not None and bias is not None:
                yield f"{table.name}.weight_qscale", scale
                yield f"{table.name}.weight_qbias", bias

    def forward(self, features: KeyedJaggedTensor) -> torch.Tensor:
        weighs = self.config.is_weighted or self.config.has_feature_processor
        return self.tbe(features.values(), features.offsets(), features.weights() if weighs else None)


class _MetaLookup(BaseEmbeddingLookup[KeyedJaggedTensor, torch.Tensor]):
    """What pooled and unpooled lookups of one device share."""

    def __init__(self, grouped_configs, device, is_pooled: bool, fused_params) -> None:
        super().__init__()
        self.device = device_of_rank(device, 0)
        self.grouped_configs = grouped_configs
        self.output_dtype = output_dtype_of((fused_params or {}).get("output_dtype", torch.float16))
        self._emb_modules = nn.ModuleList(
            [_QuantGroup(config, is_pooled, fused_params, self.device) for config in grouped_configs]
        )
        self._feature_splits = [config.num_features() for config in grouped_configs]

    def get_tbes_to_register(self) -> dict[IntNBitTableBatchedEmbeddingBagsCodegen, GroupedEmbeddingConfig]:
        """Return the objects that look up, with the groups they are for."""
        return {group.tbe: group.config for group in self._emb_modules}

    def _look_up(self, features: KeyedJaggedTensor, dim: int, processor=None) -> torch.Tensor:
        if not self.grouped_configs:
            return torch.empty(0, dtype=self.output_dtype, device=self.device)
        found = []
        features = features.to(self.device)
        for group, own in zip(self._emb_modules, features.split(self._feature_splits), strict=True):
            if group.config.has_feature_processor and processor is not None:
                own = processor(own)
            found.append(group(own))
        return found[0] if len(found) == 1 else torch.cat(found, dim=dim)

    def named_buffers(
        self, prefix: str = "", recurse: bool = True, remove_duplicate: bool = True
    ) -> Iterator[tuple[str, torch.Tensor]]:
        """Return the rows by name: `<table>.weight`, in split form with `_qscale` and `_qbias`."""
        for group in self._emb_modules:
            for name, tensor in group.state():
                yield f"{prefix}.{name}" if prefix else name, tensor

    def named_parameters(
        self, prefix: str = "", recurse: bool = True, remove_duplicate: bool = True
    ) -> Iterator[tuple[str, nn.Parameter]]:
        """Return nothing: rows in few bits do not train."""
        yield from ()

    def state_dict(self, destination=None, prefix: str = "", keep_vars: bool = False) -> dict:
        """Return the rows by name; they share memory with the tables."""
        destination = {} if destination is None else destination
        for name, tensor in self.named_buffers():
            destination[prefix + name] = tensor
        return destination

    def load_state_dict(self, state_dict, strict: bool = True) -> _IncompatibleKeys:
        """Copy rows of the same names and shapes; return what is missing and what is too much."""
        own = dict(self.named_buffers())
        for name, tensor in own.items():
            if name in state_dict and state_dict[name].shape != tensor.shape:
                raise ValueError(
                    f"sharding.quant: {name!r} is {list(state_dict[name].shape)} in the state and "
                    f"{list(tensor.shape)} here."
                )
        for name, tensor in own.items():
            if name in state_dict:
                tensor.copy_(state_dict[name])
        missing = [name for name in own if name not in state_dict]
        unexpected = [name for name in state_dict if name not in own]
        return _IncompatibleKeys(missing, unexpected)

    def flush(self) -> None:
        """Do nothing: there is no cache to write back."""

    def purge(self) -> None:
        """Do nothing: there is no cache to empty."""


class MetaInferGroupedPooledEmbeddingsLookup(_MetaLookup):
    """Pool the rows of the tables of one device: [batch, columns of all groups].

    `fused_params` may name the `output_dtype`, float16 if left out, and the form of the state.
    """

    def __init__(
        self,
        grouped_configs: list[GroupedEmbeddingConfig],
        device: torch.device | None = None,
        feature_processor: BaseGroupedFeatureProcessor | None = None,
        fused_params: dict[str, Any] | None = None,
        shard_index: int | None = None,
    ) -> None:
        super().__init__(grouped_configs, device, True, fused_params)
        self._feature_processor = feature_processor

    def forward(self, sparse_features: KeyedJaggedTensor) -> torch.Tensor:
        """Return the pooled rows. IndexError names an id that is not a row."""
        return self._look_up(sparse_features, 1, self._feature_processor)


class MetaInferGroupedEmbeddingsLookup(_MetaLookup):
    """Look up the rows of every id in the tables of one device: [ids, columns]."""

    def __init__(
        self,
        grouped_configs: list[GroupedEmbeddingConfig],
        device: torch.device | None = None,
        fused_params: dict[str, Any] | None = None,
        shard_index: int | None = None,
    ) -> None:
        super().__init__(grouped_configs, device, False, fused_params)

    def forward(self, sparse_features: KeyedJaggedTensor) -> torch.Tensor:
        """Return the rows. IndexError names an id that is not a row."""
        return self._look_up(sparse_features, 0)


class InferGroupedLookupMixin:
    """Look up on several devices, and join what their lookups know of their rows."""

    _embedding_lookups_per_rank: list[_MetaLookup]
    _is_empty_rank: list[bool]

    def forward(self, input_dist_outputs: KJTList | Iterable[KeyedJaggedTensor]) -> list[torch.Tensor]:
        """Return one tensor for each device that has tables."""
        features = list(getattr(input_dist_outputs, "features", input_dist_outputs))
        if len(features) != len(self._is_empty_rank):
            raise ValueError(
                f"sharding.quant: there are features for {len(features)} devices, not for "
                f"{len(self._is_empty_rank)}."
            )
        used = [own for own, is_empty in zip(features, self._is_empty_rank, strict=True) if not is_empty]
        return look_up_beside_each_other(self._embedding_lookups_per_rank, used)

    def state_dict(self, destination=None, prefix: str = "", keep_vars: bool = False) -> dict:
        """Return the rows of all devices."""
        destination = {} if destination is None else destination
        for lookup in self._embedding_lookups_per_rank:
            lookup.state_dict(destination, prefix, keep_vars)
        return destination

    def load_state_dict(self, state_dict, strict: bool = True) -> _IncompatibleKeys:
        """Copy the rows of all devices; return what is missing and what is too much."""
        missing: list[str] = []
        known: set[str] = set()
        for lookup in self._embedding_lookups_per_rank:
            missing += lookup.load_state_dict(state_dict).missing_keys
            known |= {name for name, _ in lookup.named_buffers()}
        unexpected = [name for name in state_dict if name not in known]
        if strict and (missing or unexpected):
            raise RuntimeError(f"sharding.quant: missing {missing}, unexpected {unexpected}.")
        return _IncompatibleKeys(missing, unexpected)

    def named_parameters(
        self, prefix: str = "", recurse: bool = True, remove_duplicate: bool = True
    ) -> Iterator[tuple[str, nn.Parameter]]:
        """Return nothing: rows in few bits do not train."""
        yield from ()

    def named_buffers(
        self, prefix: str = "", recurse: bool = True, remove_duplicate: bool = True
    ) -> Iterator[tuple[str, torch.Tensor]]:
        """Return the rows of all devices by name."""
        for lookup in self._embedding_lookups_per_rank:
            yield from lookup.named_buffers(prefix, recurse)

    def get_tbes_to_register(self) -> dict[IntNBitTableBatchedEmbeddingBagsCodegen, GroupedEmbeddingConfig]:
        """Return the objects that look up, with the groups they are for."""
        return {
            tbe: config
            for lookup in self._embedding_lookups_per_rank
            for tbe, config in lookup.get_tbes_to_register().items()
        }


class _InferGroupedLookup(InferGroupedLookupMixin, BaseEmbeddingLookup[KJTList, list[torch.Tensor]]):
    _KIND: type[_MetaLookup]  # of one device

    def __init__(
        self,
        grouped_configs_per_rank: list[list[GroupedEmbeddingConfig]],
        world_size: int,
        fused_params: dict[str, Any] | None = None,
        device: torch.device | None = None,
    ) -> None:
        super().__init__()
        if len(grouped_configs_per_rank) != world_size:
            raise ValueError(
                f"sharding.quant: there are groups for {len(grouped_configs_per_rank)} devices, not for "
                f"{world_size}."
            )
        self._is_empty_rank = [not configs for configs in grouped_configs_per_rank]
        self._embedding_lookups_per_rank = [
            self._KIND(configs, device=device_of_rank(device, rank), fused_params=fused_params)
            for rank, configs in enumerate(grouped_configs_per_rank)
            if configs
        ]


class InferGroupedPooledEmbeddingsLookup(_InferGroupedLookup):
    """Pool the rows of the tables of each device of this process."""

    _KIND = MetaInferGroupedPooledEmbeddingsLookup


class InferGroupedEmbeddingsLookup(_InferGroupedLookup):
    """Look up the rows of every id in the tables of each device of this process."""

    _KIND = MetaInferGroupedEmbeddingsLookup
