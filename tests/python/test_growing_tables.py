"""Tables that grow with their ids, on one rank."""

from __future__ import annotations

import copy

import pytest
import torch
from tessera import _C
from tessera.modules.embedding_configs import DataType, EmbeddingBagConfig, EmbeddingConfig
from tessera.modules.embedding_modules import EmbeddingBagCollection, EmbeddingCollection
from tessera.modules.mc_embedding_modules import (
    ManagedCollisionEmbeddingBagCollection,
    ManagedCollisionEmbeddingCollection,
)
from tessera.modules.mc_modules import (
    DistanceLFU_EvictionPolicy,
    GrowingManagedCollisionModule,
    LFU_EvictionPolicy,
    LRU_EvictionPolicy,
    ManagedCollisionCollection,
    MCHManagedCollisionModule,
)
from tessera.sparse.jagged_tensor import KeyedJaggedTensor

KINDS = ["SGD", "ROWWISE_ADAGRAD", "ADAM"]


def optimizer(kind="ROWWISE_ADAGRAD"):
    options = _C.embedding.OptimizerOptions()
    options.kind = getattr(_C.embedding.OptimizerKind, kind)
    options.learning_rate = 0.1
    return options


def make(
    kind="ROWWISE_ADAGRAD", is_pooled=True, dtype=DataType.FP32, features=(("f",), ("g", "f")), **options
):
    config = EmbeddingBagConfig if is_pooled else EmbeddingConfig
    configs = [
        config(None, 4, "a", feature_names=list(features[0]), data_type=dtype),
        config(None, 6, "b", feature_names=list(features[1]), data_type=dtype),
    ]
    ids = ManagedCollisionCollection(
        {c.name: GrowingManagedCollisionModule(**options) for c in configs}, configs
    )
    steps = None if kind is None else optimizer(kind)
    if is_pooled:
        return ManagedCollisionEmbeddingBagCollection(
            EmbeddingBagCollection(configs, optimizer=steps), ids, True
        )
    return ManagedCollisionEmbeddingCollection(EmbeddingCollection(configs, optimizer=steps), ids, True)


def batch(f, g):
    lengths = [len(bag) for bags in (f, g) for bag in bags]
    values = [one for bags in (f, g) for bag in bags for one in bag]
    return KeyedJaggedTensor.from_lengths_sync(
        ["f", "g"], torch.tensor(values, dtype=torch.int64), torch.tensor(lengths)
    )


def random_batch(generator, spread=2**62):
    def bags():
        lengths = torch.randint(0, 5, (8,), generator=generator).tolist()
        # Small ids often, others from everywhere.
        near = [torch.randint(-20, 20, (n,), generator=generator) for n in lengths]
        far = [torch.randint(-spread, spread, (n,), generator=generator) for n in lengths]
        pick = [torch.rand(n, generator=generator) < 0.5 for n in lengths]
        return [torch.where(p, a, b).tolist() for p, a, b in zip(pick, near, far, strict=True)]

    return batch(bags(), bags())


def loss_of(pooled):
    scale = torch.arange(1, pooled.values().size(1) + 1)
    return (pooled.values() * scale).square().mean()


def rows_by_id(module):
    """Return the weights of every id, by table."""
    found = {}
    for config, ids in module._growing():
        weight = module._tables()[config.name].weight
        listed = ids.export_ids()
        found[config.name] = {
            int(i): weight[int(r)].detach().clone()
            for i, r in zip(listed["ids"], listed["rows"], strict=True)
        }
    return found


