"""Feature-processed tables over ranks through Python, and models that join: equal to one process."""

from __future__ import annotations

import pytest
import torch
import torch.distributed as dist
from ranks import run_ranks, run_ranks_collecting
from tessera import checkpoint
from tessera.distributed.embedding import EmbeddingCollectionSharder
from tessera.distributed.embeddingbag import EmbeddingBagCollectionSharder
from tessera.distributed.fp_embeddingbag import FeatureProcessedEmbeddingBagCollectionSharder
from tessera.distributed.model_parallel import (
    DefaultDataParallelWrapper,
    DistributedModelParallel,
    dense_parameters,
)
from tessera.distributed.sharding_plan import (
    column_wise,
    construct_module_sharding_plan,
    data_parallel,
    row_wise,
    table_column_wise,
    table_row_wise,
    table_wise,
)
from tessera.distributed.train_pipeline import TrainPipelineSparseDist
from tessera.distributed.types import ShardingEnv, ShardingPlan
from tessera.modules.embedding_configs import EmbeddingBagConfig, EmbeddingConfig, PoolingType
from tessera.modules.embedding_modules import EmbeddingBagCollection, EmbeddingCollection
from tessera.modules.feature_processor_ import PositionWeightedModule, PositionWeightedModuleCollection
from tessera.modules.fp_embedding_modules import FeatureProcessedEmbeddingBagCollection
from tessera.sparse.jagged_tensor import KeyedJaggedTensor
from torch import nn

FEATURES = ["h", "f", "g"]
NAMES = ["f@a", "g", "h", "f@c"]
SAMPLES = [3, 0, 5, 2]  # of each rank: uneven, and none
RATE = 0.05


def processed(is_collection=False, device="cpu"):
    torch.manual_seed(7)
    tables = [
        EmbeddingBagConfig(10, 4, "a", feature_names=["f", "g"]),
        EmbeddingBagConfig(7, 6, "b", feature_names=["h"], pooling=PoolingType.MEAN),
        EmbeddingBagConfig(5, 4, "c", feature_names=["f"]),
    ]
    bags = EmbeddingBagCollection(tables, is_weighted=True, device=torch.device(device))
    lengths = {"f": 4, "g": 3, "h": 3}
    if is_collection:
        processors = PositionWeightedModuleCollection(lengths, device=torch.device(device))
    else:
        processors = {name: PositionWeightedModule(n, torch.device(device)) for name, n in lengths.items()}
    module = FeatureProcessedEmbeddingBagCollection(bags, processors)
    if device != "meta":
        with torch.no_grad():
            for weight in module._feature_processors.parameters():
                weight.copy_(torch.randn(weight.shape))
    return module


def batch(seed, samples=3, features=FEATURES):
    generator = torch.Generator().manual_seed(seed)
    lengths = torch.randint(0, 4, (len(features) * samples,), generator=generator)
    values = torch.randint(0, 5, (int(lengths.sum()),), generator=generator)
    return KeyedJaggedTensor.from_lengths_sync(features, values, lengths)


class Model(nn.Module):
    def __init__(self, is_collection=False, device="cpu"):
        super().__init__()
        self.fp = processed(is_collection, device)
        torch.manual_seed(3)
        self.over = nn.Linear(18, 1, device=device)

    def forward(self, features):
        pooled = self.fp(features)
        return self.over(torch.cat([pooled[name] for name in NAMES], 1)).square().sum()


def sharders(params=None):
    bags = EmbeddingBagCollectionSharder({"learning_rate": RATE, **(params or {})})
    return [FeatureProcessedEmbeddingBagCollectionSharder(bags)]


def plan_of(model, wishes, **options):
    tables = construct_module_sharding_plan(model.fp, wishes, *sharders(), device_type="cpu", **options)
    return ShardingPlan({"fp": tables})


def train_alone(whole, steps, world, seed=lambda step, rank: 10 * step + rank):
    """Step one process on all samples, the ranks' losses averaged."""
    optimizer = torch.optim.SGD(whole.parameters(), lr=RATE)
    for step in range(steps):
        optimizer.zero_grad()
        for rank in range(world):
            (whole(batch(seed(step, rank), SAMPLES[rank])) / world).backward()
        optimizer.step()
    return whole.state_dict()


def expect_state(model, tables, expected):
    for name, rows in tables.gather_tables().items():
        key = next(key for key in expected if key.endswith(f".{name}.weight"))
        torch.testing.assert_close(rows, expected[key], msg=lambda text, key=key: f"{key}: {text}")
    for name, parameter in model.named_parameters():
        if "_feature_processors" in name or name.startswith("over"):
            torch.testing.assert_close(parameter.detach(), expected[name], msg=lambda t, n=name: f"{n}: {t}")


