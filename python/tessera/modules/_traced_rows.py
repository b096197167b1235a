"""Rows of tables as an operator of torch: what collections are inside torch.compile, torch.export and jit.

The operator takes the tensors of a batch and a text that says which collection reads the rows. An unsharded
one is described whole, so that an exported program runs in another process; one that steps its rows in
backward, or is sharded, is known by a name that holds while it lives.

Backward does not read the rows twice: the operator keeps the engine's graph, and a tensor of one number, the
ticket, stands for it. The graph goes when the ticket's memory does.
"""

from __future__ import annotations

import functools
import itertools
import json
import weakref
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from tessera import _C
from tessera._recording import recording
from tessera.modules.embedding_configs import BaseEmbeddingConfig, PoolingType
from tessera.sparse._jagged import JaggedTensor
from tessera.sparse._keyed import KeyedTensor
from tessera.sparse._keyed_jagged import KeyedJaggedTensor
from tessera.sparse._traced import cut, sizes_of

_LIBRARY = torch.library.Library("tessera", "FRAGMENT")
_numbers = itertools.count(1)
_BETWEEN = "\x1f"  # names travel as one text: torch.jit.trace takes no lists of them

# ---- who reads the rows ----

_living: weakref.WeakValueDictionary[str, Any] = weakref.WeakValueDictionary()


def name_of(collection: Any) -> str:
    """Return a name under which the operator finds `collection` while it lives; it has `_read`."""
    name = f"{type(collection).__name__}:{next(_numbers)}"
    _living[name] = collection
    return name


def description(
    operation: str, configs: Sequence[BaseEmbeddingConfig], is_pooled: bool, uses_weights: bool, bounds: str
) -> str:
    """Return a collection without state of its own as a text."""
    tables = [
        [
            config.num_embeddings,
            config.embedding_dim,
            config.name,
            config.data_type.value,
            list(config.feature_names),
            getattr(config, "pooling", PoolingType.NONE).value,
        ]
        for config in configs
    ]
    return json.dumps([operation, is_pooled, uses_weights, bounds, tables])


class _Described:
    """A collection made from its description."""

    def __init__(self, text: str) -> None:
        operation, self._is_pooled, self._uses_weights, bounds, tables = json.loads(text)
        engine = _C.embedding
        options = engine.TableBatchOptions()
        options.bounds_check = getattr(engine.BoundsCheckMode, bounds)
        configs = [
            engine.EmbeddingTableConfig(
                rows,
                dim,
                name,
                getattr(engine.DataType, kind),
                features,
                getattr(engine.PoolingType, pooling),
            )
            for rows, dim, name, kind, features, pooling in tables
        ]
        self._lookup = engine.CollectionLookup(operation, configs, self._is_pooled, options)

    def _read(self, features: KeyedJaggedTensor, tables: Sequence[Tensor]) -> list[Tensor]:
        if self._is_pooled:
            return [self._lookup.pooled(features._engine(), tables, self._uses_weights).values()]
        rows = self._lookup.sequence(features._engine(), tables, False)
        return [each.values() for each in rows.values()]


_described = functools.lru_cache(maxsize=256)(_Described)


def _reader(text: str) -> Any:
    if text.startswith("["):
        return _described(text)
    found = _living.get(text)
    if found is None:
        raise RuntimeError(
            f"embed.traced: there is no {text} in this process. A program that was exported with sharded "
            "tables, or with tables that backward steps, runs where its model lives."
        )
    return found


# ---- the graph of a forward ----


class _Ticket(bytearray):
    """The memory of a ticket: eight bytes with its number. It holds the engine's graph."""

    __slots__ = ("__weakref__", "leaves", "rows")


_tickets: weakref.WeakValueDictionary[int, _Ticket] = weakref.WeakValueDictionary()


def _ticket_of(rows: Tensor, leaves: Sequence[Tensor]) -> Tensor:
    number = next(_numbers)
    ticket = _Ticket(number.to_bytes(8, "little"))
    ticket.rows, ticket.leaves = rows, list(leaves)
    _tickets[number] = ticket
    return torch.frombuffer(ticket, dtype=torch.int64)  # lives as long as the tensor's memory


# ---- the operator ----

