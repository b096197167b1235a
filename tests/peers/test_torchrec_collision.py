"""Managed collision beside torchrec 1.8.0: the same batches, the same rows, the same state."""

from __future__ import annotations

import pytest
import torch
from two_sides import OURS, SIDES, THEIRS

POLICIES = ["LFU_EvictionPolicy", "LRU_EvictionPolicy", "DistanceLFU_EvictionPolicy"]


def make(side, policy, size, interval, **options):
    modules = side("modules.mc_modules")
    return modules.MCHManagedCollisionModule(
        zch_size=size,
        device=torch.device("cpu"),
        eviction_policy=getattr(modules, policy)(**options),
        eviction_interval=interval,
    )


def call(side, module, values):
    feature = side("sparse.jagged_tensor").JaggedTensor(values, lengths=torch.tensor([values.numel()]))
    return module({"f": feature})["f"].values()


def batches(count, seed=3):
    generator = torch.Generator().manual_seed(seed)
    for _ in range(count):
        # Few often, many rarely.
        draw = torch.rand(40, generator=generator)
        yield (60 * draw**3).long() * 7919 - 12345


@pytest.mark.parametrize("interval", [1, 4])
@pytest.mark.parametrize("policy", POLICIES)
def test_the_same_rows_and_state(policy, interval):
    pairs = [(side, make(side, policy, 16, interval)) for side in SIDES]
    for step, values in enumerate(batches(40)):
        rows = [call(side, module, values) for side, module in pairs]
        assert torch.equal(*rows), step
        gone = [module.evict() for _, module in pairs]
        assert (gone[0] is None) == (gone[1] is None), step
        if gone[0] is not None:
            assert torch.equal(*gone), step
        assert torch.equal(*(module.open_slots() for _, module in pairs))
    ours, theirs = (module.state_dict() for _, module in pairs)
    assert set(ours) - set(theirs) <= {"_tessera_history_ids", "_tessera_history_iter"}
    for name, value in theirs.items():
        assert torch.equal(ours[name], value), name
    for _, module in pairs:
        module.eval()
    values = torch.arange(-12345, 60 * 7919, 7919)
    assert torch.equal(*(call(side, module, values) for side, module in pairs))


@pytest.mark.parametrize("exponent", [0.5, 2.0])
@pytest.mark.parametrize("policy", POLICIES[1:])
def test_other_exponents(policy, exponent):
    pairs = [(side, make(side, policy, 16, 2, decay_exponent=exponent)) for side in SIDES]
    for step, values in enumerate(batches(40, seed=5)):
        assert torch.equal(*(call(side, module, values) for side, module in pairs)), step


@pytest.mark.parametrize("name", ["average_threshold_filter", "dynamic_threshold_filter"])
def test_filters(name):
    counts = torch.tensor([1, 5, 2, 90, 1, 1, 1, 1, 1, 1, 1, 1])
    (ours, limit), (theirs, their_limit) = (getattr(s("modules.mc_modules"), name)(counts) for s in SIDES)
    assert torch.equal(ours, theirs) and float(limit) == pytest.approx(float(their_limit))
    torch.manual_seed(4)
    drawn = OURS("modules.mc_modules").probabilistic_threshold_filter(counts, 0.3)
    torch.manual_seed(4)
    their_draw = THEIRS("modules.mc_modules").probabilistic_threshold_filter(counts, 0.3)
    assert torch.equal(drawn[0], their_draw[0])


def both(side, policy="LFU_EvictionPolicy"):
    configs = [
        side("modules.embedding_configs").EmbeddingBagConfig(
            num_embeddings=size, embedding_dim=4, name=name, feature_names=[feature]
        )
        for size, name, feature in ((12, "a", "f"), (9, "b", "g"))
    ]
    collection = side("modules.mc_modules").ManagedCollisionCollection(
        {c.name: make(side, policy, c.num_embeddings, 1) for c in configs}, configs
    )
    bags = side("modules.embedding_modules").EmbeddingBagCollection(configs)
    return side("modules.mc_embedding_modules").ManagedCollisionEmbeddingBagCollection(
        bags, collection, return_remapped_features=True
    )


@pytest.mark.parametrize(("source", "target"), [(THEIRS, OURS), (OURS, THEIRS)])
def test_state_goes_both_ways(source, target):
    """A module trained by one, loaded by the other, looks up the same numbers."""
    old, new = both(source), both(target)

    def features(side, values):
        return side("sparse.jagged_tensor").KeyedJaggedTensor(
            keys=["f", "g"], values=values, lengths=torch.full((8,), values.numel() // 8)
        )

    for values in batches(10):
        old(features(source, values))
    state = old.state_dict()
    assert set(state) == set(new.state_dict())
    new.load_state_dict(state)
    old.eval()
    new.eval()
    for values in batches(3, seed=8):
        (pooled, mapped), (their_pooled, their_mapped) = (
            old(features(source, values)),
            new(features(target, values)),
        )
        assert torch.equal(mapped.values(), their_mapped.values())
        torch.testing.assert_close(pooled.values(), their_pooled.values())


def test_tables_that_grow_take_and_give_the_state():
    """What torchrec has learned, a growing module looks up by the ids, and torchrec again what that has."""
    old, again = both(THEIRS), both(THEIRS)
    modules, configs = OURS("modules.mc_modules"), OURS("modules.embedding_configs")
    tables = [
        configs.EmbeddingBagConfig(None, 4, name, feature_names=[feature])
        for name, feature in (("a", "f"), ("b", "g"))
    ]
    ids = {
        name: modules.GrowingManagedCollisionModule(rows - 1, when_full="refuse")
        for name, rows in (("a", 12), ("b", 9))
    }
    new = OURS("modules.mc_embedding_modules").ManagedCollisionEmbeddingBagCollection(
        OURS("modules.embedding_modules").EmbeddingBagCollection(tables),
        modules.ManagedCollisionCollection(ids, tables),
    )

    def features(side, values):
        return side("sparse.jagged_tensor").KeyedJaggedTensor(
            keys=["f", "g"], values=values, lengths=torch.full((8,), values.numel() // 8)
        )

    for values in batches(10):
        old(features(THEIRS, values))
    new.load_state_dict(old.state_dict())
    state = new.mch_state_dict(modules.LFU_EvictionPolicy())
    assert set(state) == set(old.state_dict())
    again.load_state_dict(state)
    for module in (old, new, again):
        module.eval()
    for values in batches(3, seed=8):
        wanted = old(features(THEIRS, values))[0].values()
        torch.testing.assert_close(new(features(OURS, values))[0].values(), wanted, rtol=0, atol=0)
        torch.testing.assert_close(again(features(THEIRS, values))[0].values(), wanted, rtol=0, atol=0)
