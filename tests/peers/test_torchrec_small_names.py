"""Names beside the large ones that programs import, by either import: torchrec 1.8.0 and ours."""

from __future__ import annotations

import copy
from types import SimpleNamespace

import pytest
import torch
from two_sides import OURS, SIDES

from ranks import run_ranks  # isort: skip

CPU, META = torch.device("cpu"), torch.device("meta")


def test_types_of_numbers():
    ours, theirs = (side("types").DataType for side in SIDES)
    assert [(kind.name, kind.value, str(kind)) for kind in ours] == [
        (kind.name, kind.value, str(kind)) for kind in theirs
    ]
    configs = [side("modules.embedding_configs") for side in SIDES]
    assert configs[0].DataType is ours
    bits = [{kind.name: bits for kind, bits in side.DATA_TYPE_NUM_BITS.items()} for side in configs]
    assert bits[0] == bits[1]
    for kind in theirs:
        dtypes = {side.data_type_to_dtype(side.DataType(kind.value)) for side in configs}
        assert len(dtypes) == 1
        assert len({side.dtype_to_data_type(next(iter(dtypes))).value for side in configs}) == 1
    for dtype in (torch.quint8, torch.qint8, torch.half, torch.quint4x2):
        assert len({side.dtype_to_data_type(dtype).value for side in configs}) == 1


def test_tables_of_numbers_that_do_not_train_are_refused():
    configs = OURS("modules.embedding_configs")
    for kind in ("INT64", "INT32", "UINT8", "NFP8"):
        config = configs.EmbeddingBagConfig(4, 2, "t", configs.DataType(kind), feature_names=["f"])
        with pytest.raises(
            ValueError, match=f"table 't' would have rows of {kind}. Tables that train have FP32"
        ):
            OURS("modules.embedding_modules").EmbeddingBagCollection([config])


def test_fbgemms_names_of_ours():
    codecs = [side("distributed.fbgemm_qcomm_codec") for side in SIDES]
    configs = [side("modules.embedding_configs") for side in SIDES]
    for kind in codecs[1].CommType:
        found = {side.comm_type_to_sparse_type(side.CommType(kind.value)) for side in codecs}
        assert len(found) == 1
    for kind in configs[1].DATA_TYPE_NUM_BITS:
        assert len({side.data_type_to_sparse_type(side.DataType(kind.value)) for side in configs}) == 1
    for side in configs:
        with pytest.raises(ValueError):
            side.data_type_to_sparse_type(side.DataType.INT64)
    for pooling in configs[1].PoolingType:
        for sharding in [None, *configs[1].ShardingType]:
            found = {
                side.pooling_type_to_pooling_mode(
                    side.PoolingType(pooling.value),
                    None if sharding is None else side.ShardingType(sharding.value),
                )
                for side in configs
            }
            assert len(found) == 1, (pooling, sharding)


def holder(side, kind):
    """Return a model of a layer, and one that says itself how it is copied."""

    class Own(torch.nn.Linear, getattr(side("types"), kind)):
        pass

    return torch.nn.Sequential(torch.nn.Linear(2, 2), torch.nn.Sequential(Own(2, 2)))


@pytest.mark.parametrize("kind", ["ModuleCopyMixin", "ModuleNoCopyMixin"])
def test_modules_that_say_how_they_are_copied(kind, monkeypatch):
    # torchrec's copies ask for NCCL, which this LibTorch is without.
    monkeypatch.setattr(torch._C._distributed_c10d, "ProcessGroupNCCL", type("NCCL", (), {}), raising=False)
    found = []
    for side in SIDES:
        model = holder(side, kind)
        moved = side("distributed.utils").copy_to_device(model, CPU, META)
        whole = side("distributed.utils").copy_to_device(model[1][0], CPU, META)
        found.append((moved[0].weight.is_meta, moved[1][0].weight.is_meta, whole.weight.is_meta))
        assert not model[0].weight.is_meta
    assert found[0] == found[1] == (True, kind == "ModuleCopyMixin", kind == "ModuleCopyMixin")


def test_caches_are_forgotten():
    for side in SIDES:

        class Caching(torch.nn.Module, side("types").CacheMixin):
            kept = 1

            def clear_cache(self):
                self.kept = 0

        model = torch.nn.Sequential(torch.nn.Linear(1, 1), torch.nn.Sequential(Caching()))
        side("modules.utils").reset_module_states_post_sharding(model)
        assert model[1][0].kept == 0
        regroup = side("modules.regroup").KTRegroupAsDict([["a"]], ["x"])
        regroup.clear_cache()
        assert isinstance(regroup, side("types").CacheMixin)


