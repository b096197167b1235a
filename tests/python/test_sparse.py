"""The Python face of batches and of tables on one rank; values are compared in C++ and with the peers."""

from __future__ import annotations

import copy
import pickle

import pytest
import torch
from tessera import _C
from tessera.distributed.grouped_position_weighted import GroupedPositionWeightedModule
from tessera.modules.embedding_configs import (
    BoundsCheckMode,
    DataType,
    EmbeddingBagConfig,
    EmbeddingConfig,
    PoolingType,
    data_type_to_dtype,
    dtype_to_data_type,
    pooling_type_to_str,
)
from tessera.modules.embedding_modules import EmbeddingBagCollection, EmbeddingCollection
from tessera.modules.feature_processor import PositionWeightedModule
from tessera.modules.feature_processor_ import PositionWeightedModuleCollection
from tessera.modules.regroup import KTRegroupAsDict
from tessera.sparse.jagged_tensor import (
    ComputeJTDictToKJT,
    ComputeKJTToJTDict,
    JaggedTensor,
    KeyedJaggedTensor,
    KeyedTensor,
    jt_is_equal,
    kjt_is_equal,
)
from tessera.sparse.jagged_tensor_validator import validate_keyed_jagged_tensor
from tessera.streamable import Pipelineable
from torch.utils.data import DataLoader


def batch(weights=None):
    return KeyedJaggedTensor.from_lengths_sync(
        keys=["f", "g"],
        values=torch.tensor([1, 2, 3, 0, 4, 4]),
        lengths=torch.tensor([2, 0, 1, 1, 2, 0]),
        weights=weights,
    )


def variable_batch():
    return KeyedJaggedTensor.from_lengths_sync(
        keys=["f", "g"],
        values=torch.tensor([1, 2, 3]),
        lengths=torch.tensor([1, 1, 1]),
        stride_per_key_per_rank=[[2], [1]],
        inverse_indices=(["f", "g"], torch.tensor([[0, 1, 1], [0, 0, 0]])),
    )


@pytest.mark.parametrize("made", [batch(), batch(torch.rand(6)), variable_batch()])
def test_batches_travel(made):
    again = pickle.loads(pickle.dumps(made))
    assert kjt_is_equal(again, made)
    assert again.variable_stride_per_key() == made.variable_stride_per_key()
    assert kjt_is_equal(copy.deepcopy(made), made)
    assert (again.inverse_indices_or_none() is None) == (made.inverse_indices_or_none() is None)


class Batches(torch.utils.data.Dataset):
    def __len__(self):
        return 3

    def __getitem__(self, index):
        return batch()


def test_a_loader_with_workers_hands_batches_over():
    loader = DataLoader(Batches(), batch_size=None, num_workers=1)
    assert all(kjt_is_equal(made, batch()) for made in loader)


def test_errors_have_their_python_types():
    with pytest.raises(KeyError, match="z"):
        batch()["z"]
    with pytest.raises(KeyError, match="z"):
        KeyedTensor(["a"], [1], torch.ones(2, 1))["z"]
    with pytest.raises(TypeError, match="the lengths must be int32 or int64, not Float"):
        KeyedJaggedTensor(["a"], torch.tensor([1]), lengths=torch.tensor([1.0]))
    with pytest.raises(ValueError, match="there are 2 weights for 1 values"):
        KeyedJaggedTensor(["a"], torch.tensor([1]), torch.ones(2), torch.tensor([1]))
    with pytest.raises(ValueError, match="there are no weights"):
        batch().weights()
    with pytest.raises(IndexError, match="there is no key 5 among 2"):
        batch().permute([5])
    with pytest.raises(ValueError, match="1 groups and 2 names"):
        KeyedTensor.regroup_as_dict([KeyedTensor(["a"], [1], torch.ones(2, 1))], [["a"]], ["x", "y"])


def test_identity_and_views():
    made = batch()
    assert made.split([2])[0] is made
    assert made.sync() is made
    assert made.split([1, 1])[1].values().data_ptr() == made.values()[3:].data_ptr()
    assert made.length_per_key_or_none() == [3, 3]
    assert made.unsync().length_per_key_or_none() is None
    assert made.stride_per_key_per_rank() == []
    assert variable_batch().stride_per_key_per_rank() == [[2], [1]]
    assert variable_batch().inverse_indices()[0] == ["f", "g"]
    assert ComputeKJTToJTDict()(made).keys() == {"f", "g"}
    assert kjt_is_equal(ComputeJTDictToKJT()(made.to_dict()), made)
    assert not kjt_is_equal(made, batch(torch.ones(6)))
    assert not kjt_is_equal(made, None)
    assert jt_is_equal(made["f"], JaggedTensor(torch.tensor([1, 2, 3]), lengths=torch.tensor([2, 0, 1])))
    assert made.to(torch.device("meta")).values().is_meta
    assert made.to("meta").values().is_meta
    assert JaggedTensor.empty(is_weighted=True).weights().numel() == 0
    assert KeyedJaggedTensor.empty_like(made).stride() == 3


