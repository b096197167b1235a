"""The names of nemo_automodel.components.loss.te_parallel_ce, on Tessera's engine.

docs/deviations.md lists where numbers differ from the reference because the reference's are wrong.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.distributed import ProcessGroup

from tessera import _C, _kept_graph, _vocab_ops
from tessera._tensors import local_part, vocab_part

__all__ = [
    "HAVE_TE_PARALLEL_CE",
    "MISSING_TE_PARALLEL_CE_MSG",
    "CrossEntropyFunction",
    "TEParallelCrossEntropy",
    "parallel_cross_entropy",
]

#: The engine is part of the library: it is always there, and nothing is missing.
HAVE_TE_PARALLEL_CE = True
MISSING_TE_PARALLEL_CE_MSG = ""


class CrossEntropyFunction(_kept_graph.EngineFunction):
    """Cross entropy of logits whose vocabulary is shared evenly by a group.

    >>> import torch
    >>> logits = torch.zeros(1, 2, 8, requires_grad=True)
    >>> loss = CrossEntropyFunction.apply(logits, torch.tensor([[3, -100]]))
    >>> loss.sum().backward()
    >>> logits.grad[0, :, 3].tolist()
    [-0.875, 0.0]
    """

    @staticmethod
    def forward(
        ctx: Any,
        _input: Tensor,
        target: Tensor,
        label_smoothing: float = 0.0,
        reduce_loss: bool = False,
        dist_process_group: ProcessGroup | None = None,
        ignore_idx: int = -100,
    ) -> Tensor:
        """Return the loss of every token, or their mean with `reduce_loss`. Nothing is written."""
        own, group, columns = vocab_part("parallel_cross_entropy", _input, dist_process_group)

        def compute(logits: Tensor) -> Tensor:
            if torch.compiler.is_compiling():
                reduction = "mean" if reduce_loss else "none"
                return _compiled_loss(logits, target, label_smoothing, reduction, group, ignore_idx, columns)
            return _C.parallel_cross_entropy(
                logits, local_part(target), label_smoothing, reduce_loss, group, ignore_idx, columns
            )

        return _kept_graph.run(ctx, own, False, compute)

    @staticmethod
    def backward(ctx: Any, grad_output: Tensor) -> tuple[Tensor, None, None, None, None, None]:
        """Return the gradient of the logits; upstream gradients may differ per token."""
        return _kept_graph.gradient(ctx, grad_output), None, None, None, None, None


def _compiled_loss(
    logits: Tensor,
    labels: Tensor,
    label_smoothing: float,
    reduction: str,
    group: ProcessGroup | None,
    ignore_index: int,
    columns: tuple[int, int] | None,
) -> Tensor:
    shaped = local_part(labels).reshape(logits.shape[:-1])
    wanted = [False] * 4
    return _vocab_ops.cross_entropy(
        logits, shaped, group, wanted, columns=columns, ignore_index=ignore_index, reduction=reduction,
        label_smoothing=label_smoothing,
    )[0]  # fmt: skip


def parallel_cross_entropy(
    _input: Tensor,
    target: Tensor,
    label_smoothing: float = 0.0,
    reduce_loss: bool = False,
    dist_process_group: ProcessGroup | None = None,
    ignore_idx: int = -100,
) -> Tensor:
    """Return what CrossEntropyFunction.apply returns.

    >>> import torch
    >>> round(float(parallel_cross_entropy(torch.zeros(1, 1, 8), torch.tensor([[3]]))), 4)
    2.0794
    """
    return CrossEntropyFunction.forward(
        None, _input, target, label_smoothing, reduce_loss, dist_process_group, ignore_idx
    )


class TEParallelCrossEntropy:
    """A loss for language models whose last layer is sharded by the vocabulary.

    `reduction` is "none", "mean" (over tokens that are not ignored) or "sum".

    >>> import torch
    >>> loss = TEParallelCrossEntropy(reduction="mean")
    >>> round(float(loss(torch.zeros(1, 2, 8), torch.tensor([[3, 4]]), mask=torch.tensor([[1, 0]]))), 4)
    2.0794
    """

    def __init__(
        self,
        ignore_index: int = -100,
        reduction: str = "sum",
        tp_group: ProcessGroup | None = None,
    ):
        self.ignore_index = ignore_index
        self.reduction = reduction
        self.tp_group = tp_group

    def __call__(
        self,
        logits: Tensor,
        labels: Tensor,
        mask: Tensor | None = None,
        num_label_tokens: int | None = None,
    ) -> Tensor:
        """Return the loss. Tokens where `mask` is 0 are ignored; `labels` stay as they are.

        With `num_label_tokens`, a sum is divided by it. Logits may be a DTensor sharded on its last
        dimension; the group is then that of the mesh dimension it is sharded over. Labels and mask may
        be DTensors, too, of the same tokens.
        """
        own, group, columns = vocab_part("TEParallelCrossEntropy", logits, self.tp_group)
        if torch.compiler.is_compiling():
            used = local_part(labels)
            if mask is not None:
                used = used.masked_fill(local_part(mask).reshape(used.shape) == 0, self.ignore_index)
            if self.reduction not in ("none", "mean", "sum"):
                raise ValueError(f"Invalid reduction: {self.reduction}. Use 'none', 'mean' or 'sum'.")
            loss = _compiled_loss(own, used, 0.0, self.reduction, group, self.ignore_index, columns)
            if self.reduction == "sum" and num_label_tokens is not None:
                loss = loss / max(num_label_tokens, 1)
            return loss
        return _C.te_parallel_cross_entropy(
            own,
            local_part(labels),
            local_part(mask),
            ignore_index=self.ignore_index,
            reduction=self.reduction,
            group=group,
            num_label_tokens=num_label_tokens,
            columns=columns,
        )
