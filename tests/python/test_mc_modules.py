"""Managed collision on one rank: what each call maps, what leaves, and what the reference gets wrong."""

from __future__ import annotations

import copy
import pickle

import pytest
import torch
from tessera import _C
from tessera.modules.embedding_configs import EmbeddingBagConfig, EmbeddingConfig
from tessera.modules.embedding_modules import EmbeddingBagCollection, EmbeddingCollection
from tessera.modules.mc_embedding_modules import (
    ManagedCollisionEmbeddingBagCollection,
    ManagedCollisionEmbeddingCollection,
)
from tessera.modules.mc_modules import (
    DistanceLFU_EvictionPolicy,
    LFU_EvictionPolicy,
    LRU_EvictionPolicy,
    ManagedCollisionCollection,
    MCHManagedCollisionModule,
    average_threshold_filter,
    dynamic_threshold_filter,
)
from tessera.sparse.jagged_tensor import JaggedTensor, KeyedJaggedTensor

CPU = torch.device("cpu")
LARGEST = 2**63 - 1


def module(size=4, policy=None, interval=1, **options):
    return MCHManagedCollisionModule(size, CPU, policy or LFU_EvictionPolicy(), interval, **options)


def call(ids_module, ids):
    values = torch.tensor(ids, dtype=torch.int64)
    return ids_module({"f": JaggedTensor(values, lengths=torch.tensor([len(ids)]))})["f"].values().tolist()


def evicted(ids_module):
    rows = ids_module.evict()
    return None if rows is None else rows.tolist()


A, B, C, D, EVAL = [10, 10, 11], [12, 12, 12, 13, 14], [14, 14, 14, 14], [15], [10, 14, 99]


@pytest.mark.parametrize(
    ("policy", "calls", "gone", "seen"),
    [
        (LFU_EvictionPolicy, [[0, 0, 0, 3, 3], [2] * 4, [3]], [[0], [2], []], [1, 2, 3]),
        (LRU_EvictionPolicy, [[1, 1, 1, 2, 0], [0] * 4, [2]], [[1, 2, 0], [], [2]], [3, 0, 3]),
        (DistanceLFU_EvictionPolicy, [[2, 2, 2, 0, 3], [0] * 4, [1]], [[2, 0], [0], [1]], [3, 0, 3]),
    ],
)
def test_the_trace_of_each_policy(policy, calls, gone, seen):
    """By hand from the formulas: the best scores stay, of equal ones the present id."""
    ids = module(policy=policy())
    assert call(ids, A) == [1, 1, 2]
    assert (evicted(ids), ids.open_slots().item()) == ([1, 2], 1)
    for step, values in enumerate((B, C, D)):
        assert call(ids, values) == calls[step]
        assert (evicted(ids), evicted(ids), ids.open_slots().item()) == (gone[step], None, 0)
    before = {name: value.clone() for name, value in ids.state_dict().items()}
    ids.eval()
    assert call(ids, EVAL) == seen
    for name, value in ids.state_dict().items():
        assert torch.equal(value, before[name]), name


def test_an_interval_of_three_admits_in_the_third_call():
    ids = module(interval=3)
    assert call(ids, [5, 6]) == [3, 3]
    assert call(ids, [5]) == [3]
    # Counts 3, 2 and 1: the two best take the slots that the order leaves to them.
    assert call(ids, [7, 5, 6]) == [2, 0, 1]


def test_evictions_add_up_until_somebody_asks():
    ids = module()
    call(ids, A)
    call(ids, B)
    assert evicted(ids) == [0, 1, 2]


def test_filters_see_the_counts():
    ids = module(8, LFU_EvictionPolicy(average_threshold_filter))
    assert call(ids, [1, 2, 3, 3, 3]) == [7, 7, 6, 6, 6]
    ids = module(8, LRU_EvictionPolicy(threshold_filtering_func=lambda c: dynamic_threshold_filter(c, 1.5)))
    assert call(ids, [1, 2, 3, 3, 3, 3]) == [7, 7] + [6] * 4


