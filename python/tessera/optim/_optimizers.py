"""Names and numbers of torch's and torchrec's optimizers over the engine's."""

from __future__ import annotations

from collections.abc import Iterable, Mapping

import torch

from tessera._C import embedding as _engine

Named = Mapping[str, torch.Tensor] | Iterable[torch.Tensor | tuple[str, torch.Tensor]]


def _named(params: Named) -> list[tuple[str, torch.Tensor]]:
    """Give every table a name: its own, or its place."""
    if isinstance(params, Mapping):
        return list(params.items())
    return [item if isinstance(item, tuple) else (str(i), item) for i, item in enumerate(params)]


class TableOptimizer:
    """What all optimizers of this module can do. `param_groups[0]["lr"]` may be changed at any time."""

    def __init__(self, params: Named, kind: str, lr: float, **numbers: object) -> None:
        named = _named(params)
        if not named:
            raise ValueError("optim: there are no tables to optimize.")
        options = _engine.OptimizerOptions()
        options.kind = getattr(_engine.OptimizerKind, kind)
        options.learning_rate = lr
        for name, value in numbers.items():
            setattr(options, name, value)
        self._engine = _engine.RowOptimizer(named, options)
        self.params = dict(named)
        self.param_groups = [{"params": [tensor for _, tensor in named], "lr": lr}]

    def step(self) -> None:
        """Step every table that has a gradient, once."""
        lr = self.param_groups[0]["lr"]
        if lr != self._engine.options.learning_rate:
            self._engine.set_learning_rate(lr)
        self._engine.step()

    def zero_grad(self, set_to_none: bool = True) -> None:
        """Drop the gradients."""
        self._engine.zero_grad()

    def clip_grad_norm(self, max_norm: float) -> float:
        """Scale all gradients down to this 2-norm if theirs is greater; return what it was."""
        return self._engine.clip_grad_norm(max_norm)

    def clip_grad_value(self, limit: float) -> None:
        """Move every element of the summed gradients into [-limit, limit]."""
        self._engine.clip_grad_value(limit)

    @property
    def num_steps(self) -> int:
        return self._engine.num_steps

    def state_dict(self) -> dict[str, object]:
        """Return `state`: "<table>.momentum1" and so on, the tensors themselves; and the rate."""
        return {"state": dict(self._engine.state_dict()), "lr": self.param_groups[0]["lr"]}

    def load_state_dict(self, state_dict: Mapping[str, object]) -> None:
        """Copy. Raise ValueError naming what is missing, unexpected or of another shape."""
        self._engine.load_state_dict(dict(state_dict["state"]))
        self.param_groups[0]["lr"] = state_dict["lr"]


def _decay(weight_decay: float, decoupled: bool) -> dict[str, object]:
    mode = _engine.WeightDecayMode
    return {
        "weight_decay": weight_decay,
        "weight_decay_mode": mode.DECOUPLED if decoupled else mode.L2,
    }


class SGD(TableOptimizer):
    def __init__(self, params: Named, lr: float = 0.01, weight_decay: float = 0.0, **numbers: object) -> None:
        super().__init__(params, "SGD", lr, **_decay(weight_decay, False), **numbers)


class LarsSGD(TableOptimizer):
    def __init__(
        self,
        params: Named,
        lr: float = 0.01,
        momentum: float = 0.9,
        weight_decay: float = 0.0,
        eta: float = 0.001,
        **numbers: object,
    ) -> None:
        decay = _decay(weight_decay, False)
        super().__init__(params, "LARS_SGD", lr, momentum=momentum, eta=eta, **decay, **numbers)


class _Adagrad(TableOptimizer):
    KIND = "ADAGRAD"

    def __init__(
        self,
        params: Named,
        lr: float = 0.01,
        weight_decay: float = 0.0,
        initial_accumulator_value: float = 0.0,
        eps: float = 1e-10,
        **numbers: object,
    ) -> None:
        super().__init__(
            params,
            self.KIND,
            lr,
            initial_accumulator=initial_accumulator_value,
            eps=eps,
            **_decay(weight_decay, False),
            **numbers,
        )


class Adagrad(_Adagrad):
    pass


class RowWiseAdagrad(_Adagrad):
    KIND = "ROWWISE_ADAGRAD"


class _Adam(TableOptimizer):
    KIND = "ADAM"
    DECOUPLED = False
    WEIGHT_DECAY = 0.0

    def __init__(
        self,
        params: Named,
        lr: float = 0.001,
        betas: tuple[float, float] = (0.9, 0.999),
        eps: float = 1e-8,
        weight_decay: float | None = None,
        **numbers: object,
    ) -> None:
        decay = self.WEIGHT_DECAY if weight_decay is None else weight_decay
        super().__init__(
            params,
            self.KIND,
            lr,
            beta1=betas[0],
            beta2=betas[1],
            eps=eps,
            **_decay(decay, self.DECOUPLED),
            **numbers,
        )


class Adam(_Adam):
    pass


class AdamW(_Adam):
    KIND = "ADAMW"
    DECOUPLED = True
    WEIGHT_DECAY = 0.01


class PartialRowWiseAdam(_Adam):
    KIND = "PARTIAL_ROWWISE_ADAM"


class LAMB(_Adam):
    KIND = "LAMB"


class PartialRowWiseLAMB(_Adam):
    KIND = "PARTIAL_ROWWISE_LAMB"
