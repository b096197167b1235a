"""Small parts that modules are built with.

>>> import torch
>>> check_module_output_dimension(torch.nn.Linear(3, 2), 3, 2)
True
>>> deterministic_dedup(torch.tensor([5, 3, 5]))
(tensor([3, 5]), tensor([1, 2]))
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterable

import torch
from torch import nn

from tessera.types import CacheMixin

__all__ = [
    "check_module_output_dimension",
    "construct_modulelist_from_single_module",
    "convert_list_of_modules_to_modulelist",
    "deterministic_dedup",
    "extract_module_or_tensor_callable",
    "get_module_output_dimension",
    "init_mlp_weights_xavier_uniform",
    "reset_module_states_post_sharding",
]


def extract_module_or_tensor_callable(
    module_or_callable: Callable[[], nn.Module] | nn.Module | Callable[[torch.Tensor], torch.Tensor],
) -> nn.Module | Callable[[torch.Tensor], torch.Tensor]:
    """Return a module as it is; what makes a module when called with nothing, called; others as they are."""
    if isinstance(module_or_callable, nn.Module):
        return module_or_callable
    try:
        made = module_or_callable()
    except TypeError as error:
        if "missing" in str(error) or "argument" in str(error):
            return module_or_callable  # a function of a tensor
        raise
    if not isinstance(made, nn.Module):
        raise ValueError(f"modules: a callable without arguments made a {type(made).__name__}, no module.")
    return made


def get_module_output_dimension(
    module: Callable[[torch.Tensor], torch.Tensor] | nn.Module, in_features: int
) -> int:
    """Return the last dimension of what a module makes of one row of `in_features` values."""
    return module(torch.zeros(1, in_features)).size(-1)


def check_module_output_dimension(
    module: Iterable[nn.Module] | nn.Module, in_features: int, out_features: int
) -> bool:
    """Tell whether a module, or each of a list of them, turns `in_features` columns into `out_features`."""
    if isinstance(module, (list, nn.ModuleList)):
        return all(check_module_output_dimension(part, in_features, out_features) for part in module)
    return get_module_output_dimension(module, in_features) == out_features


def init_mlp_weights_xavier_uniform(m: nn.Module) -> None:
    """Fill a linear layer: weights uniform after Xavier, bias 0. For `module.apply`."""
    if isinstance(m, nn.Linear):
        nn.init.xavier_uniform_(m.weight)
        if m.bias is not None:
            m.bias.data.fill_(0.0)


def construct_modulelist_from_single_module(module: nn.Module, sizes: tuple[int, ...]) -> nn.Module:
    """Return nested lists of these sizes of copies of a module, their linear layers filled anew."""
    if len(sizes) > 1:
        inner = [construct_modulelist_from_single_module(module, sizes[1:]) for _ in range(sizes[0])]
        return nn.ModuleList(inner)
    copies = [copy.deepcopy(module) for _ in range(sizes[0])]
    return nn.ModuleList(part.apply(init_mlp_weights_xavier_uniform) for part in copies)


def convert_list_of_modules_to_modulelist(modules: Iterable[nn.Module], sizes: tuple[int, ...]) -> nn.Module:
    """Return nested lists as nested ModuleLists. Raise AssertionError if they are not of these sizes."""
    parts = list(modules)
    if len(parts) != sizes[0]:
        raise AssertionError(f"modules: there are {len(parts)} modules and {sizes[0]} are expected.")
    if len(sizes) == 1:
        return nn.ModuleList(parts)
    return nn.ModuleList(convert_list_of_modules_to_modulelist(part, sizes[1:]) for part in parts)


def deterministic_dedup(ids: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the different ids in ascending order, and where each occurs last."""
    ordered, places = ids.sort(stable=True)
    is_last = torch.ones_like(ordered, dtype=torch.bool)
    is_last[:-1] = ordered[1:] != ordered[:-1]
    return ordered[is_last], places[is_last]


def reset_module_states_post_sharding(module: nn.Module) -> None:
    """Let every part that is a `CacheMixin` forget what it learned before the model was sharded."""
    for part in module.modules():
        if isinstance(part, CacheMixin):
            part.clear_cache()
