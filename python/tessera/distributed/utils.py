"""Small parts that sharded modules share.

>>> append_prefix("a", "b"), append_prefix("", "b")
('a.b', 'b')
>>> dict(filter_state_dict({"a.x": 1, "ab.x": 2}, "a"))
{'x': 1}
"""

from __future__ import annotations

import copy
import warnings
from collections import OrderedDict
from collections.abc import Mapping
from enum import Enum, unique
from typing import Any, TypeVar

import torch
from torch import nn
from torch.distributed import ProcessGroup

from tessera import _C
from tessera.distributed.types import ParameterSharding, ShardedModule, ShardingType
from tessera.modules.embedding_configs import BoundsCheckMode
from tessera.types import CopyMixIn

__all__ = [
    "CopyableMixin",
    "EmbOptimType",
    "PermutePooledEmbeddings",
    "add_params_from_parameter_sharding",
    "add_prefix_to_state_dict",
    "append_prefix",
    "convert_to_fbgemm_types",
    "copy_to_device",
    "filter_state_dict",
    "get_unsharded_module_names",
    "init_parameters",
    "merge_fused_params",
    "none_throws",
    "optimizer_type_to_emb_opt_type",
    "sharded_model_copy",
]

_T = TypeVar("_T")
_engine = _C.embedding


@unique
class EmbOptimType(Enum):
    """Name the rules that step rows in backward."""

    EXACT_SGD = "exact_sgd"
    EXACT_ADAGRAD = "exact_adagrad"
    EXACT_ROWWISE_ADAGRAD = "exact_row_wise_adagrad"
    ADAM = "adam"
    ADAMW = "adamw"
    PARTIAL_ROWWISE_ADAM = "partial_row_wise_adam"
    LAMB = "lamb"
    PARTIAL_ROWWISE_LAMB = "partial_row_wise_lamb"
    LARS_SGD = "lars_sgd"


_ENGINE_KINDS = {
    EmbOptimType.EXACT_SGD: "SGD",
    EmbOptimType.EXACT_ADAGRAD: "ADAGRAD",
    EmbOptimType.EXACT_ROWWISE_ADAGRAD: "ROWWISE_ADAGRAD",
}
_CLASSES = {
    "SGD": EmbOptimType.EXACT_SGD,
    "Adagrad": EmbOptimType.EXACT_ADAGRAD,
    "RowWiseAdagrad": EmbOptimType.EXACT_ROWWISE_ADAGRAD,
    "Adam": EmbOptimType.ADAM,
    "AdamW": EmbOptimType.ADAMW,
    "PartialRowWiseAdam": EmbOptimType.PARTIAL_ROWWISE_ADAM,
    "LAMB": EmbOptimType.LAMB,
    "PartialRowWiseLAMB": EmbOptimType.PARTIAL_ROWWISE_LAMB,
    "LarsSGD": EmbOptimType.LARS_SGD,
    "LarsSgd": EmbOptimType.LARS_SGD,
}


def none_throws(optional: _T | None, message: str = "Unexpected `None`") -> _T:
    """Return what is there; AssertionError if it is None."""
    if optional is None:
        raise AssertionError(message)
    return optional


def append_prefix(prefix: str, name: str) -> str:
    """Return the two with a dot between them, if both are there."""
    return f"{prefix}.{name}" if prefix and name else prefix + name


def filter_state_dict(state_dict: Mapping[str, _T], name: str) -> OrderedDict[str, _T]:
    """Return the entries below `name`, without it."""
    prefix = name + "."
    return OrderedDict(
        (key[len(prefix) :], value) for key, value in state_dict.items() if key.startswith(prefix)
    )


def add_prefix_to_state_dict(state_dict: dict[str, Any], prefix: str) -> None:
    """Put `prefix` in front of every key, in place."""
    for key in sorted(state_dict.keys()):
        state_dict[prefix + key] = state_dict.pop(key)
    metadata = getattr(state_dict, "_metadata", None)
    if metadata is not None:
        for key in list(metadata.keys()):
            metadata[append_prefix(prefix.rstrip("."), key)] = metadata.pop(key)


def _collect_unsharded(module: nn.Module, path: str, names: list[str]) -> bool:
    """Add the top-most children without sharded modules; tell whether there is one below."""
    if isinstance(module, ShardedModule):
        return True
    below: list[str] = []
    plain = []
    has_sharded = False
    for name, child in module.named_children():
        child_path = append_prefix(path, name)
        if _collect_unsharded(child, child_path, below):
            has_sharded = True
        else:
            plain.append(child_path)
    if has_sharded:
        names.extend(plain)
        names.extend(below)
    return has_sharded


