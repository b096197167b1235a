"""Managed collision over ranks: every id has one row, wherever it is looked up from."""

from __future__ import annotations

import copy
import os

import pytest
import torch
import torch.distributed as dist
from ranks import run_ranks, run_ranks_collecting
from tessera import checkpoint
from tessera.distributed.embedding import EmbeddingCollectionSharder
from tessera.distributed.embeddingbag import EmbeddingBagCollectionSharder
from tessera.distributed.mc_embedding import ManagedCollisionEmbeddingCollectionSharder
from tessera.distributed.mc_embeddingbag import ManagedCollisionEmbeddingBagCollectionSharder
from tessera.distributed.mc_modules import create_mc_sharding
from tessera.distributed.planner.enumerators import EmbeddingEnumerator
from tessera.distributed.planner.planners import EmbeddingShardingPlanner
from tessera.distributed.planner.types import ParameterConstraints, PlannerError, Topology
from tessera.distributed.sharding_plan import (
    column_wise,
    construct_module_sharding_plan,
    grid_shard,
    row_wise,
    table_column_wise,
    table_row_wise,
    table_wise,
)
from tessera.distributed.types import ShardingEnv
from tessera.modules.embedding_configs import EmbeddingBagConfig, EmbeddingConfig
from tessera.modules.embedding_modules import EmbeddingBagCollection, EmbeddingCollection
from tessera.modules.mc_embedding_modules import (
    ManagedCollisionEmbeddingBagCollection,
    ManagedCollisionEmbeddingCollection,
)
from tessera.modules.mc_modules import (
    LFU_EvictionPolicy,
    LRU_EvictionPolicy,
    ManagedCollisionCollection,
    MCHManagedCollisionModule,
)
from tessera.sparse.jagged_tensor import KeyedJaggedTensor

FUSED = {"optimizer": "EXACT_ROWWISE_ADAGRAD", "learning_rate": 0.1}
SIZES = {"a": 300, "b": 7}


def whole(is_pooled=True, sizes=SIZES, policy=LFU_EvictionPolicy, **options):
    torch.manual_seed(5)
    config = EmbeddingBagConfig if is_pooled else EmbeddingConfig
    features = {"a": ["f", "g"], "b": ["f"]}
    configs = [
        config(size, 4, name, feature_names=features[name], init_fn=torch.nn.init.ones_)
        for name, size in sizes.items()
    ]
    ids = ManagedCollisionCollection(
        {
            name: MCHManagedCollisionModule(size, torch.device("cpu"), policy(), 1, **options)
            for name, size in sizes.items()
        },
        configs,
    )
    if is_pooled:
        return ManagedCollisionEmbeddingBagCollection(EmbeddingBagCollection(configs), ids, True)
    return ManagedCollisionEmbeddingCollection(EmbeddingCollection(configs), ids, True)


def shard(module, wishes, fused=FUSED):
    if isinstance(module, ManagedCollisionEmbeddingBagCollection):
        sharder = ManagedCollisionEmbeddingBagCollectionSharder(EmbeddingBagCollectionSharder(fused))
    else:
        sharder = ManagedCollisionEmbeddingCollectionSharder(EmbeddingCollectionSharder(fused))
    plan = construct_module_sharding_plan(module, wishes, sharder)
    return sharder.shard(module, plan, ShardingEnv.from_process_group(dist.group.WORLD))


def batch(rank, step, samples, spread=40):
    generator = torch.Generator().manual_seed(100 * step + rank)
    lengths = torch.randint(0, 4, (2 * samples,), generator=generator)
    values = torch.randint(0, spread, (int(lengths.sum()),), generator=generator) * 7919 - 2**62
    return KeyedJaggedTensor.from_lengths_sync(["g", "f"], values, lengths)