def test_a_batch_larger_than_the_first_is_counted_whole():
    ids = module(40)
    call(ids, [1, 2, 3, 4])
    assert 39 not in call(ids, list(range(100, 120)))


def test_a_first_batch_may_be_empty():
    ids = module()
    assert call(ids, []) == []
    assert 3 not in call(ids, [5, 6])


def test_the_largest_id_is_an_id():
    ids = module()
    assert call(ids, [LARGEST, LARGEST]) == [2, 2]
    assert ids.open_slots().item() == 2
    assert call(ids, [LARGEST, 3, -(2**63)]) == [2, 0, 1] or ids.open_slots().item() == 0
    rows = call(ids.eval(), [LARGEST, 3, -(2**63), 9])
    assert sorted(rows) == [0, 1, 2, 3] and rows[3] == 3
    other = module()
    other.load_state_dict(ids.state_dict())
    assert call(other.eval(), [LARGEST, 3, -(2**63), 9]) == rows


@pytest.mark.parametrize("policy", [LFU_EvictionPolicy, LRU_EvictionPolicy, DistanceLFU_EvictionPolicy])
def test_a_resumed_run_goes_on_to_the_same_bits(policy):
    generator = torch.Generator().manual_seed(1)
    batches = [torch.randint(0, 30, (12,), generator=generator).tolist() for _ in range(20)]
    straight, resumed = module(8, policy(), 3), module(8, policy(), 3)
    for step, batch in enumerate(batches):
        if step == 10:  # between two intervals: ids are waiting
            saved = resumed.state_dict()
            assert "_tessera_history_ids" in saved
            resumed = module(8, policy(), 3)
            resumed.load_state_dict(saved)
        assert call(straight, batch) == call(resumed, batch), step
    for name, value in straight.state_dict().items():
        assert torch.equal(value, resumed.state_dict()[name]), name


def test_copies_and_pickles_map_alike():
    ids = module(8)
    call(ids, [1, 2, 3, 3])
    for other in (copy.deepcopy(ids), pickle.loads(pickle.dumps(ids))):
        assert call(other.eval(), [1, 2, 3, 4]) == call(copy.deepcopy(ids).eval(), [1, 2, 3, 4])


def test_buffers_changed_from_outside_are_noticed():
    ids = module()
    call(ids, [7])
    row = call(ids.eval(), [7])[0]
    ids._mch_remapped_ids_mapping[0] = (row + 1) % 3
    assert call(ids, [7]) == [(row + 1) % 3]


def test_saved_shards_can_be_merged_at_their_bounds_only():
    whole = module(8)
    whole._output_segments_tensor[:3] = torch.tensor([0, 4, 8])
    shard = whole.rebuild_with_output_id_range((4, 8), [0, 4, 8])
    assert shard.output_size() == 4 and call(shard, [1, 1]) == [6, 6] and call(shard.eval(), [9]) == [7]
    state = shard.state_dict()
    state["_output_segments_tensor"][:3] = torch.tensor([0, 6, 8])
    with pytest.raises(AssertionError, match=r"rows 4 to 7 are not a union .* \[0, 6, 8\]"):
        whole.rebuild_with_output_id_range((4, 8), [0, 4, 8]).load_state_dict(state)


@pytest.mark.parametrize(
    ("options", "kind", "text"),
    [
        ({"size": 0}, AssertionError, "zch_size 0 and eviction_interval 1 must be at least 1"),
        ({"interval": 0}, AssertionError, "zch_size 4 and eviction_interval 0 must be at least 1"),
        ({"mch_size": 3}, ValueError, "have no effect"),
        ({"mch_hash_func": hash}, ValueError, "have no effect"),
        ({"output_segments": list(range(1026))}, AssertionError, "limited to 1024 shards; 1025 given"),
        ({"out_of_range": "?"}, ValueError, "use 'check' or 'fold'"),
    ],
)
def test_settings_that_cannot_be(options, kind, text):
    with pytest.raises(kind, match=text):
        module(**options)


