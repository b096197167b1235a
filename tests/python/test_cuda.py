"""The same on a GPU, against one process on the CPU: two ranks share it over Gloo, one rank runs NCCL."""

from __future__ import annotations

import copy

import pytest
import torch
import torch.distributed as dist
from four_tables import NAMES, batch, check_loads, check_same_optimizer_state, four_tables
from ranks import run_ranks, run_ranks_collecting
from tessera import checkpoint, regions, vocab_parallel
from tessera.distributed.embeddingbag import EmbeddingBagCollectionSharder
from tessera.distributed.model_parallel import DistributedModelParallel, dense_parameters
from tessera.distributed.model_utils import from_parallel_logits_to_logprobs
from tessera.distributed.sharding_plan import (
    column_wise,
    construct_module_sharding_plan,
    data_parallel,
    row_wise,
    table_wise,
)
from tessera.distributed.train_pipeline import PrefetchTrainPipelineSparseDist, TrainPipelineSparseDist
from tessera.distributed.types import CacheParams, ShardingEnv, ShardingPlan
from tessera.modules.embedding_configs import EmbeddingBagConfig, PoolingType
from tessera.modules.embedding_modules import EmbeddingBagCollection
from tessera.nn.parallel import DistributedDataParallel
from vocab_sample import group_and_range, reference_logprob, sample, shard

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="there is no GPU here")

CUDA = torch.device("cuda", 0)
# (ranks, engines): NCCL refuses two ranks on one GPU.
ALONE, TOGETHER = (1, "cpu:shm,cuda:nccl"), (2, "gloo")
WAYS = pytest.mark.parametrize("way", [ALONE, TOGETHER], ids=["nccl", "gloo"])


def on_ranks(way, body, *args):
    size, backend = way
    return run_ranks(size, body, *args, backend=backend, limit=120)


def layers():
    torch.manual_seed(7)
    return torch.nn.Sequential(torch.nn.Linear(33, 65), torch.nn.ReLU(), torch.nn.Linear(65, 5))


def train_replicas(rank, options):
    world = dist.get_world_size()
    model, alone = layers().to(CUDA), layers()
    parallel = DistributedDataParallel(model, device_ids=[0], bucket_cap_mb=0.01, **options)
    optimizers = [torch.optim.SGD(m.parameters(), lr=0.1, momentum=0.9) for m in (model, alone)]
    for step in range(4):
        inputs = [
            torch.randn(16, 33, generator=torch.Generator().manual_seed(10 * step + r)) for r in range(world)
        ]
        for optimizer in optimizers:
            optimizer.zero_grad()
        parallel(inputs[rank].to(CUDA)).square().mean().backward()
        for part in inputs:
            (alone(part).square().mean() / world).backward()
        for ours, whole in zip(model.parameters(), alone.parameters(), strict=True):
            torch.testing.assert_close(ours.grad.cpu(), whole.grad, rtol=1e-4, atol=1e-5)
        for optimizer in optimizers:
            optimizer.step()


@WAYS
@pytest.mark.parametrize(
    "options",
    [{}, {"gradient_as_bucket_view": True}, {"find_unused_parameters": True}, {"static_graph": True}],
    ids=["plain", "views", "unused", "static"],
)
def test_gradients_are_those_of_one_process(way, options):
    on_ranks(way, train_replicas, options)


PLACES = {"a": row_wise(), "b": table_wise(0), "c": column_wise([0, 0]), "d": data_parallel()}


class Model(torch.nn.Module):
    def __init__(self, device):
        super().__init__()
        torch.manual_seed(7)
        tables = four_tables(EmbeddingBagConfig, pooling=PoolingType.MEAN)
        self.bags = EmbeddingBagCollection(tables, device=torch.device("cpu"))
        self.layer = torch.nn.Linear(20, 1).to(device)

    def forward(self, features):
        pooled = self.bags(features)
        output = self.layer(torch.cat([pooled[name] for name in NAMES], 1)).squeeze(1)
        return (output - 1).square().mean(), output


def sharded_model(device, kernel=None):
    model = Model(device)
    sharder = EmbeddingBagCollectionSharder({"learning_rate": 0.5, "optimizer": "rowwise_adagrad"})
    wishes = PLACES if dist.get_world_size() > 1 else {**PLACES, "c": table_wise(0)}
    plan = construct_module_sharding_plan(model.bags, wishes, sharder, device_type=device.type)
    for name in "abc" if kernel else "":
        plan[name].compute_kernel = kernel
        plan[name].cache_params = CacheParams(load_factor=0.6)
    return DistributedModelParallel(
        model,
        ShardingEnv.from_process_group(dist.group.WORLD),
        device,
        ShardingPlan({"bags": plan}),
        [sharder],
    )


def steps(model, device, rank, count=3):
    optimizer = torch.optim.SGD(dense_parameters(model), 0.1)
    losses = []
    for number in range(count):
        optimizer.zero_grad()
        loss, _ = model(batch(10 * number + rank).to(device))
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    return losses


