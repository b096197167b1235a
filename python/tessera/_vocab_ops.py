"""The vocabulary's functions as operators of torch, so that torch.compile takes them into its graph.

Outside a compiled graph the engine is called as it is. Inside, every function is an operator with a
shape function and a gradient of its own; a group goes by its name. Backward reads the logits twice there:
the operator of the gradient runs the engine's forward again, for nothing but tensors may be kept.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.distributed import ProcessGroup
from torch.distributed.distributed_c10d import _resolve_process_group

from tessera import _C
from tessera._recording import recording

_LIBRARY = torch.library.Library("tessera", "FRAGMENT")
COLUMNS = "int[]? columns, int? vocab_size"


class Operator:
    """One function of the engine, or one in Python that is called as those are, and its operator.

    `inputs` are the schema's arguments up to the options, `fields` those of the options, by the names they
    have in the engine's class `options`. `differentiable` are the tensors that get a gradient, `shapes`
    gives the outputs for tensors without values.
    """

    def __init__(
        self,
        engine: Callable,
        inputs: str,
        options: type,
        fields: str,
        num_outputs: int,
        shapes: Callable,
        differentiable: Sequence[str] = ("logits",),
        constants: Sequence[int] = (),
    ):
        self.engine = engine
        self.options = options
        name, arguments = "vocab" + engine.__name__.removeprefix("vocab"), f"{inputs}, {fields}"
        names = [word.split()[-1] for word in arguments.split(", ")]
        self.num_inputs = len(inputs.split(", "))
        self.fields = names[self.num_inputs :]
        usual = options()
        self.defaults = {field: getattr(usual, field) for field in self.fields}
        self.group_place = names.index("group")
        self.differentiable = tuple(names.index(tensor) for tensor in differentiable)
        self.num_outputs = num_outputs
        outputs = ", ".join(["Tensor"] * num_outputs)
        _LIBRARY.define(f"{name}({arguments}) -> ({outputs})")
        _LIBRARY.define(f"{name}_backward(Tensor?[] gradients, {arguments}) -> Tensor[]")
        torch.library.impl(f"tessera::{name}", "CompositeExplicitAutograd", lib=_LIBRARY)(self._forward)
        torch.library.impl(f"tessera::{name}_backward", "CompositeExplicitAutograd", lib=_LIBRARY)(
            self._backward
        )
        torch.library.register_fake(
            f"tessera::{name}",
            lambda *words: shapes(*self._inputs(words), **self._named(words)),
            lib=_LIBRARY,
        )
        torch.library.register_fake(f"tessera::{name}_backward", self._gradient_shapes, lib=_LIBRARY)
        self.operator = getattr(torch.ops.tessera, name)
        self.gradient = getattr(torch.ops.tessera, f"{name}_backward")

        def save(ctx: Any, inputs: tuple, output: Any) -> None:
            tensors = [word if isinstance(word, Tensor) else None for word in inputs]
            ctx.save_for_backward(*tensors)
            ctx.words = [None if isinstance(word, Tensor) else word for word in inputs]
            outputs = output if isinstance(output, tuple) else (output,)
            ctx.mark_non_differentiable(*(outputs[place] for place in constants))

        def backward(ctx: Any, *gradients: Tensor | None) -> tuple[Tensor | None, ...]:
            words = [
                word if tensor is None else tensor
                for tensor, word in zip(ctx.saved_tensors, ctx.words, strict=True)
            ]
            found = iter(self.gradient(list(gradients), *words))
            result: list[Tensor | None] = [None] * len(words)
            for place in self.differentiable:
                if words[place] is not None:
                    gradient = next(found)
                    result[place] = gradient if ctx.needs_input_grad[place] else None
            return tuple(result)

        torch.library.register_autograd(f"tessera::{name}", backward, setup_context=save, lib=_LIBRARY)

    def _inputs(self, words: Sequence[Any]) -> Sequence[Any]:
        return words[: self.num_inputs]

    def _named(self, words: Sequence[Any]) -> dict[str, Any]:
        return dict(zip(self.fields, words[self.num_inputs :], strict=True))

    def _run(self, words: Sequence[Any], like: Tensor) -> tuple[Tensor, ...]:
        inputs = list(self._inputs(words))
        name = inputs[self.group_place]
        inputs[self.group_place] = None if name is None else _resolve_process_group(name)
        options = self.options(**self._named(words))
        options.overwrite = "never"  # what an operator is given stays as it is
        outputs = self.engine(*inputs, options)
        outputs = outputs if isinstance(outputs, tuple) else (outputs,)
        return tuple(
            like.new_empty(0, dtype=torch.float32) if output is None else output for output in outputs
        )

    def _forward(self, *words: Any) -> Any:
        with torch.no_grad():
            # Results may share memory with each other, which an operator's must not.
            outputs = tuple(output.clone() for output in self._run(words, words[0]))
        return outputs if self.num_outputs > 1 else outputs[0]

    def _backward(self, gradients: Sequence[Tensor | None], *words: Any) -> list[Tensor]:
        words = list(words)
        with recording():
            leaves = []
            for place in self.differentiable:
                if words[place] is not None:
                    words[place] = words[place].detach().requires_grad_(True)
                    leaves.append(words[place])
            outputs = self._run(words, words[0])
            pairs = [
                (output, gradient)
                for output, gradient in zip(outputs, gradients, strict=True)
                if gradient is not None and output.requires_grad
            ]
            if not pairs:
                return [torch.zeros_like(leaf, requires_grad=False) for leaf in leaves]
            found = torch.autograd.grad(
                [output for output, _ in pairs], leaves, [gradient for _, gradient in pairs]
            )
        return [gradient.detach().contiguous() for gradient in found]

    def _gradient_shapes(self, gradients: Sequence[Tensor | None], *words: Any) -> list[Tensor]:
        return [
            words[place].new_empty(words[place].shape)
            for place in self.differentiable
            if words[place] is not None
        ]

    def __call__(self, *inputs: Any, **fields: Any) -> Any:
        if not torch.compiler.is_compiling():
            return self.engine(*inputs, self.options(**fields))
        words = list(inputs)
        group: ProcessGroup | None = words[self.group_place]
        words[self.group_place] = None if group is None else group.group_name
        for field, usual in self.defaults.items():
            words.append(fields.get(field, usual))
        return self.operator(*words)


@dataclasses.dataclass
class Options:
    """Those of functions in Python; each has some of them."""

    columns: Sequence[int] | None = None
    vocab_size: int | None = None
    ignore_index: int = -100
    temperature: float = 1.0
    check_labels: bool | None = None
    beta: float = 0.5
    workspace_bytes: int | None = None
    local_bias: Tensor | None = None
    local_target_bias: Tensor | None = None
    overwrite: str = "never"


def of_tokens(logits: Tensor, *inputs: Any, **fields: Any) -> Tensor:
    return logits.new_empty(logits.shape[:-1], dtype=torch.float32)


def of_ids(logits: Tensor, ids: Tensor, *inputs: Any, **fields: Any) -> Tensor:
    return logits.new_empty(ids.shape, dtype=torch.float32)


def _scores(
    like: Tensor, shape: Sequence[int], wanted: Sequence[bool], loss: str | None
) -> tuple[Tensor, ...]:
    def output(is_there: bool, extents: Sequence[int], dtype: torch.dtype = torch.float32) -> Tensor:
        return like.new_empty(extents if is_there else (0,), dtype=dtype)

    of_loss = output(loss is not None, shape if loss == "none" else ())
    argmax = output(wanted[3], shape, torch.int64 if wanted[3] else torch.float32)
    return (of_loss, *(output(flag, shape) for flag in wanted[:3]), argmax)


def _token_shapes(
    logits: Tensor,
    labels: Any,
    group: Any,
    wanted: Sequence[bool],
    reduction: str | None = None,
    **fields: Any,
) -> Any:
    return _scores(logits, logits.shape[:-1], wanted, reduction)


def _linear_shapes(
    hidden: Tensor,
    weight: Tensor,
    labels: Tensor,
    group: Any,
    wanted: Sequence[bool],
    reduction: str,
    **fields: Any,
) -> Any:
    return _scores(hidden, labels.shape, wanted, reduction)


LABELS = f"{COLUMNS}, int ignore_index, float temperature, bool? check_labels"
_TOKENS = LABELS.replace("bool?", "int reproducible_tile, bool?") + ", str overwrite"
_LOSS = "str reduction, float label_smoothing, float z_loss"
token_scores = Operator(
    _C.vocab_token_scores,
    "Tensor logits, Tensor? labels, str? group, bool[] wanted",
    _C.TokenOptions,
    _TOKENS,
    5,
    _token_shapes,
    constants=(0, 4),
)
cross_entropy = Operator(
    _C.vocab_cross_entropy,
    "Tensor logits, Tensor labels, str? group, bool[] wanted",
    _C.CrossEntropyOptions,
    f"{_TOKENS}, {_LOSS}",
    5,
    _token_shapes,
    constants=(4,),
)
linear_cross_entropy = Operator(
    _C.vocab_linear_cross_entropy,
    "Tensor hidden, Tensor weight, Tensor labels, str? group, bool[] wanted",
    _C.LinearOptions,
    f"{LABELS}, {_LOSS}, int? workspace_bytes, Tensor? local_bias, float softcap",
    5,
    _linear_shapes,
    differentiable=("hidden", "weight", "local_bias"),
    constants=(4,),
)
_AT_IDS = "Tensor logits, Tensor ids, str? group"
log_probabilities_at = Operator(_C.vocab_log_probabilities_at, _AT_IDS, _C.TokenOptions, LABELS, 1, of_ids)
logits_at = Operator(_C.vocab_logits_at, _AT_IDS, _C.TokenOptions, LABELS, 1, of_ids)
log_softmax = Operator(
    _C.vocab_log_softmax,
    "Tensor logits, str? group",
    _C.TokenOptions,
    f"{COLUMNS}, float temperature",
    1,
    lambda logits, *inputs, **fields: logits.new_empty(logits.shape),
)
soft_cross_entropy = Operator(
    _C.vocab_soft_cross_entropy,
    "Tensor logits, Tensor target_logits, str? group",
    _C.TokenOptions,
    f"{COLUMNS}, float temperature",
    1,
    of_tokens,
)
sampled_log_probabilities = Operator(
    _C.vocab_sampled_log_probabilities,
    "Tensor logits, Tensor labels, str? group",
    _C.SamplingOptions,
    f"int top_k, float top_p, {LABELS}",
    1,
    of_tokens,
)


def label_log_probabilities(
    logits: Tensor, labels: Tensor, columns: tuple[int, int] | None, group: ProcessGroup | None
) -> Tensor:
    """Return log p of the labels, for the names of the reference in a compiled graph."""
    wanted = [True, False, False, False]
    return token_scores(logits, labels, group, wanted, columns=columns)[1]


def filtered_log_probabilities(
    logits: Tensor,
    labels: Tensor,
    columns: tuple[int, int] | None,
    group: ProcessGroup | None,
    top_k: int | None,
    top_p: float,
) -> Tensor:
    """The same under filters."""
    if (top_k is None or top_k < 1) and top_p == 1.0:
        return label_log_probabilities(logits, labels, columns, group)
    top_k = 0 if top_k is None else max(top_k, 0)
    return sampled_log_probabilities(logits, labels, group, top_k=top_k, top_p=top_p, columns=columns)
