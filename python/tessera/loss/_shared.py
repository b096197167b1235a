"""What the losses by Automodel's names have in common."""

from __future__ import annotations

from torch import Tensor

from tessera import vocab_parallel
from tessera._tensors import local_part


def labels_with_mask(labels: Tensor, mask: Tensor | None, ignore_index: int, device) -> Tensor:
    """Return the labels, ignored where `mask` is 0; the caller's stay as they are."""
    labels = local_part(labels).to(device)
    if mask is None:
        return labels
    return labels.masked_fill(local_part(mask).to(device).reshape(labels.shape) == 0, ignore_index)


def masked_loss(
    logits: Tensor,
    labels: Tensor,
    mask: Tensor | None,
    num_label_tokens: int | None,
    *,
    ignore_index: int,
    reduction: str,
    inplace_grad: bool,
    tp_group,
) -> Tensor:
    """Return the cross entropy that MaskedCrossEntropy and ChunkedCrossEntropy are names of."""
    if num_label_tokens is not None and reduction != "sum":
        raise ValueError(
            f"vocab: num_label_tokens divides a sum, and the reduction is '{reduction}'. Use reduction='sum'."
        )
    loss = vocab_parallel.cross_entropy(
        logits,
        labels_with_mask(labels, mask, ignore_index, logits.device),
        tp_group,
        reduction=reduction,
        ignore_index=ignore_index,
        overwrite="backward" if inplace_grad else "never",
    )
    return loss if num_label_tokens is None else per_token(loss, num_label_tokens)


def per_token(loss: Tensor, num_label_tokens: int) -> Tensor:
    """Return the loss of one token out of so many; 0 of none."""
    return loss * 0.0 if num_label_tokens == 0 else loss / num_label_tokens
