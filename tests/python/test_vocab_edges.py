"""The vocabulary's names in Python at the edges: modes of autograd, uneven shards, wrong arguments."""

from __future__ import annotations

import pytest
import torch
import torch.distributed as dist
from ranks import run_ranks
from tessera import vocab_parallel
from tessera.distributed import model_utils
from tessera.loss import te_parallel_ce
from vocab_sample import VOCAB, reference_logprob, sample

FUNCTIONS = {
    "logprob": lambda x, ids, *rest: model_utils.DistributedLogprob.apply(x, ids, 0, VOCAB, None, *rest),
    "chunked": lambda x, ids, *rest: model_utils.ChunkedDistributedLogprob.apply(
        x, ids, 0, VOCAB, 2, None, *rest
    ),
    "gathered": lambda x, ids, *rest: model_utils.ChunkedDistributedGatherLogprob.apply(
        x, ids.unsqueeze(-1), 0, VOCAB, 2, None, *rest
    ),
    "entropy": lambda x, ids, *rest: model_utils.ChunkedDistributedEntropy.apply(x, 2, None, *rest),
    "sampled": lambda x, ids, *rest: model_utils.DistributedLogprobWithSampling.apply(
        x, ids, None, VOCAB - 1, 1.0, *rest
    ),
    "soft": lambda x, ids, *rest: model_utils.DistributedCrossEntropy.apply(x, x.detach(), None, *rest),
    "loss": lambda x, ids: te_parallel_ce.parallel_cross_entropy(x, ids),
}


@pytest.mark.parametrize("name", FUNCTIONS)
def test_functions_without_and_with_too_many_gradients(name):
    function = FUNCTIONS[name]
    whole, target = sample()
    leaf = whole.clone().requires_grad_(True)
    plain = function(leaf, target)
    assert plain.requires_grad
    if name != "loss":
        value = function(leaf, target, True)
        assert not value.requires_grad
        assert torch.equal(value, plain)
    for logits in (leaf, whole):
        with torch.inference_mode():
            assert torch.equal(function(logits, target), plain)
            assert torch.equal(function(logits.clone(), target), plain)
    with pytest.raises(RuntimeError, match="gradients of gradients are not available"):
        torch.autograd.grad(plain.sum(), leaf, create_graph=True)


def uneven_hidden_rank(rank, ends):
    generator = torch.Generator().manual_seed(4)
    hidden = torch.randn(6, 2, 16, generator=generator)
    weight = torch.randn(VOCAB, 16, generator=generator) * 0.3
    target = torch.randint(VOCAB, (2, 6), generator=generator)
    w = weight.double().requires_grad_(True)
    expected = reference_logprob((hidden.double() @ w.t()).transpose(0, 1)[:, :-1], target[:, 1:])
    expected.sum().backward()
    group = dist.group.WORLD
    start, end = ([0, *ends])[rank], ends[rank]
    rows = hidden.chunk(group.size())[rank]
    for chunk_size in (None, 1, 4, 9):
        own_weight = weight[start:end].clone().requires_grad_(True)
        value = model_utils.from_parallel_hidden_states_to_logprobs(
            rows, own_weight, False, target, start, end, group, chunk_size=chunk_size
        )
        torch.testing.assert_close(value.double(), expected.detach(), rtol=1e-4, atol=1e-4)
        value.sum().backward()
        torch.testing.assert_close(own_weight.grad.double(), w.grad[start:end], rtol=1e-4, atol=1e-4)
    nobody = model_utils.from_parallel_hidden_states_to_logprobs(
        rows[:, :0], own_weight, False, target[:0], start, end, group, chunk_size=2
    )
    assert nobody.shape == (0, 5)
    with pytest.raises(ValueError, match=r"logprobs: a chunk size of 0 tokens is not possible\."):
        model_utils.from_parallel_hidden_states_to_logprobs(
            rows, own_weight, False, target, start, end, group, chunk_size=0
        )


@pytest.mark.parametrize("ends", [(70, VOCAB), (50, 50, VOCAB)])
def test_hidden_states_with_uneven_shards(ends):
    run_ranks(len(ends), uneven_hidden_rank, ends)


def test_starts_that_describe_no_sequences():
    whole, target = sample((1, 9))
    for starts, text in (
        ([2, 9], "sequence start 0 is 2"),
        ([0, 6, 4, 9], "sequence start 2 is 4"),
        ([0, 12], "sequence start 1 is 12"),
    ):
        text += r"\. Starts begin with 0, do not fall, and end at most at 9\."
        with pytest.raises(ValueError, match=text):
            model_utils.from_parallel_logits_to_logprobs_packed_sequences(
                whole, target, torch.tensor(starts), 6, 0, VOCAB
            )
    # A sequence may be empty, and the row longer than all of them.
    value = model_utils.from_parallel_logits_to_logprobs_packed_sequences(
        whole, target, torch.tensor([0, 0, 4, 4, 8]), 6, 0, VOCAB
    )
    expected = torch.zeros(4, 5, dtype=torch.float64)
    expected[1, :3] = reference_logprob(whole[0, :3], target[0, 1:4])
    expected[3, :3] = reference_logprob(whole[0, 4:7], target[0, 5:8])
    torch.testing.assert_close(value.double(), expected, rtol=1e-5, atol=1e-5)


