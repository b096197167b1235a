"""The vocabulary's names in Python: reference surfaces against one process in float64."""

from __future__ import annotations

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from ranks import run_ranks
from tessera import vocab_parallel
from tessera.distributed import model_utils
from tessera.loss import te_parallel_ce

VOCAB = 96


def sample(shape=(2, 6), dtype=torch.float32, seed=3):
    generator = torch.Generator().manual_seed(seed)
    logits = (torch.randn(*shape, VOCAB, generator=generator) * 3).to(dtype)
    return logits, torch.randint(VOCAB, shape, generator=generator)


def group_and_range(rank):
    group = dist.group.WORLD
    share = VOCAB // group.size()
    return group, rank * share, (rank + 1) * share


def shard(whole, start, end):
    return whole[..., start:end].clone().requires_grad_(True)


def reference_logprob(whole, target):
    return torch.log_softmax(whole.double(), -1).gather(-1, target.unsqueeze(-1)).squeeze(-1)


def logprob_rank(rank):
    whole, target = sample()
    group, start, end = group_and_range(rank)
    weights = torch.rand(2, 6, generator=torch.Generator().manual_seed(1))

    x = whole.double().requires_grad_(True)
    (reference_logprob(x, target) * weights).sum().backward()

    for function in ("plain", "chunked"):
        logits = shard(whole, start, end)
        if function == "plain":
            value = model_utils.DistributedLogprob.apply(logits, target, start, end, group, False)
        else:
            value = model_utils.ChunkedDistributedLogprob.apply(logits, target, start, end, 2, group)
        assert value.dtype == torch.float32
        torch.testing.assert_close(value.double(), reference_logprob(whole, target), rtol=1e-5, atol=1e-5)
        (value * weights).sum().backward()
        torch.testing.assert_close(logits.grad.double(), x.grad[..., start:end], rtol=1e-5, atol=1e-6)

    logits = shard(whole, start, end)
    for spelling in ({"group": group}, {"tp_group": group}):
        value = model_utils.from_parallel_logits_to_logprobs(logits, target, start, end, **spelling)
        expected = reference_logprob(whole[:, :-1], target[:, 1:])
        torch.testing.assert_close(value.double(), expected, rtol=1e-5, atol=1e-5)
    value = model_utils.from_parallel_logits_to_logprobs(logits, target, start, end, group, True)
    assert not value.requires_grad
    longer = torch.cat([logits, logits], dim=1)
    value = model_utils.from_parallel_logits_to_logprobs(longer, target, start, end, group)
    assert value.shape == (2, 5)

    log_p = model_utils._compute_distributed_log_softmax(logits, group)
    expected = torch.log_softmax(whole.double(), -1)[..., start:end]
    torch.testing.assert_close(log_p.double(), expected, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("backend", ["shm", "gloo"])
@pytest.mark.parametrize("size", [1, 2, 3])
def test_logprob_surfaces(size, backend):
    run_ranks(size, logprob_rank, backend=backend)


def scores_rank(rank):
    whole, _ = sample()
    group, start, end = group_and_range(rank)
    log_p = torch.log_softmax(whole.double(), -1)

    minus_entropy = model_utils.ChunkedDistributedEntropy.apply(shard(whole, start, end), 3, group)
    torch.testing.assert_close(minus_entropy.double(), (log_p.exp() * log_p).sum(-1), rtol=1e-5, atol=1e-5)

    ids = torch.randint(VOCAB, (2, 6, 4), generator=torch.Generator().manual_seed(5))
    logits = shard(whole, start, end)
    value = model_utils.ChunkedDistributedGatherLogprob.apply(logits, ids, start, end, 3, group)
    torch.testing.assert_close(value.double(), log_p.gather(-1, ids), rtol=1e-5, atol=1e-5)
    value.sum().backward()
    x = whole.double().requires_grad_(True)
    torch.log_softmax(x, -1).gather(-1, ids).sum().backward()
    torch.testing.assert_close(logits.grad.double(), x.grad[..., start:end], rtol=1e-4, atol=1e-5)

    teacher, _ = sample(seed=9)
    logits = shard(whole, start, end)
    loss = model_utils.DistributedCrossEntropy.apply(logits, teacher[..., start:end], group)
    expected = -(torch.softmax(teacher.double(), -1) * log_p).sum(-1)
    torch.testing.assert_close(loss.double(), expected, rtol=1e-5, atol=1e-5)
    loss.sum().backward()
    expected = torch.softmax(whole.double(), -1) - torch.softmax(teacher.double(), -1)
    torch.testing.assert_close(logits.grad.double(), expected[..., start:end], rtol=1e-4, atol=1e-6)

    values, best = model_utils.distributed_vocab_topk(
        logits, 40, group, vocab_start_index=start, vocab_end_index=end
    )
    assert torch.equal(values, whole.topk(40, -1).values)
    assert torch.equal(best, whole.topk(40, -1).indices)
    gathered = model_utils.gather_logits_at_global_indices(
        logits, ids, group, vocab_start_index=start, vocab_end_index=end
    )
    assert torch.equal(gathered, whole.gather(-1, ids))


@pytest.mark.parametrize("size", [1, 2, 4])
def test_scores_and_choices(size):
    run_ranks(size, scores_rank)


def packed_rank(rank):
    whole, target = sample((1, 11))
    group, start, end = group_and_range(rank)
    starts = torch.tensor([0, 4, 9, 11], dtype=torch.int32)
    logits = shard(whole, start, end)
    value = model_utils.from_parallel_logits_to_logprobs_packed_sequences(
        logits, target, starts, 4, start, end, group
    )
    expected = torch.zeros(3, 3, dtype=torch.float64)
    for i, (first, last) in enumerate(zip(starts[:-1].tolist(), starts[1:].tolist(), strict=True)):
        one = reference_logprob(whole[:, first : last - 1], target[:, first + 1 : last])[0]
        expected[i, : min(3, len(one))] = one[:3]
    torch.testing.assert_close(value.double(), expected, rtol=1e-5, atol=1e-5)
    value.sum().backward()
    assert logits.grad[0, 3].abs().max() == 0  # the last token of a sequence predicts nothing
    rolled = model_utils.from_parallel_logits_to_logprobs_packed_sequences(
        logits, target.roll(-1, -1), starts, 4, start, end, group, target_is_pre_rolled=True
    )
    assert torch.equal(rolled, value)


@pytest.mark.parametrize("size", [1, 2])
def test_packed_sequences(size):
    run_ranks(size, packed_rank)


def hidden_rank(rank):
    generator = torch.Generator().manual_seed(4)
    group, start, end = group_and_range(rank)
    size = group.size()
    hidden = torch.randn(6, 2, 16, generator=generator)
    weight = torch.randn(VOCAB, 16, generator=generator) * 0.3
    target = torch.randint(VOCAB, (2, 6), generator=generator)
    h, w = hidden.double().requires_grad_(True), weight.double().requires_grad_(True)
    logits = (h @ w.t()).transpose(0, 1)
    expected = reference_logprob(logits[:, :-1], target[:, 1:])
    expected.sum().backward()
    rows = slice(rank * 6 // size, (rank + 1) * 6 // size)
    own_hidden = hidden[rows].clone().requires_grad_(True)
    own_weight = weight[start:end].clone().requires_grad_(True)
    value = model_utils.from_parallel_hidden_states_to_logprobs(
        own_hidden, own_weight, False, target, start, end, group, chunk_size=2
    )
    torch.testing.assert_close(value.double(), expected.detach(), rtol=1e-4, atol=1e-4)
    value.sum().backward()
    torch.testing.assert_close(own_hidden.grad.double(), h.grad[rows], rtol=1e-4, atol=1e-4)
    torch.testing.assert_close(own_weight.grad.double(), w.grad[start:end], rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("size", [1, 2, 3])
def test_hidden_states(size):
    run_ranks(size, hidden_rank)


def parallel_ce_rank(rank):
    whole, labels = sample()
    labels[0, 2] = -100
    group, start, end = group_and_range(rank)
    flat = whole.reshape(-1, VOCAB).double()
    weights = torch.rand(2, 6, generator=torch.Generator().manual_seed(1))
    for smoothing in (0.0, 0.2):
        x = flat.clone().requires_grad_(True)
        expected = F.cross_entropy(x, labels.reshape(-1), reduction="none", label_smoothing=smoothing)
        (expected * weights.reshape(-1)).sum().backward()
        logits = shard(whole, start, end)
        before = logits.detach().clone()
        loss = te_parallel_ce.parallel_cross_entropy(logits, labels, smoothing, False, group)
        assert loss.shape == (2, 6)
        torch.testing.assert_close(loss.double(), expected.reshape(2, 6).detach(), rtol=1e-5, atol=1e-5)
        (loss * weights).sum().backward(retain_graph=True)
        gradient = x.grad.reshape(2, 6, VOCAB)[..., start:end]
        torch.testing.assert_close(logits.grad.double(), gradient, rtol=1e-5, atol=1e-6)
        (loss * weights).sum().backward()
        torch.testing.assert_close(logits.grad.double(), 2 * gradient, rtol=1e-5, atol=1e-6)
        assert torch.equal(before, logits.detach())
        mean = te_parallel_ce.CrossEntropyFunction.apply(logits, labels, smoothing, True, group)
        assert mean.dim() == 0
        torch.testing.assert_close(mean.double(), (expected.sum() / 11).detach(), rtol=1e-5, atol=1e-5)

    mask = torch.ones(2, 6)
    mask[1, 4] = 0
    kept = labels.clone()
    for reduction in ("none", "mean", "sum"):
        module = te_parallel_ce.TEParallelCrossEntropy(reduction=reduction, tp_group=group)
        loss = module(shard(whole, start, end), labels, mask)
        used = labels.masked_fill(mask == 0, -100).reshape(-1)
        expected = F.cross_entropy(flat, used, reduction=reduction)
        torch.testing.assert_close(loss.double().reshape(expected.shape), expected, rtol=1e-5, atol=1e-5)
    assert torch.equal(kept, labels)
    module = te_parallel_ce.TEParallelCrossEntropy(tp_group=group)
    loss = module(shard(whole, start, end), labels, num_label_tokens=7)
    expected = F.cross_entropy(flat, labels.reshape(-1), reduction="sum") / 7
    torch.testing.assert_close(loss.double(), expected, rtol=1e-5, atol=1e-5)
    nothing = te_parallel_ce.TEParallelCrossEntropy(reduction="mean", tp_group=group)(
        shard(whole, start, end), torch.full_like(labels, -100)
    )
    assert nothing.item() == 0.0


@pytest.mark.parametrize("size", [1, 2, 3])
def test_parallel_cross_entropy(size):
    run_ranks(size, parallel_ce_rank)


def test_constants_and_wrong_reduction():
    assert te_parallel_ce.HAVE_TE_PARALLEL_CE is True
    assert te_parallel_ce.MISSING_TE_PARALLEL_CE_MSG == ""
    whole, labels = sample()
    module = te_parallel_ce.TEParallelCrossEntropy(reduction="median")
    with pytest.raises(ValueError, match=r"Invalid reduction: median\. Use 'none', 'mean' or 'sum'\."):
        module(whole, labels)


def test_errors_name_what_is_wrong():
    whole, labels = sample()
    with pytest.raises(
        IndexError, match=r"label 96 at position \[1, 0\] is outside the vocabulary of 96 ids"
    ):
        vocab_parallel.cross_entropy(
            whole, labels.index_put((torch.tensor(1), torch.tensor(0)), torch.tensor(96))
        )
    with pytest.raises(ValueError, match="overwrite is 'never', 'backward' or 'forward', not 'now'"):
        vocab_parallel.cross_entropy(whole, labels, overwrite="now")
    with pytest.raises(ValueError, match="there is no score 'perplexity'"):
        vocab_parallel.token_scores(whole, labels, None, ("perplexity",))
    with pytest.raises(TypeError, match="logits of type Double are not supported"):
        vocab_parallel.cross_entropy(whole.double(), labels)


def test_overwritten_logits_refuse_a_second_backward():
    whole, labels = sample()
    leaf = whole.clone().requires_grad_(True)
    loss = vocab_parallel.cross_entropy(leaf * 1.0, labels, overwrite="backward")
    loss.backward(retain_graph=True)
    with pytest.raises(RuntimeError, match="the logits were overwritten by their gradient"):
        loss.backward()


def test_own_names_in_one_process():
    whole, labels = sample(dtype=torch.bfloat16)
    flat = whole.reshape(-1, VOCAB).float()
    result = vocab_parallel.cross_entropy_with_scores(
        whole, labels, None, ("log_probability", "log_sum_exp", "entropy", "argmax"), z_loss=1e-3
    )
    lse = torch.logsumexp(flat, -1)
    expected = F.cross_entropy(flat, labels.reshape(-1)) + 1e-3 * lse.pow(2).mean()
    torch.testing.assert_close(result.loss, expected, rtol=1e-5, atol=1e-5)
    torch.testing.assert_close(result.tokens.log_sum_exp.reshape(-1), lse, rtol=1e-5, atol=1e-5)
    assert torch.equal(result.tokens.argmax, whole.float().argmax(-1))
    value = vocab_parallel.log_probabilities(whole, labels)
    torch.testing.assert_close(value, result.tokens.log_probability)
    hidden, weight = torch.randn(3, 4), torch.randn(9, 4)
    loss, _ = vocab_parallel.linear_cross_entropy(hidden, weight, torch.tensor([0, 5, -100]))
    expected = F.cross_entropy(hidden @ weight.t(), torch.tensor([0, 5, -100]))
    torch.testing.assert_close(loss, expected, rtol=1e-5, atol=1e-5)
