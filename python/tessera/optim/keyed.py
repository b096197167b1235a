"""Optimizers whose state goes by the names of parameters.

>>> import torch
>>> weight = torch.nn.Parameter(torch.ones(1))
>>> dense = KeyedOptimizerWrapper({"weight": weight}, lambda params: torch.optim.Adagrad(params, lr=0.5))
>>> combined = CombinedOptimizer([("over", dense)])
>>> weight.grad = torch.ones(1)
>>> combined.step()
>>> weight.tolist(), combined.state_dict()["state"]["over.weight"]["sum"].tolist()
([0.5], [1.0])
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping
from typing import Any

import torch
from torch import optim
from torch.distributed._shard.sharded_tensor import ShardedTensor

__all__ = ["CombinedOptimizer", "KeyedOptimizer", "KeyedOptimizerWrapper", "OptimizerWrapper"]


def _copy_into(own: Any, given: Any, path: str) -> Any:
    """Copy a loaded value into what is there, in place where it can be; return what is there now."""
    if isinstance(own, ShardedTensor):
        mine, theirs = own.local_shards(), given.local_shards()
        if len(mine) != len(theirs):
            raise ValueError(
                f"optim.keyed: {path} has {len(theirs)} shards in the state and {len(mine)} here; "
                "the state is of another sharding."
            )
        for part, other in zip(mine, theirs, strict=True):
            part.tensor.detach().copy_(other.tensor)
        return own
    if isinstance(own, torch.Tensor):
        own.detach().copy_(given)
        return own
    if isinstance(own, dict):
        return _load_entries(own, given, path)
    return given


def _load_entries(own: dict, given: Mapping, path: str) -> dict:
    if len(own) != len(given):
        raise ValueError(f"optim.keyed: Different state size: {len(own)} vs {len(given)} entries of {path!r}")
    for name, value in own.items():
        if name not in given:
            raise ValueError(f"optim.keyed: {path} has no entry {name!r} in the state.")
        own[name] = _copy_into(value, given[name], f"{path}.{name}")
    return own


class KeyedOptimizer(optim.Optimizer):
    """Know parameters by name: `state_dict` has the state under their names.

    The state that is loaded must be of the same parameters and entries. Groups of parameters are left out of
    it unless `save_param_groups` was called: not all parameters are on all ranks, and groups are made anew.
    """

    def __init__(
        self,
        params: Mapping[str, torch.Tensor | ShardedTensor],
        state: Mapping[Any, Any],
        param_groups: Collection[Mapping[str, Any]],
    ) -> None:
        known = set(params.values())
        unknown = [key for key in state if key not in known]
        if unknown:
            raise ValueError(
                f"optim.keyed: All state keys must be params. The following keys are not: {unknown}."
            )
        # Not torch's own beginning: parameters may be sharded tensors, and state and groups are shared.
        self._start({"state": state, "param_groups": list(param_groups), "params": params})

    def _start(self, fields: dict[str, Any]) -> None:
        fields.setdefault("defaults", {"_save_param_groups": False})
        optim.Optimizer.__setstate__(self, fields)

    def _saves_groups(self) -> bool:
        return self.defaults.get("_save_param_groups", False)

    def _names(self) -> dict[Any, str]:
        return {param: name for name, param in self.params.items()}

    def _group_states(self) -> list[dict[str, Any]]:
        names = self._names()
        return [
            {"params": sorted(names[param] for param in group["params"])}
            | {name: value for name, value in group.items() if name != "params"}
            for group in self.param_groups
        ]

    def state_dict(self) -> dict[str, Any]:
        """Return `state`, by the names of parameters, and `param_groups` if they are saved."""
        state = self.state
        found: dict[str, Any] = {
            "state": {name: state[param] for name, param in self.params.items() if param in state}
        }
        if self._saves_groups():
            found["param_groups"] = self._group_states()
        return found

    def post_load_state_dict(self) -> None:
        """Do what is left to do when a state has been loaded."""

    def load_state_dict(self, state_dict: Mapping[str, Any]) -> None:
        """Copy in place. Raise ValueError naming what is missing, unexpected or of another size."""
        own, given = self.state_dict()["state"], state_dict["state"]
        if len(own) != len(given):
            raise ValueError(f"optim.keyed: Different parameter count: {len(own)} vs {len(given)}")
        missing = sorted(own.keys() - given.keys())
        if missing:
            raise ValueError(f"optim.keyed: the state has nothing for parameter {missing[0]!r}.")
        for name, entries in own.items():
            _load_entries(entries, given[name], name)
        if self._saves_groups():
            self._load_groups(state_dict["param_groups"])
        self.post_load_state_dict()

    def _load_groups(self, given: list[Mapping[str, Any]]) -> None:
        groups = self.param_groups
        if len(groups) != len(given):
            raise ValueError(f"optim.keyed: Different param_groups count: {len(groups)} vs {len(given)}")
        by_names = {"/".join(sorted(group["params"])): group for group in given}
        names = self._names()
        for group in groups:
            key = "/".join(sorted(names[param] for param in group["params"]))
            if key not in by_names:
                raise ValueError(f"optim.keyed: the state has no group of the parameters {key}.")
            other = by_names[key]
            if len(group) != len(other):
                raise ValueError(
                    f"optim.keyed: Different param_group size: {len(group)} vs {len(other)} for {key}"
                )
            for name in group:
                if name == "params":
                    continue
                if name not in other:
                    raise ValueError(f"optim.keyed: the state of the group {key} has no {name!r}.")
                group[name] = other[name]

    def add_param_group(self, param_group: Any) -> None:
        """Raise NotImplementedError: parameters have names."""
        raise NotImplementedError("optim.keyed: groups are made when the optimizer is made.")

    def init_state(self, sparse_grad_parameter_names: set[str] | None = None) -> None:
        """Take one step with gradients of zero, so that all of the state is there, as before loading it."""
        sparse = sparse_grad_parameter_names or set()
        for name, param in self.params.items():
            if not getattr(param, "requires_grad", False):
                continue
            zeros = torch.zeros_like(param)
            param.grad = zeros.to_sparse() if name in sparse else zeros
        self.step(closure=None)

    def save_param_groups(self, save: bool) -> None:
        """Put groups of parameters into the state from now on, or leave them out."""
        self.defaults["_save_param_groups"] = save


class CombinedOptimizer(KeyedOptimizer):
    """Step several optimizers as one. Each may have a name, which begins the names of its parameters."""

    def __init__(self, optims: list[KeyedOptimizer | tuple[str, KeyedOptimizer]]) -> None:
        self._optims = [item if isinstance(item, tuple) else ("", item) for item in optims]
        for _, optimizer in self._optims:
            if not isinstance(optimizer, KeyedOptimizer):
                raise TypeError(
                    f"optim.combined: {type(optimizer).__name__} does not know its parameters by name. "
                    "Wrap it in a KeyedOptimizerWrapper."
                )
        names: set[str] = set()
        for key, optimizer in self._optims:
            for name in optimizer.params:
                name = self.prepend_opt_key(name, key)
                if name in names:
                    raise ValueError(f"optim.combined: Duplicate param key {name}")
                names.add(name)
        saves = {optimizer._saves_groups() for _, optimizer in self._optims}
        if len(saves) > 1:
            raise AssertionError("optim.combined: some optimizers save their groups and others do not.")
        self._start({"defaults": {"_save_param_groups": saves.pop() if saves else False}})

    @staticmethod
    def prepend_opt_key(name: str, opt_key: str) -> str:
        """Return the name of a parameter among those of all optimizers."""
        return f"{opt_key}.{name}" if opt_key else name

    @property
    def optimizers(self) -> list[tuple[str, KeyedOptimizer]]:
        """Return the optimizers and their names."""
        return self._optims

    @property
    def param_groups(self) -> list[dict[str, Any]]:
        """Return the groups of all optimizers; their learning rates may be changed."""
        return [group for _, optimizer in self._optims for group in optimizer.param_groups]

    @property
    def params(self) -> dict[str, torch.Tensor | ShardedTensor]:
        """Return the parameters of all optimizers by name."""
        return {
            self.prepend_opt_key(name, key): param
            for key, optimizer in self._optims
            for name, param in optimizer.params.items()
        }

    @property
    def state(self) -> dict[Any, Any]:
        """Return the state of all optimizers by parameter."""
        return {param: value for _, optimizer in self._optims for param, value in optimizer.state.items()}

    def step(self, closure: Any = None) -> None:
        """Step all."""
        for _, optimizer in self._optims:
            optimizer.step(closure=closure)

    def zero_grad(self, set_to_none: bool = True) -> None:
        """Drop all gradients."""
        for _, optimizer in self._optims:
            optimizer.zero_grad(set_to_none=set_to_none)

    def post_load_state_dict(self) -> None:
        """Let each do what is left to do."""
        for _, optimizer in self._optims:
            optimizer.post_load_state_dict()

    def save_param_groups(self, save: bool) -> None:
        """Put groups of parameters into the state from now on, or leave them out."""
        self.defaults["_save_param_groups"] = save
        for _, optimizer in self._optims:
            optimizer.save_param_groups(save)

    def set_optimizer_step(self, step: int) -> None:
        """Tell the number of the step to those that want to know."""
        _tell(self._optims, "set_optimizer_step", step)

    def update_hyper_parameters(self, params_dict: dict[str, Any]) -> None:
        """Tell new numbers to those that want to know."""
        _tell(self._optims, "update_hyper_parameters", params_dict)


def _tell(optims: list[tuple[str, Any]], method: str, value: Any) -> None:
    for _, optimizer in optims:
        if hasattr(optimizer, method):
            getattr(optimizer, method)(value)


class KeyedOptimizerWrapper(KeyedOptimizer):
    """Give the parameters of any torch optimizer names; `optim_factory` makes it of their list.

    With `pass_params_dict` it is made of the dictionary.
    """

    def __init__(
        self,
        params: Mapping[str, torch.Tensor | ShardedTensor],
        optim_factory: Callable[[list[torch.Tensor | ShardedTensor]], optim.Optimizer],
        pass_params_dict: bool = False,
    ) -> None:
        self._optimizer = optim_factory(params if pass_params_dict else list(params.values()))
        super().__init__(params, self._optimizer.state, self._optimizer.param_groups)
        self.param_groups = self._optimizer.param_groups

    def step(self, closure: Any = None) -> Any:
        """Step the optimizer inside."""
        return self._optimizer.step(closure=closure)

    def zero_grad(self, set_to_none: bool = True) -> None:
        """Drop the gradients."""
        self._optimizer.zero_grad(set_to_none=set_to_none)

    def set_optimizer_step(self, step: int) -> None:
        """Tell the number of the step to the optimizer inside, if it wants to know."""
        _tell([("", self._optimizer)], "set_optimizer_step", step)

    def update_hyper_parameters(self, params_dict: dict[str, Any]) -> None:
        """Tell new numbers to the optimizer inside, if it wants to know."""
        _tell([("", self._optimizer)], "update_hyper_parameters", params_dict)


class OptimizerWrapper(KeyedOptimizer):
    """Stand around another optimizer: parameters, state and groups are the other's."""

    def __init__(self, optimizer: KeyedOptimizer) -> None:
        self._optimizer = optimizer
        self._start({"defaults": {"_save_param_groups": optimizer._saves_groups()}})

    @property
    def params(self) -> Mapping[str, torch.Tensor | ShardedTensor]:
        """Return the parameters by name."""
        return self._optimizer.params

    @property
    def state(self) -> Mapping[Any, Any]:
        """Return the state by parameter."""
        return self._optimizer.state

    @property
    def param_groups(self) -> list[dict[str, Any]]:
        """Return the groups; their learning rates may be changed."""
        return self._optimizer.param_groups

    def step(self, closure: Any = None) -> Any:
        """Step the optimizer inside."""
        return self._optimizer.step(closure=closure)

    def zero_grad(self, set_to_none: bool = True) -> None:
        """Drop the gradients."""
        self._optimizer.zero_grad(set_to_none=set_to_none)

    def add_param_group(self, param_group: Any) -> None:
        """Raise NotImplementedError: parameters have names."""
        self._optimizer.add_param_group(param_group)

    def state_dict(self) -> dict[str, Any]:
        """Return the state of the optimizer inside."""
        return self._optimizer.state_dict()

    def post_load_state_dict(self) -> None:
        """Let the optimizer inside do what is left to do."""
        self._optimizer.post_load_state_dict()

    def load_state_dict(self, state_dict: Mapping[str, Any]) -> None:
        """Copy into the optimizer inside."""
        self._optimizer.load_state_dict(state_dict)
        self.post_load_state_dict()

    def save_param_groups(self, save: bool) -> None:
        """Put groups of parameters into the state from now on, or leave them out."""
        self.defaults["_save_param_groups"] = save
        self._optimizer.save_param_groups(save)

    def set_optimizer_step(self, step: int) -> None:
        """Tell the number of the step to the optimizer inside, if it wants to know."""
        _tell([("", self._optimizer)], "set_optimizer_step", step)

    def update_hyper_parameters(self, params_dict: dict[str, Any]) -> None:
        """Tell new numbers to the optimizer inside, if it wants to know."""
        _tell([("", self._optimizer)], "update_hyper_parameters", params_dict)
