"""The vocabulary's names in Python at the edges: modes of autograd, uneven shards, wrong arguments."""

from __future__ import annotations

import pytest
import torch
import torch.distributed as dist
from ranks import run_ranks
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
