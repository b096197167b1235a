"""Tables that grow, over ranks: the same model for every number of them, and as on one rank."""

from __future__ import annotations

import pytest
import torch
import torch.distributed as dist
from ranks import run_ranks, run_ranks_collecting
from tessera import _C, checkpoint
from tessera.distributed.comm_ops import set_gradient_division
from tessera.distributed.embedding import EmbeddingCollectionSharder
from tessera.distributed.embeddingbag import EmbeddingBagCollectionSharder
from tessera.distributed.mc_embedding import ManagedCollisionEmbeddingCollectionSharder
from tessera.distributed.mc_embeddingbag import ManagedCollisionEmbeddingBagCollectionSharder
from tessera.distributed.sharding_plan import construct_module_sharding_plan, row_wise, table_wise
from tessera.distributed.types import ShardingEnv
from tessera.modules.embedding_configs import EmbeddingBagConfig, EmbeddingConfig
from tessera.modules.embedding_modules import EmbeddingBagCollection, EmbeddingCollection
from tessera.modules.mc_embedding_modules import (
    ManagedCollisionEmbeddingBagCollection,
    ManagedCollisionEmbeddingCollection,
)
from tessera.modules.mc_modules import (
    GrowingManagedCollisionModule,
    LFU_EvictionPolicy,
    ManagedCollisionCollection,
    MCHManagedCollisionModule,
)
from tessera.sparse.jagged_tensor import KeyedJaggedTensor

FUSED = {"optimizer": "EXACT_ROWWISE_ADAGRAD", "learning_rate": 0.1}
SAMPLES = 12  # of all ranks, a step


def whole(is_pooled=True, remaps=False, **options):
    torch.manual_seed(5)
    config = EmbeddingBagConfig if is_pooled else EmbeddingConfig
    configs = [config(None, 4, "a", feature_names=["f", "g"]), config(None, 6, "b", feature_names=["h"])]
    ids = ManagedCollisionCollection(
        {c.name: GrowingManagedCollisionModule(**options) for c in configs}, configs
    )
    if is_pooled:
        return ManagedCollisionEmbeddingBagCollection(EmbeddingBagCollection(configs), ids, remaps)
    return ManagedCollisionEmbeddingCollection(EmbeddingCollection(configs), ids, remaps)


def shard(module, wishes=None, fused=FUSED):
    if isinstance(module, ManagedCollisionEmbeddingBagCollection):
        sharder = ManagedCollisionEmbeddingBagCollectionSharder(EmbeddingBagCollectionSharder(fused))
    else:
        sharder = ManagedCollisionEmbeddingCollectionSharder(EmbeddingCollectionSharder(fused))
    plan = construct_module_sharding_plan(module, wishes or {"a": row_wise(), "b": row_wise()}, sharder)
    return sharder.shard(module, plan, ShardingEnv.from_process_group(dist.group.WORLD))


def batch(step, rank, world):
    """Return the part of a rank of the step's samples, and what their gradient is made of."""
    generator = torch.Generator().manual_seed(step)
    lengths = torch.randint(0, 4, (3, SAMPLES), generator=generator)
    near = torch.randint(-9, 9, (int(lengths.sum()),), generator=generator)
    far = near * (torch.randint(0, 2, near.shape, generator=generator) * 2**52 + 1)
    bags = list(far.split(lengths.flatten().tolist()))
    weights = torch.rand(SAMPLES, 14, generator=generator)
    begin, end = SAMPLES * rank // world, SAMPLES * (rank + 1) // world
    own = [bags[key * SAMPLES + i] for key in range(3) for i in range(begin, end)]
    features = KeyedJaggedTensor.from_lengths_sync(
        ["f", "g", "h"], torch.cat(own), lengths[:, begin:end].flatten()
    )
    return features, weights[begin:end]