def cut(kind):
    last = dist.get_world_size() - 1
    return {
        "mixed": {"a": row_wise(), "b": table_wise(0)},
        "rows": {"a": row_wise(), "b": row_wise()},
        "columns": {"a": column_wise([last, 0]), "b": row_wise()},
        "columns of a host": {"a": table_column_wise([1, 0]), "b": column_wise(size_per_rank=[1, 3])},
        "host": {"a": table_row_wise(0), "b": table_wise(0)},
        "grid": {"a": grid_shard([1, 0]), "b": column_wise([0, 1, 1, 2])},
    }[kind]


def _every_id_has_one_row(rank, kind, is_pooled):
    sharded = shard(whole(is_pooled), cut(kind))
    seen, sums = [], []
    for step in range(4):
        samples = [3, 0, 5, 2][rank]
        features = batch(rank, step, samples)
        found, mapped = sharded(features)
        mapped, found = mapped.wait(), found.wait()
        assert mapped.keys() == ["f@a", "g", "f@b"]
        by_key = {"f@a": "f", "g": "g", "f@b": "f"}
        for key, source in by_key.items():
            assert torch.equal(mapped[key].lengths(), features[source].lengths())
            pairs = zip(features[source].values().tolist(), mapped[key].values().tolist(), strict=True)
            seen += [(key[-1] if "@" in key else "a", one, row) for one, row in pairs]
        if is_pooled:
            counts = torch.cat([mapped[k].lengths().view(-1, 1).expand(-1, 4) for k in list(found.keys())], 1)
            if step == 0:  # all rows are ones
                assert torch.equal(found.values(), counts.float())
            found.values().sum().backward()
        else:
            sum(rows.values().sum() for rows in found.values()).backward()
        sums.append(float(sharded.gather_tables()["a"].sum()))
    return seen, sums


def _both_kinds(rank, kind):
    pooled_only = kind in ("grid", "host")
    if pooled_only:
        os.environ["LOCAL_WORLD_SIZE"] = "2"
    return [_every_id_has_one_row(rank, kind, is_pooled) for is_pooled in (True, False)[: 2 - pooled_only]]


# One job for several cases: starting ranks takes longer than what they do.
@pytest.mark.parametrize(
    ("kind", "world"),
    [
        ("mixed", 4),
        ("rows", 3),
        ("rows", 1),
        ("columns", 3),
        ("columns of a host", 2),
        ("grid", 4),
        ("host", 4),
    ],
)
def test_every_id_has_one_row(kind, world):
    for outcomes in zip(*run_ranks(world, _both_kinds, kind), strict=True):
        row_of: dict = {}
        for seen, sums in outcomes:
            assert sums == outcomes[0][1]
            assert sums[-1] < sums[0] < 300 * 4  # ones, stepped down
            for table, one, row in seen:
                if table == "a":  # has room for all: an id never moves, and no two share a row
                    assert row_of.setdefault(one, row) == row
                    assert row != 299
        assert len(set(row_of.values())) == len(row_of)


def _as_in_one_process(rank):
    """One rank's table-wise tables give what the unsharded module gives for all batches together."""
    sharded = shard(whole(sizes={"a": 12}, policy=LRU_EvictionPolicy), {"a": table_wise(1)})
    world = dist.get_world_size()
    alone = whole(sizes={"a": 12}, policy=LRU_EvictionPolicy)
    for step in range(6):
        _, mapped = sharded(batch(rank, step, 4, spread=60))
        parts = [batch(other, step, 4, spread=60) for other in range(world)]
        # What the owner sees: the different ids of each rank, with their counts.
        _, wanted = alone(_joined(parts))
        places = [0, *torch.cumsum(torch.tensor([len(p.values()) for p in parts]), 0).tolist()]
        own = _split_like(wanted, parts)[rank]
        assert torch.equal(mapped.wait()["g"].values(), own["g"])
        assert torch.equal(mapped.wait()["f"].values(), own["f"])
        assert places[-1] == wanted.values().numel()


