"""Training loops and `shard` beside torchrec 1.8.0: batches trained on, own forwards, features made ahead."""

from __future__ import annotations

import contextlib
import os
import subprocess
import sys

import pytest
import torch
import torch.distributed as dist
from two_sides import OURS, SIDES, THEIRS

from ranks import run_ranks  # isort: skip

KEYS = ["f", "g"]


def tables(side):
    config = side("modules.embedding_configs").EmbeddingBagConfig
    return side("modules.embedding_modules").EmbeddingBagCollection(
        tables=[
            config(num_embeddings=10, embedding_dim=4, name=f"t_{key}", feature_names=[key]) for key in KEYS
        ],
        device=torch.device("cpu"),
    )


class Shift(torch.nn.Module):
    """Make other ids of a batch's; counts its calls."""

    def __init__(self, kjt):
        super().__init__()
        self.kjt = kjt
        self.calls = 0

    def forward(self, features):
        self.calls += 1
        return self.kjt.from_lengths_sync(features.keys(), (features.values() + 1) % 10, features.lengths())


class Model(torch.nn.Module):
    def __init__(self, side, shifts):
        super().__init__()
        self.ebc = tables(side)
        self.over = torch.nn.Linear(8, 1)
        self.shift = Shift(side("sparse.jagged_tensor").KeyedJaggedTensor) if shifts else torch.nn.Identity()

    def forward(self, batch):
        features = self.shift(batch.sparse_features)
        pooled = self.ebc(features)
        logits = self.over(torch.cat([pooled[key] for key in KEYS], 1)).squeeze(1)
        loss = torch.nn.functional.binary_cross_entropy_with_logits(logits, batch.labels.float())
        return loss, logits.detach()


def make(side, shifts=False, in_backward=False):
    torch.manual_seed(2)
    model = Model(side, shifts)
    if in_backward:
        optim = side("optim")
        side("optim.apply_optimizer_in_backward").apply_optimizer_in_backward(
            optim.RowWiseAdagrad, model.ebc.parameters(), {"lr": 0.05, "eps": 1e-6}
        )
    plans, types = side("distributed.sharding_plan"), side("distributed.types")
    sharder = side("distributed.embeddingbag").EmbeddingBagCollectionSharder()
    plan = plans.construct_module_sharding_plan(
        model.ebc, {"t_f": plans.row_wise(), "t_g": plans.table_wise(1)}, sharder, 2, 2, "cpu"
    )
    dmp = side("distributed").DistributedModelParallel(
        model, device=torch.device("cpu"), plan=types.ShardingPlan({"ebc": plan}), sharders=[sharder]
    )
    with torch.no_grad():
        for seed, (_, value) in enumerate(sorted(dmp.state_dict().items())):
            drawn = torch.randn(tuple(value.size()), generator=torch.Generator().manual_seed(seed))
            if not hasattr(value, "local_shards"):
                value.copy_(drawn)
                continue
            for shard in value.local_shards():
                (row, column), (height, width) = shard.metadata.shard_offsets, shard.metadata.shard_sizes
                shard.tensor.copy_(drawn[row : row + height, column : column + width])
    return dmp


def batches(side, rank, count):
    return iter(
        side("datasets.random").RandomRecDataset(
            KEYS, 3, hash_size=10, ids_per_feature=2, num_dense=1, manual_seed=rank, num_batches=count
        )
    )


def train(pipeline, source):
    outputs = []
    while True:
        try:
            outputs.append(pipeline.progress(source))
        except StopIteration:
            return outputs


def run(rank, side, count, name="TrainPipelineSparseDist", shifts=False, forward=None, **options):
    dmp = make(side, shifts)
    if forward:
        options["custom_model_fwd"] = lambda batch: forward(dmp, batch)
    optimizer = torch.optim.SGD(dmp.parameters(), lr=0.5)
    module = side("distributed.train_pipeline.train_pipelines")
    outputs = train(
        getattr(module, name)(dmp, optimizer, torch.device("cpu"), **options), batches(side, rank, count)
    )
    return dmp, outputs