def train_tables(rank):
    models = {device: sharded_model(torch.device(device)) for device in ("cpu", "cuda")}
    losses = {device: steps(model, model.device, rank) for device, model in models.items()}
    torch.testing.assert_close(losses["cuda"], losses["cpu"], rtol=1e-5, atol=1e-6)
    on_cpu = models["cpu"].module.bags.gather_tables()
    for name, rows in models["cuda"].module.bags.gather_tables().items():
        torch.testing.assert_close(rows.cpu(), on_cpu[name], rtol=1e-5, atol=1e-6)


@WAYS
def test_tables_train_as_on_the_cpu(way):
    on_ranks(way, train_tables)


def train_in_pipeline(rank):
    plain, piped = sharded_model(CUDA), sharded_model(CUDA)
    losses = steps(plain, CUDA, rank, 5)
    pipeline = TrainPipelineSparseDist(piped, torch.optim.SGD(dense_parameters(piped), 0.1), CUDA)
    batches = iter([batch(10 * number + rank) for number in range(5)])
    for _ in losses:
        pipeline.progress(batches)
    expected = plain.module.bags.gather_tables()
    for name, rows in piped.module.bags.gather_tables().items():
        torch.testing.assert_close(rows, expected[name], rtol=1e-6, atol=1e-7)


@WAYS
def test_pipelines_train_as_the_plain_loop(way):
    on_ranks(way, train_in_pipeline)


def train_from_host_memory(rank, kernel):
    near, far = sharded_model(CUDA), sharded_model(CUDA, kernel)
    steps(near, CUDA, rank, 8)
    pipeline = PrefetchTrainPipelineSparseDist(far, torch.optim.SGD(dense_parameters(far), 0.1), CUDA)
    batches = iter([batch(10 * number + rank) for number in range(8)])
    for _ in range(8):
        pipeline.progress(batches)
    expected = near.module.bags.gather_tables()
    for name, rows in far.module.bags.gather_tables().items():
        assert torch.equal(rows, expected[name]), name
    check_same_optimizer_state(near.module.bags, far.module.bags)
    # State taken while rows are cached, and given to tables with and without a cache.
    steps(far, CUDA, rank, 1)
    steps(near, CUDA, rank, 1)
    whole = {name: rows.clone() for name, rows in near.module.bags.gather_tables().items()}
    for own, other in ((far, near), (near, far)):  # a state dict is the tables' own memory
        check_loads(own.module.bags.state_dict(), whole, [other.module.bags])
    found = far.module.bags.cache_statistics()
    if kernel == "fused_uvm":
        assert not found
        return
    assert found
    for table, own in found.items():
        # The ids are small: rows of the second rank are never asked for.
        assert own.num_calls > 0 and (own.num_loaded > 0 or rank > 0), table
        assert own.expected_miss_rate(own.cached_rows / own.num_rows) == pytest.approx(own.miss_rate)


@WAYS
@pytest.mark.parametrize("kernel", ["fused_uvm", "fused_uvm_caching"])
def test_tables_in_host_memory_train_as_those_in_the_gpus(way, kernel):
    on_ranks(way, train_from_host_memory, kernel)


def differentiate(rank):
    size = dist.get_world_size()
    whole = torch.arange(6.0, dtype=torch.float64).reshape(3, 2) + 1
    sizes = [3] if size == 1 else [1, 2]
    first = sum(sizes[:rank])
    part = whole[first : first + sizes[rank]].to(CUDA).requires_grad_()
    gathered = regions.gather(part, dist.group.WORLD, 0, sizes)
    assert torch.equal(gathered.cpu(), whole)
    (gradient,) = torch.autograd.grad(gathered.pow(3).sum(), part, create_graph=True)
    (second,) = torch.autograd.grad(gradient.pow(2).sum(), part)
    torch.testing.assert_close(gradient.cpu(), 3 * whole[first : first + sizes[rank]] ** 2)
    torch.testing.assert_close(second.cpu(), 36 * whole[first : first + sizes[rank]] ** 3)
    assert torch.equal(regions.reduce(whole.to(CUDA)).cpu(), whole * size)


@WAYS
def test_regions_of_any_order(way):
    on_ranks(way, differentiate)


def score_tokens(rank):
    group, start, end = group_and_range(rank)
    whole, labels = sample()
    alone = whole.double().requires_grad_()
    expected = torch.nn.functional.cross_entropy(alone.flatten(0, 1), labels.flatten(), label_smoothing=0.1)
    expected.backward()
    logits = shard(whole.to(CUDA), start, end)
    loss = vocab_parallel.cross_entropy(logits, labels.to(CUDA), group, label_smoothing=0.1)
    loss.backward()
    torch.testing.assert_close(loss.double().cpu(), expected.detach(), rtol=1e-5, atol=1e-6)
    torch.testing.assert_close(logits.grad.double().cpu(), alone.grad[..., start:end], rtol=1e-4, atol=1e-7)
    value = from_parallel_logits_to_logprobs(
        whole[..., start:end].to(CUDA), labels.to(CUDA), start, end, group, inference_only=True
    )
    following = reference_logprob(whole[:, :-1], labels[:, 1:])
    torch.testing.assert_close(value.double().cpu(), following, rtol=1e-5, atol=1e-5)


