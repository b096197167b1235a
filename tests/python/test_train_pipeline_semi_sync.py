"""Rows one step old: against a loop by hand over whole tables."""

from __future__ import annotations

import warnings

import pytest
import torch
import torch.distributed as dist
from ranks import run_ranks
from tessera.distributed.model_parallel import DMPCollection, dense_parameters
from tessera.distributed.sharding_plan import construct_module_sharding_plan, row_wise
from tessera.distributed.train_pipeline import (
    TrainPipelineFusedSparseDist,
    TrainPipelineSemiSync,
    TrainPipelineSparseDist,
)
from tessera.distributed.types import ShardingPlan
from test_train_pipeline_sharded import (
    SHARDERS,
    Batch,
    Model,
    drain,
    sharded_model,
    source,
    tables_of,
    train_plainly,
)
from torch import nn

RATE = 0.05


def semi_sync_by_hand(count, start_batch, stashes):
    """Train one process on the batches of all ranks, as the pipeline is meant to.

    The losses of all ranks count, and the dense layer is averaged over them, as in DistributedModelParallel.
    """
    world = dist.get_world_size()
    model = sharded_model()  # rows that begin as the pipeline's
    rows = {name: nn.Parameter(table.clone()) for name, table in tables_of(model).items()}
    sums = {name: torch.zeros_like(table) for name, table in rows.items()}
    torch.manual_seed(3)
    layer = Model().layer
    optimizer = torch.optim.SGD(layer.parameters(), 0.01)
    kept: list[torch.Tensor] | None = None

    def looked_up(number):
        """Read the rows of a batch of every rank, as they are now."""
        read = []
        for rank in range(world):
            batch = Batch(rank, number)
            read.append((batch, {name: table[:].clone() for name, table in rows.items()}))
        return read

    def bags(batch, feature, table):
        jt = batch.bags[feature]
        return torch.stack([part.sum(0) for part in table[jt.values()].split(jt.lengths().tolist())] or [])

    def forward(batch, tables):
        if batch.size:
            parts = [("f", "a"), ("g", "items"), ("f", "c")]
            columns = [bags(batch, feature, tables[name]) for feature, name in parts]
            output = layer(torch.cat([batch.dense, *columns], 1)).squeeze(1)
        else:
            output = layer(torch.zeros(0, 12)).squeeze(1)
        words = tables["d"][batch.words["w"].values()].sum()
        return ((output - 1) ** 2 + words).sum(), output

    ahead = looked_up(0)
    outputs = []
    for number in range(count):
        now = ahead
        is_ahead = number >= start_batch
        if is_ahead and number + 1 < count:
            ahead = looked_up(number + 1)
        total = 0.0
        own = []
        leaves = []
        for batch, tables in now:
            leaf = {name: table.detach().requires_grad_(True) for name, table in tables.items()}
            loss, output = forward(batch, leaf)
            total = total + loss
            own.append(output.detach())
            leaves.append(leaf)
        outputs.append(own)
        optimizer.zero_grad()
        total.backward()
        for name, table in rows.items():
            gradient = sum(leaf[name].grad for leaf in leaves if leaf[name].grad is not None) / world
            if name == "d":
                table.data -= RATE * gradient
                continue
            sums[name] += gradient**2
            table.data -= RATE * gradient / (sums[name].sqrt() + 1e-8)
        gradients = [parameter.grad / world for parameter in layer.parameters()]
        given = gradients
        if stashes and is_ahead:
            given, kept = kept, gradients
        if given is not None:
            for parameter, gradient in zip(layer.parameters(), given, strict=True):
                parameter.grad = gradient.clone()
            optimizer.step()
        if not is_ahead and number + 1 < count:
            ahead = looked_up(number + 1)
    return rows, layer, outputs