def test_the_validator_names_feature_sample_and_id():
    config = EmbeddingBagConfig(num_embeddings=4, embedding_dim=1, name="t", feature_names=["f", "g"])
    assert validate_keyed_jagged_tensor(batch())
    with pytest.raises(ValueError, match=r"feature 'g', sample 1 has id 4; there are 4 rows\."):
        validate_keyed_jagged_tensor(batch(), [config])


def test_configs_follow_the_reference():
    config = EmbeddingConfig(num_embeddings=16, embedding_dim=1, name="t")
    assert config.get_weight_init_min() == -0.25
    assert config.num_features() == 0
    assert dtype_to_data_type(torch.bfloat16) == DataType.BF16
    assert data_type_to_dtype(DataType.FP16) == torch.float16
    assert pooling_type_to_str(PoolingType.MEAN) == "mean"
    with pytest.raises(ValueError, match=r"no table has rows of torch\.complex64"):
        dtype_to_data_type(torch.complex64)
    with pytest.raises(ValueError, match="pooling NONE"):
        pooling_type_to_str(PoolingType.NONE)


def tables(dims=(2, 3), **kwargs):
    return [
        EmbeddingBagConfig(
            num_embeddings=5, embedding_dim=dims[0], name="t", feature_names=["f", "g"], **kwargs
        ),
        EmbeddingBagConfig(num_embeddings=5, embedding_dim=dims[1], name="u", feature_names=["g"], **kwargs),
    ]


def test_a_collection_is_a_module():
    ebc = EmbeddingBagCollection(tables())
    assert list(ebc.state_dict()) == ["embedding_bags.t.weight", "embedding_bags.u.weight"]
    pooled = ebc(batch())
    assert pooled.keys() == ["f", "g@t", "g@u"]
    for again in (copy.deepcopy(ebc), pickle.loads(pickle.dumps(ebc))):
        assert torch.equal(again(batch()).values(), pooled.values())
    optimizer = torch.optim.SGD(ebc.parameters(), lr=0.5)
    before = ebc.embedding_bags["t"].weight.detach().clone()
    pooled["f"].sum().backward()
    optimizer.step()
    changed = (before - ebc.embedding_bags["t"].weight.detach())[:, 0]
    torch.testing.assert_close(changed, torch.tensor([0.0, 0.5, 0.5, 0.5, 0.0]))
    half = ebc.half()
    assert half(batch()).values().dtype == torch.float32
    with pytest.raises(ValueError, match="two tables are named 't'"):
        EmbeddingBagCollection([tables()[0], tables()[0]])


def test_tables_may_have_the_names_of_a_dicts_methods():
    names = ["items", "keys", "values", "pop", "clear", "training"]
    configs = [EmbeddingBagConfig(4, 3, name, feature_names=[name]) for name in names]
    collection = EmbeddingBagCollection(tables=configs)
    expected = {f"embedding_bags.{name}.weight" for name in names}
    assert {name for name, _ in collection.named_parameters()} == expected
    other = copy.deepcopy(collection)
    other.load_state_dict(collection.state_dict())
    assert set(other.state_dict()) == expected
    ids = KeyedJaggedTensor.from_lengths_sync(names, torch.arange(6) % 4, torch.ones(6, dtype=torch.int64))
    pooled = other(ids)
    assert torch.equal(pooled["pop"][0], collection.embedding_bags["pop"].weight[3])


def test_collections_on_the_meta_device():
    ebc = EmbeddingBagCollection(tables(), device=torch.device("meta"))
    assert ebc.embedding_bags["t"].weight.is_meta
    ebc.reset_parameters()
    with pytest.raises(ValueError, match="table 't' is on the meta device"):
        ebc(batch())
    ebc = ebc.to_empty(device="cpu")
    ebc.reset_parameters()
    assert ebc(batch()).values().shape == (3, 7)


@pytest.mark.parametrize("data_type", [DataType.FP32, DataType.FP16, DataType.BF16])
def test_rows_of_every_type_that_trains(data_type):
    ebc = EmbeddingBagCollection(tables(data_type=data_type))
    weight = ebc.embedding_bags["t"].weight
    assert weight.dtype == data_type_to_dtype(data_type)
    torch.testing.assert_close(ebc(batch())["f"][0], weight[1].float() + weight[2].float())