def same(ours, theirs):
    assert len(ours) == len(theirs)
    for a, b in zip(ours, theirs, strict=True):
        torch.testing.assert_close(a, b, rtol=1e-5, atol=1e-5)


def twice(dmp, batch):
    loss, output = dmp(batch)
    return 2 * loss, output + 1


def compare(rank):
    for count in (0, 1, 2, 3, 7):
        for execute_all in (True, False):
            found = [run(rank, side, count, execute_all_batches=execute_all)[1] for side in SIDES]
            assert len(found[0]) == (count if execute_all else max(0, count - 2))
            same(*found)
    for name in ("TrainPipelineBase", "EvalPipelineSparseDist", "TrainPipelineSparseDistLite"):
        same(*[run(rank, side, 4, name)[1] for side in SIDES])
    ahead, theirs = [run(rank, side, 4, forward=twice)[1] for side in SIDES]
    same(ahead, theirs)
    same(ahead, run(rank, OURS, 4, "TrainPipelineBase", forward=twice)[1])  # torchrec's does not call it
    (dmp, ours), (_, theirs) = [run(rank, side, 5, shifts=True, pipeline_postproc=True) for side in SIDES]
    same(ours, theirs)
    assert dmp.module.shift.calls == 5  # ahead, and not once more in the model's forward


def test_pipelines():
    run_ranks(2, compare, backend="gloo", env={"LOCAL_WORLD_SIZE": "2"}, limit=120)


class Stream(torch.cpu.Stream):
    """A stream in torchrec's place of one of a GPU: what is called runs at once."""

    device = torch.device("cpu")


def overlapped(rank, side, count, name, **options):
    """Train tables in backward and the rest by an optimizer; return the outputs and the model's state."""
    dmp = make(side, in_backward=True)
    optimizer = torch.optim.SGD([value for key, value in dmp.named_parameters() if "over" in key], lr=0.5)
    module = side("distributed.train_pipeline.train_pipelines")
    pipeline = getattr(module, name)(dmp, optimizer, torch.device("cpu"), **options)
    if side is THEIRS and name.startswith("Prefetch"):
        pipeline._data_dist_stream = pipeline._prefetch_stream = pipeline._default_stream = Stream()
        pipeline._stream_context = contextlib.nullcontext
    if name.startswith("Eval"):
        dmp.eval()
    outputs = train(pipeline, batches(side, rank, count))
    state = dmp.state_dict()
    parts = [state[key].local_shards() if "ebc" in key else state[key] for key in sorted(state)]
    return outputs, [part.tensor.clone() for shards in parts[:2] for part in shards], parts[2:]


def compare_overlapped(rank):
    # torchrec asks for a GPU's streams there. They order what is done, and change no number.
    torch.get_device_module = lambda device=None: torch.cpu
    torch.Tensor.record_stream = lambda tensor, stream: None
    for name, options in (
        ("TrainPipelineSemiSync", {}),
        ("TrainPipelineSemiSync", {"start_batch": 0}),
        ("TrainPipelineSemiSync", {"start_batch": 2}),
        ("TrainPipelineSemiSync", {"start_batch": 2, "stash_gradients": True}),
        ("TrainPipelineFusedSparseDist", {}),
        ("TrainPipelineFusedSparseDist", {"emb_lookup_stream": "current"}),
        ("EvalPipelineFusedSparseDist", {}),
        ("PrefetchTrainPipelineSparseDist", {}),
    ):
        for count in (0, 1, 2, 3, 7):
            (ours, *state), (theirs, *their_state) = [
                overlapped(rank, side, count, name, **options) for side in SIDES
            ]
            assert len(ours) == count
            same(ours, theirs)
            torch.testing.assert_close(state, their_state, rtol=1e-5, atol=1e-5)
            plain, *_ = overlapped(rank, OURS, count, "TrainPipelineBase")
            is_late = "SemiSync" in name and options and count > options["start_batch"] + 1
            if not name.startswith("Eval"):
                assert is_late or all(map(torch.allclose, ours, plain))
            assert not is_late or not torch.allclose(ours[-1], plain[-1])  # rows one step old