def wishes_of(world):
    last = world - 1
    return [
        {"a": row_wise(), "b": row_wise(), "c": column_wise([last, 0])},
        {"a": table_wise(last), "b": column_wise([0, last]), "c": data_parallel()},
        {"a": table_row_wise(0), "b": table_column_wise([last, last]), "c": row_wise()},
    ]


def check_training(rank):
    world = dist.get_world_size()
    expected = train_alone(Model(), 2, world)
    for number, wishes in enumerate(wishes_of(world)):
        model = Model(is_collection=number == 1)
        dmp = DistributedModelParallel(model, plan=plan_of(model, wishes), sharders=sharders())
        optimizer = torch.optim.SGD(dense_parameters(dmp), lr=RATE)
        for step in range(2):
            optimizer.zero_grad()
            dmp(batch(10 * step + rank, SAMPLES[rank])).backward()
            optimizer.step()
        own = expected
        if number == 1:  # a collection calls its parameters otherwise
            own = {
                name.replace("_feature_processors.", "_feature_processors.position_weights.").removesuffix(
                    ".position_weight"
                ): value
                for name, value in expected.items()
            }
        assert set(dmp.state_dict()) == set(own)
        expect_state(dmp, model.fp, own)


@pytest.mark.parametrize("world", [1, 3, 4])
def test_trains_as_one_process(world):
    run_ranks(world, check_training)


def check_state_and_copies(rank):
    wishes, others, _ = wishes_of(2)
    model = Model()
    dmp = DistributedModelParallel(
        model, plan=plan_of(model, wishes), sharders=sharders({"optimizer": "exact_adagrad"})
    )
    dmp(batch(rank)).backward()
    meta = Model(device="meta")
    other = DistributedModelParallel(meta, plan=plan_of(meta, others), sharders=sharders())
    assert torch.equal(meta.fp._feature_processors["f"].position_weight.detach(), torch.ones(4))
    assert not other.load_state_dict(dmp.state_dict()).missing_keys
    torch.testing.assert_close(other(batch(rank)), dmp(batch(rank)))
    twin = dmp.copy(torch.device("cpu"))
    torch.testing.assert_close(twin(batch(rank)), dmp(batch(rank)))
    with torch.no_grad():
        twin.module.fp._feature_processors["f"].position_weight.zero_()
    assert model.fp._feature_processors["f"].position_weight.detach().abs().sum() > 0
    assert list(checkpoint.fused_state(model)) == ["fp._embedding_bag_collection"]
    default = DistributedModelParallel(Model())  # the planner's plan
    assert list(default.plan.plan) == ["fp"]
    torch.testing.assert_close(default(batch(rank)), Model()(batch(rank)))
    optimizers = dmp.fused_optimizer
    assert "fp._embedding_bag_collection.embedding_bags.b.weight" in "".join(map(str, optimizers.params))


def check_accumulation(rank):
    """Two passes and one clipped step of sparse gradients, with replicas among the tables."""
    whole = Model()
    model = Model()
    dmp = DistributedModelParallel(
        model,
        plan=plan_of(model, wishes_of(2)[1]),
        sharders=sharders({"gradients": "sparse"}),
        data_parallel_wrapper=DefaultDataParallelWrapper(static_graph=False),
    )
    optimizer = torch.optim.SGD(dense_parameters(dmp), lr=RATE)
    with dmp.no_sync():
        dmp(batch(rank)).backward()
    dmp(batch(rank + 2)).backward()
    for seed in range(4):
        (whole(batch(seed)) / 2).backward()
    norm = torch.nn.utils.clip_grad_norm_(whole.parameters(), 0.5).item()
    assert abs(dmp.clip_grad_norm_(0.5) - norm) < 1e-4 * norm
    optimizer.step()
    dmp.fused_optimizer.step()
    torch.optim.SGD(whole.parameters(), lr=RATE).step()
    expect_state(dmp, model.fp, whole.state_dict())


class Losses(nn.Module):
    """Returns what a pipeline wants."""

    def __init__(self, model):
        super().__init__()
        self.model = model

    def forward(self, features):
        loss = self.model(features)
        return loss, loss.detach()


def check_pipeline(rank):
    """Ids sent ahead meet the processors' parameters of their turn."""
    losses = []
    for is_pipelined in (False, True):
        model = Model()
        dmp = DistributedModelParallel(model, plan=plan_of(model, wishes_of(2)[0]), sharders=sharders())
        optimizer = torch.optim.SGD(dense_parameters(dmp), lr=RATE)
        batches = [batch(10 * step + rank) for step in range(4)]
        found = []
        if is_pipelined:
            path = "model._dmp_wrapped_module.module.fp"
            pipeline = TrainPipelineSparseDist(
                Losses(dmp), optimizer, torch.device("cpu"), modules={path: lambda features: features}
            )
            source = iter(batches)
            found = [pipeline.progress(source).item() for _ in batches]
        else:
            for features in batches:
                optimizer.zero_grad()
                loss = dmp(features)
                loss.backward()
                optimizer.step()
                found.append(loss.item())
        losses.append(found)
    assert losses[0] == losses[1]