_LIBRARY.define(
    "rows(Tensor values, Tensor? weights, Tensor lengths, Tensor? inverse, Tensor[] tables, Tensor anchor, "
    "str keys, int[]? strides, str? inverse_names, SymInt size, int columns, str reader, bool keeps, "
    "bool wants_weights)"
    " -> (Tensor, Tensor)"
)
_LIBRARY.define(
    "rows_backward(Tensor gradient, Tensor ticket, Tensor? weights, Tensor[] tables, Tensor anchor, "
    "bool wants_weights) -> Tensor[]"
)


def _forward(
    values: Tensor,
    weights: Tensor | None,
    lengths: Tensor,
    inverse: Tensor | None,
    tables: Sequence[Tensor],
    anchor: Tensor,
    keys: str,
    strides: Sequence[int] | None,
    inverse_names: str | None,
    size: int,
    columns: int,
    reader: str,
    keeps: bool,
    wants_weights: bool,
) -> tuple[Tensor, Tensor]:
    names = keys.split(_BETWEEN)
    per_rank = None if strides is None else torch.tensor(strides).reshape(len(names), -1)

    def read(weights: Tensor | None, tables: Sequence[Tensor]) -> Tensor:
        features = KeyedJaggedTensor(
            names,
            values,
            weights,
            lengths,
            stride_per_key_per_rank=per_rank,
            inverse_indices=None if inverse_names is None else (inverse_names.split(_BETWEEN), inverse),
        )
        found = _reader(reader)._read(features, tables)
        return found[0] if columns else torch.cat([rows.reshape(-1) for rows in found])

    if not keeps:
        with torch.no_grad():
            return read(weights, tables), torch.empty(0, dtype=torch.int64)
    with recording():
        leaves = [table.detach().requires_grad_(True) for table in tables]
        if wants_weights:
            weights = weights.detach().requires_grad_(True)
            leaves.append(weights)
        rows = read(weights, leaves[: len(tables)])
    return rows.detach(), _ticket_of(rows, leaves)


def _backward(
    gradient: Tensor,
    ticket: Tensor,
    weights: Tensor | None,
    tables: Sequence[Tensor],
    anchor: Tensor,
    wants_weights: bool,
) -> list[Tensor]:
    kept = _tickets.get(int(ticket[0])) if ticket.numel() else None
    if kept is None:
        raise RuntimeError(
            "embed.traced: the graph of this forward is gone: gradients were off, or it was used before."
        )
    if kept.rows.requires_grad:
        # Not autograd.grad: rows that are stepped, and parameters of sharded tables, have to be reached too.
        with recording():
            torch.autograd.backward(kept.rows, gradient)
    grads = [torch.zeros_like(leaf) if leaf.grad is None else leaf.grad for leaf in kept.leaves]
    return [*(grad.detach().contiguous() for grad in grads), torch.zeros_like(anchor)]


torch.library.impl("tessera::rows", "CompositeExplicitAutograd", lib=_LIBRARY)(_forward)
torch.library.impl("tessera::rows_backward", "CompositeExplicitAutograd", lib=_LIBRARY)(_backward)


def _shapes(values: Tensor, *words: Any) -> tuple[Tensor, Tensor]:
    size, columns, _, keeps, _ = words[-5:]
    shape = (size, columns) if columns else (size,)
    ticket = torch.empty(1 if keeps else 0, dtype=torch.int64, device="cpu")
    return values.new_empty(shape, dtype=torch.float32), ticket


def _gradient_shapes(
    gradient: Tensor, ticket: Tensor, weights: Any, tables: Any, anchor: Tensor, wants_weights: bool
) -> list[Tensor]:
    wanted = [*tables, weights] if wants_weights else list(tables)
    return [torch.empty_like(each) for each in [*wanted, anchor]]


torch.library.register_fake("tessera::rows", _shapes, lib=_LIBRARY)
torch.library.register_fake("tessera::rows_backward", _gradient_shapes, lib=_LIBRARY)


def _save(ctx: Any, inputs: tuple, output: tuple[Tensor, Tensor]) -> None:
    weights, tables, anchor = inputs[1], inputs[4], inputs[5]
    ctx.num_tables = len(tables)
    ctx.wants_weights = weights is not None and weights.requires_grad
    ctx.save_for_backward(output[1], anchor, *([weights] if ctx.wants_weights else []), *tables)
    ctx.mark_non_differentiable(output[1])


