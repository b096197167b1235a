"""The name of nemo_automodel.components.loss.masked_ce, on Tessera's engine."""

from __future__ import annotations

from torch import Tensor, nn
from torch.distributed import ProcessGroup

from tessera.loss import _shared

__all__ = ["MaskedCrossEntropy"]


class MaskedCrossEntropy(nn.Module):
    """Cross entropy of labels of which some are ignored, summed unless `reduction` says otherwise.

    Labels that are `ignore_index` or -100 are ignored. Logits may be a DTensor, sharded by the vocabulary
    or not, or this rank's equal share of it over `tp_group`. Arithmetic is float32 whatever `fp32_upcast`
    says, and one pass needs no `chunk_size`. With `inplace_grad` the gradient takes the place of the logits
    in backward.

    >>> import torch
    >>> loss = MaskedCrossEntropy()
    >>> round(float(loss(torch.zeros(2, 8), torch.tensor([3, 1]), mask=torch.tensor([1, 0]))), 4)
    2.0794
    """

    def __init__(
        self,
        fp32_upcast: bool = True,
        ignore_index: int = -100,
        reduction: str = "sum",
        chunk_size: int | None = None,
        *,
        inplace_grad: bool = False,
        tp_group: ProcessGroup | None = None,
    ):
        super().__init__()
        self.fp32_upcast = fp32_upcast
        self.ignore_index = ignore_index
        self.reduction = reduction
        self.chunk_size = chunk_size
        self.inplace_grad = inplace_grad
        self.tp_group = tp_group

    def forward(
        self,
        logits: Tensor,
        labels: Tensor,
        mask: Tensor | None = None,
        num_label_tokens: int | None = None,
        loss_weights: Tensor | None = None,
    ) -> Tensor:
        """Return the loss; a sum is divided by `num_label_tokens` if it is given.

        `loss_weights`, one per label, multiply the losses before they are summed.
        """
        return _shared.masked_loss(
            logits,
            labels,
            mask,
            num_label_tokens,
            loss_weights,
            ignore_index=self.ignore_index,
            reduction=self.reduction,
            inplace_grad=self.inplace_grad,
            tp_group=self.tp_group,
        )
