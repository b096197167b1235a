"""The vocabulary's own names in Python, and the filters, against one process in float64."""

from __future__ import annotations

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from ranks import run_ranks
from tessera import vocab_parallel
from tessera.distributed import model_utils
from vocab_sample import VOCAB, group_and_range, sample, shard


def kept_ids(logits, top_k, top_p):
    """Which ids stay, by sorting whole rows: all equal ones if one of them does."""
    keep = torch.ones_like(logits, dtype=torch.bool)
    if top_k is not None and top_k != -1:
        keep &= logits >= logits.topk(min(top_k, logits.shape[-1]), -1).values[..., -1:]
    if top_p < 1.0:
        p = torch.softmax(logits.double().masked_fill(~keep, -torch.inf), -1)
        greater = (logits.unsqueeze(-2) > logits.unsqueeze(-1)).double()
        keep &= torch.einsum("...ij,...j->...i", greater, p) < top_p
    return keep


def sampling_rank(rank):
    group, start, end = group_and_range(rank)
    for dtype in (torch.float32, torch.bfloat16, torch.float16):
        whole, target = sample(dtype=dtype)
        whole[0, 0, :4] = whole[0, 0].max()  # ties
        whole[1, 2, 5:] = -torch.inf
        whole[1, 3] = 0.0
        whole[1, 3, ::2] = -0.0  # equal to the others
        target[0, 1], target[1, 2] = whole[0, 1].argmin(), 3
        target[0, 2] = -100
        for top_k, top_p in ((5, 1.0), (None, 0.7), (20, 0.5), (1, 1.0), (1000, 0.999), (-1, 1.0)):
            x = whole.double().requires_grad_(True)
            keep = kept_ids(whole.double(), top_k, top_p)
            log_p = torch.log_softmax(x.masked_fill(~keep, -torch.inf), -1)
            used = target.clamp_min(0).unsqueeze(-1)
            expected = log_p.gather(-1, used).squeeze(-1)
            expected = expected.detach().masked_fill(target == -100, 0.0)
            counts = target != -100  # one that was dropped has torch's gradient, too
            log_p.gather(-1, used).squeeze(-1)[counts].sum().backward()
            for chunk in (None, 2):
                logits = shard(whole, start, end)
                if chunk is None:
                    value = model_utils.DistributedLogprobWithSampling.apply(
                        logits, target, group, top_k, top_p
                    )
                else:
                    value = model_utils.ChunkedDistributedLogprobWithSampling.apply(
                        logits, target, group, top_k, top_p, chunk
                    )
                torch.testing.assert_close(value.double(), expected, rtol=1e-5, atol=1e-5)
                value.backward(torch.ones(()).expand_as(value))
                rounding = {torch.float32: 1e-5, torch.bfloat16: 8e-3, torch.float16: 2e-3}[dtype]
                torch.testing.assert_close(
                    logits.grad.double(), x.grad[..., start:end], rtol=rounding, atol=1e-6
                )
    # Whole rows, and the threshold itself.
    filtered, keep = model_utils.apply_top_k_top_p(whole, 5, 0.9)
    assert torch.equal(keep, kept_ids(whole.double(), 5, 0.9))
    assert torch.equal(filtered, whole.masked_fill(~keep, -torch.inf))
    smallest = vocab_parallel.smallest_kept_logit(whole[..., start:end], group, top_k=3)
    assert torch.equal(smallest, whole.float().topk(3, -1).values[..., -1])


@pytest.mark.parametrize("size", [1, 2, 3])
def test_sampling_filters(size):
    run_ranks(size, sampling_rank)


def test_sampling_errors():
    whole, labels = sample()
    with pytest.raises(ValueError, match=r"a top_p of 0 is not possible\. It lies in \(0, 1\]\."):
        vocab_parallel.sampled_log_probabilities(whole, labels, top_p=0.0)
    with pytest.raises(
        ValueError,
        match=r"^vocab\.smallest_kept_logit: a top_k of -2 is not possible\. Use 0 to keep all ids\.",
    ):
        vocab_parallel.smallest_kept_logit(whole, top_k=-2)
    with pytest.raises(IndexError, match=r"label 96 at position \[0, 0\]"):
        vocab_parallel.sampled_log_probabilities(whole, torch.full_like(labels, 96), top_k=2)


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
    targets = torch.tensor([0, 5, -100])
    loss = vocab_parallel.linear_cross_entropy(hidden, weight, targets)
    expected = F.cross_entropy(hidden @ weight.t(), targets)
    torch.testing.assert_close(loss, expected, rtol=1e-5, atol=1e-5)
    scores = vocab_parallel.linear_cross_entropy_with_scores(hidden, weight, targets, None, ("entropy",))
    torch.testing.assert_close(scores.loss, expected, rtol=1e-5, atol=1e-5)
    expected = torch.distributions.Categorical(logits=hidden @ weight.t()).entropy()
    torch.testing.assert_close(scores.tokens.entropy, expected, rtol=1e-5, atol=1e-5)