@pytest.mark.parametrize("kind", KINDS)
def test_training_is_that_of_a_table_with_a_row_for_every_id(kind):
    """A plain table with rows for all ids, begun with the same values, takes the same steps."""
    generator = torch.Generator().manual_seed(2)
    growing = make(kind)
    batches = [random_batch(generator) for _ in range(12)]
    every = torch.cat([b.values() for b in batches]).unique()
    row_of = {int(one): place for place, one in enumerate(every)}
    configs = [
        EmbeddingBagConfig(len(every), 4, "a", feature_names=["f"]),
        EmbeddingBagConfig(len(every), 6, "b", feature_names=["g", "f"]),
    ]
    plain = EmbeddingBagCollection(configs, optimizer=optimizer(kind))
    with torch.no_grad():
        for config, ids in growing._growing():
            bound = config.embedding_dim**-0.5
            first = ids.first_values(every, config.embedding_dim, -bound, bound)
            plain.embedding_bags[config.name].weight.copy_(first)
    for number, features in enumerate(batches):
        places = torch.tensor([row_of[int(one)] for one in features.values()], dtype=torch.int64)
        mapped = KeyedJaggedTensor.from_lengths_sync(features.keys(), places, features.lengths())
        pooled, wanted = growing(features)[0], plain(mapped)
        assert torch.equal(pooled.values(), wanted.values()), number
        loss_of(pooled).backward()
        loss_of(wanted).backward()
    for table, rows in rows_by_id(growing).items():
        for one, row in rows.items():
            assert torch.equal(row, plain.embedding_bags[table].weight[row_of[one]])


def test_growth_keeps_what_was_learned():
    module = make("ADAM")
    loss_of(module(batch([[5]], [[6]]))[0]).backward()
    before = rows_by_id(module)["a"][5]
    state = module._embedding_module.fused_optimizer().state_dict()["a.momentum1"][1].clone()
    many = list(range(100, 5000))
    module(batch([many], [[6]]))  # grows; no step
    assert torch.equal(rows_by_id(module)["a"][5], before)
    assert torch.equal(module._embedding_module.fused_optimizer().state_dict()["a.momentum1"][1], state)
    assert module._embedding_module.fused_optimizer().num_steps == 1
    assert module._tables()["a"].weight.size(0) >= 4902


@pytest.mark.parametrize("kind", KINDS)
def test_a_resumed_run_goes_on_to_the_same_bits(kind):
    generator = torch.Generator().manual_seed(3)
    options = {"capacity": 1024, "eviction": "lfu", "admission": "freq:2", "when_full": "refuse"}
    straight, resumed = make(kind, **options), make(kind, **options)
    for step in range(16):
        if step == 8:
            saved = copy.deepcopy(resumed.state_dict())
            resumed = make(kind, **options)
            resumed.load_state_dict(saved)
        features = random_batch(generator, spread=3000)
        for module in (straight, resumed):
            loss_of(module(features)[0]).backward()
    one, two = rows_by_id(straight), rows_by_id(resumed)
    for table in one:
        assert one[table].keys() == two[table].keys()
        assert all(torch.equal(row, two[table][number]) for number, row in one[table].items())
        default = [module._tables()[table].weight[0] for module in (straight, resumed)]
        assert torch.equal(*default)
    a, b = straight.state_dict(), resumed.state_dict()
    for name in a:
        if name.endswith(("._ids", "._counts", "._last_steps")):
            order = [s[name.rpartition(".")[0] + "._ids"].argsort() for s in (a, b)]
            assert torch.equal(a[name][order[0]], b[name][order[1]]), name


def mch(policy, sizes=(40, 40), is_pooled=True):
    """Return the tables of `make` as tables that do not grow."""
    config = EmbeddingBagConfig if is_pooled else EmbeddingConfig
    configs = [
        config(sizes[0], 4, "a", feature_names=["f"]),
        config(sizes[1], 6, "b", feature_names=["g", "f"]),
    ]
    modules = {
        c.name: MCHManagedCollisionModule(c.num_embeddings, torch.device("cpu"), policy(), 1) for c in configs
    }
    ids = ManagedCollisionCollection(modules, configs)
    if is_pooled:
        return ManagedCollisionEmbeddingBagCollection(EmbeddingBagCollection(configs), ids, True)
    return ManagedCollisionEmbeddingCollection(EmbeddingCollection(configs), ids, True)


def outputs(found, is_pooled):
    return found.values() if is_pooled else torch.cat([one.values().flatten() for one in found.values()])


