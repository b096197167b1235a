"""Batches as nodes of torch's trees: tensors are the leaves, names and sizes the context."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch.fx._pytree import register_pytree_flatten_spec
from torch.utils._pytree import MappingKey, register_pytree_node

from tessera.sparse._jagged import JaggedTensor
from tessera.sparse._keyed import KeyedTensor
from tessera.sparse._keyed_jagged import KeyedJaggedTensor


def _parts_of_jt(jt: JaggedTensor) -> tuple[list, Any]:
    return [jt._values, jt._weights, jt._lengths, jt._offsets], None


def _jt_of(parts: Iterable, context: Any) -> JaggedTensor:
    jt = JaggedTensor.__new__(JaggedTensor)
    jt._take(*parts)
    return jt


def _parts_of_kjt(kjt: KeyedJaggedTensor) -> tuple[list, Any]:
    names, rows = (None, None) if kjt._inverse is None else kjt._inverse
    parts = [kjt._values, kjt._weights, kjt._lengths, kjt._offsets, rows]
    strides = None if kjt._strides is None else [list(row) for row in kjt._strides]
    return parts, [list(kjt._keys), None if names is None else list(names), kjt._stride, strides]


def _kjt_of(parts: Iterable, context: Any) -> KeyedJaggedTensor:
    values, weights, lengths, offsets, rows = parts
    keys, names, stride, strides = context
    kjt = KeyedJaggedTensor.__new__(KeyedJaggedTensor)
    inverse = None if names is None else (names, rows)
    kjt._take(list(keys), values, weights, lengths, offsets, stride, strides, inverse)
    return kjt


def _parts_of_kt(kt: KeyedTensor) -> tuple[list, Any]:
    return [kt._values], [list(kt._keys), list(kt._length_per_key), kt._key_dim]


def _kt_of(parts: Iterable, context: Any) -> KeyedTensor:
    (values,) = parts
    keys, length_per_key, key_dim = context
    kt = KeyedTensor.__new__(KeyedTensor)
    kt._take(list(keys), list(length_per_key), values, key_dim)
    return kt


def _register(node: type, flatten: Callable, unflatten: Callable, names: list[str]) -> None:
    def flatten_with_keys(batch: Any) -> tuple[list, Any]:
        parts, context = flatten(batch)
        return [(MappingKey(name), part) for name, part in zip(names, parts, strict=True)], context

    register_pytree_node(
        node,
        flatten,
        unflatten,
        serialized_type_name=f"tessera.{node.__name__}",
        flatten_with_keys_fn=flatten_with_keys,
    )
    register_pytree_flatten_spec(node, lambda batch, spec: flatten(batch)[0])


def register() -> None:
    """Let torch look into batches, and load them. What comes back from a tree is checked when it is used."""
    torch.serialization.add_safe_globals([JaggedTensor, KeyedJaggedTensor, KeyedTensor])
    _register(JaggedTensor, _parts_of_jt, _jt_of, ["values", "weights", "lengths", "offsets"])
    _register(
        KeyedJaggedTensor,
        _parts_of_kjt,
        _kjt_of,
        ["values", "weights", "lengths", "offsets", "inverse_indices"],
    )
    _register(KeyedTensor, _parts_of_kt, _kt_of, ["values"])