def test_ids_beyond_an_explicit_bound():
    with pytest.raises(ValueError, match=r"id -3 at position 2 of 'f' is not within 0 to 9\."):
        call(module(input_hash_size=10), [1, 9, -3, 5000])
    folded = module(input_hash_size=10, out_of_range="fold")
    folded_id = (_C.collision.id_hash(5000) >> 1) % 10
    call(folded, [1, 5000])
    assert call(folded.eval(), [5000]) == call(folded, [folded_id])
    hashed = module(input_hash_size=10, input_hash_func=lambda values, size: values % size)
    call(hashed, [17])
    assert call(hashed.eval(), [7]) != [3]


# ---- collections ----


def batch(**features):
    lengths = [len(bag) for bags in features.values() for bag in bags]
    values = [one for bags in features.values() for bag in bags for one in bag]
    return KeyedJaggedTensor.from_lengths_sync(
        list(features), torch.tensor(values, dtype=torch.int64), torch.tensor(lengths)
    )


def tables(**options):
    return [
        EmbeddingBagConfig(4, 2, "a", feature_names=["f"], **options),
        EmbeddingBagConfig(6, 2, "b", feature_names=["g"], **options),
    ]


def test_modules_belong_to_tables_by_name():
    ids = ManagedCollisionCollection({"b": module(6), "a": module(4)}, tables())
    mapped = ids(batch(g=[[7, 7]], f=[[1]]))
    assert mapped.keys() == ["f", "g"]
    ids.eval()
    assert mapped["f"].values().tolist() == [2] and mapped["g"].values().tolist() == [4, 4]
    assert ids(batch(g=[[1]], f=[[7]]))["g"].values().tolist() == [5]
    assert ids.open_slots() == {"b": torch.tensor([4]), "a": torch.tensor([2])}


def test_what_does_not_fit_together_is_named():
    with pytest.raises(ValueError, match="Table b is not present"):
        ManagedCollisionCollection({"a": module(4)}, tables())
    with pytest.raises(AssertionError, match="for b is 5; it must match 6"):
        ManagedCollisionCollection({"a": module(4), "b": module(5)}, tables())
    ids = ManagedCollisionCollection({"a": module(4), "b": module(6)}, tables())
    with pytest.raises(ValueError, match="no feature 'g', which table 'b' needs, among the 1 keys"):
        ids(batch(f=[[1]]))
    with pytest.raises(AssertionError, match=r"\['a'\] and \['a', 'b'\]"):
        ManagedCollisionEmbeddingBagCollection(EmbeddingBagCollection(tables()[:1]), ids)


def fused(kind="ROWWISE_ADAGRAD", rate=0.5):
    options = _C.embedding.OptimizerOptions()
    options.kind = getattr(_C.embedding.OptimizerKind, kind)
    options.learning_rate = rate
    return options


@pytest.mark.parametrize("is_pooled", [True, False])
def test_a_new_id_begins_with_a_new_row(is_pooled):
    """Weights and the state of the optimizer are those of a new row, in the call that gave it away."""
    config = EmbeddingBagConfig if is_pooled else EmbeddingConfig
    configs = [config(3, 2, "t", feature_names=["f"], init_fn=torch.nn.init.ones_)]
    ids = ManagedCollisionCollection({"t": module(3, LRU_EvictionPolicy())}, configs)
    if is_pooled:
        bags = EmbeddingBagCollection(configs, optimizer=fused())
        both = ManagedCollisionEmbeddingBagCollection(bags, ids, True)
    else:
        bags = EmbeddingCollection(configs, optimizer=fused())
        both = ManagedCollisionEmbeddingCollection(bags, ids, True)

    def step(*wanted):
        found, mapped = both(batch(f=[list(wanted)]))
        rows = found["f"] if is_pooled else found["f"].values()
        rows.sum().backward()
        return rows.detach(), mapped["f"].values().tolist()

    first, rows = step(1)
    assert first.tolist() == [[1.0, 1.0]]
    step(1)
    state = bags.fused_optimizer().state_dict()["t.momentum1"]
    assert state[rows[0]] > 0
    step(2)
    found, rows_now = step(3)  # takes the row of 1
    assert rows_now == rows
    assert found.tolist() == [[1.0, 1.0]]


