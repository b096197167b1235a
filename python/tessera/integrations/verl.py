"""The names of verl: log-probabilities and entropies for reinforcement learning."""

from __future__ import annotations

from torch import Tensor
from torch.distributed import ProcessGroup

from tessera import vocab_parallel
from tessera.integrations import _replace
from tessera.integrations._megatron_group import tensor_parallel_group

__all__ = [
    "entropy_from_logits",
    "entropy_from_logits_with_chunking",
    "install",
    "linear_cross_entropy",
    "logprobs_from_logits",
    "vocab_parallel_entropy",
    "vocab_parallel_entropy_with_chunking",
    "vocab_parallel_log_probs_from_logits",
    "vocab_parallel_sum_pi_squared",
]


def vocab_parallel_entropy(vocab_parallel_logits: Tensor, group: ProcessGroup | None = None) -> Tensor:
    """Return the entropy of every token, float32. `group` is Megatron's if it is left out.

    >>> import torch
    >>> round(float(vocab_parallel_entropy(torch.zeros(1, 8))), 4)
    2.0794
    """
    return vocab_parallel.token_scores(
        vocab_parallel_logits, None, tensor_parallel_group(group), ("entropy",)
    ).entropy


def vocab_parallel_entropy_with_chunking(
    vocab_parallel_logits: Tensor, chunk_size: int = 2048, group: ProcessGroup | None = None
) -> Tensor:
    """Return vocab_parallel_entropy; one pass needs no chunks, so `chunk_size` has no effect.

    >>> import torch
    >>> round(float(vocab_parallel_entropy_with_chunking(torch.zeros(1, 1, 8))), 4)
    2.0794
    """
    return vocab_parallel_entropy(vocab_parallel_logits, group)


def vocab_parallel_log_probs_from_logits(
    logits: Tensor, labels: Tensor, group: ProcessGroup | None = None
) -> Tensor:
    """Return log p of the labels, float32. `group` is Megatron's if it is left out.

    >>> import torch
    >>> round(float(vocab_parallel_log_probs_from_logits(torch.zeros(1, 8), torch.tensor([3]))), 4)
    -2.0794
    """
    return vocab_parallel.log_probabilities(logits, labels, tensor_parallel_group(group))


def vocab_parallel_sum_pi_squared(vocab_parallel_logits: Tensor, group: ProcessGroup | None = None) -> Tensor:
    """Return the sum over the vocabulary of p^2 of every token. `group` is Megatron's if it is left out.

    >>> import torch
    >>> round(float(vocab_parallel_sum_pi_squared(torch.zeros(1, 8))), 4)
    0.125
    """
    return vocab_parallel.sum_of_squared_probabilities(vocab_parallel_logits, tensor_parallel_group(group))


def logprobs_from_logits(logits: Tensor, labels: Tensor, inplace_backward: bool = True) -> Tensor:
    """Return log p of the labels, shaped as they are; logits are whole, or a DTensor.

    With `inplace_backward` the gradient takes the place of the logits.

    >>> import torch
    >>> round(float(logprobs_from_logits(torch.zeros(1, 8), torch.tensor([3]))), 4)
    -2.0794
    """
    overwrite = "backward" if inplace_backward else "never"
    return vocab_parallel.log_probabilities(logits, labels, overwrite=overwrite)


def entropy_from_logits(logits: Tensor) -> Tensor:
    """Return the entropy of every token; logits are whole, or a DTensor.

    >>> import torch
    >>> round(float(entropy_from_logits(torch.zeros(1, 8))), 4)
    2.0794
    """
    return vocab_parallel.token_scores(logits, None, None, ("entropy",)).entropy


def entropy_from_logits_with_chunking(logits: Tensor, chunk_size: int = 2048) -> Tensor:
    """Return entropy_from_logits; one pass needs no chunks, so `chunk_size` has no effect.

    >>> import torch
    >>> round(float(entropy_from_logits_with_chunking(torch.zeros(1, 8))), 4)
    2.0794
    """
    return entropy_from_logits(logits)


def linear_cross_entropy(
    hidden: Tensor,
    weight: Tensor,
    labels: Tensor,
    temperature: float = 1.0,
    reduction: str = "none",
    dist_process_group: ProcessGroup | None = None,
) -> tuple[Tensor, Tensor]:
    """Return log p of the labels and the entropy, from hidden states, without holding all logits.

    `hidden` [..., features] is the same on all ranks, `weight` [columns, features] this rank's share of
    the vocabulary. With `reduction` "mean" or "sum" the first is that of the log-probabilities.

    >>> import torch
    >>> log_p, entropy = linear_cross_entropy(torch.zeros(1, 4), torch.zeros(8, 4), torch.tensor([3]))
    >>> round(float(log_p), 4), round(float(entropy), 4)
    (-2.0794, 2.0794)
    """
    scores = vocab_parallel.linear_cross_entropy_with_scores(
        hidden,
        weight,
        labels,
        dist_process_group,
        ("entropy",),
        reduction=reduction,
        temperature=temperature,
    )
    return -scores.loss, scores.tokens.entropy


def install() -> list[str]:
    """Put these functions in the place of verl's, and return where. Raises ImportError without verl."""
    return _replace.replace(
        "verl",
        {
            "verl.utils.megatron.tensor_parallel": {
                "vocab_parallel_entropy": vocab_parallel_entropy,
                "vocab_parallel_entropy_with_chunking": vocab_parallel_entropy_with_chunking,
                "vocab_parallel_log_probs_from_logits": vocab_parallel_log_probs_from_logits,
                "vocab_parallel_sum_pi_squared": vocab_parallel_sum_pi_squared,
            },
            "verl.utils.torch_functional": {
                "logprobs_from_logits": logprobs_from_logits,
                "entropy_from_logits": entropy_from_logits,
                "entropy_from_logits_with_chunking": entropy_from_logits_with_chunking,
            },
        },
    )