def test_mask_that_does_not_fit():
    whole, labels = sample()
    text = r"a mask of shape \[5\] does not fit labels of shape \[2, 6\]\."
    with pytest.raises(ValueError, match=text):
        te_parallel_ce.TEParallelCrossEntropy()(whole, labels, torch.ones(5))


def dtensor_rank(rank):
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.tensor import DTensor, Replicate, Shard

    mesh = init_device_mesh("cpu", (2,))
    whole, labels = sample()
    mask = torch.ones(2, 6)
    mask[0, 1] = 0
    share = VOCAB // 2
    local = whole[..., rank * share : (rank + 1) * share].contiguous().requires_grad_(True)
    logits = DTensor.from_local(local, mesh, [Shard(2)], run_check=False)
    loss = te_parallel_ce.TEParallelCrossEntropy()(
        logits,
        DTensor.from_local(labels, mesh, [Replicate()], run_check=False),
        DTensor.from_local(mask, mesh, [Replicate()], run_check=False),
    )
    expected = -(reference_logprob(whole, labels) * mask).sum()
    torch.testing.assert_close(loss.double(), expected, rtol=1e-5, atol=1e-5)
    loss.backward()
    expected = torch.softmax(whole, -1)[..., rank * share : (rank + 1) * share][1, 0].sum()
    is_own = int(rank * share <= labels[1, 0] < (rank + 1) * share)
    torch.testing.assert_close(local.grad[1, 0].sum(), expected - is_own, rtol=1e-4, atol=1e-5)


def test_labels_and_mask_of_a_mesh():
    run_ranks(2, dtensor_rank, backend="gloo")


def other_labels_rank(rank, change):
    """The labels of the last rank are other ones."""
    whole, labels = sample()
    group = dist.group.WORLD
    columns = vocab_parallel.columns_of(VOCAB, group)
    own = whole[..., slice(*columns)].clone().requires_grad_(True)
    hidden, weight = torch.ones(2, 6, 4), torch.ones(columns[1] - columns[0], 4)
    ids = labels.unsqueeze(-1)
    last = group.size() - 1
    given = labels.clone()
    if rank == last:
        given[1, 3] = -100 if change == "ignored" else (labels[1, 3] + 50) % VOCAB
    text = rf"the labels of rank {last} are not those of rank 0\. All ranks that share a vocabulary"
    for function in (
        lambda y: vocab_parallel.cross_entropy(own, y, group, columns=columns),
        lambda y: vocab_parallel.cross_entropy(own, y, group, columns=columns, vocab_size=VOCAB),
        lambda y: vocab_parallel.log_probabilities(own, y, group, columns=columns),
        lambda y: vocab_parallel.log_probabilities_at(own, y.unsqueeze(-1), group, columns=columns),
        lambda y: vocab_parallel.logits_at(own, y.unsqueeze(-1), group, columns=columns),
        lambda y: vocab_parallel.sampled_log_probabilities(own, y, group, columns=columns, top_k=5),
        lambda y: vocab_parallel.linear_cross_entropy(hidden, weight, y, group, columns=columns),
        lambda y: model_utils.DistributedLogprob.apply(own, y, *columns, group),
        lambda y: model_utils.from_parallel_logits_to_logprobs(own, y, *columns, group),
        lambda y: te_parallel_ce.CrossEntropyFunction.forward(None, own, y, 0.0, True, group),
    ):
        with pytest.raises(ValueError, match=text):
            function(given)
        function(labels)  # the group goes on
    assert torch.equal(ids.squeeze(-1), labels)


@pytest.mark.parametrize("backend", ["shm", "gloo"])
@pytest.mark.parametrize("change", ["other", "ignored"])
@pytest.mark.parametrize("size", [2, 3])
def test_labels_that_differ_between_ranks(size, change, backend):
    run_ranks(size, other_labels_rank, change, backend=backend)


def test_names_of_the_reference():
    """Keywords, and filters that are off."""
    whole, target = sample()
    hidden, weight = torch.zeros(6, 2, 4), torch.zeros(VOCAB, 4)
    value = model_utils.from_parallel_hidden_states_to_logprobs(
        tensor_parallel_hidden_states=hidden,
        output_weight_layer=weight,
        runtime_gather_output=False,
        target=target,
        vocab_start_index=0,
        vocab_end_index=VOCAB,
        tp_group=None,
    )
    assert value.shape == (2, 5)
    assert model_utils.group_all_reduce_sum(x=whole, group=None) is whole
    assert model_utils.group_all_reduce_sum_with_grad(x=whole, group=None) is whole
    plain = model_utils.DistributedLogprob.apply(whole, target, 0, VOCAB, None)
    for top_k in (None, 0, -1, -7):
        value = model_utils.DistributedLogprobWithSampling.apply(whole, target, None, top_k, 1.0)
        assert torch.equal(value, plain)
        params = model_utils.TrainingSamplingParams(top_k=top_k)
        value = model_utils.from_parallel_logits_to_logprobs(whole, target, 0, VOCAB, sampling_params=params)
        torch.testing.assert_close(
            value.double(), reference_logprob(whole[:, :-1], target[:, 1:]), rtol=1e-5, atol=1e-5
        )
        assert model_utils.apply_top_k_top_p(whole, top_k, 1.0) == (whole, None)
        filtered, _ = model_utils.apply_top_k_top_p(whole, top_k, 0.5)
        assert torch.equal(filtered, model_utils.apply_top_k_top_p(whole, None, 0.5)[0])
