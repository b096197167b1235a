"""Rounds the tables of a model to few bits, and lays them over the devices of one process.

>>> from tessera.modules.embedding_configs import EmbeddingBagConfig
>>> tables = [EmbeddingBagConfig(4, 16, "t", feature_names=["f"])]
>>> model = nn.Sequential(EmbeddingBagCollection(tables))
>>> quantize_embeddings(model, torch.qint8, inplace=False)[0].embedding_bags["t"].weight.shape
torch.Size([4, 32])
>>> model, plan = shard_quant_model(quantize_inference_model(model), world_size=2, compute_device="cpu")
>>> type(model[0]).__name__, plan.plan["0"]["t"].sharding_type
('ShardedQuantEmbeddingBagCollection', 'table_wise')
"""

from __future__ import annotations

import abc
import copy
import json
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from typing import Any

import torch
from torch import nn

from tessera.distributed.embedding_types import EmbeddingComputeKernel
from tessera.distributed.planner import EmbeddingShardingPlanner, ParameterConstraints, Topology
from tessera.distributed.planner.storage_reservations import FixedPercentageStorageReservation
from tessera.distributed.quant_embeddingbag import (
    QuantEmbeddingBagCollectionSharder,
    QuantFeatureProcessedEmbeddingBagCollectionSharder,
)
from tessera.distributed.shard import shard_modules
from tessera.distributed.types import ModuleSharder, ShardingEnv, ShardingPlan, ShardingType
from tessera.modules.embedding_modules import (
    EmbeddingBagCollection,
    EmbeddingBagCollectionInterface,
    EmbeddingCollection,
    EmbeddingCollectionInterface,
)
from tessera.modules.fp_embedding_modules import FeatureProcessedEmbeddingBagCollection
from tessera.quant.embedding_modules import EmbeddingBagCollection as QuantEmbeddingBagCollection
from tessera.quant.embedding_modules import EmbeddingCollection as QuantEmbeddingCollection
from tessera.quant.embedding_modules import (
    FeatureProcessedEmbeddingBagCollection as QuantFeatureProcessedEmbeddingBagCollection,
)
from tessera.quant.embedding_modules import QuantConfig

__all__ = [
    "DEFAULT_QUANTIZATION_DTYPE",
    "DEFAULT_QUANT_MAPPING",
    "DEFAULT_SHARDERS",
    "FEATURE_PROCESSED_EBC_TYPE",
    "BatchingMetadata",
    "PredictFactory",
    "PredictModule",
    "QualNameMetadata",
    "quantize_dense",
    "quantize_embeddings",
    "quantize_feature",
    "quantize_inference_model",
    "shard_quant_model",
    "trim_torch_package_prefix_from_typename",
]


def trim_torch_package_prefix_from_typename(typename: str) -> str:
    """Return a type's name without what torch.package puts before it.

    >>> trim_torch_package_prefix_from_typename("<torch_package_0>.torch.nn.Linear")
    'torch.nn.Linear'
    """
    return typename.partition(".")[2] if typename.startswith("<torch_package_") else typename


def _name_of(kind: type) -> str:
    return trim_torch_package_prefix_from_typename(f"{kind.__module__}.{kind.__qualname__}")


DEFAULT_QUANTIZATION_DTYPE: torch.dtype = torch.int8
DEFAULT_QUANT_MAPPING: dict[str, type[nn.Module]] = {
    _name_of(EmbeddingBagCollection): QuantEmbeddingBagCollection,
    _name_of(EmbeddingCollection): QuantEmbeddingCollection,
}
FEATURE_PROCESSED_EBC_TYPE: str = _name_of(FeatureProcessedEmbeddingBagCollection)
# Quantised collections of single rows have no sharder: each device looks up in whole ones.
DEFAULT_SHARDERS: list[ModuleSharder] = [
    QuantEmbeddingBagCollectionSharder(),
    QuantFeatureProcessedEmbeddingBagCollectionSharder(),
]