def check_by_hand(rank):
    for count, start_batch, stashes in ((5, 0, False), (5, 2, False), (5, 1, True), (1, 0, True)):
        rows, layer, expected = semi_sync_by_hand(count, start_batch, stashes)
        model = sharded_model()
        pipeline = TrainPipelineSemiSync(
            model,
            torch.optim.SGD(dense_parameters(model), 0.01),
            torch.device("cpu"),
            start_batch=start_batch,
            stash_gradients=stashes,
        )
        outputs = drain(pipeline, source(rank, count))
        assert len(outputs) == count
        for found, of_ranks in zip(outputs, expected, strict=True):
            torch.testing.assert_close(found, of_ranks[rank], rtol=1e-4, atol=1e-5)
        for name, table in tables_of(model).items():
            torch.testing.assert_close(table, rows[name].data, rtol=1e-4, atol=1e-5)
        torch.testing.assert_close(model.module.layer.weight, layer.weight, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("world", [1, 2, 3])
def test_rows_of_the_step_before_the_last(world):
    run_ranks(world, check_by_hand)


def check_before_the_start(rank):
    expected_model, expected = train_plainly(rank, 6)
    rows = tables_of(expected_model)
    for make in (
        lambda *given: TrainPipelineSemiSync(*given, start_batch=99),
        TrainPipelineFusedSparseDist,
    ):
        model = sharded_model()
        pipeline = make(model, torch.optim.SGD(dense_parameters(model), 0.01), torch.device("cpu"))
        outputs = drain(pipeline, source(rank, 6))
        assert all(torch.equal(one, other) for one, other in zip(outputs, expected, strict=True))
        assert all(torch.equal(table, rows[name]) for name, table in tables_of(model).items())


def test_before_the_start_the_bits_of_the_plain_loop():
    run_ranks(2, check_before_the_start)


def check_evaluation(rank):
    for kind in (TrainPipelineSparseDist, TrainPipelineSemiSync):
        model = sharded_model()
        before = tables_of(model)
        model.eval()
        pipeline = kind(model, torch.optim.SGD(dense_parameters(model), 0.01), torch.device("cpu"))
        assert len(drain(pipeline, source(rank, 3))) == 3
        assert all(torch.equal(table, before[name]) for name, table in tables_of(model).items())
        assert all(parameter.grad is None for parameter in dense_parameters(model))


def test_a_model_in_eval_mode_is_not_trained():
    run_ranks(2, check_evaluation)


class Holder(nn.Module):
    def __init__(self):
        super().__init__()
        self.table = Model().first
        self.layer = nn.Linear(4, 1)

    def forward(self, batch):
        output = self.layer(self.table(batch.bags)["f"]).squeeze(1)
        return (output - 1) ** 2, output


def check_optimizers(rank):
    from tessera.distributed.model_parallel import DistributedModelParallel
    from tessera.distributed.types import ShardingEnv

    model = Holder()
    plan = construct_module_sharding_plan(
        model.table,
        {"a": row_wise(compute_kernel="dense")},
        SHARDERS[0],
        dist.get_world_size(),
        device_type="cpu",
    )
    env = ShardingEnv.from_process_group(dist.group.WORLD)
    dmp = DistributedModelParallel(model, env, plan=ShardingPlan({"table": plan}), sharders=SHARDERS)
    optimizer = torch.optim.SGD(dmp.parameters(), 0.01)
    with pytest.raises(ValueError, match="the optimizer steps parameters of 'table'"):
        TrainPipelineSemiSync(dmp, optimizer, torch.device("cpu"), strict=True)
    with pytest.warns(UserWarning, match="the optimizer steps parameters of 'table'"):
        TrainPipelineSemiSync(dmp, optimizer, torch.device("cpu"))
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        TrainPipelineSemiSync(dmp, torch.optim.SGD(dmp.module.layer.parameters(), 0.01), torch.device("cpu"))


def test_an_optimizer_of_tables_is_told():
    run_ranks(1, check_optimizers)


def check_replicas(rank):
    for kind, options in (
        (TrainPipelineSparseDist, {}),
        (TrainPipelineSemiSync, {"start_batch": 0}),
        (TrainPipelineSparseDist, {"dmp_collection_sync_interval_batches": None}),
    ):
        torch.manual_seed(5)
        model = Holder()
        plan = construct_module_sharding_plan(
            model.table, {"a": row_wise()}, SHARDERS[0], 1, 1, device_type="cpu"
        )
        dmp = DMPCollection(
            model,
            torch.device("cpu"),
            ShardingPlan({"table": plan}),
            dist.get_world_size(),
            1,
            dist.group.WORLD,
            sharders=SHARDERS,
        )
        pipeline = kind(
            dmp, torch.optim.SGD(dmp.module.layer.parameters(), 0.01), torch.device("cpu"), **options
        )
        drain(pipeline, (Batch(rank, 1 + 4 * number + 2 * rank) for number in range(4)))
        rows = dmp.module.table.gather_tables()["a"]
        others = [torch.empty_like(rows) for _ in range(dist.get_world_size())]
        dist.all_gather(others, rows)
        is_same = all(torch.equal(rows, other) for other in others)
        assert is_same == (options.get("dmp_collection_sync_interval_batches", 1) is not None)


def test_pipelines_average_the_replicas_of_a_collection():
    run_ranks(2, check_replicas)