def get_unsharded_module_names(model: nn.Module) -> list[str]:
    """Return the top-most modules that hold no sharded module, beside ones that do."""
    names: list[str] = []
    _collect_unsharded(model, "", names)
    return names


class sharded_model_copy:
    """Within it, copy.deepcopy copies tensors to `device` and shares groups; None shares tensors too."""

    def __init__(self, device: str | int | torch.device | None) -> None:
        self.device = device

    def __enter__(self) -> None:
        device = self.device

        def share(obj: Any, memo: dict) -> Any:
            return obj

        def move(tensor: torch.Tensor, memo: dict) -> torch.Tensor:
            if id(tensor) not in memo:
                memo[id(tensor)] = tensor.detach().to(device, copy=True)
            return memo[id(tensor)]

        copy_tensor = share if device is None else move

        def copy_parameter(param: nn.Parameter, memo: dict) -> nn.Parameter:
            if id(param) not in memo:
                data = param.detach() if device is None else param.detach().to(device, copy=True)
                memo[id(param)] = nn.Parameter(data, param.requires_grad)
            return memo[id(param)]

        replacements = {torch.Tensor: copy_tensor, nn.Parameter: copy_parameter, ProcessGroup: share}
        self._saved = [(kind, kind.__dict__.get("__deepcopy__")) for kind in replacements]
        for kind, function in replacements.items():
            kind.__deepcopy__ = function

    def __exit__(self, *exc: object) -> None:
        for kind, function in self._saved:
            if function is None:
                del kind.__deepcopy__
            else:
                kind.__deepcopy__ = function


def copy_to_device(module: nn.Module, current_device: torch.device, to_device: torch.device) -> nn.Module:
    """Return a copy whose parameters and buffers of `current_device` are on `to_device`.

    Modules that are a `CopyMixIn` say themselves what becomes of them.
    """
    with sharded_model_copy(device=None):
        copied = copy.deepcopy(module)
    if isinstance(copied, CopyMixIn):
        return copied.copy(to_device)

    def move(owner: nn.Module, tensors: dict[str, torch.Tensor | None]) -> None:
        for name, tensor in tensors.items():
            if tensor is None or tensor.device != torch.device(current_device):
                continue
            moved = tensor.detach().to(to_device)
            is_parameter = isinstance(tensor, nn.Parameter)
            tensors[name] = nn.Parameter(moved, tensor.requires_grad) if is_parameter else moved

    def visit(owner: nn.Module) -> None:
        if not isinstance(owner, CopyableMixin) or owner is copied:
            move(owner, owner._parameters)
            move(owner, owner._buffers)
        for name, child in owner._modules.items():
            if isinstance(child, CopyMixIn):
                owner._modules[name] = child.copy(to_device)
            elif child is not None:
                visit(child)

    visit(copied)
    return copied


class CopyableMixin(nn.Module):
    """Let a module be copied to a device."""

    def copy(self, device: torch.device) -> nn.Module:
        """Return a copy on `device`."""
        with sharded_model_copy(device):
            return copy.deepcopy(self)


def optimizer_type_to_emb_opt_type(optimizer_class: type) -> EmbOptimType | None:
    """Return the rule of an optimizer class, torch's or Tessera's, by its name.

    >>> optimizer_type_to_emb_opt_type(torch.optim.Adagrad)
    <EmbOptimType.EXACT_ADAGRAD: 'exact_adagrad'>
    """
    if optimizer_class.__name__ not in _CLASSES:
        raise ValueError(
            f"sharding.fused_params: no rule steps rows like {optimizer_class.__name__}. There are "
            f"{', '.join(_CLASSES)}."
        )
    return _CLASSES[optimizer_class.__name__]


def merge_fused_params(
    fused_params: dict[str, Any] | None = None, param_fused_params: dict[str, Any] | None = None
) -> dict[str, Any]:
    """Return both together; those of the parameter win, and `lr` means `learning_rate`.

    >>> merge_fused_params({"learning_rate": 0.1, "eps": 1e-8}, {"lr": 0.2})
    {'learning_rate': 0.2, 'eps': 1e-08}
    """
    merged = dict(fused_params or {})
    own = dict(param_fused_params or {})
    if "lr" in own:
        own["learning_rate"] = own.pop("lr")
    merged.update(own)
    return merged


