"""Rows in few bits beside fbgemm 1.8.0: the same bytes."""

from __future__ import annotations

import fbgemm_gpu  # noqa: F401  (its operators)
import pytest
import torch
from tessera import _C
from two_sides import SIDES

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
# Weights are compared for sums.
@pytest.mark.parametrize(
    ("pooling", "is_weighted"), [("SUM", False), ("SUM", True), ("MEAN", False), ("NONE", False)]
)
def test_lookups_are_those_of_the_module(type, pooling, is_weighted):
    from fbgemm_gpu.split_embedding_configs import SparseType
    from fbgemm_gpu.split_table_batched_embeddings_ops_common import EmbeddingLocation, PoolingMode
    from fbgemm_gpu.split_table_batched_embeddings_ops_inference import (
        IntNBitTableBatchedEmbeddingBagsCodegen,
    )

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


def collections(side, dtype, split, per_table=None):
    """The same tables on one side, rounded by its own function."""
    configs = side("modules.embedding_configs")
    module = side("modules.embedding_modules").EmbeddingBagCollection(
        tables=[
            configs.EmbeddingBagConfig(
                num_embeddings=30, embedding_dim=64, name="a", feature_names=["f", "g"]
            ),
            configs.EmbeddingBagConfig(
                num_embeddings=12,
                embedding_dim=32,
                name="b",
                feature_names=["h"],
                pooling=configs.PoolingType.MEAN,
            ),
        ]
    )
    generator = torch.Generator().manual_seed(9)
    with torch.no_grad():
        for bag in module.embedding_bags.values():
            bag.weight.copy_(torch.randn(bag.weight.shape, generator=generator))
    if split:
        side("quant.embedding_modules").quant_prep_enable_quant_state_dict_split_scale_bias(module)
    model = torch.nn.Sequential(module)
    return side("inference.modules").quantize_embeddings(
        model, dtype, inplace=True, output_dtype=torch.float32, per_table_weight_dtype=per_table
    )[0]


def batch_of(side):
    lengths = torch.tensor([2, 0, 3, 1, 1, 1, 0, 4, 2])
    ids = torch.arange(int(lengths.sum())) * 5 % 12
    return side("sparse.jagged_tensor").KeyedJaggedTensor.from_lengths_sync(["h", "f", "g"], ids, lengths)


@pytest.mark.parametrize("dtype", [torch.qint8, torch.quint4x2, torch.float16])
@pytest.mark.parametrize("split", [False, True])
def test_collections_have_the_same_rows_and_results(dtype, split):
    ours, theirs = (collections(side, dtype, split) for side in SIDES)
    state, their_state = ours.state_dict(), theirs.state_dict()
    assert list(state) == list(their_state)
    if dtype != torch.quint4x2:  # whose state there has twice as many columns as bytes
        for name, own in state.items():
            assert (own.shape, own.dtype) == (their_state[name].shape, their_state[name].dtype), name
            assert torch.equal(own, their_state[name]), name
    found, wanted = ours(batch_of(SIDES[0])), theirs(batch_of(SIDES[1]))
    assert list(found.keys()) == list(wanted.keys())
    torch.testing.assert_close(found.values(), wanted.values(), rtol=1e-5, atol=1e-5)
    bytes_of = theirs._emb_modules[0].split_embedding_weights(split_scale_shifts=False)[0][0]
    assert torch.equal(ours._emb_modules[0].rows(0), bytes_of)