def _table_names(module: nn.Module) -> set[str]:
    """Return the names of the tables of a collection; none of another module."""
    if isinstance(module, FeatureProcessedEmbeddingBagCollection):
        module = module._embedding_bag_collection
    if isinstance(module, EmbeddingBagCollectionInterface):
        return {config.name for config in module.embedding_bag_configs()}
    if isinstance(module, EmbeddingCollectionInterface):
        return {config.name for config in module.embedding_configs()}
    return set()


def _replace(module: nn.Module, make: Any) -> nn.Module:
    """Put what `make` returns in the place of the modules that it returns something for."""
    whole = make(module)
    if whole is not None:
        return whole
    waiting = [module]
    while waiting:
        parent = waiting.pop()
        for name, child in parent.named_children():
            made = make(child)
            if made is None:
                waiting.append(child)
            else:
                setattr(parent, name, made)
    return module


def quantize_embeddings(
    module: nn.Module,
    dtype: torch.dtype,
    inplace: bool,
    additional_qconfig_spec_keys: list[type[nn.Module]] | None = None,
    additional_mapping: dict[type[nn.Module], type[nn.Module]] | None = None,
    output_dtype: torch.dtype = torch.float32,
    per_table_weight_dtype: dict[str, torch.dtype] | None = None,
) -> nn.Module:
    """Put rounded collections in the place of the float ones; return the model.

    `dtype` is torch.qint8, quint4x2, quint2x4, float16, bfloat16 or float32. `additional_mapping` names
    further types of modules and what has a `from_float` for them; `additional_qconfig_spec_keys` those of
    them that get the types. With `inplace`, `module` itself is changed, unless it is a collection.
    """
    mapping: dict[type, type] = {EmbeddingBagCollection: QuantEmbeddingBagCollection}
    mapping |= additional_mapping or {}
    typed = {EmbeddingBagCollection, *(additional_qconfig_spec_keys or ())}
    own_types = per_table_weight_dtype or {}
    known = {name for part in module.modules() if type(part) in typed for name in _table_names(part)}
    unknown = sorted(set(own_types) - known)
    if unknown:
        raise ValueError(f"embed.quantised: there are no tables {unknown}, for which types are given.")

    def rounded(own: nn.Module) -> nn.Module | None:
        if type(own) not in mapping:
            return None
        if type(own) in typed:
            names = _table_names(own)
            types = {name: kind for name, kind in own_types.items() if name in names}
            own.qconfig = QuantConfig.of(dtype, output_dtype, types or None)
        return mapping[type(own)].from_float(own)

    return _replace(module if inplace else copy.deepcopy(module), rounded)


def quantize_inference_model(
    model: nn.Module,
    quantization_mapping: dict[str, type[nn.Module]] | None = None,
    per_table_weight_dtype: dict[str, torch.dtype] | None = None,
    fp_weight_dtype: torch.dtype = DEFAULT_QUANTIZATION_DTYPE,
    quantization_dtype: torch.dtype = DEFAULT_QUANTIZATION_DTYPE,
    output_dtype: torch.dtype = torch.float32,
) -> nn.Module:
    """Put rounded collections in the place of all collections of a model, also of those of single rows.

    `quantization_mapping` says by the full names of types what takes their place. `fp_weight_dtype` is the
    type of tables behind feature processors. The model itself is changed, unless it is a collection.
    """
    mapping = DEFAULT_QUANT_MAPPING if quantization_mapping is None else quantization_mapping
    own_types = per_table_weight_dtype or {}
    processed_kind = FeatureProcessedEmbeddingBagCollection
    found = {type(part): mapping.get(_name_of(type(part))) for part in model.modules()}
    kinds = {kind: made for kind, made in found.items() if made is not None}
    processed = {
        name: kind
        for part in model.modules()
        if isinstance(part, processed_kind)
        for name, kind in own_types.items()
        if name in _table_names(part)
    }
    if processed_kind in found and processed_kind not in kinds:
        # First, since tables behind processors have a type of their own.
        def behind(part: nn.Module) -> nn.Module | None:
            return _rounded_behind_processor(part, fp_weight_dtype, output_dtype, processed)

        model = _replace(model, behind)
    rest = {name: kind for name, kind in own_types.items() if name not in processed}
    return quantize_embeddings(
        model, quantization_dtype, True, list(kinds), kinds, output_dtype, rest or None
    )