def _joined(parts):
    keys = ["g", "f"]
    values = torch.cat([part[key].values() for key in keys for part in parts])
    lengths = torch.cat([part[key].lengths() for key in keys for part in parts])
    return KeyedJaggedTensor.from_lengths_sync(keys, values, lengths)


def _split_like(mapped, parts):
    pieces = {k: mapped[k].values().split([p[k].values().numel() for p in parts]) for k in ("f", "g")}
    return [{k: pieces[k][rank] for k in pieces} for rank in range(len(parts))]


def _resets(rank, wish, fused):
    """A row that changes hands begins anew on its owner, state of a fused optimizer included."""
    module = whole(sizes={"a": 6}, policy=LRU_EvictionPolicy)
    sharded = shard(module, {"a": wish}, fused)
    parameters = list(sharded.parameters())
    # The dense kernel leaves gradients to an optimizer outside.
    assert bool(sharded.fused_optimizer.params) == (fused is not None)
    optimizer = torch.optim.SGD(parameters, lr=0.5) if fused is None and parameters else None
    kept = []
    for step in range(8):
        ids = torch.arange(3) + 10 * step  # new ids in every step
        features = KeyedJaggedTensor.from_lengths_sync(["f", "g"], ids, torch.tensor([3, 0]))
        pooled, mapped = sharded(features)
        rows = mapped.wait()["f"].values()
        known = rows != 5
        pooled = pooled["f"]
        if known.all():
            assert torch.equal(pooled.detach(), torch.full((1, 4), 3.0)), step
        pooled.sum().backward()
        if optimizer is not None:
            optimizer.step()
            optimizer.zero_grad()
        stepped = sharded.gather_tables()["a"][rows[known]]
        assert bool((stepped < 1).all()), step  # what the next one must not see
        kept.append(int(known.sum()))
    assert kept[-1] > 0 and 3 in kept


def _columns_as_whole_rows(rank):
    """Cut by columns, a table has the bits of one that lies on one rank: ids, rows, weights and state."""
    fused = {"optimizer": "EXACT_ADAGRAD", "learning_rate": 0.5}
    tables = [
        shard(whole(sizes={"a": 12}, policy=LRU_EvictionPolicy), {"a": wish}, fused)
        for wish in (table_wise(1), column_wise([1, 0]), column_wise([0, 0, 1], [1, 2, 1]))
    ]
    for step in range(8):  # more ids than rows: rows change hands in every step
        found = [each(batch(rank, step, 4, spread=60)) for each in tables]
        for pooled, mapped in found[1:]:
            assert torch.equal(mapped.wait().values(), found[0][1].wait().values()), step
            for key in ("f", "g"):
                assert torch.equal(pooled.wait()[key], found[0][0].wait()[key]), step
        for pooled, _ in found:
            (pooled.wait().values() ** 2).sum().backward()
        wholes = [each.gather_tables()["a"] for each in tables]
        assert torch.equal(wholes[0], wholes[1]) and torch.equal(wholes[0], wholes[2]), step
    assert not torch.equal(wholes[0], torch.ones(12, 4))


def _planned_by_columns(rank):
    """A planner that is told to cut columns is obeyed."""
    module = nn_with(whole(sizes={"a": 64}))
    sharder = ManagedCollisionEmbeddingBagCollectionSharder(EmbeddingBagCollectionSharder(FUSED))
    constraints = {"a": ParameterConstraints(sharding_types=["column_wise"], min_partition=2)}
    planner = EmbeddingShardingPlanner(Topology(2, "cpu"), constraints=constraints)
    plan = planner.plan(module, [sharder])
    sharding = plan.plan["bags"]["a"]
    assert sharding.sharding_type == "column_wise"
    sharded = sharder.shard(module.bags, plan.plan["bags"], ShardingEnv.from_process_group(dist.group.WORLD))
    pooled, _ = sharded(batch(rank, 0, 4))
    pooled.wait().values().sum().backward()


