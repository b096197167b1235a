"""Optimizers that know names, schedules and clipping, beside torchrec 1.8.0."""

from __future__ import annotations

import copy

import pytest
import torch
import torch.distributed as dist
from two_sides import OURS, SIDES

from ranks import run_ranks  # isort: skip


def weights():
    torch.manual_seed(3)
    return {"p": torch.nn.Parameter(torch.randn(2)), "q": torch.nn.Parameter(torch.randn(3))}


def wrapped(side, params, kind=torch.optim.Adagrad, lr=0.1):
    return side("optim.keyed").KeyedOptimizerWrapper(params, lambda given: kind(given, lr=lr))


def run(optimizer, params, steps, seed=0):
    """Step with the same gradients; return rates and values."""
    generator = torch.Generator().manual_seed(seed)
    rates = []
    for _ in range(steps):
        for param in (params["p"], params["q"]):  # torchrec adds one for the schedule
            param.grad = torch.randn(param.shape, generator=generator)
        optimizer.step()
        rates.append([group["lr"] for group in optimizer.param_groups])
    return rates, [params[name].detach().clone() for name in "pq"]


def same_tree(ours, theirs):
    assert type(ours) is type(theirs)
    if isinstance(ours, dict):
        assert list(ours) == list(theirs)
        for key in ours:
            same_tree(ours[key], theirs[key])
    elif isinstance(ours, list):
        assert len(ours) == len(theirs)
        for a, b in zip(ours, theirs, strict=True):
            same_tree(a, b)
    elif isinstance(ours, torch.Tensor):
        torch.testing.assert_close(ours, theirs)
    else:
        assert ours == theirs


@pytest.mark.parametrize("saves", [False, True])
@pytest.mark.parametrize("kind", [torch.optim.Adagrad, torch.optim.Adam, torch.optim.SGD])
def test_states_by_name(kind, saves):
    found = []
    for side in SIDES:
        keyed = side("optim.keyed")
        params, others = weights(), weights()
        one, two = wrapped(side, params, kind), wrapped(side, others, kind, 0.2)
        combined = keyed.CombinedOptimizer([("one", one), ("two", two)])
        combined.save_param_groups(saves)
        run(one, params, 3)
        run(two, others, 2)
        first = combined.state_dict()
        new = [wrapped(side, part, kind, 0.7) for part in (params, others)]
        again = keyed.CombinedOptimizer([("one", new[0]), ("two", new[1])])
        again.save_param_groups(saves)
        again.init_state()
        again.load_state_dict(first)
        found.append([first, again.state_dict(), [group["lr"] for group in again.param_groups]])
        assert sorted(combined.params) == ["one.p", "one.q", "two.p", "two.q"]
        with pytest.raises(ValueError, match="Duplicate param key p"):
            keyed.CombinedOptimizer([one, two])
        if kind is not torch.optim.SGD:
            with pytest.raises(ValueError, match="Different parameter count: 4 vs 0"):
                again.load_state_dict({"state": {}, "param_groups": []})
        with pytest.raises(NotImplementedError):
            one.add_param_group({})
        torch.optim.lr_scheduler.StepLR(combined, 1)
    same_tree(*found)


STAGES = [
    [("LINEAR", {"max_iters": 4, "value": 0.1})],
    [("CONSTANT", {"max_iters": 2, "value": 0.1, "lr_scale": 3.0}), ("INVSQRT", {"max_iters": 5})],
    [("STEP", {"max_iters": 6, "value": 0.5}), ("POLY", {"max_iters": 12, "value": 2.0, "decay_iters": 20})],
    [("STEP", {"max_iters": 9, "value": 0.5, "decay_iters": 3})],
    [("COSINE_ANNEALING_WARM_RESTARTS", {"max_iters": 9, "value": 0.2, "sgdr_period": 4})],
    [
        ("NONE", {"max_iters": 3}),
        ("INTERPOLATE", {"max_iters": 8, "start_interpolating_iters": 3, "end_value": 3.0}),
    ],
    [],
]