@pytest.mark.parametrize("policy", [LFU_EvictionPolicy, LRU_EvictionPolicy, DistanceLFU_EvictionPolicy])
@pytest.mark.parametrize("is_pooled", [True, False])
def test_the_state_of_tables_that_do_not_grow_goes_both_ways(policy, is_pooled):
    generator = torch.Generator().manual_seed(6)
    old = mch(policy, is_pooled=is_pooled)
    for _ in range(6):
        old(random_batch(generator, spread=60))
    largest = 2**63 - 1
    old(batch([[largest]], [[3]]))
    new = make("ROWWISE_ADAGRAD", is_pooled=is_pooled, capacity=39, when_full="refuse")
    new(random_batch(generator))  # what was there before is gone
    new.load_state_dict(old.state_dict())
    back = mch(policy, is_pooled=is_pooled)
    probes = [random_batch(generator, spread=90) for _ in range(4)]
    for module in (old, new):
        module.eval()
    for probe in [*probes, batch([[largest]], [[largest]])]:
        assert torch.equal(outputs(new(probe)[0], is_pooled), outputs(old(probe)[0], is_pooled))
    for _, ids in new._growing():
        ids._ids.erase(torch.tensor([largest]))
    back.load_state_dict(new.mch_state_dict(policy()))
    back.eval()
    for probe in probes:
        assert torch.equal(outputs(back(probe)[0], is_pooled), outputs(new(probe)[0], is_pooled))
    new.train()
    before = rows_by_id(new)
    outputs(new(probes[0])[0], is_pooled).square().mean().backward()  # goes on from there
    after = rows_by_id(new)
    assert any(not torch.equal(row, after["a"][number]) for number, row in before["a"].items())


def test_what_an_mch_table_cannot_hold_is_said():
    module = make("SGD")
    module(batch([[7, 8]], [[1]]))
    with pytest.raises(ValueError, match="table 'a' has 2 ids and no capacity; an MCH table has a number"):
        module.mch_state_dict(LFU_EvictionPolicy())
    module = make("SGD", capacity=5)
    module(batch([[2**63 - 1]], [[1]]))
    with pytest.raises(ValueError, match="table 'a' has id 9223372036854775807, which marks empty slots"):
        module.mch_state_dict(LFU_EvictionPolicy())
    state = mch(LFU_EvictionPolicy).state_dict()
    state["_embedding_module.embedding_bags.b.weight"] = torch.zeros(20, 6)
    with pytest.raises(
        ValueError, match="table 'b' was saved with 40 slots and 20 rows; load the whole table"
    ):
        make("SGD").load_state_dict(state)


def test_an_evicted_id_that_comes_back_begins_anew():
    module = make("ROWWISE_ADAGRAD", features=(("f",), ("g",)), eviction="ttl:2", track_removed=True)
    first = module(batch([[7]], [[1]]))[0]["f"].detach().clone()
    for _ in range(2):
        loss_of(module(batch([[7]], [[1]]))[0]).backward()
    assert not torch.equal(module(batch([[7]], [[1]]))[0]["f"], first)
    ids = module._growing()[0][1]
    for _ in range(4):
        module(batch([[8]], [[1]]))
    assert ids.take_removed_ids().tolist() == [7]
    assert torch.equal(module(batch([[7]], [[1]]))[0]["f"], first)


@pytest.mark.parametrize("default", ["row", "zero", "init"])
def test_unknown_ids(default):
    module = make("SGD", features=(("f",), ("g",)), admission="freq:9", default=default)
    ids = module._growing()[0][1]
    first = module(batch([[7], [8, 8]], [[], []]))[0]["f"].detach().clone()
    wanted = ids.first_values(torch.tensor([7, 8]), 4, -0.5, 0.5) if default == "init" else torch.zeros(2, 4)
    assert torch.equal(first[0], wanted[0]) and torch.equal(first[1], 2 * wanted[1])
    (module(batch([[7]], [[]]))[0]["f"].sum()).backward()
    again = module.eval()(batch([[7], [8]], [[], []]))[0]["f"]
    trained = wanted - 0.1 if default == "row" else wanted
    assert torch.equal(again, trained)
    assert len(ids) == 0