def test_the_planner_counts_what_maps_the_ids():
    module, rows = whole(sizes={"a": 200_000}), 200_000
    sharder = ManagedCollisionEmbeddingBagCollectionSharder(EmbeddingBagCollectionSharder(FUSED))
    sharders = [sharder, EmbeddingBagCollectionSharder(FUSED)]
    assert sharder.storage_usage(torch.empty(10, 4), "cpu", "fused") == {"ddr": 10 * (16 + 66)}

    def options_of(bags):
        constraints = {"a": ParameterConstraints(min_partition=2)}
        enumerator = EmbeddingEnumerator(Topology(2, "cpu"), 512, constraints)
        found = enumerator.enumerate(nn_with(bags), sharders)
        return {option.sharding_type: option for option in found if option.compute_kernel == "fused"}

    mapped, plain = options_of(module), options_of(module._embedding_module)
    for kind in ("table_wise", "row_wise"):
        held = [sum(shard.storage.ddr for shard in found[kind].shards) for found in (mapped, plain)]
        assert held[0] - held[1] == pytest.approx(66 * rows, abs=2), kind
    # Of columns that are cut, any part may have the ids.
    for shards in zip(mapped["column_wise"].shards, plain["column_wise"].shards, strict=True):
        assert shards[0].storage.ddr - shards[1].storage.ddr == pytest.approx(66 * rows, abs=2)
    # 4 MB of rows and their optimizer's state; 13 MB of ids beside them.
    planner = EmbeddingShardingPlanner(Topology(1, "cpu", ddr_cap=16_000_000))
    planner.plan(nn_with(module._embedding_module), sharders)
    with pytest.raises(PlannerError, match="fits no rank"):
        planner.plan(nn_with(module), sharders)


def nn_with(bags):
    model = torch.nn.Module()
    model.bags = bags
    return model


def _resumes(rank, kind):
    straight, resumed = (shard(whole(), cut(kind)) for _ in range(2))
    for step in range(6):
        if step == 3:
            state = resumed.state_dict()
            resumed = shard(whole(), cut(kind))
            resumed.load_state_dict(state)
        results = [each(batch(rank, step, 4))[1].wait() for each in (straight, resumed)]
        assert torch.equal(results[0].values(), results[1].values()), step
    return sorted(name for name in straight.state_dict() if "_mch_" in name)


def _stepped(module, rank, world, steps, spread=30):
    """Return rows and outputs of this rank's part of some batches; the largest id is always there."""
    found = []
    for step in steps:
        features = batch(0, step, 12, spread)
        lengths = features.lengths().view(2, 12)
        values = features.values().clone()
        values[values == values.min()] = 2**63 - 1
        bags = values.split(lengths.flatten().tolist())
        begin, end = 12 * rank // world, 12 * (rank + 1) // world
        own = torch.cat([bags[12 * key + i] for key in range(2) for i in range(begin, end)])
        own_lengths = lengths[:, begin:end].flatten()
        pooled, mapped = module(KeyedJaggedTensor.from_lengths_sync(["g", "f"], own, own_lengths))
        if hasattr(pooled, "wait"):
            pooled, mapped = pooled.wait(), mapped.wait()
        if module.training:
            pooled.values().sum().backward()
        found.append((pooled.values().detach(), [mapped[key].values() for key in mapped.keys()]))  # noqa: SIM118
    return found


def _same(one, other):
    return all(
        torch.equal(a, b) and all(torch.equal(x, y) for x, y in zip(rows, others, strict=True))
        for (a, rows), (b, others) in zip(one, other, strict=True)
    )


SAVED = {"a": 240, "b": 12}


def _waiting(**options):
    module = whole(sizes=SAVED, **options)
    for ids in module._managed_collision_collection._managed_collision_modules.values():
        ids._eviction_interval = 3
    return module