class Retryable(Exception):
    is_retryable = True


class Failing:
    """Three batches, with something wrong before the second and after the third."""

    def __init__(self):
        self.steps = iter(
            [torch.zeros(2), Retryable(), torch.ones(2), torch.ones(2) * 2, RuntimeError("disk")]
        )

    def __iter__(self):
        return self

    def __next__(self):
        found = next(self.steps)
        if isinstance(found, Exception):
            raise found
        return found


def test_a_thread_that_reads_ahead():
    found = []
    for side in SIDES:
        kind = side("distributed.train_pipeline.utils").DataLoadingThread
        assert side("distributed").DataLoadingThread is kind
        assert side("distributed.train_pipeline").DataLoadingThread is kind
        thread = kind(CPU, Failing(), to_device_non_blocking=True)
        thread.start()
        taken = [thread.get_next_batch().tolist() for _ in range(3)]
        with pytest.raises(RuntimeError, match="disk"):
            thread.get_next_batch()
        ended = kind(CPU, iter([torch.zeros(1)]), False)
        ended.start()
        taken.append(ended.get_next_batch(none_throws=True).tolist())
        assert ended.get_next_batch() is None
        with pytest.raises(StopIteration):
            ended.get_next_batch(none_throws=True)
        ended.stop()
        found.append(taken)
    assert found[0] == found[1] == [[0.0, 0.0], [1.0, 1.0], [2.0, 2.0], [0.0]]


def test_a_thread_that_is_stopped_ends():
    thread = OURS("distributed.train_pipeline").DataLoadingThread(CPU, iter([object()] * 5), False)
    thread.start()
    assert thread.get_next_batch() is not None  # what has no `to` is left as it is
    thread.stop()
    thread.join(20)
    assert not thread.is_alive()


def bags(side, dim=4):
    config = side("modules.embedding_configs").EmbeddingBagConfig
    made = [config(num_embeddings=7, embedding_dim=dim, name="t", feature_names=["f", "g"])]
    torch.manual_seed(4)
    return side("modules.embedding_modules").EmbeddingBagCollection(tables=made, device=CPU)


@pytest.mark.parametrize("name", ["DLRMWrapper", "SimpleDeepFMNNWrapper"])
def test_models_that_tell_their_loss(name):
    found = []
    dense, label = torch.linspace(-1, 1, 12).reshape(4, 3), torch.tensor([0.0, 1.0, 1.0, 0.0])
    for side in SIDES:
        ids = side("sparse.jagged_tensor").KeyedJaggedTensor.from_lengths_sync(
            ["f", "g"], torch.tensor([1, 5, 2, 6]), torch.tensor([1, 0, 1, 0, 0, 1, 1, 0])
        )
        collection = bags(side)
        torch.manual_seed(6)
        if name == "DLRMWrapper":
            model = side("models.dlrm").DLRMWrapper(collection, 3, [5, 4], [6, 1])
        else:
            model = side("models.deepfm").SimpleDeepFMNNWrapper(3, collection, 5, 2)
        with torch.no_grad():
            for seed, weight in enumerate(model.parameters()):
                weight.copy_(torch.randn(weight.shape, generator=torch.Generator().manual_seed(seed)) / 3)
        batch = SimpleNamespace(float_features=dense, idlist_features=ids, label=label)
        loss, output = model(batch)
        loss.backward()
        gradients = {key: weight.grad for key, weight in model.named_parameters()}
        found.append((loss, output, model.eval()(batch), gradients))
    (loss, output, evaluated, gradients), theirs = found
    for ours, other in zip((loss, output, evaluated), theirs, strict=False):
        torch.testing.assert_close(ours, other, rtol=1e-5, atol=1e-6)
    assert list(gradients) == list(theirs[3])
    for key, gradient in gradients.items():
        torch.testing.assert_close(gradient, theirs[3][key], rtol=1e-4, atol=1e-6)