def test_rows_of_single_ids_and_half_precision():
    module = make("SGD", is_pooled=False, dtype=DataType.FP16, features=(("f",), ("g",)))
    rows, mapped = module(batch([[5, -5], [5]], [[1], []]))
    assert mapped["f"].values().tolist() == [1, 2, 1]
    wanted = module._growing()[0][1].first_values(torch.tensor([5, -5]), 4, -0.5, 0.5).half().float()
    assert torch.equal(rows["f"].values(), wanted[[0, 1, 0]])


def test_dense_gradients_grow_with_the_table():
    module = make(None, features=(("f",), ("g",)))
    module(batch([[1]], [[1]]))[0]["f"].sum().backward()
    module(batch([list(range(2, 3000))], [[1]]))[0]["f"].sum().backward()
    gradient = module._tables()["a"].weight.grad
    assert gradient.shape == module._tables()["a"].weight.shape
    assert gradient.sum(1).tolist()[1:3000] == [4.0] * 2999


def test_tables_and_seeds_begin_differently():
    configs = [EmbeddingBagConfig(None, 4, name, feature_names=["f"]) for name in ("a", "b")]
    ids = ManagedCollisionCollection({c.name: GrowingManagedCollisionModule() for c in configs}, configs)
    module = ManagedCollisionEmbeddingBagCollection(
        EmbeddingBagCollection(configs, optimizer=optimizer()), ids
    )
    pooled = module(batch([[3]], [[]]))[0]
    assert not torch.equal(pooled["f@a"], pooled["f@b"])


@pytest.mark.parametrize(
    ("options", "text"),
    [
        ({"capacity": 0}, "a capacity of 0"),
        ({"admission": "freq:x"}, "admission is 'freq:x'"),
        ({"admission": "freq:0"}, "Give 1 to 255"),
        ({"admission": "prob:2"}, "more than 0 and at most 1"),
        ({"eviction": "ttl"}, "eviction is 'ttl'"),
        ({"eviction": "rru"}, "eviction is 'rru'"),
        ({"default": "x"}, "default is 'x'"),
        ({"when_full": "x"}, "when_full is 'x'"),
        ({"eviction": "lfu", "eviction_interval": 2}, "interval of 2 is for a time to live alone"),
        ({"eviction_interval": 2}, "interval of 2 is for a time to live alone"),
        ({"eviction": "lru", "decay_exponent": 0.5}, "exponent of 0.500000 is for distance-lfu alone"),
        ({"eviction": "lfu"}, "without a capacity none ever is. Give a capacity"),
        ({"eviction": "lru"}, "without a capacity none ever is. Give a capacity"),
        ({"eviction": "distance-lfu"}, "without a capacity none ever is. Give a capacity"),
    ],
)
def test_settings_that_cannot_be(options, text):
    with pytest.raises(ValueError, match=text):
        GrowingManagedCollisionModule(**options)


def assert_same(before, after):
    assert before.keys() == after.keys()
    for name, value in before.items():
        assert value == after[name] if isinstance(value, dict) else torch.equal(value, after[name]), name


def test_a_table_that_does_not_grow_takes_back_what_others_have_planned():
    configs = [EmbeddingBagConfig(None, 4, "a", feature_names=["f"])]
    configs.append(EmbeddingBagConfig(8, 4, "b", feature_names=["g"]))
    bounded = MCHManagedCollisionModule(8, torch.device("cpu"), LFU_EvictionPolicy(), 1, input_hash_size=100)
    growing = GrowingManagedCollisionModule()
    ids = ManagedCollisionCollection({"a": growing, "b": bounded}, configs)
    with pytest.raises(ValueError, match="id 500 at position 0"):
        ids(batch([[7]], [[500]]))
    assert len(growing) == 0 and int(growing._current_iter_tensor) == 0
    assert ids(batch([[7]], [[50]]))["f"].values().tolist() == [1]


_IDS = "_managed_collision_collection._managed_collision_modules."


def _twice(state):
    key = f"{_IDS}b._ids"
    state[key] = torch.cat([state[key][:1], state[key][:1], state[key][2:]])