def add_params_from_parameter_sharding(
    fused_params: dict[str, Any] | None, parameter_sharding: ParameterSharding
) -> dict[str, Any]:
    """Return `fused_params` with what the table's sharding says about cache, rounding and bounds."""
    params = dict(fused_params or {})
    if parameter_sharding.cache_params is not None:
        cache = parameter_sharding.cache_params
        named = {
            "cache_algorithm": cache.algorithm,
            "cache_load_factor": cache.load_factor,
            "cache_reserved_memory": cache.reserved_memory,
            "cache_precision": cache.precision,
            "prefetch_pipeline": cache.prefetch_pipeline,
        }
        params.update({name: value for name, value in named.items() if value is not None})
    for name in ("enforce_hbm", "stochastic_rounding", "bounds_check_mode"):
        value = getattr(parameter_sharding, name)
        if value is not None:
            params[name] = value
    is_replica = parameter_sharding.sharding_type == ShardingType.DATA_PARALLEL.value
    if params and (is_replica or parameter_sharding.compute_kernel == "dense"):
        warnings.warn(
            f"sharding.fused_params: {', '.join(params)} mean nothing to a table that leaves its gradient.",
            stacklevel=2,
        )
    return params


def _names_steps(fused_params: Mapping[str, Any] | None) -> bool:
    """Tell whether they say how backward steps rows, not only where rows lie."""
    return bool(fused_params) and not fused_params.keys().isdisjoint(
        ("optimizer", "learning_rate", "gradients")
    )


def convert_to_fbgemm_types(fused_params: dict[str, Any]) -> dict[str, Any]:
    """Return a copy: the engine takes these names and values as they are."""
    return dict(fused_params)


# Keys that say where rows lie or how they are cached (_row_cache.py); nothing about their steps.
_PLACES = frozenset(
    (
        "cache_algorithm",
        "cache_load_factor",
        "cache_reserved_memory",
        "cache_precision",
        "prefetch_pipeline",
        "enforce_hbm",
        "output_dtype",
        "weights_precision",
    )
)
_NUMBERS = frozenset(
    (
        "learning_rate",
        "eps",
        "beta1",
        "beta2",
        "weight_decay",
        "momentum",
        "eta",
        "stochastic_rounding",
        "max_gradient",
        "initial_accumulator",
        "seed",
    )
)


def _to_options(fused_params: Mapping[str, Any]) -> _C.embedding.OptimizerOptions:
    """Return the engine's options. Raises ValueError for a name or rule it does not know."""
    options = _engine.OptimizerOptions()
    params = {key: value for key, value in fused_params.items() if key not in _PLACES}
    params.pop("bounds_check_mode", None)
    if not params.pop("gradient_clipping", "max_gradient" in params):
        params.pop("max_gradient", None)
    rule = params.pop("optimizer", EmbOptimType.EXACT_SGD)
    name = rule if isinstance(rule, str) else rule.name
    kinds = {kind.name: _ENGINE_KINDS.get(kind, kind.name) for kind in EmbOptimType}
    kinds |= {kind: kind for kind in ("SGD", "ADAGRAD", "ROWWISE_ADAGRAD")}
    if name.upper() not in kinds:
        raise ValueError(f"sharding.fused_params: the optimizer {name!r} is not one of {', '.join(kinds)}.")
    options.kind = getattr(_engine.OptimizerKind, kinds[name.upper()])
    mode = params.pop("weight_decay_mode", None)
    if mode is not None:
        word = getattr(mode, "name", str(mode)).upper()
        if word not in ("NONE", "L2", "DECOUPLE", "DECOUPLED"):
            raise ValueError(f"sharding.fused_params: weight_decay_mode {word!r} is not L2 or DECOUPLE.")
        kinds_of_decay = _engine.WeightDecayMode
        options.weight_decay_mode = kinds_of_decay.L2 if word in ("NONE", "L2") else kinds_of_decay.DECOUPLED
    betas = params.pop("betas", None)
    if betas is not None:
        params["beta1"], params["beta2"] = betas
    if "initial_accumulator_value" in params:
        params["initial_accumulator"] = params.pop("initial_accumulator_value")
    for key, value in params.items():
        if key not in _NUMBERS:
            raise ValueError(
                f"sharding.fused_params: there is no {key!r} among {', '.join(sorted(_NUMBERS))}."
            )
        setattr(options, key, value)
    return options