def gathered(rank, world):
    """Bring the state of a sharded model together on rank 0, and onto another device, with both names."""
    for side in SIDES:
        transform, plans = side("inference.state_dict_transform"), side("distributed.sharding_plan")
        collection = bags(side, dim=4)
        whole = copy.deepcopy(collection)
        plan = plans.construct_module_sharding_plan(
            collection, {"t": plans.row_wise()}, None, world, world, "cpu"
        )
        model = side("distributed").DistributedModelParallel(
            torch.nn.ModuleDict({"tables": collection, "layer": torch.nn.Linear(2, 1)}),
            device=CPU,
            plan=side("distributed.types").ShardingPlan({"tables": plan}),
            sharders=[side("distributed.embeddingbag").EmbeddingBagCollectionSharder()],
        )
        state = model.state_dict()
        (name,) = [key for key in state if key.startswith("tables")]
        assert isinstance(state[name], side("distributed").ShardedTensor)
        for shard in state[name].local_shards():
            row, height = shard.metadata.shard_offsets[0], shard.metadata.shard_sizes[0]
            shard.tensor.copy_(whole.embedding_bags["t"].weight.detach()[row : row + height])
        target = {"layer.bias": torch.zeros(1), name: torch.zeros(7, 4)}
        transform.state_dict_gather(state, target)
        assert torch.equal(target["layer.bias"], state["layer.bias"])
        if rank == 0:
            torch.testing.assert_close(target[name], whole.embedding_bags["t"].weight.detach())
        group = torch.distributed.group.WORLD
        assert transform.state_dict_all_gather_keys({f"k{rank}": None, "a": None}, group) == ["a", "k0", "k1"]
        moved = transform.state_dict_to_device(state, group, torch.device("cpu"))
        assert sorted(moved) == sorted(state)
        assert [s.tensor.tolist() for s in moved[name].local_shards()] == [
            s.tensor.tolist() for s in state[name].local_shards()
        ]
        with pytest.raises(ValueError):
            transform.state_dict_gather({"x": 3}, {"x": torch.zeros(1)})


def test_states_that_are_brought_together():
    run_ranks(2, gathered, 2, backend="gloo", env={"LOCAL_WORLD_SIZE": "2", "LIMIT": "60"}, limit=120)


def test_the_switch_of_devices_is_kept():
    for side in SIDES:
        settings = side("distributed.global_settings")
        assert settings.get_propogate_device() is False
        settings.set_propogate_device(True)
        assert settings.get_propogate_device() is True
        settings.set_propogate_device(False)


def test_arguments_about_the_order_of_rows():
    for side in SIDES:
        config = side("modules.embedding_configs").EmbeddingConfig
        collection = side("modules.embedding_modules").EmbeddingCollection(
            [config(num_embeddings=4, embedding_dim=2, name="t", feature_names=["f"])],
            use_gather_select=True,
            use_gather_select_per_sharding={"row_wise": False},
        )
        assert collection.use_gather_select() is True
        assert collection.use_gather_select_per_sharding() == {"row_wise": False}


def test_where_shards_lie():
    for side in SIDES:
        assert side("distributed.sharding_plan").placement("cpu", 3, 2) == "rank:3/cpu"


def test_what_is_not_there_says_so():
    types, parallel = OURS("distributed.types"), OURS("distributed.model_parallel")
    config = types.DMPCollectionConfig(torch.nn.Linear, types.ShardingPlan({}), 1)
    assert (config.sharding_strategy, config.node_group_size) == (types.ShardingStrategy.DEFAULT, None)
    with pytest.raises(
        ValueError, match="there is no tracker of changed rows; leave model_tracker_configs out"
    ):
        parallel.DistributedModelParallel(torch.nn.Linear(1, 1), model_tracker_configs=object())
    group = SimpleNamespace(size=lambda: 2, rank=lambda: 0)
    for wish in (
        {"submodule_configs": [config]},
        {"rs_awaitable_hook_module": "over"},
        {"use_sharded_relay": True},
    ):
        with pytest.raises(ValueError, match=f"all modules are replicated alike.*{next(iter(wish))}"):
            parallel.DMPCollection(torch.nn.Linear(1, 1), CPU, types.ShardingPlan({}), 2, 1, group, **wish)
    with pytest.raises(ValueError, match="collision: enable_per_feature_lookups is there for torchrec's"):
        OURS("modules.mc_modules").ManagedCollisionModule(CPU, [0, 4], enable_per_feature_lookups=True)
    suffixed = OURS("modules.mc_modules").ManagedCollisionModule(CPU, [0, 4], read_only_suffix="_r")
    assert suffixed.readable_suffix == "_r"
