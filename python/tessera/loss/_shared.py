"""What the losses by Automodel's names have in common."""

from __future__ import annotations

from torch import Tensor

from tessera import vocab_parallel
from tessera._tensors import local_part

_PADDING = -100  # of data sets, whatever a loss ignores


def labels_with_mask(labels: Tensor, mask: Tensor | None, ignore_index: int, device) -> Tensor:
    """Return labels that are ignored where `mask` is 0 and where a data set pads; the caller's stay."""
    labels = local_part(labels).to(device)
    if ignore_index != _PADDING:
        labels = labels.masked_fill(labels == _PADDING, ignore_index)
    if mask is None:
        return labels
    return labels.masked_fill(local_part(mask).to(device).reshape(labels.shape) == 0, ignore_index)


def masked_loss(
    logits: Tensor,
    labels: Tensor,
    mask: Tensor | None,
    num_label_tokens: int | None,
    loss_weights: Tensor | None,
    *,
    ignore_index: int,
    reduction: str,
    inplace_grad: bool,
    tp_group,
) -> Tensor:
    """Return the cross entropy that MaskedCrossEntropy and ChunkedCrossEntropy are names of."""
    check_factors("MaskedCrossEntropy", reduction, labels, num_label_tokens, loss_weights)
    loss = vocab_parallel.cross_entropy(
        logits,
        labels_with_mask(labels, mask, ignore_index, logits.device),
        tp_group,
        reduction=reduction if loss_weights is None else "none",
        ignore_index=ignore_index,
        overwrite="backward" if inplace_grad else "never",
    )
    return with_factors(loss, num_label_tokens, loss_weights)


def check_factors(
    name: str, reduction: str, labels: Tensor, num_label_tokens: int | None, loss_weights: Tensor | None
) -> None:
    """Raise ValueError for weights and divisors that are not of a sum over these labels."""
    if loss_weights is not None and (reduction != "sum" or loss_weights.shape != labels.shape):
        raise ValueError(
            f"vocab.{name}: weights of shape {list(loss_weights.shape)} do not fit labels of shape "
            f"{list(labels.shape)}, or the reduction '{reduction}' is not 'sum'."
        )
    if num_label_tokens is not None and reduction != "sum":
        raise ValueError(
            f"vocab.{name}: num_label_tokens divides a sum, and the reduction is '{reduction}'. "
            "Use reduction='sum'."
        )


def with_factors(loss: Tensor, num_label_tokens: int | None, loss_weights: Tensor | None) -> Tensor:
    """Return the losses of tokens, if there are weights, as their weighted sum; divided, if asked for."""
    if loss_weights is not None:
        weights = local_part(loss_weights).to(loss.device, loss.dtype)
        loss = (loss * weights.reshape(loss.shape)).sum()
    return loss if num_label_tokens is None else per_token(loss, num_label_tokens)


def per_token(loss: Tensor, num_label_tokens: int) -> Tensor:
    """Return the loss of one token out of so many; 0 of none."""
    return loss * 0.0 if num_label_tokens == 0 else loss / num_label_tokens
