"""Rows of tables in the language of torch.jit.script: what a scripted collection computes.

torch's own operators, so that a saved script needs LibTorch alone. What collections call are nodes in the
graphs of torch.fx.
"""

from __future__ import annotations

from typing import Optional

import torch
from torch import Tensor, fx
from torch.nn import functional

from tessera.sparse.jagged_tensor import JaggedTensor, KeyedJaggedTensor


def ids_of(feature: JaggedTensor, num_rows: int, reads_row_0: bool) -> Tensor:
    """Return the ids of a feature; those outside the table are 0 where that is wanted."""
    ids = feature.values().to(torch.int64)
    if reads_row_0:
        ids = torch.where((ids >= 0) & (ids < num_rows), ids, torch.zeros_like(ids))
    return ids


@fx.wrap
def pooled_rows(
    features: KeyedJaggedTensor,
    name: str,
    feature: JaggedTensor,
    table: Tensor,
    is_mean: bool,
    is_weighted: bool,
    reads_row_0: bool,
    is_sparse: bool,
) -> Tensor:
    """Return the pooled rows of a feature, a row for each sample, float32."""
    ids = ids_of(feature, table.shape[0], reads_row_0)
    if table.dtype != torch.float32:  # summed in float32 all the same
        numbers = functional.embedding(ids, table, sparse=is_sparse).to(torch.float32)
        found = pooled_numbers(feature, numbers, is_mean, is_weighted)
    else:
        weights: Optional[Tensor] = None  # noqa: UP045
        if is_weighted:
            weights = feature.weights().to(torch.float32)
        found = functional.embedding_bag(
            ids,
            table,
            feature.offsets().to(torch.int64),
            mode="sum",
            sparse=is_sparse,
            per_sample_weights=weights,
            include_last_offset=True,
        )
        if is_mean:
            found = found / feature.lengths().clamp(min=1).unsqueeze(1).to(torch.float32)
    inverse = features.inverse_indices_or_none()
    if inverse is not None:
        found = found[inverse[1][inverse[0].index(name)]]
    return found


@fx.wrap
def rows_apart(
    features: KeyedJaggedTensor,
    name: str,
    feature: JaggedTensor,
    table: Tensor,
    need_indices: bool,
    reads_row_0: bool,
    is_sparse: bool,
) -> JaggedTensor:
    """Return the row of every id of a feature, in bags as long as the feature's, float32."""
    ids = ids_of(feature, table.shape[0], reads_row_0)
    given = feature.values()
    lengths = feature.lengths()
    inverse = features.inverse_indices_or_none()
    if inverse is not None:
        samples = inverse[1][inverse[0].index(name)]
        begins = feature.offsets()[:-1][samples].to(torch.int64)
        lengths = lengths[samples]
        ends = torch.cumsum(lengths, 0)
        places = torch.repeat_interleave(begins - (ends - lengths), lengths)
        places = places + torch.arange(places.shape[0], device=places.device)
        ids = ids[places]
        given = given[places]
    rows = functional.embedding(ids, table, sparse=is_sparse).to(torch.float32)
    return JaggedTensor(rows, given if need_indices else None, lengths, None)


def weights_by_position(feature: JaggedTensor, position_weight: Tensor) -> Tensor:
    """Return the weight of each id's place in its bag. RuntimeError for a bag that is too long."""
    lengths = feature.lengths().to(torch.int64)
    begins = torch.repeat_interleave(feature.offsets()[:-1].to(torch.int64), lengths)
    places = torch.arange(begins.shape[0], device=begins.device) - begins
    return position_weight[places]


def pooled_numbers(feature: JaggedTensor, numbers: Tensor, is_mean: bool, is_weighted: bool) -> Tensor:
    """Return the sum or mean of each bag of rows that are there, one for each id."""
    weights: Optional[Tensor] = None  # noqa: UP045
    if is_weighted:
        weights = feature.weights().to(torch.float32)
    found = functional.embedding_bag(
        torch.arange(numbers.shape[0], device=numbers.device),
        numbers,
        feature.offsets().to(torch.int64),
        mode="sum",
        per_sample_weights=weights,
        include_last_offset=True,
    )
    if is_mean:
        found = found / feature.lengths().clamp(min=1).unsqueeze(1).to(torch.float32)
    return found


def floats_of(rows: Tensor, size: int, exponent_bits: int) -> Tensor:
    """Return the numbers whose bytes stand in rows, float32: a script cannot see bytes as another type."""
    parts = rows.to(torch.int64).reshape(rows.shape[0], -1, size)
    bits = (parts << (torch.arange(size, device=rows.device) * 8)).sum(2)
    fraction_bits = 8 * size - 1 - exponent_bits
    top = (1 << exponent_bits) - 1
    exponent = (bits >> fraction_bits) & top
    fraction = bits & ((1 << fraction_bits) - 1)
    digits = fraction + torch.where(exponent > 0, 1 << fraction_bits, 0)
    power = exponent.clamp(min=1) - ((1 << (exponent_bits - 1)) - 1 + fraction_bits)
    numbers = digits.to(torch.float64) * torch.pow(2.0, power.to(torch.float64))
    special = torch.where(fraction == 0, float("inf"), float("nan"))
    numbers = torch.where(exponent == top, special.to(torch.float64), numbers)
    return torch.where((bits >> (8 * size - 1)) == 1, -numbers, numbers).to(torch.float32)


@fx.wrap
def quantised_rows(
    feature: JaggedTensor,
    table: Tensor,
    num_columns: int,
    kind: str,
) -> Tensor:
    """Return the numbers of a feature's rows, float32: codes behind a scale and a bias, or small floats."""
    ids = feature.values().to(torch.int64)
    rows = table[ids]
    if kind == "fp32":
        return floats_of(rows[:, : 4 * num_columns], 4, 8)
    if kind == "fp16":
        return floats_of(rows[:, : 2 * num_columns], 2, 5)
    if kind == "bf16":
        return floats_of(rows[:, : 2 * num_columns], 2, 8)
    scale, bias = floats_of(rows[:, 0:2], 2, 5), floats_of(rows[:, 2:4], 2, 5)
    rows = rows[:, 4:]
    bits = 8
    if kind == "int4":
        bits = 4
    elif kind == "int2":
        bits = 2
    per_byte = 8 // bits
    places = torch.arange(per_byte, device=rows.device) * bits
    codes = (rows.to(torch.int64).unsqueeze(2) >> places) & ((1 << bits) - 1)
    codes = codes.reshape(rows.shape[0], -1)[:, :num_columns]
    return codes.to(torch.float32) * scale.to(torch.float32) + bias.to(torch.float32)


@fx.wrap
def pooled_quantised_rows(
    feature: JaggedTensor,
    table: Tensor,
    num_columns: int,
    kind: str,
    is_mean: bool,
    is_weighted: bool,
) -> Tensor:
    """Return the sum or mean of each bag of a feature, float32."""
    numbers = quantised_rows(feature, table, num_columns, kind)
    return pooled_numbers(feature, numbers, is_mean, is_weighted)
