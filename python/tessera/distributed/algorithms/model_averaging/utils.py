"""Averaging parameters over the ranks."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch
import torch.distributed as dist

from tessera import _C

__all__ = ["average_parameters", "average_parameters_or_parameter_groups", "get_params_to_average"]


def get_params_to_average(params: Iterable[Any]) -> list[torch.Tensor]:
    """Return the tensors of `params`, which are parameters or an optimizer's parameter groups."""
    tensors: list[torch.Tensor] = []
    for entry in params:
        tensors.extend(entry["params"] if isinstance(entry, dict) else [entry])
    return tensors


def average_parameters(params: Iterable[torch.Tensor], process_group: dist.ProcessGroup | None) -> None:
    """Replace `params` by their average over the group. All ranks call it."""
    _C.average_parameters(list(params), process_group or dist.group.WORLD)


def average_parameters_or_parameter_groups(
    params: Iterable[Any], process_group: dist.ProcessGroup | None
) -> None:
    """Replace parameters, or those of parameter groups, by their average over the group."""
    average_parameters(get_params_to_average(params), process_group)
