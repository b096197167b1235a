"""Collections whose rows backward steps: the optimizer is chosen where they are made.

>>> import torch
>>> from tessera.modules.embedding_configs import EmbeddingBagConfig
>>> from tessera.sparse.jagged_tensor import KeyedJaggedTensor
>>> table = EmbeddingBagConfig(4, 2, "t", feature_names=["f"], init_fn=torch.nn.init.ones_)
>>> ebc = FusedEmbeddingBagCollection([table], torch.optim.SGD, {"lr": 0.5})
>>> features = KeyedJaggedTensor.from_lengths_sync(["f"], torch.tensor([3]), torch.tensor([1]))
>>> ebc(features).values().sum().backward()
>>> ebc.embedding_bags["t"].weight[2:].tolist()
[[1.0, 1.0], [0.5, 0.5]]
"""

from __future__ import annotations

import copy
from collections.abc import Mapping
from typing import Any

import torch
from torch import nn

from tessera import _C
from tessera.modules.embedding_configs import EmbeddingBagConfig, EmbeddingConfig
from tessera.modules.embedding_modules import EmbeddingBagCollection, EmbeddingCollection
from tessera.optim.fused import FusedOptimizer, FusedOptimizerModule

__all__ = [
    "EmbeddingFusedOptimizer",
    "FusedEmbeddingBagCollection",
    "FusedEmbeddingCollection",
    "fuse_embedding_optimizer",
]


class EmbeddingFusedOptimizer(FusedOptimizer):
    """Show what backward's rule keeps, by the names of tables: `<table>.weight.momentum_1` and so on.

    The state is the engine's own memory. `step` and `zero_grad` tell it the learning rate of `param_groups`.
    Rules that count steps have `<table>.weight.step`, too.
    """

    def __init__(self, tables: Mapping[str, torch.Tensor], rows: _C.embedding.RowOptimizer) -> None:
        self._rows = rows
        self._rate = rows.options.learning_rate
        self._counters: list[torch.Tensor] = []
        kept = rows.state_dict()
        counts = any(name.endswith(".momentum2") for name in kept)
        params, state = {}, {}
        for table, weight in tables.items():
            key = f"{table}.weight"
            params[key] = weight
            entries = {
                f"{key}.{entry.replace('momentum', 'momentum_')}": kept[f"{table}.{entry}"]
                for entry in ("momentum1", "momentum2")
                if f"{table}.{entry}" in kept
            }
            if counts:
                entries[f"{key}.step"] = torch.zeros((), dtype=torch.int64)
                self._counters.append(entries[f"{key}.step"])
            if entries:
                state[weight] = entries
        super().__init__(params, state, [{"params": list(params.values()), "lr": self._rate}])

    def _tell_rate(self) -> None:
        rate = self.param_groups[0]["lr"]
        if rate != self._rate:
            self._rows.set_learning_rate(rate)
            self._rate = rate

    def step(self, closure: Any = None) -> None:
        """Tell the rate: backward has stepped."""
        self._tell_rate()

    def zero_grad(self, set_to_none: bool = True) -> None:
        """Tell the rate: backward leaves no gradients."""
        self._tell_rate()

    def state_dict(self) -> dict[str, Any]:
        """Return `state` by the names of parameters."""
        for counter in self._counters:
            counter.fill_(self._rows.num_steps)
        return super().state_dict()

    def post_load_state_dict(self) -> None:
        """Tell the engine the rate and the number of the step."""
        self._tell_rate()
        if self._counters:
            self._rows.load_state_dict({**self._rows.state_dict(), "step": self._counters[0].clone()})


