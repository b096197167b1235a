"""Features to row-wise tables, groups of tables, lookups of parts, and the small functions around."""

from __future__ import annotations

import warnings
from collections import OrderedDict

import pytest
import torch
import torch.distributed as dist
from ranks import run_ranks
from tessera.distributed import utils
from tessera.distributed.embedding_lookup import (
    GroupedEmbeddingsLookup,
    GroupedPooledEmbeddingsLookup,
    embeddings_cat_empty_rank_handle,
    fx_wrap_tensor_view2d,
)
from tessera.distributed.embedding_sharding import (
    EmbeddingShardingContext,
    FusedKJTListSplitsAwaitable,
    KJTListSplitsAwaitable,
    KJTSplitsAllToAllMeta,
    ListOfKJTListSplitsAwaitable,
    bucketize_kjt_before_all2all,
    group_tables,
)
from tessera.distributed.embedding_types import (
    BaseEmbeddingSharder,
    EmbeddingComputeKernel,
    EmbeddingLocation,
    KJTList,
    ShardedEmbeddingTable,
    compute_kernel_to_embedding_location,
)
from tessera.distributed.types import CacheParams, NoWait, ParameterSharding, ShardedModule
from tessera.modules.embedding_configs import BoundsCheckMode, DataType, PoolingType
from tessera.sparse.jagged_tensor import KeyedJaggedTensor
from torch import nn

Kernel = EmbeddingComputeKernel


def test_bucketize_gives_the_measured_values():
    kjt = KeyedJaggedTensor.from_lengths_sync(
        ["a", "b"],
        torch.tensor([0, 5, 9, 10, 11, -1, 3, 7, 100]),
        torch.tensor([3, 2, 0, 4]),
        weights=torch.arange(9.0),
    )
    spread, permute = bucketize_kjt_before_all2all(
        kjt, 4, torch.tensor([3, 3]), output_permute=True, bucketize_pos=True
    )
    assert spread.keys() == ["a", "b"] * 4
    assert spread.stride() == 2
    assert spread.lengths().tolist() == [1, 0, 0, 1, 1, 0, 0, 1, 0, 0, 0, 1, 1, 2, 0, 1]
    assert spread.values().tolist() == [0, 25, 2, 0, 1, 0, 1, 2, 4611686018427387903]
    assert spread.weights().tolist() == [0, 3, 1, 1, 2, 2, 0, 1, 0]
    assert permute.tolist() == [0, 2, 5, 6, 7, 8, 3, 4, 1]
    plain, none = bucketize_kjt_before_all2all(kjt, 4, torch.tensor([3, 3]))
    assert none is None
    assert plain.weights()[permute].tolist() == list(range(9))
    uneven, _ = bucketize_kjt_before_all2all(
        kjt, 2, torch.tensor([0, 0]), block_bucketize_row_pos=[torch.tensor([0, 10, 12])] * 2
    )
    assert uneven.values()[: int(uneven.lengths()[:4].sum())].tolist() == [0, 5, 9, 3, 7, 50]
    with pytest.raises(ValueError, match="1 block sizes for 2 keys"):
        bucketize_kjt_before_all2all(kjt, 2, torch.tensor([3]))


def test_bucketize_keeps_variable_batches():
    kjt = KeyedJaggedTensor.from_lengths_sync(
        ["a", "b"], torch.tensor([1, 4, 2]), torch.tensor([1, 1, 1]), stride_per_key_per_rank=[[2], [1]]
    )
    spread, _ = bucketize_kjt_before_all2all(kjt, 2, torch.tensor([3, 3]))
    assert spread.stride_per_key_per_rank() == [[2], [1], [2], [1]]
    assert spread.lengths().tolist() == [1, 0, 1, 0, 1, 0]
    assert spread.values().tolist() == [1, 2, 1]


def table(name, **changes):
    given = {
        "num_embeddings": 10,
        "embedding_dim": 4,
        "name": name,
        "feature_names": [f"f_{name}"],
        "embedding_names": [f"f_{name}"],
        "local_rows": 10,
        "local_cols": 4,
        "compute_kernel": Kernel.FUSED,
    }
    return ShardedEmbeddingTable(**(given | changes))


def names(groups):
    return [[config.table_names() for config in rank] for rank in groups]


