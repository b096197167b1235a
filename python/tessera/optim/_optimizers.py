"""Names and numbers of torch's and torchrec's optimizers over the engine's."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from types import MappingProxyType
from typing import Any

import torch

from tessera._C import embedding as _engine

Named = Mapping[str, torch.Tensor] | Iterable[torch.Tensor | tuple[str, torch.Tensor]]

# What torch calls the state of its own rules, after the engine's names; the rest is called as in the engine.
_SUM = {"momentum1": "sum"}
_MOMENTUM = {"momentum1": "momentum_buffer"}
_AVERAGES = {"momentum1": "exp_avg", "momentum2": "exp_avg_sq"}


class TableOptimizer(torch.optim.Optimizer):
    """What all optimizers of this module can do: torch's interface, and norms of sparse gradients.

    `params` may also be a dictionary of names. Numbers in `param_groups` may be changed at any time, so
    schedules work. State goes by parameter: `step`, and tensors called as torch calls them.
    """

    KIND: str
    STATE: Mapping[str, str] = MappingProxyType({})

    def __init__(self, params: Named, defaults: dict[str, Any]) -> None:
        given = list(params.items()) if isinstance(params, Mapping) else list(params)
        if not given:
            raise ValueError("optim: there are no tables to optimize.")
        self._engines: list[tuple[_engine.RowOptimizer, tuple] | None] = []
        super().__init__(given, defaults)
        for place in range(len(self.param_groups)):
            self._engine_of(place)

    def _options(self, group: Mapping[str, Any]) -> _engine.OptimizerOptions:
        options = _engine.OptimizerOptions()
        options.kind = getattr(_engine.OptimizerKind, self.KIND)
        options.learning_rate = float(group["lr"])
        for name, value in self._numbers(group).items():
            setattr(options, name, value)
        return options

    def _numbers(self, group: Mapping[str, Any]) -> dict[str, Any]:
        """Return the engine's numbers out of a group's."""
        mode = _engine.WeightDecayMode
        known = {"weight_decay", "eps", "momentum", "eta", "max_gradient", "stochastic_rounding", "seed"}
        numbers = {name: value for name, value in group.items() if name in known}
        numbers["weight_decay_mode"] = mode.DECOUPLED if self.KIND == "ADAMW" else mode.L2
        if "betas" in group:
            numbers["beta1"], numbers["beta2"] = group["betas"]
        if "initial_accumulator_value" in group:
            numbers["initial_accumulator"] = group["initial_accumulator_value"]
        return numbers

    def _engine_of(self, place: int) -> _engine.RowOptimizer | None:
        """Return the engine of a group, made when its parameters have memory; with the group's numbers."""
        group = self.param_groups[place]
        self._engines += [None] * (place + 1 - len(self._engines))
        engine = self._engines[place]
        now = tuple(sorted((name, str(value)) for name, value in self._numbers(group).items()))
        if engine is None or engine[1] != now:
            if any(param.is_meta for param in group["params"]):
                return None
            named = [(str(number), param) for number, param in enumerate(group["params"])]
            made = _engine.RowOptimizer(named, self._options(group))
            if engine is not None:
                made.load_state_dict(engine[0].state_dict())
            self._engines[place] = engine = (made, now)
            self._show_state(place)
        if engine[0].options.learning_rate != float(group["lr"]):
            engine[0].set_learning_rate(float(group["lr"]))
        return engine[0]

    def _show_state(self, place: int) -> None:
        """Put the engine's own tensors where torch looks for state."""
        engine = self._engines[place][0]
        tensors = engine.state_dict()
        for number, param in enumerate(self.param_groups[place]["params"]):
            entries: dict[str, Any] = {"step": torch.tensor(float(engine.num_steps))}
            for own, name in self.STATE.items():
                tensor = tensors[f"{number}.{own}"]
                entries[name] = tensor.unsqueeze(1) if tensor.dim() == 1 else tensor
            self.state[param] = entries

    def _all(self) -> list[_engine.RowOptimizer]:
        found = [self._engine_of(place) for place in range(len(self.param_groups))]
        if None in found:
            raise ValueError("optim: a parameter is on the meta device. Give it memory before stepping.")
        return found

    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        """Step every table that has a gradient, once; return what the closure returns."""
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        for place, engine in enumerate(self._all()):
            engine.step()
            for param in self.param_groups[place]["params"]:
                self.state[param]["step"].fill_(engine.num_steps)
        return loss

    def clip_grad_norm(self, max_norm: float) -> float:
        """Scale all gradients down to this 2-norm if theirs is greater; return what it was."""
        engines = self._all()
        if len(engines) == 1:
            return engines[0].clip_grad_norm(max_norm)
        norms = [engine.clip_grad_norm(float("inf")) for engine in engines]
        total = sum(norm**2 for norm in norms) ** 0.5
        if total > max_norm:
            for engine, norm in zip(engines, norms, strict=True):
                engine.clip_grad_norm(norm * max_norm / total)
        return total

    def clip_grad_value(self, limit: float) -> None:
        """Move every element of the summed gradients into [-limit, limit]."""
        for engine in self._all():
            engine.clip_grad_value(limit)

    @property
    def num_steps(self) -> int:
        """Return how many steps were taken."""
        return max(engine.num_steps for engine in self._all())

    def load_state_dict(self, state_dict: Mapping[str, Any]) -> None:
        """Copy state and numbers. Raise ValueError naming what is missing or of another shape.

        State keeps its own type, whatever the type of the rows.
        """
        groups = state_dict["param_groups"]
        sizes = [len(group["params"]) for group in self.param_groups]
        if sizes != [len(group["params"]) for group in groups]:
            raise ValueError(f"optim: the groups have {sizes} parameters here and others in the state.")
        for group, given in zip(self.param_groups, groups, strict=True):
            group.update(
                {name: value for name, value in given.items() if name not in ("params", "param_names")}
            )
        for place, (engine, group) in enumerate(zip(self._all(), groups, strict=True)):
            tensors = {name: tensor.clone() for name, tensor in engine.state_dict().items()}
            for number, key in enumerate(group["params"]):
                entries = state_dict["state"].get(key)
                if entries is None:
                    raise ValueError(f"optim: the state has nothing for parameter {number} of group {place}.")
                for own, name in self.STATE.items():
                    if name not in entries:
                        raise ValueError(f"optim: the state of parameter {number} has no {name!r}.")
                    wanted = tensors[f"{number}.{own}"]
                    if entries[name].numel() != wanted.numel():
                        raise ValueError(
                            f"optim: {name!r} of parameter {number} has {entries[name].numel()} elements in "
                            f"the state and {wanted.numel()} here."
                        )
                    tensors[f"{number}.{own}"] = entries[name].reshape(wanted.shape)
                tensors["step"] = torch.tensor(int(entries["step"]))
            engine.load_state_dict(tensors)
            self._show_state(place)


