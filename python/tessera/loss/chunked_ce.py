"""The name of nemo_automodel.components.loss.chunked_ce, on Tessera's engine."""

from __future__ import annotations

import torch
from torch import Tensor
from torch.distributed import ProcessGroup

from tessera._tensors import local_part
from tessera.loss import _shared
from tessera.loss.linear_ce import linear_loss
from tessera.loss.masked_ce import MaskedCrossEntropy

__all__ = ["ChunkedCrossEntropy"]


class ChunkedCrossEntropy(MaskedCrossEntropy):
    """Cross entropy under the name that takes chunks; one pass needs none, nor a compiler.

    With a weight it is that of hidden states, without ever holding all logits, as in today's Automodel;
    without one that of logits, as in older ones.

    >>> hidden, weight, labels = torch.zeros(2, 4), torch.zeros(8, 4), torch.tensor([3, -100])
    >>> round(float(ChunkedCrossEntropy()(hidden, labels, weight)), 4)
    2.0794
    >>> round(float(ChunkedCrossEntropy()(torch.zeros(2, 8), labels)), 4)
    2.0794
    """

    def __init__(
        self,
        chunk_len: int = 512,
        compile: bool = True,
        ignore_index: int = -100,
        reduction: str = "sum",
        *,
        inplace_grad: bool = False,
        tp_group: ProcessGroup | None = None,
    ):
        super().__init__(
            ignore_index=ignore_index, reduction=reduction, inplace_grad=inplace_grad, tp_group=tp_group
        )
        self.chunk_len = chunk_len
        self.compile = compile

    def forward(
        self,
        hidden_states: Tensor,
        labels: Tensor,
        lm_weight: Tensor | None = None,
        num_label_tokens: int | None = None,
        grad_reduce_group: ProcessGroup | None = None,
        loss_weights: Tensor | None = None,
        *,
        mask: Tensor | None = None,
        logits_dtype: torch.dtype | None = None,
    ) -> Tensor:
        """Return the loss of `labels` [...] under softmax(hidden_states lm_weight^T), or of logits.

        A third argument shaped as the labels is the mask, as it was with logits. Weights that are cut,
        `grad_reduce_group` and `loss_weights` are as in FusedLinearCrossEntropy. Logits are float32,
        whatever `logits_dtype` says.
        """
        if lm_weight is not None and lm_weight.shape == labels.shape:
            lm_weight, mask = None, lm_weight
        if lm_weight is None:
            return super().forward(hidden_states, labels, mask, num_label_tokens, loss_weights)
        hidden = hidden_states.to(lm_weight.dtype)
        if hidden.dim() == 3 and hidden.shape[0] == 1 and labels.dim() == 1:
            hidden = hidden.squeeze(0)
        return linear_loss(
            self,
            "ChunkedCrossEntropy",
            hidden,
            _shared.labels_with_mask(labels, mask, self.ignore_index, local_part(hidden).device),
            lm_weight,
            num_label_tokens,
            grad_reduce_group,
            loss_weights,
        )