@pytest.mark.parametrize("body", [check_state_and_copies, check_accumulation, check_pipeline])
def test_two_ranks(body):
    run_ranks(2, body)


def too_long(rank):
    module = processed()
    sharder = FeatureProcessedEmbeddingBagCollectionSharder()
    plan = construct_module_sharding_plan(module, wishes_of(2)[0], sharder, device_type="cpu")
    sharded = sharder.shard(module, plan, ShardingEnv.from_process_group(dist.group.WORLD))
    length = 4 if rank == 1 else 1
    lengths = torch.tensor([1, 1, length])
    features = KeyedJaggedTensor.from_lengths_sync(
        FEATURES, torch.zeros(2 + length, dtype=torch.int64), lengths
    )
    sharded(features)


def test_a_bag_too_long_is_the_same_error_everywhere():
    for outcome in run_ranks_collecting(2, too_long):
        assert outcome.error == (
            "ValueError: sharding.embedding_bag_collection: on rank 1, embed.position_weighted: feature 'g', "
            "sample 0 has 4 ids, but there are weights for 3 positions."
        )


def test_modules_that_do_not_fit():
    tables = [EmbeddingBagConfig(10, 4, "a", feature_names=["f", "g"])]
    with pytest.raises(ValueError, match="the collection is not weighted"):
        FeatureProcessedEmbeddingBagCollection(EmbeddingBagCollection(tables), {})
    with pytest.raises(
        ValueError, match=r"processors are of \['f'\], the tables have the features \['f', 'g'\]"
    ):
        FeatureProcessedEmbeddingBagCollection(
            EmbeddingBagCollection(tables, is_weighted=True), {"f": PositionWeightedModule(2)}
        )
    module = processed()
    processors, bags = module.split()
    torch.testing.assert_close(bags(processors(batch(1))).values(), module(batch(1)).values())


# ---- ranks with different numbers of batches ----


class Two(nn.Module):
    """Pooled tables behind processors, and rows of single ids."""

    def __init__(self):
        super().__init__()
        self.fp = processed()
        torch.manual_seed(11)
        self.ec = EmbeddingCollection([EmbeddingConfig(6, 2, "e", feature_names=["f"])])
        self.over = nn.Linear(18, 1)

    def forward(self, features):
        pooled = self.fp(features)
        rows = self.ec(features)["f"].values()
        return self.over(torch.cat([pooled[name] for name in NAMES], 1)).square().sum() + rows.square().sum()


def check_join(rank, counts):
    world = dist.get_world_size()
    whole = Two()
    reference = torch.optim.SGD(whole.parameters(), lr=RATE)
    for step in range(max(counts)):
        reference.zero_grad()
        for r in range(world):
            if step < counts[r]:
                (whole(batch(10 * step + r, 2)) / world).backward()
        reference.step()
    model = Two()
    plan = plan_of(model, wishes_of(world)[0])
    own = [*sharders(), EmbeddingCollectionSharder({"learning_rate": RATE})]
    plan.plan["ec"] = construct_module_sharding_plan(model.ec, {"e": row_wise()}, own[1], device_type="cpu")
    dmp = DistributedModelParallel(model, plan=plan, sharders=own)
    optimizer = torch.optim.SGD(dense_parameters(dmp), lr=RATE)
    with dmp.join():
        for step in range(counts[rank]):
            optimizer.zero_grad()
            dmp(batch(10 * step + rank, 2)).backward()
            optimizer.step()
    optimizer.zero_grad()
    dmp(batch(100 + rank, 2)).backward()  # all together again
    optimizer.step()
    reference.zero_grad()
    for r in range(world):
        (whole(batch(100 + r, 2)) / world).backward()
    reference.step()
    expected = whole.state_dict()
    expect_state(dmp, model.fp, expected)
    torch.testing.assert_close(model.ec.gather_tables()["e"], expected["ec.embeddings.e.weight"])
    with pytest.raises(ValueError, match="join with divide_by_initial_world_size"):
        dmp.join(divide_by_initial_world_size=False)
    with pytest.raises(RuntimeError, match="exhausted"), dmp.join(throw_on_early_termination=True):
        for _ in range(rank):
            dmp(batch(rank))


@pytest.mark.parametrize(("backend", "counts"), [("shm", [1, 4, 2]), ("gloo", [0, 2])])
def test_ranks_join(backend, counts):
    run_ranks(len(counts), check_join, counts, backend=backend)
