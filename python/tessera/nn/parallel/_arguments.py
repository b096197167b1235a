"""What the constructor of DistributedDataParallel is given, as the engine wants it."""

from __future__ import annotations

import functools
import warnings
from collections.abc import Sequence

import torch
import torch.distributed as dist
from torch import Tensor
from torch.nn import Module


def parameters_of(module: Module) -> list[tuple[str, Tensor, bool]]:
    """Each parameter once, by its first name, and whether its gradient is sparse; no parts of tables."""
    seen: set[Tensor] = set()
    found = []
    for module_name, part in module.named_modules():
        is_sparse = isinstance(part, (torch.nn.Embedding, torch.nn.EmbeddingBag)) and part.sparse
        for name, parameter in part.named_parameters(recurse=False):
            if parameter not in seen and not getattr(parameter, "_is_table_part", False):
                seen.add(parameter)
                found.append((f"{module_name}.{name}" if module_name else name, parameter, is_sparse))
    return found


def delayed_names(
    module: Module, named: Sequence[tuple[str, Tensor]], trigger: Tensor
) -> tuple[list[str], str]:
    """Return the module's own names for delayed parameters and for the one that starts their reduction."""
    names = {id(parameter): name for name, parameter, _ in parameters_of(module)}
    for name, parameter in named:
        if id(parameter) not in names:
            raise ValueError(f"delay_all_reduce_named_params: '{name}' is no parameter of the module.")
    if id(trigger) not in names:
        raise ValueError("param_to_hook_all_reduce is no parameter of the module.")
    return [names[id(parameter)] for _, parameter in named], names[id(trigger)]


@functools.cache
def _has_slices() -> bool:
    return hasattr(dist.device_mesh.DeviceMesh, "_get_root_mesh")


def group_of(process_group, device_mesh, module: Module) -> dist.ProcessGroup:
    if process_group and device_mesh is not None:
        raise RuntimeError("Cannot specify both process_group and device_mesh arguments.")
    if device_mesh is None:
        if process_group is not None:
            return process_group
        return dist.distributed_c10d._get_default_group()
    if device_mesh.ndim != 1:
        raise RuntimeError(f"Only 1D device mesh is supported, but got {device_mesh}.")
    if _has_slices() and device_mesh._get_root_mesh() != device_mesh:
        from torch.distributed.tensor.parallel.ddp import _pre_dp_module_transform

        _pre_dp_module_transform(module)
    return device_mesh.get_group(mesh_dim=0)


def devices_of(devices) -> list[torch.device]:
    """Return a device with a number for each: "cuda" alone is the current one, as for torch."""

    def numbered(device) -> torch.device:
        named = torch.device("cuda", device) if isinstance(device, int) else torch.device(device)
        if named.type == "cuda" and named.index is None:
            return torch.device("cuda", torch.cuda.current_device())
        return named

    return [numbered(device) for device in devices or ()]


def warn_of_broadcast_buffers(is_ignored: bool) -> None:
    if is_ignored:
        text = (
            "Both `broadcast_buffers` and `forward_sync_buffers` were specified. `broadcast_buffers` "
            "is deprecated and its value is ignored when `forward_sync_buffers` is provided."
        )
    else:
        text = (
            "`broadcast_buffers` is deprecated. Use `forward_sync_buffers` instead; unlike "
            "`broadcast_buffers=False`, `forward_sync_buffers=False` still sends buffers once at "
            "construction."
        )
    warnings.warn(text, FutureWarning, stacklevel=3)
