"""The names of megatron.core's vocabulary-parallel cross entropy."""

from __future__ import annotations

from torch import Tensor
from torch.distributed import ProcessGroup

from tessera import vocab_parallel
from tessera._tensors import vocab_part
from tessera.integrations import _replace
from tessera.integrations._megatron_group import tensor_parallel_group

__all__ = ["fused_vocab_parallel_cross_entropy", "install", "vocab_parallel_cross_entropy"]


def vocab_parallel_cross_entropy(
    vocab_parallel_logits: Tensor,
    target: Tensor,
    label_smoothing: float = 0.0,
    tp_group: ProcessGroup | None = None,
) -> Tensor:
    """Return the loss of every token, shaped as `target`, float32. The logits stay as they are.

    `tp_group` is Megatron's tensor-parallel group if it is left out and Megatron is set up; otherwise the
    logits are whole. Smoothing is Megatron's: of K ids the label keeps 1 - label_smoothing, and the others
    share the rest. K is the size of the whole vocabulary, where Megatron takes this rank's share.

    >>> import torch
    >>> round(float(vocab_parallel_cross_entropy(torch.zeros(1, 1, 8), torch.tensor([[3]]), 0.1)), 4)
    2.0794
    """
    logits, group, columns = vocab_part(
        "vocab_parallel_cross_entropy", vocab_parallel_logits, tensor_parallel_group(tp_group)
    )
    smoothing = 0.0
    if label_smoothing != 0.0:
        if not 0.0 < label_smoothing < 1.0:
            raise ValueError(
                f"vocab.vocab_parallel_cross_entropy: a label smoothing of {label_smoothing} is not between "
                "0 and 1."
            )
        ids = vocab_parallel_logits.shape[-1]
        if columns is None and group is not None:
            ids *= group.size()
        # What is dealt out evenly to all ids gives the label its share, too.
        smoothing = min(label_smoothing * ids / (ids - 1), 1.0) if ids > 1 else 0.0
    return vocab_parallel.cross_entropy(
        logits, target, group, columns=columns, reduction="none", label_smoothing=smoothing
    )


def fused_vocab_parallel_cross_entropy(
    vocab_parallel_logits: Tensor, target: Tensor, tp_group: ProcessGroup | None = None
) -> Tensor:
    """Return vocab_parallel_cross_entropy without smoothing; the gradient has the logits' type.

    >>> import torch
    >>> round(float(fused_vocab_parallel_cross_entropy(torch.zeros(1, 1, 8), torch.tensor([[3]]))), 4)
    2.0794
    """
    return vocab_parallel_cross_entropy(vocab_parallel_logits, target, 0.0, tp_group)


def install() -> list[str]:
    """Put these functions in the place of Megatron's, and return where. Raises ImportError without it."""
    return _replace.replace(
        "megatron",
        {
            "megatron.core.tensor_parallel.cross_entropy": {
                "vocab_parallel_cross_entropy": vocab_parallel_cross_entropy
            },
            "megatron.core.fusions.fused_cross_entropy": {
                "fused_vocab_parallel_cross_entropy": fused_vocab_parallel_cross_entropy
            },
        },
    )