def _to_checkpoint(rank, root, kind):
    """Save between two intervals and go on from there."""
    world = dist.get_world_size()
    straight, saved, resumed = (shard(_waiting(), cut(kind)) for _ in range(3))
    _stepped(straight, rank, world, range(5))
    _stepped(saved, rank, world, range(5))
    _stepped(resumed, rank, world, range(20, 24))  # what a load must undo
    state = {"model": saved.state_dict(), "fused": checkpoint.fused_state(saved)}
    waiting = [name for name in state["model"] if name.endswith("_tessera_history_ids")]
    assert len(waiting) == 2
    checkpoint.save(root, 5, state, dist.group.WORLD)
    state = {"model": resumed.state_dict(), "fused": checkpoint.fused_state(resumed)}
    checkpoint.load(root, state, dist.group.WORLD)
    resumed.load_state_dict(state["model"])
    ids, names = saved.state_dict(), resumed.state_dict()
    assert list(ids) == list(names)
    assert all(torch.equal(ids[name], names[name]) for name in ids if "_tessera_" in name)
    steps = range(5, 11)
    assert _same(_stepped(resumed, rank, world, steps), _stepped(straight, rank, world, steps))
    return _stepped(saved.eval(), rank, world, range(4))


def _from_checkpoint(rank, root, kind):
    world = dist.get_world_size()
    loaded = shard(_waiting(), cut(kind))
    state = {"model": loaded.state_dict(), "fused": checkpoint.fused_state(loaded)}
    checkpoint.load(root, state, dist.group.WORLD)
    loaded.load_state_dict(state["model"])
    return _stepped(loaded.eval(), rank, world, range(4))


def _refuses_checkpoint(rank, root, kind):
    loaded = shard(_waiting(), cut(kind))
    before = {name: value for name, value in loaded.state_dict().items() if "_tessera_" in name}
    state = {"model": loaded.state_dict()}
    checkpoint.load(root, state, dist.group.WORLD)
    with pytest.raises(ValueError, match=r"saved in shards that begin at rows .* Load with as many ranks"):
        loaded.load_state_dict(state["model"])
    return sorted(before)


@pytest.mark.parametrize("kind", ["rows", "mixed"])
def test_checkpoints_hold_the_ids_of_all_ranks(tmp_path, kind):
    root = str(tmp_path)
    parts = run_ranks(4, _to_checkpoint, root, kind)
    fewer = run_ranks(2, _from_checkpoint, root, kind)
    (one,) = run_ranks(1, _from_checkpoint, root, kind)
    for step in range(4):  # rows of the ids, and what was learned of them
        wanted = torch.cat([found[step][0] for found in parts])
        torch.testing.assert_close(torch.cat([found[step][0] for found in fewer]), wanted)
        torch.testing.assert_close(one[step][0], wanted)
        for key in range(3):
            rows = torch.cat([found[step][1][key] for found in parts])
            assert torch.equal(torch.cat([found[step][1][key] for found in fewer]), rows)
            assert torch.equal(one[step][1][key], rows)
    # Not sharded, from the whole state.
    alone = _waiting()
    alone.load_state_dict(checkpoint.read(root)["model"])
    ids = alone._managed_collision_collection._managed_collision_modules["a"]
    assert ids._loaded_num_ids is not None and len(ids._loaded_num_ids) == 4
    assert len(ids._history) == 2
    for mine, theirs in zip(_stepped(alone.eval(), 0, 1, range(4)), one, strict=True):
        torch.testing.assert_close(mine[0], theirs[0])
        assert all(torch.equal(a, b) for a, b in zip(mine[1], theirs[1], strict=True))
    run_ranks(3, _refuses_checkpoint, root, kind)


