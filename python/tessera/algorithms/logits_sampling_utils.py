"""The names of nemo_rl.algorithms.logits_sampling_utils: top-k and top-p filters of whole rows."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from torch import Tensor

from tessera import _C

__all__ = [
    "TrainingSamplingParams",
    "apply_top_k_top_p",
    "need_top_k_filtering",
    "need_top_k_or_top_p_filtering",
    "need_top_p_filtering",
]


@dataclass
class TrainingSamplingParams:
    """Filters of the generator that the probabilities are for; no top_k, or one below 1, keeps all ids."""

    top_k: int | None = None
    top_p: float = 1.0
    temperature: float = 1.0


def need_top_k_filtering(top_k: int | None) -> bool:
    """Return whether this top_k drops anything."""
    return top_k is not None and top_k > 0


def need_top_p_filtering(top_p: float | None) -> bool:
    """Return whether this top_p drops anything."""
    return top_p is not None and top_p != 1.0


def need_top_k_or_top_p_filtering(sampling_params: Any | None) -> bool:
    """Return whether these parameters drop anything; None drops nothing.

    >>> need_top_k_or_top_p_filtering(TrainingSamplingParams(top_k=-1))
    False
    >>> need_top_k_or_top_p_filtering(TrainingSamplingParams(top_p=0.9))
    True
    """
    if sampling_params is None:
        return False
    return need_top_k_filtering(sampling_params.top_k) or need_top_p_filtering(sampling_params.top_p)


def apply_top_k_top_p(
    logits: Tensor, top_k: int | None, top_p: float, chunk_size: int | None = None
) -> tuple[Tensor, Tensor | None]:
    """Return the logits with dropped ones at -inf, and where they were kept (None if nothing is dropped).

    Equal logits are kept or dropped together. `chunk_size` has no effect: no row is sorted.

    >>> import torch
    >>> apply_top_k_top_p(torch.tensor([[1.0, 3.0, 2.0]]), 2, 1.0)[0].tolist()
    [[-inf, 3.0, 2.0]]
    """
    if not need_top_k_filtering(top_k) and not need_top_p_filtering(top_p):
        return logits, None
    return _C.apply_top_k_top_p(logits, top_k, top_p)