def _rounded_behind_processor(
    part: nn.Module,
    dtype: torch.dtype,
    output_dtype: torch.dtype,
    types: dict[str, torch.dtype],
) -> nn.Module | None:
    if type(part) is not FeatureProcessedEmbeddingBagCollection:
        return None
    names = _table_names(part)
    own = {name: kind for name, kind in types.items() if name in names}
    part.qconfig = QuantConfig.of(dtype, output_dtype, own or None)
    return QuantFeatureProcessedEmbeddingBagCollection.from_float(part)


def shard_quant_model(
    model: nn.Module,
    world_size: int = 1,
    compute_device: str = "cuda",
    sharding_device: str = "meta",
    sharders: list[ModuleSharder] | None = None,
    device_memory_size: int | None = None,
    constraints: dict[str, ParameterConstraints] | None = None,
    ddr_cap: int | None = None,
    sharding_plan: ShardingPlan | None = None,
) -> tuple[nn.Module, ShardingPlan]:
    """Lay the quantised pooled tables of a model over devices of this process; return it with the plan.

    Without a plan each table goes whole to one device, or as `constraints` say. Rows are copied, so that
    the model predicts at once; with `sharding_device` "meta" they go to the `compute_device`. Quantised
    collections of single rows stay whole.
    """
    sharders = sharders or DEFAULT_SHARDERS
    device = torch.device(compute_device if sharding_device == "meta" else sharding_device)
    plan = sharding_plan or _plan_of(
        model, world_size, compute_device, sharders, device_memory_size, constraints, ddr_cap
    )
    env = ShardingEnv.from_local(world_size, 0)
    return shard_modules(model, env, device, plan, sharders), plan


def _plan_of(
    model: nn.Module,
    world_size: int,
    compute_device: str,
    sharders: list[ModuleSharder],
    device_memory_size: int | None,
    constraints: dict[str, ParameterConstraints] | None,
    ddr_cap: int | None,
) -> ShardingPlan:
    if constraints is None:
        kinds = {sharder.module_type for sharder in sharders}
        tables = [name for part in model.modules() if type(part) in kinds for name in part.embedding_bags]
        constraints = {
            name: ParameterConstraints(
                sharding_types=[ShardingType.TABLE_WISE.value],
                compute_kernels=[EmbeddingComputeKernel.QUANT.value],
            )
            for name in tables
        }
    if device_memory_size is None and compute_device == "cuda" and torch.cuda.is_available():
        device_memory_size = torch.cuda.get_device_properties(torch.cuda.current_device()).total_memory
    topology = Topology(
        world_size=world_size,
        compute_device=compute_device,
        local_world_size=world_size,
        hbm_cap=device_memory_size,
        ddr_cap=ddr_cap,
    )
    planner = EmbeddingShardingPlanner(
        topology=topology,
        batch_size=1,
        constraints=constraints,
        storage_reservation=FixedPercentageStorageReservation(percentage=0.0),
    )
    plan = planner.plan(model, sharders)
    for tables in plan.plan.values():
        for sharding in tables.values():  # planned were the bytes of rows; their numbers are cut evenly
            sharding.sharding_spec = None
    return plan


@dataclass
class QualNameMetadata:
    """Say whether a method of a served model has to be prepared for."""

    need_preproc: bool