def test_ids_outside_their_table():
    features = KeyedJaggedTensor.from_lengths_sync(
        ["f", "g"], torch.tensor([1, 7, -1]), torch.tensor([0, 2, 0, 1])
    )
    with pytest.raises(IndexError, match=r"'f', sample 1 .*7.*'t'"):
        EmbeddingBagCollection(tables())(features)
    for mode in (BoundsCheckMode.WARNING, BoundsCheckMode.IGNORE):
        ebc = EmbeddingBagCollection(tables(), bounds_check_mode=mode)
        rows = ebc.embedding_bags["t"].weight
        torch.testing.assert_close(ebc(features)["f"][1], rows[1] + rows[0])
        torch.testing.assert_close(ebc(features)["g@t"][1], rows[0])


def test_gradients_of_weights_only_when_asked_for():
    ebc = EmbeddingBagCollection(tables(), is_weighted=True)
    plain = torch.rand(6)
    ebc(batch(plain)).values().sum().backward()
    assert plain.grad is None
    asking = plain.clone().requires_grad_()
    ebc(batch(asking)).values().sum().backward()
    rows = ebc.embedding_bags["t"].weight.sum(1)
    torch.testing.assert_close(asking.grad[:3], rows[[1, 2, 3]])
    with pytest.raises(ValueError, match="the features have no weights"):
        ebc(batch())


def test_sparse_gradients_hold_the_rows_looked_up():
    ebc = EmbeddingBagCollection(tables(), sparse_gradients=True)
    ebc(batch())["f"].sum().backward()
    grad = ebc.embedding_bags["t"].weight.grad
    assert grad.is_sparse
    torch.testing.assert_close(grad.to_dense()[:, 0], torch.tensor([0.0, 1.0, 1.0, 1.0, 0.0]))


def test_a_fused_optimizer_steps_in_backward():
    options = _C.embedding.OptimizerOptions()
    options.learning_rate = 0.5
    ebc = EmbeddingBagCollection(tables(), optimizer=options)
    before = ebc.embedding_bags["t"].weight.detach().clone()
    ebc(batch())["f"].sum().backward()
    changed = (before - ebc.embedding_bags["t"].weight.detach())[:, 0]
    torch.testing.assert_close(changed, torch.tensor([0.0, 0.5, 0.5, 0.5, 0.0]))
    assert ebc.embedding_bags["t"].weight.grad is None
    assert ebc.fused_optimizer().num_steps == 1
    assert EmbeddingBagCollection(tables()).fused_optimizer() is None


def test_rows_apart():
    configs = [
        EmbeddingConfig(5, 2, "t", feature_names=["f"]),
        EmbeddingConfig(5, 3, "u", feature_names=["g"]),
    ]
    ec = EmbeddingCollection(configs, need_indices=True)
    rows = ec(batch())
    assert list(rows) == ["f", "g"]
    assert rows["g"].values().shape == (3, 3)
    assert rows["g"].weights().tolist() == [0, 4, 4]
    assert ec.embedding_names_by_table() == [["f"], ["g"]]
    assert list(ec.state_dict()) == ["embeddings.t.weight", "embeddings.u.weight"]
    with pytest.raises(ValueError, match=r"\[2, 3\] columns"):
        ec.embedding_dim()
    assert torch.equal(copy.deepcopy(ec)(batch())["f"].values(), rows["f"].values())


def test_a_variable_batch_is_spread():
    pooled = EmbeddingBagCollection(tables())(variable_batch())
    assert pooled.values().shape == (3, 7)
    assert torch.equal(pooled["f"][1], pooled["f"][2])


def test_position_weights():
    grouped = GroupedPositionWeightedModule({"f": 2, "g": 2})
    assert sorted(grouped.state_dict()) == ["position_weights.f", "position_weights.g"]
    ebc = EmbeddingBagCollection(tables(), is_weighted=True)
    ebc(grouped(batch())).values().sum().backward()
    rows = ebc.embedding_bags["t"].weight.detach().sum(1)
    torch.testing.assert_close(grouped.position_weights["f"].grad, torch.stack([rows[1] + rows[3], rows[2]]))
    features = PositionWeightedModule({"f": 2})(batch().to_dict())
    assert features["f"].weights().tolist() == [1.0, 1.0, 1.0]
    assert features["g"].weights_or_none() is None
    assert PositionWeightedModuleCollection({"f": 3})(batch()).weights().tolist() == [1.0] * 6
    with pytest.raises(ValueError, match="feature 'f', sample 0 has 2 ids"):
        GroupedPositionWeightedModule({"f": 1})(batch())