def train(module, steps, rank=0, world=1):
    outputs = []
    for step in steps:
        features, weights = batch(step, rank, world)
        pooled, _ = module(features)
        pooled = pooled.wait() if hasattr(pooled, "wait") else pooled
        found = torch.cat([pooled[key] for key in ("f", "g", "h")], 1)
        (found * weights).sum().backward()
        outputs.append(found.detach())
    return outputs


def by_id(state, table):
    """Return what a state has of every id of a table."""
    base = f"_managed_collision_collection._managed_collision_modules.{table}."
    ids, counts, last = (state[f"{base}_{name}"].tolist() for name in ("ids", "counts", "last_steps"))
    weight = state[f"_embedding_module.embedding_bags.{table}.weight"]
    kept = state[f"_tessera_optimizer.{table}.momentum1"]
    found = {
        one: (counts[i], last[i], weight[i + 1].tolist(), kept[i + 1].tolist()) for i, one in enumerate(ids)
    }
    return found, weight[0].tolist()


def _trained(rank, options, is_mixed):
    set_gradient_division(False)
    wishes = {"a": row_wise(), "b": table_wise(1)} if is_mixed else None
    sharded = shard(whole(**options), wishes)
    outputs = train(sharded, range(6), rank, dist.get_world_size())
    state = sharded.state_dict()
    growth = [(table.table, table.ids, table.sightings) for table in sharded.growth()]
    return outputs, [by_id(state, table) for table in "ab"], growth


OPTIONS = [{}, {"admission": "freq:2"}, {"capacity": 1, "eviction": "lfu", "when_full": "refuse"}]


@pytest.mark.parametrize("options", OPTIONS)
def test_every_number_of_ranks_gives_the_same_bits(options):
    (wanted, tables, growth), *_ = run_ranks(1, _trained, options, False)
    assert len(tables[0][0]) > 10
    for world in (2, 3):
        found = run_ranks(world, _trained, options, world == 3)
        for step, together in enumerate(wanted):
            assert torch.equal(torch.cat([outputs[step] for outputs, _, _ in found]), together)
        for _, own, counted in found:  # the whole state on every rank
            assert own == tables and counted == growth


def _as_alone(rank):
    set_gradient_division(False)
    alone = whole()
    alone._embedding_module = EmbeddingBagCollection(alone._embedding_module._configs, optimizer=_adagrad())
    sharded = shard(whole())
    for mine, theirs in zip(train(sharded, range(4)), train(alone, range(4)), strict=True):
        torch.testing.assert_close(mine, theirs)
    # Both states are of one kind.
    sharded.load_state_dict(alone.state_dict())
    other = whole()
    other._embedding_module = EmbeddingBagCollection(other._embedding_module._configs, optimizer=_adagrad())
    state = {name: value for name, value in sharded.state_dict().items() if not name.endswith(".steps")}
    other.load_state_dict(state | {"_tessera_optimizer.step": alone.state_dict()["_tessera_optimizer.step"]})
    for mine, theirs in zip(train(sharded, range(4, 6)), train(other, range(4, 6)), strict=True):
        torch.testing.assert_close(mine, theirs)


def _adagrad():
    options = _C.embedding.OptimizerOptions()
    options.kind = _C.embedding.OptimizerKind.ROWWISE_ADAGRAD
    options.learning_rate = 0.1
    return options


def test_one_rank_is_as_without_sharding():
    run_ranks(1, _as_alone)


def _resumed(rank, options, state, steps):
    set_gradient_division(False)
    sharded = shard(whole(**options))
    if state is not None:
        sharded.load_state_dict(state)
    train(sharded, steps, rank, dist.get_world_size())
    return sharded.state_dict()


@pytest.mark.parametrize("options", OPTIONS[1:])
def test_a_state_goes_on_with_any_number_of_ranks(options):
    straight = run_ranks(2, _resumed, options, None, range(9))[0]
    state = run_ranks(2, _resumed, options, None, range(3))[0]
    state = run_ranks(3, _resumed, options, state, range(3, 6))[0]
    state = run_ranks(1, _resumed, options, state, range(6, 9))[0]
    for table in "ab":
        assert by_id(state, table) == by_id(straight, table)