def test_pipelines_that_overlap():
    run_ranks(2, compare_overlapped, backend="gloo", env={"LOCAL_WORLD_SIZE": "2"}, limit=120)


def changed(side, name):
    """Return a pipeline whose user leaves out batches, scales losses and clips gradients."""

    class Changed(getattr(side("distributed.train_pipeline.train_pipelines"), name)):
        left_out = 0

        def _next_batch(self, dataloader_iter):
            batch = super()._next_batch(dataloader_iter)
            while batch is not None and batch.labels.sum() == 0:
                self.left_out += 1
                batch = super()._next_batch(dataloader_iter)
            return batch

        def _backward(self, losses):
            torch.sum(losses * 8, dim=0).backward()

    if name == "TrainPipelineBase":
        return Changed

    class Clipped(Changed):
        made = 0

        def copy_batch_to_gpu(self, dataloader_iter):
            batch, context = super().copy_batch_to_gpu(dataloader_iter)
            if batch is not None:
                batch.sparse_features = batch.sparse_features.permute([0, 1])
            return batch, context

        def _create_context(self):
            self.made += 1
            return super()._create_context()

        def _optimizer_step(self):
            torch.nn.utils.clip_grad_value_(self._model.parameters(), 0.3)
            super()._optimizer_step()

    return Clipped


def compare_changed(rank):
    for name in ("TrainPipelineBase", "TrainPipelineSparseDist"):
        found = []
        for side in SIDES:
            dmp = make(side)
            pipeline = changed(side, name)(
                dmp, torch.optim.SGD(dmp.parameters(), lr=0.5), torch.device("cpu")
            )
            made = list(batches(side, rank, 10))
            for number in (0, 4, 5, 9):  # on all ranks, so that none has more
                made[number].labels.zero_()
            for number in set(range(10)) - {0, 4, 5, 9}:
                made[number].labels[0] = 1
            outputs = train(pipeline, iter(made))
            assert (len(outputs), pipeline.left_out) == (6, 4)
            assert name == "TrainPipelineBase" or pipeline.made >= 6
            found.append(outputs)
        same(*found)
        plain = run(rank, OURS, 6, name)[1]
        assert not torch.allclose(plain[-1], found[0][-1])  # not vacuous


def test_steps_that_users_replace():
    run_ranks(2, compare_changed, backend="gloo", env={"LOCAL_WORLD_SIZE": "2"}, limit=120)


def test_steps_that_no_loop_calls_are_told():
    base = OURS("distributed.train_pipeline").TrainPipelineSparseDist
    with pytest.warns(
        UserWarning, match="Own has _wait_for_batch, dequeue_batch, which no step of a pipeline calls"
    ):
        type("Own", (base,), {"dequeue_batch": print, "_wait_for_batch": print})


def accumulated(rank, side, count, steps):
    """Train with several batches per step; return the outputs and what the dense layer has become."""
    dmp = make(side)
    optimizer = torch.optim.SGD(dmp.parameters(), lr=0.5)
    pipeline = side("distributed.train_pipeline.train_pipelines").TrainPipelineSparseDist(
        dmp, optimizer, torch.device("cpu")
    )
    module = side("distributed.train_pipeline.gradient_accumulation")
    config = module.GradientAccumulationConfig(num_steps=steps)
    wrapped = module.GradientAccumulationWrapper(pipeline, optimizer, dmp, config)
    outputs = train(wrapped, batches(side, rank, count))
    weight = next(value for name, value in dmp.named_parameters() if name.endswith("over.weight"))
    return outputs, weight.detach().clone()


