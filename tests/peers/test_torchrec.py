"""Tessera beside torchrec 1.8.0 on the same input: batches, collections, position weights."""

from __future__ import annotations

import pytest
import tessera.modules.embedding_configs as our_configs
import tessera.modules.embedding_modules as our_modules
import tessera.modules.feature_processor as our_processor
import tessera.modules.feature_processor_ as our_collections
import tessera.sparse.jagged_tensor as ours
import torch
import torchrec.modules.embedding_configs as their_configs
import torchrec.modules.embedding_modules as their_modules
import torchrec.modules.feature_processor as their_processor
import torchrec.modules.feature_processor_ as their_collections
import torchrec.sparse.jagged_tensor as theirs
from tessera import _C

CLOSE = {"rtol": 1e-5, "atol": 1e-6}


def fields(num_keys, stride, weighted=False, id_type=torch.int64, length_type=torch.int64, rows=10, seed=0):
    generator = torch.Generator().manual_seed(seed)
    lengths = torch.randint(0, 5, (num_keys * stride,), generator=generator).to(length_type)
    values = torch.randint(0, rows, (int(lengths.sum()),), generator=generator).to(id_type)
    weights = torch.rand(values.numel(), generator=generator) if weighted else None
    return {
        "keys": [f"f{i}" for i in range(num_keys)],
        "values": values,
        "lengths": lengths,
        "weights": weights,
    }


def variable(weighted=False):
    lengths = torch.tensor([2, 1, 0, 1, 0, 3])
    values = torch.arange(1, 8)
    return {
        "keys": ["f0", "f1", "f2"],
        "values": values,
        "lengths": lengths,
        "weights": values / 10 if weighted else None,
        "stride_per_key_per_rank": [[1, 0], [1, 2], [0, 2]],
    }


def pair(given):
    return (
        ours.KeyedJaggedTensor.from_lengths_sync(**given),
        theirs.KeyedJaggedTensor.from_lengths_sync(**given),
    )


def same(a, b):
    if a is None or b is None:
        return a is None and b is None
    return a.dtype == b.dtype and torch.equal(a, b)


def assert_same(our, their):
    assert our.keys() == their.keys()
    assert same(our.values(), their.values())
    assert same(our.weights_or_none(), their.weights_or_none())
    assert same(our.lengths(), their.lengths())
    assert our.stride_per_key() == their.stride_per_key()
    assert our.length_per_key() == their.length_per_key()
    assert our.variable_stride_per_key() == their.variable_stride_per_key()
    assert our.stride_per_key_per_rank() == their.stride_per_key_per_rank()
    if our.keys():
        assert same(our.offsets(), their.offsets())
        assert our.offset_per_key() == their.offset_per_key()
        assert our.lengths_offset_per_key() == their.lengths_offset_per_key()
    assert our.dist_labels() == their.dist_labels()


BATCHES = [
    fields(3, 4),
    fields(3, 4, weighted=True, id_type=torch.int32, length_type=torch.int32),
    fields(1, 1),
    fields(2, 0),
    variable(),
    variable(weighted=True),
]


@pytest.mark.parametrize("given", BATCHES)
def test_batches_agree(given):
    our, their = pair(given)
    assert_same(our, their)
    assert our.stride() == their.stride()
    for key in our.keys() if our.stride() else ():
        assert same(our[key].values(), their[key].values())
        assert same(our[key].offsets(), their[key].offsets())
    count = len(our.keys())
    for order in ([*range(count)][::-1], [0, 0], [count - 1]):
        assert_same(our.permute(order), their.permute(order))
    segments = [1, 0, count - 1]
    for a, b in zip(our.split(segments), their.split(segments), strict=True):
        assert a.keys() == b.keys()
        assert same(a.values(), b.values())
        assert same(a.weights_or_none(), b.weights_or_none())
        assert a.stride_per_key() == b.stride_per_key()
    assert our.split([count])[0] is our
    assert our.dist_splits([1, count - 1]) == their.dist_splits([1, count - 1])
    for a, b in zip(our.dist_tensors(), their.dist_tensors(), strict=True):
        assert same(a, b)
    assert_same(ours.KeyedJaggedTensor.concat([our, our]), theirs.KeyedJaggedTensor.concat([their, their]))
    if our.stride():
        again = ours.KeyedJaggedTensor.from_jt_dict(our.to_dict())
        assert ours.kjt_is_equal(again, our)
        assert_same(again, theirs.KeyedJaggedTensor.from_jt_dict(their.to_dict()).sync())


def test_text_agrees():
    for given in (fields(2, 3), variable()):
        our, their = pair(given)
        assert str(our) == str(their)


def test_a_repeated_key_is_its_last_place():
    given = {"keys": ["a", "b", "a"], "values": torch.arange(3), "lengths": torch.ones(3, dtype=torch.int64)}
    our, their = pair(given)
    assert same(our["a"].values(), their["a"].values())
    assert our.index_per_key() == their.index_per_key()