def _through_a_checkpoint(rank, options, root, steps):
    """Go on from what was saved last, if anything was, and save."""
    set_gradient_division(False)
    sharded = shard(whole(**options))
    if checkpoint.steps(root):
        sharded.load_state_dict(checkpoint.read(root)["model"])
    train(sharded, steps, rank, dist.get_world_size())
    checkpoint.save(root, steps[-1] + 1, {"model": sharded.state_dict()}, dist.group.WORLD)


def _loads_lists_as_long_alone(rank, options, root):
    """Into tables with another number of ids, `load` is refused, and says what has another shape."""
    sharded = shard(whole(**options))
    with pytest.raises(checkpoint.CheckpointError, match=r"_ids' is I64 .*, the state wants"):
        checkpoint.load(root, {"model": sharded.state_dict()}, dist.group.WORLD)


@pytest.mark.parametrize("options", OPTIONS[1:])
def test_a_checkpoint_goes_on_with_any_number_of_ranks(options, tmp_path):
    straight = run_ranks(2, _resumed, options, None, range(9))[0]
    root = str(tmp_path)
    for world, steps in ((2, range(3)), (3, range(3, 6)), (1, range(6, 9))):
        run_ranks(world, _through_a_checkpoint, options, root, steps)
    state = checkpoint.read(root)["model"]
    for table in "ab":
        assert by_id(state, table) == by_id(straight, table)
    run_ranks(2, _loads_lists_as_long_alone, options, root)


def _sequences(rank):
    sharded = shard(whole(is_pooled=False))
    features, _ = batch(1, rank, dist.get_world_size())
    found = sharded(features)[0].wait()
    ids = GrowingManagedCollisionModule(name="a")
    bound = 0.5  # of four columns
    wanted = ids.first_values(features["f"].values(), 4, -bound, bound)
    torch.testing.assert_close(found["f"].values(), wanted, rtol=0, atol=0)
    sum(rows.values().sum() for rows in found.values()).backward()
    sharded.eval()
    with torch.no_grad():
        sharded(features)[0].wait()
    return [table.sightings for table in sharded.growth()]


def test_rows_of_single_ids():
    first, *others = run_ranks(2, _sequences)
    assert all(other == first for other in others)


def _full(rank):
    sharded = shard(whole(capacity=1))
    two = [_C.collision.id_of_hash(77 << 10), _C.collision.id_of_hash(1 << 20 | 77 << 10)]  # of one bucket
    lengths = torch.tensor([2, 0, 0])
    sharded(KeyedJaggedTensor.from_lengths_sync(["f", "g", "h"], torch.tensor(two), lengths))[0].wait()


def test_a_full_table_is_the_same_error_on_all_ranks():
    errors = [str(outcome.error) for outcome in run_ranks_collecting(2, _full)]
    assert len(set(errors)) == 1
    assert "capacity of 1" in errors[0]


def _refused(rank):
    with pytest.raises(ValueError, match="return_remapped_features"):
        shard(whole(remaps=True))
    with pytest.raises(ValueError, match="fused_params"):
        shard(whole(), fused=None)
    configs = [EmbeddingBagConfig(None, 4, "a", feature_names=["f"])]
    configs.append(EmbeddingBagConfig(8, 4, "b", feature_names=["h"]))
    fixed = MCHManagedCollisionModule(8, torch.device("cpu"), LFU_EvictionPolicy(), 1)
    ids = ManagedCollisionCollection({"a": GrowingManagedCollisionModule(), "b": fixed}, configs)
    with pytest.raises(ValueError, match="'a' grows and table 'b' does not"):
        shard(ManagedCollisionEmbeddingBagCollection(EmbeddingBagCollection(configs), ids))


