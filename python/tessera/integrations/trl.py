"""The names of trl.trainer.utils: log-probabilities and entropies of whole or sharded logits."""

from __future__ import annotations

from torch import Tensor
from torch.distributed import ProcessGroup

from tessera import vocab_parallel
from tessera._tensors import local_part
from tessera.integrations import _replace

__all__ = ["entropy_from_logits", "install", "selective_log_softmax"]


def selective_log_softmax(logits: Tensor, index: Tensor, group: ProcessGroup | None = None) -> Tensor:
    """Return log p at `index`, shaped as it is: [...] of the logits' tokens, or [..., k].

    In float32, rounded once to the logits' type, which the project's is; logits may be a DTensor sharded
    by the vocabulary, or equal shares of it over `group`.

    >>> import torch
    >>> round(float(selective_log_softmax(torch.zeros(1, 8), torch.tensor([3]))), 4)
    -2.0794
    """
    ids = local_part(index)
    if ids.dim() == logits.dim():
        value = vocab_parallel.log_probabilities_at(logits, ids, group)
    else:
        value = vocab_parallel.log_probabilities(logits, ids, group)
    return value.to(logits.dtype)


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
    names = {"selective_log_softmax": selective_log_softmax, "entropy_from_logits": entropy_from_logits}
    return _replace.replace("trl", {"trl.trainer.utils": names})