def test_what_is_left_to_do_after_a_state():
    """Programs that load state by themselves say so; every wrapper hands it on to what it holds."""
    found = []
    for side in SIDES:
        warmup, keyed, clipping = side("optim.warmup"), side("optim.keyed"), side("optim.clipping")
        stages = [
            warmup.WarmupStage(warmup.WarmupPolicy.CONSTANT, max_iters=2, value=0.1),
            warmup.WarmupStage(warmup.WarmupPolicy.CONSTANT, max_iters=9, value=0.7),
        ]
        params, others = weights(), weights()
        inner = warmup.WarmupOptimizer(wrapped(side, params), stages, lr=0.5)
        outer = keyed.CombinedOptimizer(
            [
                ("a", keyed.OptimizerWrapper(clipping.GradientClippingOptimizer(inner))),
                ("b", wrapped(side, others)),
            ]
        )
        run(inner, params, 1)  # from then on there is a place
        rates = [[group["lr"] for group in outer.param_groups]]
        place = inner.state[inner.params["__warmup"]]["warmup"]
        place.copy_(torch.tensor([1, 1]))
        outer.post_load_state_dict()
        rates.append([group["lr"] for group in outer.param_groups])
        found.append(rates)
    torch.testing.assert_close(torch.tensor(found[0]), torch.tensor(found[1]))
    torch.testing.assert_close(torch.tensor(found[0]), torch.tensor([[0.05, 0.1], [0.35, 0.1]]))


@pytest.mark.parametrize("stages", STAGES)
def test_schedules(stages):
    found = []
    for side in SIDES:
        warmup = side("optim.warmup")
        params = weights()
        made = [warmup.WarmupStage(warmup.WarmupPolicy[policy], **numbers) for policy, numbers in stages]
        optimizer = warmup.WarmupOptimizer(wrapped(side, params), made, lr=0.5)
        first = [group["lr"] for group in optimizer.param_groups]
        rates, values = run(optimizer, params, 14)
        state = optimizer.state_dict()
        state["state"]["__warmup"]["warmup"] = torch.tensor([2, 0])
        optimizer.load_state_dict(state)
        found.append((first, rates, values, state, [group["lr"] for group in optimizer.param_groups]))
    ours, theirs = found
    assert ours[0] == pytest.approx(theirs[0]) and ours[4] == pytest.approx(theirs[4])
    torch.testing.assert_close(torch.tensor(ours[1]), torch.tensor(theirs[1]))
    same_tree(list(ours[2]), list(theirs[2]))
    same_tree(ours[3], theirs[3])


@pytest.mark.parametrize("clipping", ["NORM", "VALUE", "NONE"])
@pytest.mark.parametrize("norm_type", [1.0, 2.0, "inf"])
def test_clipping(clipping, norm_type):
    found = []
    for side in SIDES:
        module = side("optim.clipping")
        params = weights()
        optimizer = module.GradientClippingOptimizer(
            wrapped(side, params), module.GradientClipping[clipping], 0.3, norm_type, track_grad_norm=True
        )
        _, values = run(optimizer, params, 4)
        norm = optimizer.last_total_grad_norm
        found.append(
            [values, [param.grad for param in params.values()], None if norm is None else norm.clone()]
        )
    same_tree(*found)