def _foreign(state):
    key = f"{_IDS}b._extra_state"
    state[key] = {**state[key], "id_hash": "murmur"}


def _counted_wrong(state):
    state[f"{_IDS}b._counts"] = torch.zeros_like(state[f"{_IDS}b._counts"])


def _too_short(state):
    state["_embedding_module.embedding_bags.b.weight"] = state["_embedding_module.embedding_bags.b.weight"][
        :-1
    ]


def _too_narrow(state):
    key = "_embedding_module.embedding_bags.b.weight"
    state[key] = state[key][:, :3]


def _without_counts(state):
    del state[f"{_IDS}b._counts"]


def _without_rows(state):
    del state["_embedding_module.embedding_bags.b.weight"]


def _short_state(state):
    state["_tessera_optimizer.b.momentum1"] = state["_tessera_optimizer.b.momentum1"][1:]


def _other_optimizer(state):
    state["_tessera_optimizer.b.momentum2"] = torch.zeros(5, 6)


SPOILED = [
    (_twice, "table 'b': rows 0 and 1 both have id"),
    (_foreign, "table 'b' was saved with the hash 'murmur'; this is 'xmx64-1'"),
    (_counted_wrong, "table 'b': row 0 has count 0"),
    (_too_short, "the weight of table 'b' has the shape"),
    (_too_narrow, "the weight of table 'b' has the shape"),
    (_without_counts, "state of table 'b' has no .*_counts"),
    (_without_rows, "has ids of table 'b', but no rows"),
    (_short_state, "momentum1 of table 'b' has the shape"),
    (_other_optimizer, "'_tessera_optimizer.b.momentum2' is nothing that the optimizer"),
]


@pytest.mark.parametrize(("spoil", "text"), SPOILED)
def test_a_state_that_is_refused_changes_no_table(spoil, text):
    generator = torch.Generator().manual_seed(4)
    saved, module = make(), make()
    for _ in range(3):
        loss_of(saved(random_batch(generator))[0]).backward()
        loss_of(module(random_batch(generator))[0]).backward()
    loss_of(module(random_batch(generator))[0]).backward()
    before = copy.deepcopy(module.state_dict())
    state = dict(saved.state_dict())
    good = dict(state)
    spoil(state)
    with pytest.raises(ValueError, match=text):
        module.load_state_dict(state)
    assert_same(before, module.state_dict())
    module.load_state_dict(good)
    for table, rows in rows_by_id(saved).items():
        assert all(torch.equal(row, rows_by_id(module)[table][one]) for one, row in rows.items())


def test_ids_alone_are_loaded_by_all_tables_or_by_none():
    saved, module = make(), make()
    for features, one in ((batch([[1, 2]], [[3]]), saved), (batch([[9]], [[8]]), module)):
        one(features)
    ids = module._managed_collision_collection
    before = copy.deepcopy(ids.state_dict())
    state = {name.removeprefix("_managed_collision_collection."): v for name, v in saved.state_dict().items()}
    state = {name: value for name, value in state.items() if name.startswith("_managed")}
    spoiled = dict(state)
    key = "_managed_collision_modules.b._ids"
    spoiled[key] = spoiled[key][:1].expand(spoiled[key].numel())
    with pytest.raises(ValueError, match="both have id"):
        ids.load_state_dict(spoiled)
    assert_same(before, ids.state_dict())
    ids.load_state_dict(state)
    assert_same(state, ids.state_dict())


def test_rows_without_a_state_of_their_optimizer_begin_with_one():
    generator = torch.Generator().manual_seed(7)
    saved, module = make("SGD"), make("ROWWISE_ADAGRAD")
    for one in (saved, module):
        for _ in range(3):
            loss_of(one(random_batch(generator))[0]).backward()
    state = {name: v for name, v in saved.state_dict().items() if not name.startswith("_tessera_optimizer")}
    module.load_state_dict(state)
    kept = module._embedding_module.fused_optimizer().state_dict()
    assert all(not kept[f"{table}.momentum1"].any() for table in "ab")


