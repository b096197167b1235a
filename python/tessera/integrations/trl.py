"""The names of trl.trainer.utils: log-probabilities and entropies of whole or sharded logits."""

from __future__ import annotations

from torch import Tensor
from torch.distributed import ProcessGroup

from tessera import vocab_parallel
from tessera._tensors import local_part
from tessera.integrations import _replace

__all__ = ["entropy_from_logits", "install", "selective_log_softmax", "selective_log_softmax_and_entropy"]

_IGNORED = -100


def _ids_in_use(index: Tensor, row_mask: Tensor | None) -> Tensor:
    ids = local_part(index)
    return ids if row_mask is None else ids.masked_fill(local_part(row_mask) == 0, _IGNORED)


def _check_temperature(name: str, temperature: float) -> None:
    if temperature <= 0:
        raise ValueError(f"vocab.{name}: temperature must be positive, not {temperature}.")


def selective_log_softmax(
    logits: Tensor,
    index: Tensor,
    temperature: float = 1.0,
    row_mask: Tensor | None = None,
    *,
    group: ProcessGroup | None = None,
) -> Tensor:
    """Return log p at `index`, shaped as it is: [...] of the logits' tokens, or [..., k].

    0 without a gradient where `row_mask`, shaped as `index`, is 0. In float32, rounded once to the logits'
    type, which the project's is; logits may be a DTensor sharded by the vocabulary, or equal shares of it
    over `group`.

    >>> import torch
    >>> round(float(selective_log_softmax(torch.zeros(1, 8), torch.tensor([3]))), 4)
    -2.0794
    """
    _check_temperature("selective_log_softmax", temperature)
    ids = _ids_in_use(index, row_mask)
    if ids.dim() == logits.dim():
        value = vocab_parallel.log_probabilities_at(logits, ids, group, temperature=temperature)
    else:
        value = vocab_parallel.log_probabilities(logits, ids, group, temperature=temperature)
    return value.to(logits.dtype)


def selective_log_softmax_and_entropy(
    logits: Tensor,
    index: Tensor,
    entropy_requires_grad: bool = True,
    temperature: float = 1.0,
    row_mask: Tensor | None = None,
    *,
    group: ProcessGroup | None = None,
) -> tuple[Tensor, Tensor]:
    """Return what selective_log_softmax does for one id a token, and the entropy, from one pass.

    >>> import torch
    >>> both = selective_log_softmax_and_entropy(torch.zeros(1, 8), torch.tensor([3]))
    >>> [round(float(value), 4) for value in both]
    [-2.0794, 2.0794]
    """
    _check_temperature("selective_log_softmax_and_entropy", temperature)
    ids = _ids_in_use(index, row_mask)
    scores = vocab_parallel.token_scores(
        logits, ids, group, ("log_probability", "entropy"), temperature=temperature
    )
    entropy = scores.entropy if entropy_requires_grad else scores.entropy.detach()
    if row_mask is not None:
        entropy = entropy.masked_fill(local_part(row_mask) == 0, 0.0)
    return scores.log_probability.to(logits.dtype), entropy.to(logits.dtype)


def entropy_from_logits(logits: Tensor, chunk_size: int = 128, group: ProcessGroup | None = None) -> Tensor:
    """Return the entropy of every token, in the logits' type. `chunk_size` has no effect.

    >>> import torch
    >>> round(float(entropy_from_logits(torch.zeros(1, 8))), 4)
    2.0794
    """
    entropy = vocab_parallel.token_scores(logits, None, group, ("entropy",)).entropy
    return entropy.to(logits.dtype)


def install() -> list[str]:
    """Put these functions in the place of TRL's, and return where. Raises ImportError without TRL."""
    names = {
        "entropy_from_logits": entropy_from_logits,
        "selective_log_softmax": selective_log_softmax,
        "selective_log_softmax_and_entropy": selective_log_softmax_and_entropy,
    }
    return _replace.replace("trl", {"trl.trainer.utils": names})