def global_norm(rank):
    """Parts of a table count with those of the other ranks, replicas once."""
    plans, types = OURS("distributed.sharding_plan"), OURS("distributed.types")
    config = OURS("modules.embedding_configs").EmbeddingBagConfig
    ebc = OURS("modules.embedding_modules").EmbeddingBagCollection([config(10, 4, "t", feature_names=["f"])])
    plan = plans.construct_module_sharding_plan(ebc, {"t": plans.row_wise()}, device_type="cpu")
    sharder = OURS("distributed.embeddingbag").EmbeddingBagCollectionSharder()
    sharded = sharder.shard(ebc, plan, types.ShardingEnv.from_process_group(dist.group.WORLD))
    part = sharded.embedding_bags["t"].weight
    replica = torch.nn.Parameter(torch.zeros(2))
    module = OURS("optim.clipping")
    optimizer = module.GradientClippingOptimizer(
        wrapped(OURS, {"t": part, "r": replica}, torch.optim.SGD, 0.0),
        module.GradientClipping.NORM,
        1.0,
        enable_global_grad_clip=True,
        track_grad_norm=True,
    )
    whole = torch.arange(40.0).view(10, 4)
    replica.grad = torch.tensor([3.0, 4.0])
    part.grad = whole[5 * rank : 5 * rank + 5].clone()
    optimizer.step()
    norm = (whole.square().sum() + 25.0).sqrt()
    torch.testing.assert_close(optimizer.last_total_grad_norm, norm)
    torch.testing.assert_close(part.grad, whole[5 * rank : 5 * rank + 5] / norm, rtol=1e-5, atol=1e-6)
    torch.testing.assert_close(replica.grad, torch.tensor([3.0, 4.0]) / norm, rtol=1e-5, atol=1e-6)


def test_norms_over_shards():
    run_ranks(2, global_norm)


@pytest.mark.parametrize("sparse", [False, True])
def test_rowwise_adagrad(sparse):
    found = []
    for side in SIDES:
        torch.manual_seed(5)
        weight = torch.nn.Parameter(torch.randn(6, 4))
        optimizer = side("optim.rowwise_adagrad").RowWiseAdagrad([weight], lr=0.1, eps=1e-6)
        for step in range(3):
            gradient = torch.zeros(6, 4)
            gradient[step : step + 3] = torch.randn(3, 4, generator=torch.Generator().manual_seed(step))
            weight.grad = gradient.to_sparse(1) if sparse and side is OURS else gradient
            optimizer.step()
        found.append((weight.detach(), optimizer.state_dict()))
    (ours, our_state), (theirs, their_state) = found
    torch.testing.assert_close(ours, theirs, rtol=1e-5, atol=1e-6)
    same_tree(our_state["state"], their_state["state"])
    assert {**our_state["param_groups"][0]} == {**their_state["param_groups"][0]}


def fused_layout(rank):
    found = []
    for side in SIDES:
        plans, types = side("distributed.sharding_plan"), side("distributed.types")
        config = side("modules.embedding_configs").EmbeddingBagConfig
        collection = side("modules.embedding_modules").EmbeddingBagCollection

        class Model(torch.nn.Module):
            def __init__(self, collection=collection, config=config):
                super().__init__()
                self.ebc = collection(
                    tables=[
                        config(num_embeddings=10, embedding_dim=8, name=n, feature_names=[f"f_{n}"])
                        for n in "abc"
                    ],
                    device=torch.device("cpu"),
                )

        model = Model()
        side("optim.apply_optimizer_in_backward").apply_optimizer_in_backward(
            side("optim").RowWiseAdagrad, model.ebc.parameters(), {"lr": 0.1}
        )
        wishes = {"a": plans.row_wise(), "b": plans.table_wise(1), "c": plans.column_wise([0, 1])}
        sharder = side("distributed.embeddingbag").EmbeddingBagCollectionSharder()
        plan = plans.construct_module_sharding_plan(model.ebc, wishes, sharder, 2, 2, "cpu")
        dmp = side("distributed.model_parallel").DistributedModelParallel(
            model, device=torch.device("cpu"), plan=types.ShardingPlan({"ebc": plan}), sharders=[sharder]
        )
        optimizer = dmp.fused_optimizer
        assert isinstance(optimizer, torch.optim.Optimizer)
        layout = {}
        for name, entries in optimizer.state_dict()["state"].items():
            for key, value in entries.items():
                boxes = sorted(
                    (s.shard_offsets, s.shard_sizes, s.placement.rank())
                    for s in value.metadata().shards_metadata
                )
                layout[name, key] = (tuple(value.size()), boxes, len(value.local_shards()))
        steps = side("optim.optimizers").in_backward_optimizer_filter
        stepped = sorted(name for name, p in steps(dmp.named_parameters(), include=True) if p.numel())
        found.append((layout, stepped, {type(v).__name__ for v in optimizer.params.values()}))
    assert found[0] == found[1]