def test_a_feature_of_two_tables_has_a_row_in_each():
    configs = [
        EmbeddingBagConfig(4, 2, "a", feature_names=["f", "g"], init_fn=torch.nn.init.ones_),
        EmbeddingBagConfig(6, 3, "b", feature_names=["f"], init_fn=torch.nn.init.ones_),
    ]
    ids = ManagedCollisionCollection({"a": module(4), "b": module(6)}, configs)
    both = ManagedCollisionEmbeddingBagCollection(EmbeddingBagCollection(configs), ids, True)
    pooled, mapped = both(batch(f=[[7, 7], [8]], g=[[7], []]))
    assert mapped.keys() == ["f@a", "g", "f@b"]
    assert mapped["f@a"].values().tolist() == [1, 1, 2] and mapped["g"].values().tolist() == [1]
    assert mapped["f@b"].values().tolist() == [3, 3, 4]
    assert pooled.keys() == ["f@a", "g", "f@b"]
    assert pooled["f@b"].tolist() == [[2.0] * 3, [1.0] * 3]
    assert [name for name, _ in both.named_parameters()] == [
        "_embedding_module.embedding_bags.a.weight",
        "_embedding_module.embedding_bags.b.weight",
    ]


def test_weights_of_the_features_go_along():
    configs = [EmbeddingBagConfig(4, 2, "a", feature_names=["f"], init_fn=torch.nn.init.ones_)]
    ids = ManagedCollisionCollection({"a": module(4)}, configs)
    both = ManagedCollisionEmbeddingBagCollection(EmbeddingBagCollection(configs, is_weighted=True), ids)
    features = batch(f=[[7, 8]]).with_weights(torch.tensor([0.5, 2.0]))
    assert both(features)[0]["f"].tolist() == [[2.5, 2.5]]


def test_rows_can_change_between_forward_and_backward():
    configs = [EmbeddingBagConfig(3, 2, "t", feature_names=["f"])]
    ids = ManagedCollisionCollection({"t": module(3, LRU_EvictionPolicy())}, configs)
    bags = EmbeddingBagCollection(configs)
    both = ManagedCollisionEmbeddingBagCollection(bags, ids, allow_in_place_embed_weight_update=True)
    first = both(batch(f=[[1]]))[0]["f"].sum()
    both(batch(f=[[2]]))
    both(batch(f=[[3]]))
    first.backward()
    assert bags.embedding_bags["t"].weight.grad.sum() == 2


def test_copies_of_collections_map_and_look_up_alike():
    configs = [
        EmbeddingBagConfig(4, 2, "a", feature_names=["f"]),
        EmbeddingBagConfig(6, 3, "b", feature_names=["f"]),
    ]
    ids = ManagedCollisionCollection({"a": module(4), "b": module(6)}, configs)
    both = ManagedCollisionEmbeddingBagCollection(EmbeddingBagCollection(configs), ids, True)
    both(batch(f=[[7, 7], [8]]))
    wanted = copy.deepcopy(both).eval()(batch(f=[[7, 7], [8]]))[0].values()
    other = ManagedCollisionEmbeddingBagCollection(
        EmbeddingBagCollection(configs), ManagedCollisionCollection({"a": module(4), "b": module(6)}, configs)
    )
    other.load_state_dict(copy.deepcopy(both).state_dict())
    for found in (pickle.loads(pickle.dumps(both)), other):
        assert torch.equal(found.eval()(batch(f=[[7, 7], [8]]))[0].values(), wanted)