def test_tables_that_agree_are_grouped():
    assert names(group_tables([[table("a"), table("b")], []])) == [[["a", "b"]], []]
    for change in (
        {"data_type": DataType.FP16},
        {"pooling": PoolingType.MEAN},
        {"has_feature_processor": True},
        {"fused_params": {"learning_rate": 0.5}},
        {"compute_kernel": Kernel.DENSE},
    ):
        groups = names(group_tables([[table("a"), table("b", **change), table("c")]]))
        assert groups == [[["a", "c"], ["b"]]], change
    cached = {"compute_kernel": Kernel.FUSED_UVM_CACHING}
    mixed = [
        table("a", **cached, fused_params={"cache_load_factor": 0.2}),
        table("b", **cached, num_embeddings=30, fused_params={"cache_load_factor": 0.6}),
        table("c", compute_kernel=Kernel.FUSED_UVM),
    ]
    (config,) = group_tables([mixed])[0]
    assert config.compute_kernel == Kernel.FUSED
    assert config.fused_params == {"cache_load_factor": pytest.approx(0.5)}
    early = {"fused_params": {"prefetch_pipeline": True}}
    groups = group_tables([[table("a", **cached, **early), table("b", **cached, **early, local_cols=2)]])
    assert names(groups) == [[["a"], ["b"]]]
    with pytest.raises(ValueError, match="some tables are weighted and some are not"):
        group_tables([[table("a"), table("b", is_weighted=True)]])


def features(keys, seed=0, weighted=False, strides=None):
    generator = torch.Generator().manual_seed(seed)
    count = sum(sum(s) for s in strides) if strides else 3 * len(keys)
    lengths = torch.randint(0, 4, (count,), generator=generator)
    values = torch.randint(0, 10, (int(lengths.sum()),), generator=generator)
    weights = torch.rand(values.numel(), generator=generator) if weighted else None
    return KeyedJaggedTensor.from_lengths_sync(
        keys, values, lengths, weights=weights, stride_per_key_per_rank=strides
    )


def bags(kjt, key, weight, weights=False):
    jt = kjt[key]
    return nn.functional.embedding_bag(
        jt.values(),
        weight,
        jt.offsets()[:-1],
        mode="sum",
        per_sample_weights=jt.weights() if weights else None,
    )


def test_a_pooled_lookup_is_the_bags_of_its_groups():
    tables = [table("a"), table("b", compute_kernel=Kernel.DENSE), table("c", local_cols=2)]
    lookup = GroupedPooledEmbeddingsLookup(group_tables([tables])[0])
    own = dict(lookup.named_parameters())
    assert list(own) == ["a.weight", "c.weight", "b.weight"]
    assert [name for name, _ in lookup.named_parameters_by_table()] == ["a", "c", "b"]
    kjt = features(["f_a", "f_c", "f_b"])
    expected = torch.cat([bags(kjt, f"f_{name}", own[f"{name}.weight"].detach()) for name in "acb"], 1)
    pooled = lookup(kjt)
    torch.testing.assert_close(pooled, expected)
    before = {name: weight.detach().clone() for name, weight in own.items()}
    pooled.sum().backward()
    assert own["b.weight"].grad is not None
    assert torch.equal(own["b.weight"], before["b.weight"])
    counts = torch.bincount(kjt["f_a"].values(), minlength=10).float()
    torch.testing.assert_close(own["a.weight"].detach(), before["a.weight"] - 0.01 * counts[:, None])

    state = lookup.state_dict(prefix="p.")
    assert set(state) == {"p.a.weight", "p.b.weight", "p.c.weight"}
    other = GroupedPooledEmbeddingsLookup(group_tables([tables])[0])
    result = other.load_state_dict(lookup.state_dict())
    assert result.missing_keys == [] and result.unexpected_keys == []
    torch.testing.assert_close(other(kjt), lookup(kjt))
    assert other.load_state_dict({"x": torch.ones(1)}, strict=False).unexpected_keys == ["x"]
    with pytest.raises(RuntimeError, match=r"missing \['a.weight', 'c.weight', 'b.weight'\]"):
        other.load_state_dict({})
    with pytest.raises(ValueError, match=r"'a.weight' is \[1\] in the state and \[10, 4\] here"):
        other.load_state_dict({"a.weight": torch.ones(1)})
    for call in (lookup.flush, lookup.purge):
        call()
    lookup.prefetch(kjt)