def compare_accumulated(rank):
    for count, steps in ((6, 3), (4, 2), (4, 1)):
        (ours, weight), (theirs, their_weight) = [accumulated(rank, side, count, steps) for side in SIDES]
        same(ours, theirs)
        torch.testing.assert_close(weight, their_weight, rtol=1e-5, atol=1e-5)
    # A rest of one batch. torchrec steps what each rank has alone, and the ranks part; here they agree.
    for side, agrees in zip(SIDES, (True, False), strict=True):
        _, weight = accumulated(rank, side, 7, 3)
        both = [torch.empty_like(weight) for _ in range(2)]
        dist.all_gather(both, weight)
        assert torch.equal(*both) == agrees


def test_gradient_accumulation():
    run_ranks(2, compare_accumulated, backend="gloo", env={"LOCAL_WORLD_SIZE": "2"}, limit=120)
    for wrong in ({"num_steps": 0}, {"num_warmup_steps": 0}):
        for side in SIDES:
            with pytest.raises(ValueError, match=f"{next(iter(wrong))} must be >= 1, got 0"):
                side("distributed.train_pipeline.gradient_accumulation").GradientAccumulationConfig(**wrong)


class Dense(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.layer = torch.nn.Linear(2, 1)

    def forward(self, batch):
        output = self.layer(batch)
        return output.square().mean(), output.detach()


def test_a_compiled_step():
    found = []
    for side in SIDES:
        torch.manual_seed(0)
        model, calls = Dense(), []
        module = side("distributed.train_pipeline.train_pipelines")
        pipeline = module.TrainPipelinePT2(
            model,
            torch.optim.SGD(model.parameters(), lr=0.1),
            torch.device("cpu"),
            compile_configs=module.TorchCompileConfig(backend="eager", compile_on_iter=1),
            pre_compile_fn=lambda _, calls=calls: calls.append("before"),
            post_compile_fn=lambda _, calls=calls: calls.append("after"),
            input_transformer=lambda batch: 2 * batch,
        )
        outputs = train(pipeline, iter([torch.full((3, 2), float(i)) for i in range(4)]))
        found.append((outputs, calls))
    (ours, calls), (theirs, their_calls) = found
    same(ours, theirs)
    assert calls == their_calls == ["before", "after"]


def towers(side):
    module = side("modules.embedding_tower")
    first, second = tables(side), tables(side)
    for seed, bags in enumerate((first, second)):
        generator = torch.Generator().manual_seed(seed)
        with torch.no_grad():
            for name in ("t_f", "t_g"):
                bags.embedding_bags[name].weight.copy_(torch.randn(10, 4, generator=generator))
    sides = [module.EmbeddingTower(bags, Joined()) for bags in (first, second)]
    return module.EmbeddingTowerCollection(sides)


class Joined(torch.nn.Module):
    def forward(self, pooled):
        return pooled.values().cumsum(1)


def test_towers():
    found = []
    for side in SIDES:
        kjt = side("sparse.jagged_tensor").KeyedJaggedTensor
        features = kjt.from_lengths_sync(KEYS, torch.tensor([1, 2, 3]), torch.tensor([1, 0, 1, 1]))
        found.append(towers(side)(features))
    torch.testing.assert_close(*found)
    with pytest.raises(ValueError, match="tower 0 needs features"):
        towers(OURS)()


def pooled_by_shard(rank):
    os.environ["LOCAL_WORLD_SIZE"] = "2"
    found = []
    for side in SIDES:
        plans, sharding = side("distributed.sharding_plan"), side("distributed.shard")
        bags = tables(side)
        cpu = torch.device("cpu")
        whole = sharding.shard(bags, plans.apply_to_all(bags, plans.row_wise()), device=cpu)
        one = sharding.shard(tables(side), plans.table_wise(1), device=cpu)
        found.append([sorted(part.state_dict()) for part in (whole, one)])
    assert found[0] == found[1]
    model = Model(OURS, False)
    weights = {name: value.clone() for name, value in model.state_dict().items()}
    sharded = OURS("distributed.shard").shard_modules(model, device=torch.device("cpu"))
    assert sharded is model and type(model.ebc).__name__ == "ShardedEmbeddingBagCollection"
    for name, rows in model.ebc.gather_tables().items():
        mine = weights[f"ebc.embedding_bags.{name}.weight"]
        dist.broadcast(mine, 0 if name == "t_f" else 1)
        torch.testing.assert_close(rows, mine)
    with pytest.raises(ValueError, match="there is no sharder for Linear"):
        OURS("distributed.shard").shard(torch.nn.Linear(1, 1), {})


def test_shard():
    run_ranks(2, pooled_by_shard, backend="gloo", env={"LOCAL_WORLD_SIZE": "2"})


def test_exchanges_out_of_one_record():
    for side in SIDES:
        module = side("distributed.fbgemm_qcomm_codec")
        config = module.QCommsConfig(
            forward_precision=module.CommType.FP16,
            backward_precision=module.CommType.BF16,
            forward_loss_scale=2.0,
        )
        codecs = module.get_qcomm_codecs(config)
        values = torch.tensor([0.5, -3.0])
        assert codecs.forward.quantized_dtype == torch.float16
        assert codecs.backward.quantized_dtype == torch.bfloat16
        wire = codecs.forward.encode(values)
        assert wire.dtype == torch.float16 and torch.equal(codecs.forward.decode(wire).float(), values)
        registry = module.get_qcomm_codecs_registry(config)
        assert set(registry) >= {"POOLED_EMBEDDINGS_ALL_TO_ALL", "SEQUENCE_EMBEDDINGS_ALL_TO_ALL"}


def test_names_at_the_top():
    for names in (
        (
            "",
            [
                "EmbeddingBagCollection",
                "EmbeddingBagConfig",
                "KeyedJaggedTensor",
                "KeyedTensor",
                "Pipelineable",
            ],
        ),
        (
            "distributed",
            ["DistributedModelParallel", "TrainPipelineSparseDist", "ShardingEnv", "get_local_size"],
        ),
        ("optim", ["RowWiseAdagrad", "CombinedOptimizer", "WarmupOptimizer", "GradientClippingOptimizer"]),
        ("optim", ["SemisyncOptimizer", "apply_optimizer_in_backward"]),
        ("fx", ["Tracer", "symbolic_trace"]),
    ):
        path, wanted = names
        for root in ("tessera", "torchrec"):
            module = __import__(f"{root}.{path}".rstrip("."), fromlist=["x"])
            for name in wanted:
                assert getattr(module, name).__name__ == name


@pytest.mark.parametrize("root", ["tessera", "torchrec"])
def test_places_after_one_import(root):
    """Programs import the package alone, and write whole paths."""
    places = (
        "sparse.jagged_tensor.KeyedJaggedTensor",
        "modules.embedding_configs.EmbeddingBagConfig",
        "modules.embedding_modules.EmbeddingBagCollection",
        "modules.crossnet.LowRankCrossNet",
        "distributed.model_parallel.DistributedModelParallel",
        "distributed.planner.EmbeddingShardingPlanner",
        "distributed.types.ShardingEnv",
        "optim.apply_optimizer_in_backward",
        "optim.keyed.KeyedOptimizerWrapper",
        "optim.rowwise_adagrad.RowWiseAdagrad",
        "quant.EmbeddingBagCollection",
        "quant.embedding_modules.EmbeddingCollection",
        "fx.Tracer",
    )
    lines = [f"import {root}", *(f"assert callable({root}.{place}), '{place}'" for place in places)]
    lines += [f"assert not hasattr({root}.modules, 'no_such_module')"]
    subprocess.run([sys.executable, "-W", "ignore", "-c", "\n".join(lines)], check=True, timeout=120)