def ids_rank(rank):
    """Uneven shares: 96 ids on up to 5 ranks, and one more."""
    size = dist.get_world_size()
    group = dist.group.WORLD
    whole, _ = sample()
    whole = torch.cat([whole, torch.zeros(2, 6, 1)], -1)
    columns = vocab_parallel.columns_of(VOCAB + 1, group)
    shares = whole.tensor_split(size, -1)
    start = sum(share.shape[-1] for share in shares[:rank])
    assert columns == (start, start + shares[rank].shape[-1])
    ids = torch.randint(VOCAB + 1, (2, 6, 3), generator=torch.Generator().manual_seed(5))
    ids[0, 0] = torch.tensor([VOCAB, 7, VOCAB])
    ids[1, 1, 0] = -1
    used = ids.clamp_min(0)
    for function, value_of in (
        (vocab_parallel.logits_at, lambda x: x),
        (vocab_parallel.log_probabilities_at, lambda x: torch.log_softmax(x, -1)),
    ):
        logits = shard(whole, *columns)
        value = function(logits, ids, group, columns=columns, ignore_index=-1)
        x = whole.double().requires_grad_(True)
        expected = value_of(x).gather(-1, used).masked_fill(ids < 0, 0.0)
        torch.testing.assert_close(value.double(), expected.detach(), rtol=1e-5, atol=1e-5)
        value.sum().backward()
        expected.sum().backward()
        torch.testing.assert_close(logits.grad.double(), x.grad[..., slice(*columns)], rtol=1e-4, atol=1e-5)
        with pytest.raises(
            IndexError, match=r"id -1 at position \[1, 1, 0\] is outside the vocabulary of 97"
        ):
            function(logits, ids, group, columns=columns, check_labels=True)


@pytest.mark.parametrize("size", [1, 2, 3, 4])
def test_values_at_ids_of_uneven_shares(size):
    run_ranks(size, ids_rank)


def test_labels_that_stand_for_no_token_and_are_not_looked_at():
    whole, labels = sample()
    labels[0, 1] = 7
    value = vocab_parallel.sampled_log_probabilities(whole, labels, top_k=VOCAB, ignore_index=7)
    assert value[0, 1] == 0.0
    labels[0, 1] = VOCAB
    value = vocab_parallel.log_probabilities(whole, labels, check_labels=False)
    assert value[0, 1].isnan() and value.isnan().sum() == 1
    with pytest.raises(ValueError, match=r"vocab\.columns_of: a vocabulary of -1 ids cannot be dealt out\."):
        vocab_parallel.columns_of(-1)


def linear_rank(rank, dtype):
    """Bias and softcap, with the logits kept, made again in parts, and on ranks with uneven shares."""
    group = dist.group.WORLD
    vocab = VOCAB + 1
    generator = torch.Generator().manual_seed(8)
    hidden = torch.randn(7, 16, generator=generator).to(dtype)
    weight = torch.randn(vocab, 16, generator=generator).to(dtype)
    bias = torch.randn(vocab, generator=generator).to(dtype)
    labels = torch.randint(vocab, (7,), generator=generator)
    labels[2] = -100
    columns = vocab_parallel.columns_of(vocab, group)
    rounding = 1e-5 if dtype == torch.float32 else 2e-2

    def assert_near(value, expected):
        # 16-bit logits are off by that share of the largest, and so is what is made of them.
        error = (value.double() - expected.detach()).abs().max()
        assert error <= rounding * expected.abs().max(), (error, expected.abs().max())

    for softcap in (0.0, 5.0):
        for has_bias in (True, False):
            leaves = [t.double().requires_grad_(True) for t in (hidden, weight, bias)]
            logits = leaves[0] @ leaves[1].t() + (leaves[2] if has_bias else 0.0)
            if softcap:
                logits = softcap * torch.tanh(logits / softcap)
            for reduction in ("mean", "none"):
                for leaf in leaves:
                    leaf.grad = None
                expected = F.cross_entropy(logits, labels, reduction=reduction)
                factors = torch.arange(1.0, expected.numel() + 1).view(expected.shape)
                (expected * factors).sum().backward(retain_graph=True)
                for workspace in (None, 7 * 10 * hidden.element_size()):
                    h = hidden.clone().requires_grad_(True)
                    w, b = (t[slice(*columns)].clone().requires_grad_(True) for t in (weight, bias))
                    loss = vocab_parallel.linear_cross_entropy(
                        h,
                        w,
                        labels,
                        group,
                        columns=columns,
                        reduction=reduction,
                        workspace_bytes=workspace,
                        local_bias=b if has_bias else None,
                        softcap=softcap,
                    )
                    assert_near(loss, expected)
                    (loss * factors).sum().backward()
                    own = slice(*columns)
                    assert_near(h.grad, leaves[0].grad)
                    assert_near(w.grad, leaves[1].grad[own])
                    if has_bias:
                        assert_near(b.grad, leaves[2].grad[own])
    with pytest.raises(
        ValueError, match=r"linear_cross_entropy: a bias of shape \[2\] does not fit a weight"
    ):
        vocab_parallel.linear_cross_entropy(hidden, w, labels, group, columns=columns, local_bias=bias[:2])
    with pytest.raises(ValueError, match=r"a softcap of -1 is not possible\. Use 0 for none\."):
        vocab_parallel.linear_cross_entropy(hidden, w, labels, group, columns=columns, softcap=-1.0)


@pytest.mark.parametrize(
    ("size", "backend", "dtype"),
    [
        (1, "shm", torch.float32),
        (2, "gloo", torch.float32),
        (3, "shm", torch.float32),
        (2, "shm", torch.bfloat16),
    ],
)
def test_linear_form_with_bias_and_softcap(size, backend, dtype):
    run_ranks(size, linear_rank, dtype, backend=backend)
