"""Batches of bags of different lengths: JaggedTensor, KeyedJaggedTensor and KeyedTensor.

The classes are the engine's own; they hold tensors and compute in C++.

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

from collections.abc import Iterable, Sequence

import torch
from torch import Tensor
from torch.fx._pytree import register_pytree_flatten_spec
from torch.utils._pytree import register_pytree_node

from tessera import _C
from tessera.streamable import Pipelineable

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
JaggedTensor = _engine.JaggedTensor
KeyedJaggedTensor = _engine.KeyedJaggedTensor
KeyedTensor = _engine.KeyedTensor
for _class in (JaggedTensor, KeyedJaggedTensor, KeyedTensor):
    _class.__module__ = __name__
    Pipelineable.register(_class)


def _register_nodes() -> None:
    """Let torch look into batches: their tensors are leaves, names and sizes are the context."""

    def parts_of_jt(jt: JaggedTensor) -> list:
        return [jt.values(), jt.weights_or_none(), jt.lengths_or_none(), jt.offsets_or_none()]

    def parts_of_kjt(kjt: KeyedJaggedTensor) -> list:
        strides = torch.tensor(kjt.stride_per_key_per_rank()) if kjt.variable_stride_per_key() else None
        inverse = kjt.inverse_indices_or_none()
        rows = None if inverse is None else inverse[1]
        tensors = [kjt.values(), kjt.weights_or_none(), kjt.lengths_or_none(), kjt.offsets_or_none()]
        return [*tensors, strides, rows]

    def names_of_kjt(kjt: KeyedJaggedTensor) -> tuple:
        inverse = kjt.inverse_indices_or_none()
        stride = None if kjt.keys() else kjt.stride()
        return kjt.keys(), None if inverse is None else list(inverse[0]), stride

    def kjt_of(parts: Iterable, names: tuple) -> KeyedJaggedTensor:
        values, weights, lengths, offsets, strides, rows = parts
        keys, inverse_names, stride = names
        inverse = None if rows is None else (inverse_names, rows)
        return KeyedJaggedTensor(
            keys,
            values,
            weights=weights,
            lengths=lengths,
            offsets=offsets,
            stride=stride,
            stride_per_key_per_rank=strides,
            inverse_indices=inverse,
        )

    def kt_of(parts: Iterable, names: tuple) -> KeyedTensor:
        keys, length_per_key, key_dim = names
        return KeyedTensor(keys, length_per_key, *parts, key_dim)

    register_pytree_node(
        JaggedTensor,
        lambda jt: (parts_of_jt(jt), None),
        lambda parts, _: JaggedTensor(*parts),
        serialized_type_name="tessera.JaggedTensor",
    )
    register_pytree_node(
        KeyedJaggedTensor,
        lambda kjt: (parts_of_kjt(kjt), names_of_kjt(kjt)),
        kjt_of,
        serialized_type_name="tessera.KeyedJaggedTensor",
    )
    register_pytree_node(
        KeyedTensor,
        lambda kt: ([kt.values()], (kt.keys(), kt.length_per_key(), kt.key_dim())),
        kt_of,
        serialized_type_name="tessera.KeyedTensor",
    )
    register_pytree_flatten_spec(JaggedTensor, lambda jt, spec: parts_of_jt(jt))
    register_pytree_flatten_spec(KeyedJaggedTensor, lambda kjt, spec: parts_of_kjt(kjt))
    register_pytree_flatten_spec(KeyedTensor, lambda kt, spec: [kt.values()])


_register_nodes()


def jt_is_equal(jt_1: JaggedTensor, jt_2: JaggedTensor) -> bool:
    """Return whether both hold the same bags and weights; floats may differ by rounding."""
    both = isinstance(jt_1, JaggedTensor) and isinstance(jt_2, JaggedTensor)
    return both and _engine.jt_is_equal(jt_1, jt_2)


def kjt_is_equal(kjt_1: KeyedJaggedTensor, kjt_2: KeyedJaggedTensor) -> bool:
    """Return whether both hold the same keys, in order, with the same bags and weights."""
    both = isinstance(kjt_1, KeyedJaggedTensor) and isinstance(kjt_2, KeyedJaggedTensor)
    return both and _engine.kjt_is_equal(kjt_1, kjt_2)


def _regroup_as_dict(
    keyed_tensors: Sequence[KeyedTensor], groups: Sequence[Sequence[str]], keys: Sequence[str]
) -> dict[str, Tensor]:
    """Return `KeyedTensor.regroup` with a name for each group."""
    if len(groups) != len(keys):
        raise ValueError(f"jagged.regroup: there are {len(groups)} groups and {len(keys)} names.")
    return dict(zip(keys, KeyedTensor.regroup(keyed_tensors, groups), strict=True))


KeyedTensor.regroup_as_dict = staticmethod(_regroup_as_dict)


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