_IDS = "_managed_collision_collection._managed_collision_modules."


def _spoiled(state, fault):
    """Return the state with a fault in its second table, and what the error says of it."""
    if fault == "hash":
        extra = state[f"{_IDS}b._extra_state"]
        return {f"{_IDS}b._extra_state": extra | {"id_hash": "murmur"}}, "saved with the hash 'murmur'"
    if fault == "twice":
        ids = state[f"{_IDS}b._ids"].clone()
        ids[-1] = ids[0]
        return {f"{_IDS}b._ids": ids}, "both have id"
    if fault == "step":
        last = state[f"{_IDS}b._last_steps"].clone()
        last[0] = -1
        return {f"{_IDS}b._last_steps": last}, "last step -1"
    if fault == "rows":
        key = "_embedding_module.embedding_bags.b.weight"
        return {key: state[key][:-1]}, "has the shape"
    return {f"{_IDS}b._counts": None}, "has no"


def _unloadable(rank):
    set_gradient_division(False)
    world = dist.get_world_size()
    saved, sharded = shard(whole()), shard(whole())
    train(saved, range(3), rank, world)
    train(sharded, range(3, 7), rank, world)
    good, before = saved.state_dict(), sharded.state_dict()
    told = []
    for fault in ("hash", "twice", "step", "rows", "missing"):
        for guilty in (range(world), [world - 1]):  # on all ranks, and on the last alone
            changes, text = _spoiled(good, fault)
            state = good | (changes if rank in guilty else {})
            state = {name: value for name, value in state.items() if value is not None}
            with pytest.raises(ValueError, match=text) as caught:
                sharded.load_state_dict(state)
            told.append(str(caught.value))
            after = sharded.state_dict()
            for name, value in before.items():
                assert value == after[name] if isinstance(value, dict) else torch.equal(value, after[name])
    sharded.load_state_dict(good)
    for table in "ab":
        assert by_id(sharded.state_dict(), table) == by_id(good, table)
    return told


@pytest.mark.parametrize("world", [1, 2])
def test_a_state_that_is_refused_changes_no_table(world):
    first, *others = run_ranks(world, _unloadable)
    assert all(told == first for told in others)
    if world > 1:
        assert first[1].endswith("(on rank 1)") and first[0].endswith("(on rank 0)")


def _without_memory(rank):
    """The last rank has room for some thousand ids of the second table; the others for all."""
    set_gradient_division(False)
    world = dist.get_world_size()
    saved = shard(whole())
    ids = torch.arange(20000)
    lengths = torch.tensor([20000, 0, 20000])
    saved(KeyedJaggedTensor.from_lengths_sync(["f", "g", "h"], ids.repeat(2), lengths))[0].wait()
    module = whole()
    second = module._managed_collision_collection._managed_collision_modules["b"]
    options_of = second._table_options

    def limited(seed=None):
        options = options_of(seed)
        if seed is None and rank == world - 1:  # of the rows, not of a state that is looked through
            options.most_bytes = 3 << 16
        return options

    second._table_options = limited
    sharded = shard(module)
    train(sharded, range(3), rank, world)
    good, before = saved.state_dict(), sharded.state_dict()
    with pytest.raises(ValueError, match=r"table 'b': no memory for .* bytes") as caught:
        sharded.load_state_dict(dict(good))
    after = sharded.state_dict()
    for name, value in before.items():
        assert value == after[name] if isinstance(value, dict) else torch.equal(value, after[name]), name
    train(sharded, range(3, 5), rank, world)  # it goes on
    return str(caught.value)


@pytest.mark.parametrize("world", [1, 2])
def test_without_memory_for_one_table_none_is_loaded(world):
    told = run_ranks(world, _without_memory)
    assert len(set(told)) == 1 and told[0].endswith("(on rank 1)") == (world > 1)


def test_what_cannot_be_is_an_error():
    run_ranks(1, _refused)