def test_a_lookup_without_tables_still_has_a_gradient():
    pooled = GroupedPooledEmbeddingsLookup([])(features(["x"]).split([0, 1])[0])
    assert pooled.shape == (3, 0) and pooled.requires_grad
    rows = GroupedEmbeddingsLookup([])(features(["x"]).split([0, 1])[0])
    assert rows.shape == (0,) and rows.requires_grad
    assert fx_wrap_tensor_view2d(torch.arange(6), 2, 3).shape == (2, 3)
    one = torch.ones(1, 2)
    assert embeddings_cat_empty_rank_handle([one], one) is one
    assert embeddings_cat_empty_rank_handle([one, one], one, dim=1).shape == (1, 4)


def test_variable_batches_come_rank_by_rank():
    tables = [table("a", pooling=PoolingType.MEAN), table("b")]
    lookup = GroupedPooledEmbeddingsLookup(group_tables([tables])[0])
    strides = [[2, 1], [1, 3]]
    kjt = features(["f_a", "f_b"], strides=strides)
    own = dict(lookup.named_parameters())
    flat = lookup(kjt)
    parts = {}
    for key, weight, mode in (("f_a", own["a.weight"], "mean"), ("f_b", own["b.weight"], "sum")):
        jt = kjt[key]
        pooled = nn.functional.embedding_bag(jt.values(), weight, jt.offsets()[:-1], mode=mode)
        parts[key] = pooled.split(strides[("f_a", "f_b").index(key)])
    order = [("f_a", 0), ("f_b", 0), ("f_a", 1), ("f_b", 1)]
    expected = torch.cat([parts[key][rank].reshape(-1) for key, rank in order])
    torch.testing.assert_close(flat, expected.detach())


def test_a_sequence_lookup_is_the_rows():
    lookup = GroupedEmbeddingsLookup(group_tables([[table("a", pooling=PoolingType.NONE)]])[0])
    kjt = features(["f_a"])
    (weight,) = (weight for _, weight in lookup.named_parameters())
    torch.testing.assert_close(lookup(kjt).view(-1, 4), weight.detach()[kjt.values()])


def weighted_lookup(rank):
    tables = [table("a", is_weighted=True, compute_kernel=Kernel.DENSE)]
    kjt = features(["f_a"], weighted=True)
    kjt.weights().requires_grad_()
    for scales, factor in ((True, 2.0), (False, 1.0)):
        lookup = GroupedPooledEmbeddingsLookup(
            group_tables([tables])[0], pg=dist.group.WORLD, scale_weight_gradients=scales
        )
        (weight,) = (weight for _, weight in lookup.named_parameters())
        kjt.weights().grad = None
        lookup(kjt).sum().backward()
        expected = factor * weight.detach()[kjt.values()].sum(1)
        torch.testing.assert_close(kjt.weights().grad, expected)


class Context(EmbeddingShardingContext):
    def __init__(self):
        super().__init__()
        self.input_splits = []
        self.output_splits = []


class Contexts:
    def __init__(self, count):
        self.sharding_contexts = [Context() for _ in range(count)]


def fused_splits(rank):
    group = dist.group.WORLD
    here = features(["x"])
    first = KJTSplitsAllToAllMeta.of(group, features(["a", "b"], seed=rank), [1, 1])
    assert first.keys == [["a"], ["b"]][rank]
    assert first.splits_cumsum == [0, 1, 2] and len(first.splits_tensors) == len(first.labels) + 1
    varied = features(["c"], seed=rank, strides=[[rank + 1]])
    second = KJTSplitsAllToAllMeta.of(group, varied, [0, 1])
    contexts = [Contexts(2), Contexts(1)]
    requests = [
        KJTListSplitsAwaitable([first, NoWait(NoWait(here))], contexts[0]),
        KJTListSplitsAwaitable([second], contexts[1]),
    ]
    lists = FusedKJTListSplitsAwaitable(requests, contexts, group).wait()
    (a, x), (c,) = (awaitable.wait() for awaitable in lists)
    assert x is here and a.stride() == 6
    sent = torch.cat([features(["a", "b"], seed=r)[["a", "b"][rank]].values() for r in range(2)])
    assert a.values().tolist() == sent.tolist()
    context = contexts[0].sharding_contexts[0]
    assert context.batch_size_per_rank == [3, 3]
    assert sum(context.output_splits) == a.values().numel()
    if rank == 1:
        assert contexts[1].sharding_contexts[0].batch_size_per_rank_per_feature == [[1], [2]]
        assert c.values().numel() == sum(
            features(["c"], seed=r, strides=[[r + 1]]).values().numel() for r in (0, 1)
        )
    nothing = FusedKJTListSplitsAwaitable([], [], None)
    assert nothing.wait() == []
    with pytest.raises(ValueError, match="there are features to send and no group"):
        FusedKJTListSplitsAwaitable(requests, contexts, None)
    lists = ListOfKJTListSplitsAwaitable([NoWait(NoWait(KJTList([here])))]).wait().wait()
    assert lists[0][0] is here and len(lists) == 1


