"""Rows in few bits beside fbgemm 1.8.0: the same bytes."""

from __future__ import annotations

import fbgemm_gpu  # noqa: F401  (its operators)
import pytest
import torch
from tessera import _C

BITS = {"int8": 8, "int4": 4, "int2": 2}


def tables(type, numbers, pooling="SUM", alignment=1):
    rows, dim = numbers.shape
    made = _C.embedding.QuantisedTables(
        [("t", rows, dim, type, ["f"])], getattr(_C.embedding.PoolingType, pooling), alignment
    )
    made.assign(0, numbers)
    return made


def random_rows(count, dim):
    """Rows whose ranges go from where a float16 scale is subnormal to where it is large."""
    generator = torch.Generator().manual_seed(5)
    spread = 2.0 ** torch.randint(-18, 12, (count, 1), generator=generator)
    middle = torch.randn(count, 1, generator=generator) * spread * 3
    return middle + spread * torch.randn(count, dim, generator=generator)


@pytest.mark.parametrize("type", BITS)
@pytest.mark.parametrize("dim", [8, 64, 104, 128])
def test_rows_are_those_of_the_operator(type, dim):
    numbers = random_rows(5000, dim)
    numbers[0] = 0.25  # all alike
    numbers[1] = 0
    numbers[2, 1:] = numbers[2, 0]
    theirs = torch.ops.fbgemm.FloatToFusedNBitRowwiseQuantizedSBHalf(numbers, BITS[type])
    ours = tables(type, numbers).rows(0)
    # The operator puts scale and bias behind the codes, the lookup in front.
    assert torch.equal(ours, torch.cat([theirs[:, -4:], theirs[:, :-4]], 1))
    back = torch.ops.fbgemm.FusedNBitRowwiseQuantizedSBHalfToFloat(theirs, BITS[type])
    assert torch.equal(tables(type, numbers).dequantised(0), back)


@pytest.mark.parametrize("type", ["int8", "int4", "int2", "fp16", "fp32"])
@pytest.mark.parametrize("pooling", ["SUM", "MEAN", "NONE"])
@pytest.mark.parametrize("is_weighted", [False, True])
def test_lookups_are_those_of_the_module(type, pooling, is_weighted):
    from fbgemm_gpu.split_embedding_configs import SparseType
    from fbgemm_gpu.split_table_batched_embeddings_ops_common import EmbeddingLocation, PoolingMode
    from fbgemm_gpu.split_table_batched_embeddings_ops_inference import (
        IntNBitTableBatchedEmbeddingBagsCodegen,
    )

    if pooling == "NONE" and is_weighted:
        pytest.skip("the peer weighs pooled rows only")
    if pooling == "MEAN" and is_weighted:
        pytest.skip("one meaning of the mean: docs/deviations.md")
    numbers = torch.randn(50, 64, generator=torch.Generator().manual_seed(1))
    ours = tables(type, numbers, pooling)
    theirs = IntNBitTableBatchedEmbeddingBagsCodegen(
        [("t", 50, 64, getattr(SparseType, type.upper()),
          EmbeddingLocation.HOST)],
        pooling_mode=getattr(PoolingMode, pooling),
        device="cpu",
        output_dtype=SparseType.FP32,
        row_alignment=1,
    )  # fmt: skip
    theirs.initialize_weights()
    weight, _ = theirs.split_embedding_weights(split_scale_shifts=False)[0]
    weight.copy_(ours.rows(0))
    generator = torch.Generator().manual_seed(2)
    lengths = torch.randint(0, 6, (40,), generator=generator)
    offsets = torch.cat([torch.zeros(1, dtype=torch.long), lengths.cumsum(0)])
    ids = torch.randint(0, 50, (int(offsets[-1]),), generator=generator)
    weights = torch.randn(len(ids), generator=generator) if is_weighted else None
    wanted = theirs(ids.int(), offsets.int(), weights)
    found = ours.forward(ids, offsets, weights)
    torch.testing.assert_close(found, wanted, rtol=1e-5, atol=2e-6)
    if pooling == "NONE":  # one row each: nothing is added in another order
        assert torch.equal(found, wanted)