def test_regroup_with_an_empty_group():
    pooled = KeyedTensor(["a", "b"], [1, 2], torch.arange(6.0).view(2, 3))
    parts = KeyedTensor.regroup([pooled], [[], ["b"], ["a", "b"]])
    assert [part.shape[1] for part in parts] == [0, 2, 3]
    assert KTRegroupAsDict([["b"], []], ["x", "y"])([pooled])["y"].shape == (2, 0)


def test_the_meta_device_of_a_context():
    with torch.device("meta"):
        ebc = EmbeddingBagCollection(tables())
        rows = EmbeddingCollection([EmbeddingConfig(10, 4, "t", feature_names=["f"])])
    assert ebc.device.type == rows.device.type == "meta"
    assert all(parameter.is_meta for part in (ebc, rows) for parameter in part.parameters())
    features = KeyedJaggedTensor(
        ["f", "g"],
        torch.empty(5, dtype=torch.int64, device="meta"),
        lengths=torch.empty(6, dtype=torch.int32, device="meta"),
    )
    assert features.sync().length_per_key() == [3, 2]
    whole = EmbeddingBagCollection(tables())
    expected = whole(batch())
    shape = ebc(features)
    assert shape.values().is_meta and shape.keys() == expected.keys()
    assert shape.values().shape == expected.values().shape


def test_tables_are_torchs_modules():
    ebc = EmbeddingBagCollection(tables())
    assert all(type(table) is torch.nn.EmbeddingBag for table in ebc.embedding_bags.values())
    ids, offsets = torch.tensor([1, 2]), torch.tensor([0, 2])
    weight = ebc.embedding_bags["t"].weight
    torch.testing.assert_close(ebc.embedding_bags["t"](ids, offsets)[0], weight[1] + weight[2])
    rows = EmbeddingCollection([EmbeddingConfig(10, 4, "t", feature_names=["f"])])
    assert type(rows.embeddings["t"]) is torch.nn.Embedding


def test_lengths_of_nothing_may_be_floats():
    """torch.tensor([]) is float."""
    nothing = torch.tensor([])
    assert KeyedJaggedTensor(["a"], nothing, lengths=nothing).stride() == 0
    assert KeyedJaggedTensor.from_lengths_sync([], nothing, nothing).offset_per_key() == [0]
    assert JaggedTensor(nothing, lengths=nothing).offsets().tolist() == [0]
    with pytest.raises(TypeError, match="the lengths must be int32 or int64, not Float"):
        JaggedTensor(torch.ones(1), lengths=torch.ones(1))


def test_empty_like():
    jt = JaggedTensor(torch.tensor([1, 2]), weights=torch.ones(2).half(), lengths=torch.tensor([2]))
    empty = JaggedTensor.empty_like(jt)
    assert empty.values().dtype == torch.int64 and empty.values().numel() == 0
    assert empty.weights().dtype == torch.float16 and empty.lengths().dtype == torch.int64
    assert (
        JaggedTensor.empty_like(JaggedTensor(torch.ones(1), lengths=torch.tensor([1]))).weights_or_none()
        is None
    )


def test_batches_are_nodes_of_trees():
    kjt = KeyedJaggedTensor(
        ["a", "b"],
        torch.tensor([1, 2, 3]),
        weights=torch.ones(3),
        lengths=torch.tensor([1, 1, 0, 1]),
        stride_per_key_per_rank=[[1, 1], [2, 0]],
        inverse_indices=(["a", "b"], torch.zeros(2, 2, dtype=torch.int64)),
    )
    twice = torch.utils._pytree.tree_map_only(torch.Tensor, lambda tensor: tensor.clone(), {"x": [kjt]})["x"][
        0
    ]
    assert kjt_is_equal(twice, kjt)
    assert twice.stride_per_key_per_rank() == kjt.stride_per_key_per_rank()
    assert torch.equal(twice.inverse_indices()[1], kjt.inverse_indices()[1])
    empty = KeyedJaggedTensor([], torch.tensor([]), lengths=torch.tensor([]), stride=3)
    assert torch.utils._pytree.tree_map(lambda leaf: leaf, empty).stride() == 3
    jt = JaggedTensor(torch.tensor([1.0, 2.0]), lengths=torch.tensor([2]))
    double = torch.utils._pytree.tree_map_only(torch.Tensor, lambda tensor: tensor * 2, jt)
    assert double.values().tolist() == [2.0, 4.0]
    pooled = KeyedTensor(["a", "b"], [1, 2], torch.ones(2, 3))
    leaves, spec = torch.utils._pytree.tree_flatten(pooled)
    assert len(leaves) == 1 and torch.utils._pytree.tree_unflatten([leaves[0] * 3], spec)["b"].sum() == 12
    for value in (kjt, jt, pooled):
        assert isinstance(value, Pipelineable)