def _gradients(ctx: Any, gradient: Tensor, _: Any) -> tuple:
    ticket, anchor, *others = ctx.saved_tensors
    weights = others[0] if ctx.wants_weights else None
    tables = others[1:] if ctx.wants_weights else others
    found = torch.ops.tessera.rows_backward(gradient, ticket, weights, tables, anchor, ctx.wants_weights)
    of_weights = found[ctx.num_tables] if ctx.wants_weights else None
    return None, of_weights, None, None, found[: ctx.num_tables], found[-1], *[None] * 8


torch.library.register_autograd("tessera::rows", _gradients, setup_context=_save, lib=_LIBRARY)


# ---- what collections call ----


def _call(
    features: KeyedJaggedTensor,
    weights: Tensor | None,
    tables: Sequence[Tensor],
    anchor: Tensor,
    size: int,
    columns: int,
    reader: str,
) -> Tensor:
    inverse = features._inverse
    strides = features._strides
    needs = [anchor, *tables] if weights is None else [anchor, *tables, weights]
    keeps = torch.is_grad_enabled() and any(each.requires_grad for each in needs)
    keeps = keeps and not torch.jit.is_tracing()  # which traces without gradients to check itself
    rows, _ = torch.ops.tessera.rows(
        features._values,
        weights,
        features.lengths(),
        None if inverse is None else inverse[1],
        list(tables),
        anchor,
        _BETWEEN.join(features._keys),
        None if strides is None else [size for row in strides for size in row],
        None if inverse is None else _BETWEEN.join(inverse[0]),
        size,
        columns,
        reader,
        keeps,
        keeps and weights is not None and weights.requires_grad,
    )
    return rows


def pooled(
    features: KeyedJaggedTensor,
    uses_weights: bool,
    tables: Sequence[Tensor],
    anchor: Tensor,
    names: Sequence[str],
    dims: Sequence[int],
    reader: str,
) -> KeyedTensor:
    """Return the pooled rows of a batch that torch traces."""
    weights = features.weights() if uses_weights else None
    values = _call(features, weights, tables, anchor, features.stride(), sum(dims), reader)
    return KeyedTensor(list(names), list(dims), values)


def apart(
    features: KeyedJaggedTensor,
    need_indices: bool,
    tables: Sequence[Tensor],
    anchor: Tensor,
    outputs: Sequence[tuple[str, str, int]],
    reader: str,
) -> dict[str, JaggedTensor]:
    """Return the rows of a batch that torch traces; `outputs` are name, feature and columns of each."""
    if need_indices and features._inverse is not None:
        raise NotImplementedError("embed.traced: need_indices with inverse indices is not traced.")
    by_name = features.to_dict()
    lengths = {key: feature.lengths() for key, feature in by_name.items()}
    if features._inverse is None:
        counts = {key: feature.values().shape[0] for key, feature in by_name.items()}
    else:
        for place, key in enumerate(features._inverse[0]):
            lengths[key] = lengths[key][features._inverse[1][place]]
        sums = sizes_of(torch.stack([length.sum() for length in lengths.values()]))
        counts = dict(zip(lengths, sums, strict=True))
    sizes = [counts[feature] * dim for _, feature, dim in outputs]
    total = 0  # not sum(): what torch makes of it cannot be saved
    for size in sizes:
        total = total + size
    flat = _call(features, None, tables, anchor, total, 0, reader)
    return {
        name: JaggedTensor(
            rows.reshape(counts[feature], dim),
            by_name[feature].values() if need_indices else None,
            lengths[feature],
        )
        for (name, feature, dim), rows in zip(outputs, cut(flat, sizes), strict=True)
    }


def as_module_node(module: torch.nn.Module, features: Any) -> Any:
    """Return the call of `module` in the graph of torch.fx; if it is what is traced, what is inside."""
    path = features.tracer.path_of_module(module)
    if not path and hasattr(module, "_inside"):
        return module._inside(features)
    if not path:
        raise ValueError(f"fx: a {type(module).__name__} is called as a whole. Trace a model that holds it.")
    return features.tracer.create_proxy("call_module", path, (features,), {})