@dataclass
class BatchingMetadata:
    """Say how requests of an input are joined: its type, its device and which tensors are pinned."""

    type: str
    device: str
    pinned: list[str]


class PredictFactory(abc.ABC):
    """Make a model that predicts, and say how a server joins its requests."""

    @abc.abstractmethod
    def create_predict_module(self) -> nn.Module:
        """Return the model with its weights."""

    @abc.abstractmethod
    def batching_metadata(self) -> dict[str, BatchingMetadata]:
        """Return how requests are joined, by input."""

    def batching_metadata_json(self) -> str:
        """Return the same as JSON."""
        return json.dumps({name: asdict(how) for name, how in self.batching_metadata().items()})

    @abc.abstractmethod
    def result_metadata(self) -> str:
        """Return the type of the results."""

    @abc.abstractmethod
    def run_weights_independent_tranformations(self, predict_module: nn.Module) -> nn.Module:
        """Return the model after steps that do without its weights, tracing for example."""

    @abc.abstractmethod
    def run_weights_dependent_transformations(self, predict_module: nn.Module) -> nn.Module:
        """Return the model after steps that need its weights."""

    def qualname_metadata(self) -> dict[str, QualNameMetadata]:
        """Return what is to know of single methods, by name."""
        return {}

    def qualname_metadata_json(self) -> str:
        """Return the same as JSON."""
        return json.dumps({name: asdict(how) for name, how in self.qualname_metadata().items()})

    def model_inputs_data(self) -> dict[str, Any]:
        """Return what measurements need to make inputs."""
        return {}


class PredictModule(nn.Module):
    """Predict with a model in evaluation, without gradients; a class of one's own has `predict_forward`.

    The state is the model's. Without `device` it is the current GPU.
    """

    def __init__(self, module: nn.Module, device: str | None = None) -> None:
        super().__init__()
        self._module = module
        self._device = None if device is None else torch.device(device)
        self._module.eval()

    @property
    def predict_module(self) -> nn.Module:
        """Return the model."""
        return self._module

    @abc.abstractmethod
    def predict_forward(self, batch: dict[str, torch.Tensor]) -> Any:
        """Return predictions for the tensors of a request."""

    def forward(self, batch: dict[str, torch.Tensor]) -> Any:
        """Return predictions for the tensors of a request."""
        if self._device is None:
            self._device = torch.device("cuda", torch.cuda.current_device())
        with torch.inference_mode():
            return self.predict_forward(batch)

    def state_dict(self, destination=None, prefix: str = "", keep_vars: bool = False) -> dict[str, Any]:
        """Return the model's state."""
        return self._module.state_dict(destination=destination, prefix=prefix, keep_vars=keep_vars)


def quantize_feature(module: nn.Module, inputs: tuple[Any, ...]) -> tuple[Any, ...]:
    """Return inputs with numbers of 32 and 64 bits in half precision, for a hook before a forward."""
    wide = (torch.float32, torch.float64)
    return tuple(
        value.half() if isinstance(value, torch.Tensor) and value.dtype in wide else value for value in inputs
    )


def quantize_dense(
    predict_module: PredictModule,
    dtype: torch.dtype,
    additional_embedding_module_type: list[type[nn.Module]] | None = None,
) -> nn.Module:
    """Bring the model's parts without tables to half precision, with what is given to them; return all."""
    for part in _dense_parts(predict_module.predict_module, additional_embedding_module_type or []):
        if dtype != torch.half:
            raise NotImplementedError(
                f"embed.quantised: parts without tables go to torch.float16 alone, not to {dtype}."
            )
        part.half().register_forward_pre_hook(quantize_feature)
    return predict_module


def _dense_parts(model: nn.Module, others: list[type[nn.Module]]) -> Iterator[nn.Module]:
    interfaces = (EmbeddingBagCollectionInterface, EmbeddingCollectionInterface)
    for part in model.children():
        if not isinstance(part, interfaces) and type(part) not in others:
            yield part
