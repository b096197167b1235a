"""The name of nemo_automodel.components.loss.linear_ce, on Tessera's engine."""

from __future__ import annotations

from torch import Tensor, nn
from torch.distributed import ProcessGroup

from tessera import vocab_parallel
from tessera._tensors import is_part_of_mesh, local_part
from tessera.loss import _shared

__all__ = ["HAVE_CUT_CROSS_ENTROPY", "FusedLinearCrossEntropy"]

#: The engine is part of the library, and needs no other.
HAVE_CUT_CROSS_ENTROPY = True


class FusedLinearCrossEntropy(nn.Module):
    """The last layer and its cross entropy, without ever holding all logits.

    `impl` is accepted and has no effect.

    >>> import torch
    >>> loss = FusedLinearCrossEntropy()
    >>> round(float(loss(torch.zeros(1, 2, 4), torch.tensor([[3, -100]]), torch.zeros(8, 4))), 4)
    2.0794
    """

    def __init__(
        self,
        ignore_index: int = -100,
        logit_softcapping: float = 0,
        reduction: str = "sum",
        impl: str = "cce",
        *,
        tp_group: ProcessGroup | None = None,
    ):
        super().__init__()
        if impl not in ("cce", "torch_compile"):
            raise ValueError(
                f"vocab.FusedLinearCrossEntropy: impl is 'cce' or 'torch_compile', not '{impl}'."
            )
        self.ignore_index = ignore_index
        self.logit_softcapping = logit_softcapping
        self.reduction = reduction
        self.impl = impl
        self.tp_group = tp_group

    def forward(
        self,
        hidden_states: Tensor,
        labels: Tensor,
        lm_weight: Tensor,
        num_label_tokens: int | None = None,
        grad_reduce_group: ProcessGroup | None = None,
        loss_weights: Tensor | None = None,
    ) -> Tensor:
        """Return the loss of `labels` [...] under softmax(hidden_states lm_weight^T).

        A weight that is a DTensor is sharded by the vocabulary over ranks that have the same hidden
        states. With `grad_reduce_group` it is sharded over ranks that have tokens of their own: it is
        brought together, and the ranks' gradients are averaged. `loss_weights`, one per token, multiply
        the losses before they are summed.
        """
        return linear_loss(
            self,
            "FusedLinearCrossEntropy",
            hidden_states,
            local_part(labels),
            lm_weight,
            num_label_tokens,
            grad_reduce_group,
            loss_weights,
            softcap=float(self.logit_softcapping or 0.0),
        )


def linear_loss(
    loss: nn.Module,
    name: str,
    hidden_states: Tensor,
    labels: Tensor,
    lm_weight: Tensor,
    num_label_tokens: int | None,
    grad_reduce_group: ProcessGroup | None,
    loss_weights: Tensor | None,
    *,
    softcap: float = 0.0,
) -> Tensor:
    """Return what FusedLinearCrossEntropy and ChunkedCrossEntropy are names of, as `loss` was made."""
    _shared.check_factors(name, loss.reduction, labels, num_label_tokens, loss_weights)
    weight = lm_weight
    if grad_reduce_group is not None and is_part_of_mesh(lm_weight):
        weight = _brought_together(name, lm_weight, grad_reduce_group)
    found = vocab_parallel.linear_cross_entropy(
        hidden_states,
        weight,
        labels,
        loss.tp_group,
        reduction=loss.reduction if loss_weights is None else "none",
        ignore_index=loss.ignore_index,
        softcap=softcap,
    )
    return _shared.with_factors(found, num_label_tokens, loss_weights)


def _brought_together(name: str, weight: Tensor, group: ProcessGroup) -> Tensor:
    from torch.distributed.tensor import Partial

    ranks = weight.device_mesh.size()
    if group.size() != ranks:
        raise ValueError(
            f"vocab.{name}: grad_reduce_group has {group.size()} ranks, the mesh of the "
            f"weight {ranks}. They must be the same."
        )
    whole = weight.full_tensor(grad_placements=[Partial()] * weight.device_mesh.ndim)
    if whole.requires_grad:
        whole.register_hook(lambda gradient: gradient / ranks)
    return whole
