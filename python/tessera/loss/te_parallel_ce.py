"""The names of nemo_automodel.components.loss.te_parallel_ce, on Tessera's engine.

docs/deviations.md lists where numbers differ from the reference because the reference's are wrong.
"""

from __future__ import annotations

from typing import Any

from torch import Tensor
from torch.distributed import ProcessGroup

from tessera import _C, _kept_graph
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
            return _C.parallel_cross_entropy(
                logits, local_part(target), label_smoothing, reduce_loss, group, ignore_idx, columns
            )

        return _kept_graph.run(ctx, own, False, compute)

    @staticmethod
    def backward(ctx: Any, grad_output: Tensor) -> tuple[Tensor, None, None, None, None, None]:
        """Return the gradient of the logits; upstream gradients may differ per token."""
        return _kept_graph.gradient(ctx, grad_output), None, None, None, None, None


parallel_cross_entropy = CrossEntropyFunction.apply


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
        return _C.te_parallel_cross_entropy(
            own,
            local_part(labels),
            local_part(mask),
            self.ignore_index,
            self.reduction,
            group,
            num_label_tokens,
            columns,
        )