def test_the_state_of_fused_tables():
    run_ranks(2, fused_layout, backend="gloo", env={"LOCAL_WORLD_SIZE": "2"})


class _Averaged(torch.optim.SGD):
    """A global optimizer of one rank: towards where the model began."""

    def __init__(self, params):
        super().__init__(params, lr=0.5, momentum=0.9)
        self.began = [param.detach().clone() for group in self.param_groups for param in group["params"]]

    def global_step(self, local_steps, closure=None):
        params = [param for group in self.param_groups for param in group["params"]]
        for param, began in zip(params, self.began, strict=True):
            param.grad = began - param.detach()
            param.detach().copy_(began)
        torch.optim.SGD.step(self, closure)
        for param, began in zip(params, self.began, strict=True):
            began.copy_(param.detach())


def _semi_sync(side, seed=3):
    torch.manual_seed(seed)
    model = torch.nn.Linear(3, 2)
    keyed = side("optim.keyed").KeyedOptimizerWrapper
    params = dict(model.named_parameters())
    local = keyed(params, lambda given: torch.optim.Adam(given, lr=0.1))
    outer = keyed(params, _Averaged)
    optimizer = side("optim.semi_sync").SemisyncOptimizer(model.parameters(), local, outer, num_local_steps=3)
    return model, optimizer


def _semi_sync_steps(model, optimizer, count, seed=0):
    generator = torch.Generator().manual_seed(seed)
    for _ in range(count):
        optimizer.zero_grad()
        model(torch.randn(4, 3, generator=generator)).square().sum().backward()
        optimizer.step()


def test_semi_sync_steps_and_state():
    found = []
    for side in SIDES:
        model, optimizer = _semi_sync(side)
        _semi_sync_steps(model, optimizer, 7)
        found.append((list(model.parameters()), optimizer.state_dict()["state"]))
    (ours, state), (theirs, their_state) = found
    for one, other in zip(ours, theirs, strict=True):
        torch.testing.assert_close(one, other, rtol=0, atol=0)
    assert list(state) == list(their_state)
    for name, entries in their_state.items():
        assert sorted(entries) == sorted(state[name])
        for entry, value in entries.items():
            torch.testing.assert_close(state[name][entry], value)


def test_semi_sync_goes_on_from_a_state():
    model, optimizer = _semi_sync(OURS)
    _semi_sync_steps(model, optimizer, 4)
    other, loaded = _semi_sync(OURS)
    _semi_sync_steps(other, loaded, 3, seed=9)
    loaded.load_state_dict(copy.deepcopy(optimizer.state_dict()))
    other.load_state_dict(model.state_dict())
    loaded._global_optimizer._optimizer.began = [
        value.clone() for value in optimizer._global_optimizer._optimizer.began
    ]
    for pair in ((model, optimizer), (other, loaded)):
        _semi_sync_steps(*pair, 3, seed=5)
    for one, two in zip(model.parameters(), other.parameters(), strict=True):
        torch.testing.assert_close(one, two, rtol=0, atol=0)


def test_semi_sync_says_what_is_wrong():
    keyed = OURS("optim.keyed").KeyedOptimizerWrapper
    semi_sync = OURS("optim.semi_sync").SemisyncOptimizer
    params = {"weight": torch.nn.Parameter(torch.ones(1))}
    plain = keyed(params, lambda given: torch.optim.SGD(given, lr=1.0))
    with pytest.raises(TypeError, match="around one with global_step"):
        semi_sync(params.values(), plain, plain)
    with pytest.raises(ValueError, match="num_local_steps is 0"):
        semi_sync(params.values(), plain, keyed(params, _Averaged), 0)
    model, optimizer = _semi_sync(OURS)
    _semi_sync_steps(model, optimizer, 3)
    with pytest.raises(RuntimeError, match="step_counter__"):
        optimizer.load_state_dict({"state": {"weight": {}}})