def _to_bounds_check(mode: Any) -> _C.embedding.BoundsCheckMode:
    """Return the engine's mode; by default ids outside their table are errors."""
    name = BoundsCheckMode.FATAL.name if mode is None else mode.name
    if not hasattr(_engine.BoundsCheckMode, name):
        raise ValueError(f"sharding.fused_params: bounds_check_mode {name} is not FATAL, WARNING or IGNORE.")
    return getattr(_engine.BoundsCheckMode, name)


# What a new torch optimizer has in its groups that says how it runs, not what it computes.
_TORCH_ONLY = frozenset(
    (
        "maximize",
        "foreach",
        "fused",
        "capturable",
        "differentiable",
        "amsgrad",
        "nesterov",
        "dampening",
        "lr_decay",
        "decoupled_weight_decay",
    )
)


def _in_backward_params(param: torch.Tensor, table: str) -> dict[str, Any] | None:
    """Return the fused params of an optimizer that was set to run in backward, or None."""
    classes = getattr(param, "_optimizer_classes", [])
    if not classes:
        return None
    if len(classes) > 1:
        raise ValueError(
            f"sharding.fused_params: table {table!r} has {len(classes)} optimizers; give it one."
        )
    kwargs = dict(getattr(param, "_optimizer_kwargs", [{}])[0])
    for key in _TORCH_ONLY & kwargs.keys():
        if kwargs.pop(key):
            raise ValueError(f"sharding.fused_params: table {table!r} asks for {key}, which no rule has.")
    rule = optimizer_type_to_emb_opt_type(classes[0])
    if rule == EmbOptimType.EXACT_SGD and kwargs.pop("momentum", 0):
        raise ValueError(f"sharding.fused_params: table {table!r} asks for SGD with momentum.")
    # Rules of torch that differ from the engine's in their defaults.
    defaults = {EmbOptimType.EXACT_ADAGRAD: {"eps": 1e-10}, EmbOptimType.ADAMW: {"weight_decay": 0.01}}
    own = getattr(classes[0], "__module__", "").startswith("torch.optim")
    return {"optimizer": rule, **(defaults.get(rule, {}) if own else {}), **kwargs}


def init_parameters(module: nn.Module, device: torch.device) -> None:
    """Give meta parameters and buffers memory on `device` and fill them with `reset_parameters`.

    Does nothing if there are none. Modules that hold meta tensors must have `reset_parameters`.
    """

    def is_meta(tensors: Any) -> bool:
        return any(tensor.is_meta for tensor in tensors)

    if not is_meta(module.parameters()) and not is_meta(module.buffers()):
        return
    holders = (nn.ParameterDict, nn.ParameterList)  # their parameters are their owner's
    for name, owner in module.named_modules():
        if isinstance(owner, (ShardedModule, *holders)):
            continue
        parts = [owner, *(child for child in owner.children() if isinstance(child, holders))]
        own = [t for part in parts for t in (*part.parameters(False), *part.buffers(False))]
        if not is_meta(own):
            continue
        if not hasattr(owner, "reset_parameters"):
            raise ValueError(
                f"sharding.init_parameters: {name or type(owner).__name__} has meta parameters and no "
                "reset_parameters."
            )
        for part in parts:
            part.to_empty(device=device, recurse=False)
        owner.reset_parameters()


class PermutePooledEmbeddings:
    """Order blocks of columns anew: block k of the result is block `permute[k]` of the input.

    >>> permute = PermutePooledEmbeddings([1, 2], [1, 0])
    >>> permute(torch.tensor([[1, 2, 3]])).tolist()
    [[2, 3, 1]]
    """

    def __init__(self, embs_dims: list[int], permute: list[int], device: torch.device | None = None) -> None:
        if sorted(permute) != list(range(len(embs_dims))):
            raise ValueError(
                f"sharding.permute: {permute} does not name each of {len(embs_dims)} blocks once."
            )
        begins = [sum(embs_dims[:place]) for place in range(len(embs_dims))]
        columns = [c for place in permute for c in range(begins[place], begins[place] + embs_dims[place])]
        self._columns = torch.tensor(columns, dtype=torch.long, device=device)

    def __call__(self, values: torch.Tensor) -> torch.Tensor:
        """Return the values with their blocks of columns in the new order."""
        return values.index_select(1, self._columns)