@pytest.mark.parametrize("given", [fields(4, 3, weighted=True), fields(4, 3)])
@pytest.mark.parametrize("stagger", [1, 2])
def test_received_batches_agree(given, stagger):
    # Four ranks send two keys each, in equal batches of three.
    tensors = [torch.cat([t, t]) for t in pair(given)[0].dist_tensors()]
    num_workers, num_keys = 4, 2
    order = [x + (num_workers // stagger) * y for x in range(num_workers // stagger) for y in range(stagger)]
    recat = torch.tensor([i + j * num_keys for i in range(num_keys) for j in order], dtype=torch.int32)
    arguments = (["x", "y"], tensors, False, num_workers, recat, [3] * 4, stagger)
    assert_same(ours.KeyedJaggedTensor.dist_init(*arguments), theirs.KeyedJaggedTensor.dist_init(*arguments))


def test_received_uneven_batches_agree():
    strides = [1, 3]
    lengths = torch.tensor([2, 0, 1, 0, 2, 1, 1, 1])
    values = torch.arange(int(lengths.sum()))
    # Rank 0: one sample of x and y; rank 1: three of each.
    recat = torch.tensor([0, 2, 3, 4, 1, 5, 6, 7], dtype=torch.int32)
    arguments = (["x", "y"], [lengths, values], False, 2, recat, strides)
    assert_same(ours.KeyedJaggedTensor.dist_init(*arguments), theirs.KeyedJaggedTensor.dist_init(*arguments))


def test_received_variable_batches_agree():
    lengths = torch.tensor([2, 1, 0, 1, 2])
    tensors = [lengths, torch.arange(6), torch.tensor([1, 2, 2, 0]), torch.rand(6)]
    recat = torch.tensor([0, 2, 1, 3], dtype=torch.int32)
    arguments = (["x", "y"], tensors, True, 2, recat, None)
    assert_same(ours.KeyedJaggedTensor.dist_init(*arguments), theirs.KeyedJaggedTensor.dist_init(*arguments))


@pytest.mark.parametrize("id_type", [torch.int32, torch.int64])
@pytest.mark.parametrize("num_buckets", [1, 2, 3])
def test_buckets_agree(id_type, num_buckets):
    given = fields(3, 7, weighted=True, id_type=id_type, length_type=id_type, rows=40)
    blocks = [5, 20, 1]
    our = _C.jagged.bucketize(
        given["lengths"], given["values"], given["weights"], num_buckets, [7] * 3, blocks, [], True, True
    )
    their = torch.ops.fbgemm.block_bucketize_sparse_features(
        given["lengths"],
        given["values"],
        bucketize_pos=True,
        sequence=True,
        block_sizes=torch.tensor(blocks, dtype=id_type),
        my_size=num_buckets,
        weights=given["weights"],
    )
    for a, b in zip(our, their, strict=True):
        assert torch.equal(
            a.long() if not a.is_floating_point() else a, b.long() if not b.is_floating_point() else b
        )


def test_padded_rows_agree():
    given = {"values": torch.rand(8), "lengths": torch.tensor([2, 0, 1, 5])}
    our, their = ours.JaggedTensor(**given), theirs.JaggedTensor(**given)
    for length in (None, 1, 3, 7):
        assert torch.equal(our.to_padded_dense(length, 9.0), their.to_padded_dense(length, 9.0))
    for a, b in zip(our.to_dense(), their.to_dense(), strict=True):
        assert torch.equal(a, b)


def test_regroup_agrees():
    left, right = torch.rand(3, 5), torch.rand(3, 4)
    groups = [["d", "a"], ["b", "a", "c"], ["a"]]
    results = []
    for kind in (ours, theirs):
        inputs = [left.clone().requires_grad_(), right.clone().requires_grad_()]
        tensors = [
            kind.KeyedTensor(["a", "b"], [2, 3], inputs[0]),
            kind.KeyedTensor(["c", "d"], [1, 3], inputs[1]),
        ]
        grouped = kind.KeyedTensor.regroup(tensors, groups)
        sum((i + 1) * part.sum() for i, part in enumerate(grouped)).backward()
        results.append([*grouped, *(tensor.grad for tensor in inputs)])
    for a, b in zip(*results, strict=True):
        assert torch.equal(a, b)


TABLES = [
    {"num_embeddings": 10, "embedding_dim": 3, "name": "t0", "feature_names": ["f0", "f1"]},
    {"num_embeddings": 10, "embedding_dim": 17, "name": "t1", "feature_names": ["f1"]},
    {"num_embeddings": 10, "embedding_dim": 8, "name": "t2", "feature_names": ["f2"]},
]


def collections(kind, weighted, pooling):
    ours_made = our_modules.EmbeddingBagCollection(
        tables=[
            our_configs.EmbeddingBagConfig(**table, pooling=our_configs.PoolingType[mode])
            for table, mode in zip(TABLES, pooling, strict=True)
        ],
        is_weighted=weighted,
    )
    theirs_made = their_modules.EmbeddingBagCollection(
        tables=[
            their_configs.EmbeddingBagConfig(**table, pooling=their_configs.PoolingType[mode])
            for table, mode in zip(TABLES, pooling, strict=True)
        ],
        is_weighted=weighted,
    )
    assert theirs_made.load_state_dict(ours_made.state_dict()) is not None
    return ours_made, theirs_made


@pytest.mark.parametrize("weighted", [False, True])
@pytest.mark.parametrize("id_type", [torch.int32, torch.int64])
def test_pooled_rows_agree(weighted, id_type):
    # The peer refuses a weighted mean.
    pooling = ["SUM", "SUM", "SUM"] if weighted else ["SUM", "MEAN", "MEAN"]
    our, their = collections(ours, weighted, pooling)
    given = fields(3, 6, weighted=weighted, id_type=id_type, length_type=id_type)
    inputs = pair(given)
    results = []
    for module, features in zip((our, their), inputs, strict=True):
        pooled = module(features)
        (pooled.values() * torch.arange(pooled.values().numel()).view_as(pooled.values())).sum().backward()
        results.append((pooled, module))
    (ours_pooled, _), (theirs_pooled, _) = results
    assert ours_pooled.keys() == theirs_pooled.keys() == ["f0", "f1@t0", "f1@t1", "f2"]
    assert ours_pooled.length_per_key() == theirs_pooled.length_per_key()
    torch.testing.assert_close(ours_pooled.values(), theirs_pooled.values(), **CLOSE)
    theirs_grads = dict(their.named_parameters())
    for name, weight in our.named_parameters():
        torch.testing.assert_close(weight.grad, theirs_grads[name].grad, **CLOSE)


def test_a_variable_batch_agrees():
    given = {
        "keys": ["f0", "f1", "f2"],
        "values": torch.tensor([1, 2, 3, 4, 5]),
        "lengths": torch.tensor([1, 2, 1, 0, 1]),
        "stride_per_key_per_rank": [[2], [1], [2]],
        "inverse_indices": (["f0", "f1", "f2"], torch.tensor([[0, 1, 0], [0, 0, 0], [1, 1, 0]])),
    }
    our, their = collections(ours, False, ["SUM", "MEAN", "SUM"])
    pooled = [module(features) for module, features in zip((our, their), pair(given), strict=True)]
    assert pair(given)[0].stride() == pair(given)[1].stride() == 3
    torch.testing.assert_close(pooled[0].values(), pooled[1].values(), **CLOSE)


@pytest.mark.parametrize("need_indices", [False, True])
def test_rows_apart_agree(need_indices):
    tables = [dict(table, embedding_dim=5) for table in TABLES]
    our = our_modules.EmbeddingCollection(
        [our_configs.EmbeddingConfig(**table) for table in tables], need_indices=need_indices
    )
    their = their_modules.EmbeddingCollection(
        [their_configs.EmbeddingConfig(**table) for table in tables], need_indices=need_indices
    )
    their.load_state_dict(our.state_dict())
    a, b = (module(features) for module, features in zip((our, their), pair(fields(3, 6)), strict=True))
    assert list(a) == list(b)
    assert our.embedding_names_by_table() == their.embedding_names_by_table()
    for name in a:
        torch.testing.assert_close(a[name].values(), b[name].values(), **CLOSE)
        assert same(a[name].lengths(), b[name].lengths())
        assert same(a[name].weights_or_none(), b[name].weights_or_none())
    sum(feature.values().sum() for feature in a.values()).backward()
    sum(feature.values().sum() for feature in b.values()).backward()
    for (name, p), (other, q) in zip(our.named_parameters(), their.named_parameters(), strict=True):
        assert name == other
        torch.testing.assert_close(p.grad, q.grad, **CLOSE)


def test_position_weights_agree():
    lengths = {"f0": 5, "f1": 4, "f2": 7}
    our = our_processor.PositionWeightedProcessor(lengths)
    their = their_processor.PositionWeightedProcessor(lengths)
    for name, weight in our.named_parameters():
        with torch.no_grad():
            weight.copy_(torch.rand(weight.shape))
        their.state_dict()[name].copy_(weight)
    a, b = (module(features) for module, features in zip((our, their), pair(fields(3, 6)), strict=True))
    torch.testing.assert_close(a.weights(), b.weights())
    (a.weights() * torch.arange(a.weights().numel())).sum().backward()
    (b.weights() * torch.arange(b.weights().numel())).sum().backward()
    grads = {name: weight.grad for name, weight in their.named_parameters()}
    for name, weight in our.named_parameters():
        torch.testing.assert_close(weight.grad, grads[name])


def test_position_weights_by_feature():
    lengths = {"f0": 5, "f1": 4}
    for side in (our_collections, their_collections):
        module = side.PositionWeightedModuleCollection(lengths)
        found = module.position_weights_dict
        assert {name: w.tolist() for name, w in found.items()} == {"f0": [1.0] * 5, "f1": [1.0] * 4}
        for name, weight in module.position_weights.items():
            assert found[name] is weight  # the weights themselves
        moved = module.copy(torch.device("meta"))
        assert [weight.is_meta for weight in moved.position_weights_dict.values()] == [True, True]