def test_results_of_earlier_calls_may_be_held_while_tables_grow():
    """As a training loop holds the last loss."""
    module = make(None)
    held = []
    for features in (batch([[5]], [[6]]), batch([list(range(2000))], [[6]]), batch([[5]], [[6]])):
        held.append(loss_of(module(features)[0]))
        held[-1].backward()
    weight = module._tables()["a"].weight
    assert weight.grad.shape == weight.shape and weight.size(0) > 2000


def _without_memory(patch, failing):
    """Let the n-th piece of memory be one that is not there: of weights and gradients, of optimizers."""
    left = [failing]
    empty_rows, optimizer_of = _C.embedding.empty_rows, EmbeddingBagCollection.fused_optimizer

    def take():
        left[0] -= 1
        if left[0] == 0:
            raise RuntimeError("DefaultCPUAllocator: can't allocate memory")

    def new_rows(*args):
        take()
        return empty_rows(*args)

    def new_optimizer(module):
        if module._weights()[0].size(0) > 1024:  # of tables that have grown
            take()
        return optimizer_of(module)

    patch.setattr(_C.embedding, "empty_rows", new_rows)
    patch.setattr(EmbeddingBagCollection, "fused_optimizer", new_optimizer)


@pytest.mark.parametrize("default", ["row", "init"])
@pytest.mark.parametrize(("kind", "pieces"), [("ADAM", 3), ("SGD", 3), (None, 4)])
def test_without_memory_for_rows_nothing_changes(monkeypatch, kind, pieces, default):
    straight, module = make(kind, default=default), make(kind, default=default)
    first, many = batch([[5]], [[6]]), batch([list(range(100, 2000))], [list(range(4000, 6000))])
    for one in (straight, module):
        loss_of(one(first)[0]).backward()
    before = module.state_dict()
    gradients = [weight.grad for weight in module._embedding_module._weights()]
    # In evaluation, unknown ids need rows to read what theirs would begin with.
    for is_training in (True, False) if default == "init" else (True,):
        module.train(is_training)
        for failing in range(1, pieces + 1):
            with monkeypatch.context() as patch:
                _without_memory(patch, failing)
                with pytest.raises(
                    MemoryError, match=r"no memory for \d+ rows of table 'a', .* Set a capacity"
                ):
                    module(many)
            assert_same(before, module.state_dict())
            assert [len(ids) for _, ids in module._growing()] == [1, 2]
            assert [int(ids._current_iter_tensor) for _, ids in module._growing()] == [1, 1]
            assert [w.size(0) for w in module._embedding_module._weights()] == [1024, 1024]
            weights = zip(gradients, module._embedding_module._weights(), strict=True)
            assert all(gradient is weight.grad for gradient, weight in weights)
    # It goes on as one that never was without.
    module.train()
    for features in (first, many, first):
        results = [one(features)[0] for one in (straight, module)]
        assert torch.equal(results[0].values(), results[1].values())
        for result in results:
            loss_of(result).backward()
    assert_same(straight.state_dict(), module.state_dict())


def test_errors_leave_all_as_it_was():
    with pytest.raises(AssertionError, match="has 5 rows, but its ids grow"):
        ManagedCollisionCollection({"t": GrowingManagedCollisionModule()}, [EmbeddingBagConfig(5, 2, "t")])
    module = make("SGD", features=(("f",), ("g",)), capacity=1)
    same = [_C.collision.id_of_hash(n << 20) for n in (1, 2)]  # of one bucket
    module(batch([[same[0]]], [[]]))
    before = module.state_dict()
    # In the first table, and in the second after the first one has admitted.
    for features, table in ((batch([same], [[]]), "a"), (batch([[77, same[0]]], [same]), "b")):
        with pytest.raises(_C.collision.IdTableFull, match=f"table '{table}': no room for id"):
            module(features)
        assert_same(before, module.state_dict())
    _, remapped = module(batch([[77, same[0]]], [same[:1]]))
    assert remapped["f"].values().tolist() == [2, 1] and [len(ids) for _, ids in module._growing()] == [2, 1]
    with pytest.raises(TypeError, match="is not copied"):
        copy.deepcopy(module._growing()[0][1])