@pytest.mark.parametrize("body", [weighted_lookup, fused_splits])
def test_two_ranks(body):
    run_ranks(2, body)


def test_sharders_offer_every_type_on_every_device():
    class Sharder(BaseEmbeddingSharder):
        module_type = nn.Module

        def shard(self, module, params, env, device=None):
            raise NotImplementedError

    sharder = Sharder({"learning_rate": 0.1})
    assert len(sharder.sharding_types("cpu")) == 7
    assert sharder.compute_kernels("data_parallel", "cpu") == ["dense"]
    assert sharder.compute_kernels("row_wise", "cpu") == ["dense", "fused"]
    assert sharder.fused_params == {"learning_rate": 0.1}
    rows = torch.empty(4, 2)
    assert sharder.storage_usage(rows, "cuda", "fused") == {"hbm": 32}
    assert sharder.storage_usage(rows, "cuda", "fused_uvm") == {"ddr": 32}
    assert compute_kernel_to_embedding_location(Kernel.QUANT_UVM_CACHING) == EmbeddingLocation.MANAGED_CACHING
    assert compute_kernel_to_embedding_location(Kernel.DENSE) == EmbeddingLocation.DEVICE


def test_state_dict_names():
    state = OrderedDict({"b": 1, "a": 2})
    utils.add_prefix_to_state_dict(state, "m.")
    assert state == {"m.a": 2, "m.b": 1}
    assert utils.append_prefix("", "") == ""
    assert utils.none_throws(0) == 0
    with pytest.raises(AssertionError, match="Unexpected"):
        utils.none_throws(None)


def test_fused_params():
    shared = {"learning_rate": 0.1}
    merged = utils.merge_fused_params(shared, {"lr": 0.2, "eps": 1e-3})
    assert merged == {"learning_rate": 0.2, "eps": 1e-3} and shared == {"learning_rate": 0.1}
    sharding = ParameterSharding(
        "table_wise",
        "fused",
        cache_params=CacheParams(load_factor=0.3),
        stochastic_rounding=True,
        bounds_check_mode=BoundsCheckMode.WARNING,
    )
    params = utils.add_params_from_parameter_sharding(shared, sharding)
    assert params == {
        "learning_rate": 0.1,
        "cache_load_factor": 0.3,
        "stochastic_rounding": True,
        "bounds_check_mode": BoundsCheckMode.WARNING,
    }
    options = utils._to_options({**params, "optimizer": utils.EmbOptimType.EXACT_ROWWISE_ADAGRAD})
    assert options.kind.name == "ROWWISE_ADAGRAD" and options.stochastic_rounding
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        utils.add_params_from_parameter_sharding(shared, ParameterSharding("data_parallel", "dense"))
    assert "mean nothing to a table that leaves its gradient" in str(caught[0].message)
    for params, text in [
        ({"optimizer": "shampoo"}, "the optimizer 'shampoo' is not one of"),
        ({"speed": 1}, "there is no 'speed' among"),
        ({"weight_decay_mode": "COWCLIP"}, "weight_decay_mode 'COWCLIP' is not"),
    ]:
        with pytest.raises(ValueError, match=text):
            utils._to_options(params)
    with pytest.raises(ValueError, match="no rule steps rows like LBFGS"):
        utils.optimizer_type_to_emb_opt_type(torch.optim.LBFGS)