def test_waiting_ids_are_in_checkpoints_of_one_process(tmp_path):
    straight, saved, resumed = (_waiting() for _ in range(3))
    for module in (straight, saved):
        _stepped(module, 0, 1, range(5))
    checkpoint.save(str(tmp_path), 1, {"model": saved.state_dict()})
    state = {"model": resumed.state_dict()}
    checkpoint.load(str(tmp_path), state)
    probes = [copy.deepcopy(module).eval()(batch(0, 1, 12, 30)) for module in (resumed, saved)]
    assert torch.equal(probes[0][1].values(), probes[1][1].values())  # its sorted ids are seen at once
    resumed.load_state_dict(state["model"])  # with the ids that wait
    for step in range(5, 9):
        found, wanted = (_stepped(module.train(), 0, 1, [step]) for module in (resumed, straight))
        assert all(torch.equal(a, b) for a, b in zip(found[0][1], wanted[0][1], strict=True))


def _owners_of(rank, **options):
    """Return the rank whose rows some ids get, of two with half of the rows each."""
    sharded = shard(whole(sizes={"a": 300}, **options), {"a": row_wise()})
    ids = torch.tensor([1, 2, 100, 101])
    _, mapped = sharded(KeyedJaggedTensor.from_lengths_sync(["f", "g"], ids, torch.tensor([4, 0])))
    mine = sharded._managed_collision_collection._managed_collision_modules["a"]._num_ids
    return (mapped.wait()["f"].values() // 150).tolist(), mine


def _two_ways_to_deal(rank):
    by_hash = _owners_of(rank)
    by_range = _owners_of(rank, input_hash_size=200, input_hash_func=lambda ids, size: ids % size)
    # A size alone says which ids there are, not how they are dealt.
    assert _owners_of(rank, input_hash_size=200) == by_hash
    return by_hash, by_range


def test_small_ids_are_dealt_by_hash_and_by_ranges_where_they_were_asked_for():
    outcomes = run_ranks(2, _two_ways_to_deal)
    for rank, (by_hash, by_range) in enumerate(outcomes):
        assert by_hash == ([0, 1, 0, 0], (3, 1)[rank])  # buckets 56, 752, 342, 154 of 1024
        assert by_range == ([0, 0, 1, 1], 2)


def _bad_batch(rank):
    sharded = shard(whole(input_hash_size=100), cut("rows"))
    values = torch.tensor([5, 1000 if rank == 1 else 6])
    sharded(KeyedJaggedTensor.from_lengths_sync(["f", "g"], values, torch.tensor([1, 1])))


def test_a_bad_id_of_one_rank_is_an_error_on_all():
    for outcome in run_ranks_collecting(2, _bad_batch):
        assert "id 1000 at position 1 of 'a' is not within 0 to 99" in outcome.error
        assert outcome.error.startswith("ValueError") and outcome.error.endswith("(on rank 1)")


def _refused(rank):
    trained = whole(sizes={"a": 12})
    trained(batch(0, 0, 4))
    with pytest.raises(ValueError, match="ids already; their rows cannot be dealt over ranks"):
        shard(trained, {"a": row_wise()})


def _two_ranks(rank):
    _as_in_one_process(rank)
    for wish in (row_wise(), column_wise([0, 1]), column_wise([1, 1, 0, 0], [1, 1, 1, 1])):
        for fused in ({**FUSED, "learning_rate": 0.5}, None):
            _resets(rank, wish, fused)
    _columns_as_whole_rows(rank)
    _planned_by_columns(rank)
    _refused(rank)
    return [_resumes(rank, kind) for kind in ("mixed", "rows", "columns")]


def test_maps_as_one_process_resets_rows_and_resumes():
    base = "_managed_collision_collection._managed_collision_modules."
    names = ["_mch_counts", "_mch_remapped_ids_mapping", "_mch_sorted_raw_ids"]
    wanted = [f"{base}{table}.{name}" for table in "ab" for name in names]
    assert run_ranks(2, _two_ranks) == [[wanted] * 3] * 2


def test_what_cannot_be_sharded_is_said():
    with pytest.raises(ValueError, match="Sharding not supported data_parallel"):
        create_mc_sharding("data_parallel", [], None)
