"""The name of nemo_automodel.components.loss.chunked_ce, on Tessera's engine."""

from __future__ import annotations

from torch import Tensor, nn
from torch.distributed import ProcessGroup

from tessera.loss import _shared

__all__ = ["ChunkedCrossEntropy"]


class ChunkedCrossEntropy(nn.Module):
    """MaskedCrossEntropy under the name that takes a chunk; one pass needs none, nor a compiler.

    >>> import torch
    >>> round(float(ChunkedCrossEntropy()(torch.zeros(2, 8), torch.tensor([3, -100]))), 4)
    2.0794
    """

    def __init__(
        self,
        chunk_len: int = 32,
        compile: bool = True,
        ignore_index: int = -100,
        reduction: str = "sum",
        *,
        inplace_grad: bool = False,
        tp_group: ProcessGroup | None = None,
    ):
        super().__init__()
        self.chunk_len = chunk_len
        self.compile = compile
        self.ignore_index = ignore_index
        self.reduction = reduction
        self.inplace_grad = inplace_grad
        self.tp_group = tp_group

    def forward(
        self,
        logits: Tensor,
        labels: Tensor,
        mask: Tensor | None = None,
        num_label_tokens: int | None = None,
    ) -> Tensor:
        """Return the loss; a sum is divided by `num_label_tokens` if it is given."""
        return _shared.masked_loss(
            logits,
            labels,
            mask,
            num_label_tokens,
            ignore_index=self.ignore_index,
            reduction=self.reduction,
            inplace_grad=self.inplace_grad,
            tp_group=self.tp_group,
        )