def test_optimizers_set_by_torch_are_read():
    from torch.distributed.optim import _apply_optimizer_in_backward

    def params(optimizer, **kwargs):
        weight = nn.Parameter(torch.zeros(2, 2))
        _apply_optimizer_in_backward(optimizer, [weight], kwargs)
        return utils._in_backward_params(weight, "t")

    assert utils._in_backward_params(nn.Parameter(torch.zeros(1)), "t") is None
    options = utils._to_options(utils.merge_fused_params(None, params(torch.optim.Adagrad, lr=0.3)))
    assert (options.kind.name, options.learning_rate, options.eps) == ("ADAGRAD", 0.3, 1e-10)
    options = utils._to_options(utils.merge_fused_params(None, params(torch.optim.AdamW, betas=(0.1, 0.2))))
    assert (options.beta1, options.beta2, options.weight_decay) == (0.1, 0.2, 0.01)
    with pytest.raises(ValueError, match="'t' asks for SGD with momentum"):
        params(torch.optim.SGD, lr=0.1, momentum=0.9)
    with pytest.raises(ValueError, match="'t' asks for amsgrad"):
        params(torch.optim.Adam, lr=0.1, amsgrad=True)
    weight = nn.Parameter(torch.zeros(1))
    for _ in range(2):
        _apply_optimizer_in_backward(torch.optim.SGD, [weight], {"lr": 1.0})
    with pytest.raises(ValueError, match="'t' has 2 optimizers"):
        utils._in_backward_params(weight, "t")


class Sharded(ShardedModule):
    def create_context(self): ...
    def input_dist(self, ctx, *input, **kwargs): ...
    def compute(self, ctx, dist_input): ...
    def output_dist(self, ctx, output): ...


def test_unsharded_modules_are_named():
    model = nn.ModuleDict(
        {
            "over": nn.Linear(1, 1),
            "sparse": nn.ModuleDict({"ebc": Sharded(), "beside": nn.Sequential(nn.Linear(1, 1))}),
        }
    )
    assert sorted(utils.get_unsharded_module_names(model)) == ["over", "sparse.beside"]
    assert utils.get_unsharded_module_names(nn.Sequential(nn.Linear(1, 1))) == []


def test_copies():
    class Copyable(utils.CopyableMixin):
        def __init__(self):
            super().__init__()
            self.layer = nn.Linear(2, 2)
            self.register_buffer("b", torch.ones(1))
            self.tied = self.layer.weight

    module = Copyable()
    there = module.copy(torch.device("meta"))
    assert there.layer.weight.is_meta and there.b.is_meta and there.tied is there.layer.weight
    assert not module.layer.weight.is_meta
    moved = utils.copy_to_device(module, torch.device("cpu"), torch.device("meta"))
    assert moved.layer.weight.is_meta and moved.b.is_meta and not module.b.is_meta
    with utils.sharded_model_copy(None):
        pass
    assert "__deepcopy__" not in torch.distributed.ProcessGroup.__dict__


def test_meta_parameters_are_filled():
    module = nn.Sequential(nn.Linear(2, 3, device="meta"), nn.Linear(3, 1))
    kept = module[1].weight.clone()
    utils.init_parameters(module, torch.device("cpu"))
    assert not module[0].weight.is_meta and torch.equal(module[1].weight, kept)
    assert module[0].weight.abs().sum() > 0

    class Bare(nn.Module):
        def __init__(self):
            super().__init__()
            self.p = nn.Parameter(torch.empty(1, device="meta"))

    with pytest.raises(ValueError, match="Bare has meta parameters and no reset_parameters"):
        utils.init_parameters(Bare(), torch.device("cpu"))


def test_permuted_blocks_have_permuted_gradients():
    x = torch.arange(6.0).view(1, 6).requires_grad_()
    permute = utils.PermutePooledEmbeddings([1, 2, 3], [2, 0, 1])
    assert permute(x).tolist() == [[3, 4, 5, 0, 1, 2]]
    (permute(x) * torch.arange(6.0)).sum().backward()
    assert x.grad.tolist() == [[3, 4, 5, 0, 1, 2]]
    with pytest.raises(ValueError, match="does not name each of 2 blocks once"):
        utils.PermutePooledEmbeddings([1, 2], [0, 0])
