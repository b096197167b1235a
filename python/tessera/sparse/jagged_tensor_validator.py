"""Say what is wrong with a batch, before it is used.

>>> import torch
>>> from tessera.sparse.jagged_tensor import KeyedJaggedTensor
>>> kjt = KeyedJaggedTensor(["a"], torch.tensor([1, 2]), lengths=torch.tensor([3, -1]))
>>> validate_keyed_jagged_tensor(kjt)
Traceback (most recent call last):
ValueError: jagged.validate: feature 'a', sample 1 has a length of -1.
"""

from __future__ import annotations

from collections.abc import Sequence

from tessera import _C
from tessera.modules.embedding_configs import BaseEmbeddingConfig
from tessera.sparse.jagged_tensor import KeyedJaggedTensor

__all__ = ["validate_keyed_jagged_tensor"]


def validate_keyed_jagged_tensor(
    kjt: KeyedJaggedTensor, configs: Sequence[BaseEmbeddingConfig] | None = None
) -> bool:
    """Raise ValueError that names feature, sample and id for whatever is wrong; return True otherwise.

    Lengths must not be negative, agree with the offsets and add up; keys must not repeat; strides and
    inverse indices must fit; with `configs`, every id must lie within its table.
    """
    rows = [
        (feature, config.num_embeddings)
        for config in configs or ()
        for feature in config.feature_names or [config.name]
    ]
    _C.jagged.validate(kjt._engine(), rows)
    return True