@WAYS
def test_losses_of_a_cut_vocabulary(way):
    on_ranks(way, score_tokens)


def move_between_devices(rank, folder):
    state = {device: sharded_model(torch.device(device)) for device in ("cpu", "cuda")}
    steps(state["cuda"], CUDA, rank)
    for source, target in (("cuda", "cpu"), ("cpu", "cuda")):
        root = f"{folder}/{source}"
        saved = state[source]
        whole = {name: rows.cpu() for name, rows in saved.module.bags.gather_tables().items()}
        checkpoint.save(root, 1, saved.state_dict(), dist.group.WORLD)
        other = sharded_model(torch.device(target))
        checkpoint.load(root, other.state_dict(), dist.group.WORLD)
        for name, rows in other.module.bags.gather_tables().items():
            assert torch.equal(rows.cpu(), whole[name]), (source, name)
        state[target] = other


@WAYS
def test_checkpoints_move_between_devices(way, tmp_path):
    on_ranks(way, move_between_devices, str(tmp_path))


def mix_devices(rank):
    tables = sharded_model(CUDA)
    tables(batch(rank))  # its ids are on the CPU


def test_ids_on_another_device_are_refused_on_every_rank():
    outcomes = run_ranks_collecting(2, mix_devices, backend="gloo")
    texts = {outcome.error for outcome in outcomes}
    assert len(texts) == 1, texts
    assert "cuda" in texts.pop()


def copy_and_run(rank):
    model = layers().to(CUDA)
    parallel = DistributedDataParallel(model, device_ids=[0])
    with pytest.raises(ValueError, match="cpu"):
        DistributedDataParallel(torch.nn.ModuleList([copy.deepcopy(model), layers()]), device_ids=[0])
    return parallel(torch.ones(1, 33, device=CUDA)).shape


def test_a_model_on_two_kinds_of_device_is_refused():
    assert on_ranks(TOGETHER, copy_and_run) == [(1, 5), (1, 5)]


def host_waits(profile):
    """Return the calls inside "step" that make the host wait for the device, by name."""
    events = profile.events()
    begin, end = next((e.time_range.start, e.time_range.end) for e in events if e.name == "step")
    waits = (
        "Synchronize",
        "Memcpy HtoD (Pageable",
        "Memcpy DtoH (Device -> Pageable",
        "cudaMalloc",
        "cudaFree",
    )
    return [
        e.name for e in events if begin <= e.time_range.start <= end and any(name in e.name for name in waits)
    ]


def test_a_step_never_waits_for_the_device():
    from tessera import _C
    from tessera.modules.embedding_configs import BoundsCheckMode
    from torch.profiler import ProfilerActivity, profile, record_function

    optimizer = _C.embedding.OptimizerOptions()
    optimizer.kind = _C.embedding.OptimizerKind.ROWWISE_ADAGRAD
    tables = EmbeddingBagCollection(
        four_tables(EmbeddingBagConfig),
        device=CUDA,
        bounds_check_mode=BoundsCheckMode.IGNORE,
        optimizer=optimizer,
    )
    layer = torch.nn.Linear(20, 1).to(CUDA)
    dense = torch.optim.SGD(layer.parameters(), 0.1, momentum=0.9)
    batches = [batch(number, samples=64).to(CUDA) for number in range(3)]

    def step(features):
        pooled = tables(features)
        layer(torch.cat([pooled[name] for name in NAMES], 1)).square().mean().backward()
        dense.step()
        dense.zero_grad(set_to_none=True)

    for features in batches:  # memory is asked for by the first steps
        step(features)
    torch.cuda.synchronize()
    with profile(activities=[ProfilerActivity.CPU, ProfilerActivity.CUDA]) as recorded:
        with record_function("step"):
            step(batches[0])
        torch.cuda.synchronize()
    assert host_waits(recorded) == []
    # What would be counted is: the same step with its loss read at once.
    both = [ProfilerActivity.CPU, ProfilerActivity.CUDA]
    with profile(activities=both) as recorded, record_function("step"):
        step(batches[1])
        layer.weight.sum().item()
    assert host_waits(recorded) != []


def test_ids_of_another_device_and_ids_outside_are_errors():
    tables = EmbeddingBagCollection(four_tables(EmbeddingBagConfig), device=CUDA)
    with pytest.raises(ValueError, match=r"are on cpu, the tables are on cuda:0"):
        tables(batch(1))
    outside = batch(1).to(CUDA)
    outside.values().fill_(1000)
    with pytest.raises(IndexError, match=r"1000"):
        tables(outside)
    # The device works on: the check comes before the rows are read.
    assert tables(batch(1).to(CUDA)).values().isfinite().all()


def test_memory_that_is_not_there_names_what_asked():
    free = torch.cuda.mem_get_info()[0]
    config = EmbeddingBagConfig(free // 16384 + 1, 4096, "huge", feature_names=["f"])
    with pytest.raises(torch.OutOfMemoryError, match="Tried to allocate"):
        EmbeddingBagCollection([config], device=CUDA)
