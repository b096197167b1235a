"""Batches of bags of different lengths: JaggedTensor, KeyedJaggedTensor and KeyedTensor.

They hold tensors, and the engine computes in C++. Where torch traces a program (torch.compile, torch.export,
torch.jit.trace) their methods are torch's operators; a call with a Proxy of torch.fx is a node of its graph.

>>> import torch
>>> kjt = KeyedJaggedTensor.from_lengths_sync(
...     keys=["a", "b"], values=torch.tensor([1, 2, 3]), lengths=torch.tensor([2, 0, 0, 1])
... )
>>> print(kjt)
KeyedJaggedTensor({
    "a": [[1, 2], []],
    "b": [[], [3]]
})
<BLANKLINE>
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from tessera import _C
from tessera.sparse import _nodes
from tessera.sparse._jagged import JaggedTensor
from tessera.sparse._keyed import KeyedTensor
from tessera.sparse._keyed_jagged import KeyedJaggedTensor

__all__ = [
    "ComputeJTDictToKJT",
    "ComputeKJTToJTDict",
    "JaggedTensor",
    "KeyedJaggedTensor",
    "KeyedTensor",
    "jt_is_equal",
    "kjt_is_equal",
    "permute_multi_embedding",
    "regroup_kts",
]

_engine = _C.jagged
_nodes.register()


def jt_is_equal(jt_1: JaggedTensor, jt_2: JaggedTensor) -> bool:
    """Return whether both hold the same bags and weights; floats may differ by rounding."""
    both = isinstance(jt_1, JaggedTensor) and isinstance(jt_2, JaggedTensor)
    return both and _engine.jt_is_equal(jt_1._engine(), jt_2._engine())


def kjt_is_equal(kjt_1: KeyedJaggedTensor, kjt_2: KeyedJaggedTensor) -> bool:
    """Return whether both hold the same keys, in order, with the same bags and weights."""
    both = isinstance(kjt_1, KeyedJaggedTensor) and isinstance(kjt_2, KeyedJaggedTensor)
    return both and _engine.kjt_is_equal(kjt_1._engine(), kjt_2._engine())


def regroup_kts(keyed_tensors: Sequence[KeyedTensor], groups: Sequence[Sequence[str]]) -> list[Tensor]:
    """Return one tensor per group: the columns of its keys, in the order listed."""
    return KeyedTensor.regroup(keyed_tensors, groups)


def permute_multi_embedding(
    keyed_tensors: Sequence[KeyedTensor], groups: Sequence[Sequence[str]]
) -> list[Tensor]:
    """Return one tensor per group, like `regroup_kts`."""
    return KeyedTensor.regroup(keyed_tensors, groups)


class ComputeKJTToJTDict(torch.nn.Module):
    """Turn a KeyedJaggedTensor into its features, by key."""

    def forward(self, keyed_jagged_tensor: KeyedJaggedTensor) -> dict[str, JaggedTensor]:
        """Return the features by key."""
        return keyed_jagged_tensor.to_dict()


class ComputeJTDictToKJT(torch.nn.Module):
    """Put features together."""

    def forward(self, jt_dict: dict[str, JaggedTensor]) -> KeyedJaggedTensor:
        """Return a KeyedJaggedTensor of the features, in the order of the dictionary."""
        return KeyedJaggedTensor.from_jt_dict(jt_dict)