class SGD(TableOptimizer):
    """Step by the gradient."""

    KIND = "SGD"

    def __init__(self, params: Named, lr: float = 0.01, weight_decay: float = 0.0, **numbers: Any) -> None:
        super().__init__(params, {"lr": lr, "weight_decay": weight_decay, **numbers})


class LarsSGD(TableOptimizer):
    """SGD with momentum, each row at a rate by the norms of weights and gradient."""

    KIND = "LARS_SGD"
    STATE = _MOMENTUM

    def __init__(
        self,
        params: Named,
        lr: float = 0.01,
        momentum: float = 0.9,
        weight_decay: float = 0.0,
        eta: float = 0.001,
        **numbers: Any,
    ) -> None:
        defaults = {"lr": lr, "momentum": momentum, "weight_decay": weight_decay, "eta": eta, **numbers}
        super().__init__(params, defaults)


class _Adagrad(TableOptimizer):
    STATE = _SUM

    def __init__(
        self,
        params: Named,
        lr: float = 0.01,
        lr_decay: float = 0.0,
        weight_decay: float = 0.0,
        initial_accumulator_value: float = 0.0,
        eps: float = 1e-10,
        *,
        maximize: bool = False,
        **numbers: Any,
    ) -> None:
        if lr_decay or maximize:
            raise ValueError(
                "optim: there is neither lr_decay nor maximize; use a schedule, or the other sign."
            )
        super().__init__(
            params,
            {
                "lr": lr,
                "lr_decay": lr_decay,
                "eps": eps,
                "weight_decay": weight_decay,
                "initial_accumulator_value": initial_accumulator_value,
                "maximize": maximize,
                **numbers,
            },
        )


class Adagrad(_Adagrad):
    """Adagrad, of the rows that have a gradient."""

    KIND = "ADAGRAD"


class RowWiseAdagrad(_Adagrad):
    """Adagrad with one sum per row: of the means of its gradients' squares."""

    KIND = "ROWWISE_ADAGRAD"


class _Adam(TableOptimizer):
    STATE = _AVERAGES
    WEIGHT_DECAY = 0.0

    def __init__(
        self,
        params: Named,
        lr: float = 0.001,
        betas: tuple[float, float] = (0.9, 0.999),
        eps: float = 1e-8,
        weight_decay: float | None = None,
        **numbers: Any,
    ) -> None:
        decay = self.WEIGHT_DECAY if weight_decay is None else weight_decay
        super().__init__(params, {"lr": lr, "betas": betas, "eps": eps, "weight_decay": decay, **numbers})


class Adam(_Adam):
    """Adam, of the rows that have a gradient."""

    KIND = "ADAM"


class AdamW(_Adam):
    """Adam with weight decay apart from the gradient."""

    KIND = "ADAMW"
    WEIGHT_DECAY = 0.01


class PartialRowWiseAdam(_Adam):
    """Adam with one second moment per row."""

    KIND = "PARTIAL_ROWWISE_ADAM"


class LAMB(_Adam):
    """Adam, each row at a rate by the norms of weights and step."""

    KIND = "LAMB"


class PartialRowWiseLAMB(_Adam):
    """LAMB with one second moment per row."""

    KIND = "PARTIAL_ROWWISE_LAMB"