class _Fused(FusedOptimizerModule):
    """What both collections share: the rule, and its optimizer."""

    def _choose(self, optimizer_type: type[torch.optim.Optimizer], optimizer_kwargs: dict[str, Any]) -> Any:
        from tessera.distributed.utils import _in_backward_params, _to_options

        # As the sharding reads it from a parameter.
        asked = torch.empty(0)
        asked._optimizer_classes, asked._optimizer_kwargs = [optimizer_type], [dict(optimizer_kwargs)]
        try:
            params = _in_backward_params(asked, "") or {}
            params = {"learning_rate" if key == "lr" else key: value for key, value in params.items()}
            return _to_options(params)
        except ValueError as error:
            raise ValueError(
                f"Cannot fuse optimizer_type={optimizer_type} with kwargs {optimizer_kwargs}: {error}"
            ) from error

    def _note(self, kind: type, kwargs: dict[str, Any]) -> None:
        self._optimizer_type = kind
        self._optimizer_kwargs = kwargs
        weights = self._weights()
        for weight in weights:  # a sharder reads the rule there
            weight._optimizer_classes, weight._optimizer_kwargs = [kind], [dict(kwargs)]
        # Tables on the meta device have no rows yet, so that nothing is kept beside them.
        is_meta = any(weight.is_meta for weight in weights)
        self._optimizer = None if is_meta else self._make_optimizer()

    def _make_optimizer(self) -> EmbeddingFusedOptimizer:
        weights = {name: table.weight for name, table in self._tables().items()}
        return EmbeddingFusedOptimizer(weights, self._lookup.optimizer(self._weights()))

    # Copies and unpickled modules have an engine of their own, with what the rule has kept.
    def __getstate__(self) -> dict[str, Any]:
        state = super().__getstate__()
        optimizer = state.pop("_optimizer")
        state["_options"] = (*state["_options"][:2], None)  # the engine's, which is not copied
        if optimizer is not None:
            state["_kept"] = copy.deepcopy(optimizer.state_dict()), optimizer.param_groups[0]["lr"]
        return state

    def __setstate__(self, state: dict[str, Any]) -> None:
        kept = state.pop("_kept", None)
        chosen = self._choose(state["_optimizer_type"], state["_optimizer_kwargs"])
        state["_options"] = (*state["_options"][:2], chosen)
        super().__setstate__(state)
        self._note(self._optimizer_type, self._optimizer_kwargs)
        if kept is None:
            return
        optimizer = self.fused_optimizer()
        optimizer.load_state_dict(kept[0])
        optimizer.param_groups[0]["lr"] = kept[1]
        optimizer.step()

    def optimizer_type(self) -> type[torch.optim.Optimizer]:
        """Return the class of the rule."""
        return self._optimizer_type

    def optimizer_kwargs(self) -> dict[str, Any]:
        """Return what the rule was made with."""
        return self._optimizer_kwargs

    def fused_optimizer(self) -> EmbeddingFusedOptimizer:
        """Return the optimizer that stands for the steps of backward. ValueError on the meta device."""
        if self._optimizer is None:
            self._optimizer = self._make_optimizer()
        return self._optimizer


class FusedEmbeddingBagCollection(_Fused, EmbeddingBagCollection):
    """Pool rows as EmbeddingBagCollection does; backward steps them.

    `optimizer_type` is a class of torch.optim or tessera.optim whose rule the engine has; ValueError for
    others. `location` says where torchrec puts rows on a GPU; here they lie on `device`.
    """

    def __init__(
        self,
        tables: list[EmbeddingBagConfig],
        optimizer_type: type[torch.optim.Optimizer],
        optimizer_kwargs: dict[str, Any],
        is_weighted: bool = False,
        device: torch.device | None = None,
        location: Any = None,
    ) -> None:
        options = self._choose(optimizer_type, optimizer_kwargs)
        EmbeddingBagCollection.__init__(self, tables, is_weighted, device, optimizer=options)
        self._note(optimizer_type, optimizer_kwargs)


class FusedEmbeddingCollection(_Fused, EmbeddingCollection):
    """Look rows up as EmbeddingCollection does; backward steps them. Arguments as its pooled sibling's."""

    def __init__(
        self,
        tables: list[EmbeddingConfig],
        optimizer_type: type[torch.optim.Optimizer],
        optimizer_kwargs: dict[str, Any],
        device: torch.device | None = None,
        need_indices: bool = False,
        location: Any = None,
    ) -> None:
        options = self._choose(optimizer_type, optimizer_kwargs)
        EmbeddingCollection.__init__(self, tables, device, need_indices, optimizer=options)
        self._note(optimizer_type, optimizer_kwargs)


def _fused(
    module: nn.Module, kind: type[torch.optim.Optimizer], kwargs: dict[str, Any], device: Any
) -> nn.Module | None:
    if isinstance(module, EmbeddingBagCollection):
        made: nn.Module = FusedEmbeddingBagCollection(
            module.embedding_bag_configs(), kind, kwargs, module.is_weighted(), device
        )
    elif isinstance(module, EmbeddingCollection):
        made = FusedEmbeddingCollection(
            module.embedding_configs(), kind, kwargs, device, module.need_indices()
        )
    else:
        return None
    if not any(parameter.is_meta for parameter in (*module.parameters(), *made.parameters())):
        made.load_state_dict(module.state_dict())
    return made


def fuse_embedding_optimizer(
    model: nn.Module,
    optimizer_type: type[torch.optim.Optimizer],
    optimizer_kwargs: dict[str, Any],
    device: torch.device,
    location: Any = None,
) -> nn.Module:
    """Replace the collections of a model, in place, by ones that backward steps; they keep their rows.

    Returns the model, or what takes its place if it is a collection itself.
    """
    whole = _fused(model, optimizer_type, optimizer_kwargs, device)
    if whole is not None:
        return whole
    for name, child in model.named_children():
        setattr(model, name, fuse_embedding_optimizer(child, optimizer_type, optimizer_kwargs, device))
    return model
