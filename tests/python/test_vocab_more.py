"""Class weights, a given log-sum-exp, given sets of ids, squares, divergences: against one process."""

from __future__ import annotations

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from ranks import run_ranks
from tessera import vocab_parallel

VOCAB = 97
WORLDS = [(1, "shm"), (2, "gloo"), (3, "shm")]


def parts(group):
    generator = torch.Generator().manual_seed(5)
    whole = torch.randn(2, 6, VOCAB, generator=generator) * 3
    labels = torch.randint(VOCAB, (2, 6), generator=generator)
    labels[0, 2] = -100
    columns = vocab_parallel.columns_of(VOCAB, group)
    return whole, labels, columns, whole[..., slice(*columns)].clone().requires_grad_(True)


def assert_same(value, expected, leaf, x, columns, weights=None):
    torch.testing.assert_close(value.double(), expected.detach(), rtol=2e-5, atol=2e-5)
    if weights is None:
        weights = torch.arange(1.0, value.numel() + 1).view(value.shape)
    leaf.grad, x.grad = None, None
    (value * weights).sum().backward()
    (expected * weights).sum().backward()
    torch.testing.assert_close(leaf.grad.double(), x.grad[..., slice(*columns)], rtol=1e-4, atol=1e-4)


def logits_rank(rank):
    group = dist.group.WORLD
    whole, labels, columns, own = parts(group)
    x = whole.double().requires_grad_(True)
    generator = torch.Generator().manual_seed(6)
    factors = torch.rand(VOCAB, generator=generator)
    for reduction in ("none", "sum", "mean"):
        value = vocab_parallel.cross_entropy(
            own, labels, group, columns=columns, reduction=reduction, class_weights=factors
        )
        expected = F.cross_entropy(
            x.view(-1, VOCAB), labels.view(-1), weight=factors.double(), reduction=reduction
        )
        assert_same(value, expected.view(value.shape), own, x, columns)
    nothing = vocab_parallel.cross_entropy(
        own, torch.full_like(labels, -100), group, columns=columns, class_weights=factors
    )
    assert nothing.item() == 0.0
    with pytest.raises(ValueError, match="class weights and label smoothing do not go together"):
        vocab_parallel.cross_entropy(own, labels, group, class_weights=factors, label_smoothing=0.1)

    value = vocab_parallel.sum_of_squared_probabilities(own, group, columns=columns, temperature=0.8)
    assert_same(value, torch.softmax(x / 0.8, -1).square().sum(-1), own, x, columns)

    ids = torch.randint(VOCAB, (2, 6, 4), generator=generator)
    ids[1, 1, 2] = -100
    lse = vocab_parallel.token_scores(
        own, None, group, ("log_sum_exp",), columns=columns, temperature=0.8
    ).log_sum_exp
    value = vocab_parallel.log_probabilities_at(
        own, ids, group, columns=columns, temperature=0.8, log_sum_exp=lse
    )
    expected = torch.log_softmax(x / 0.8, -1).gather(-1, ids.clamp_min(0)).masked_fill(ids < 0, 0.0)
    assert_same(value, expected, own, x, columns)
    # One that is given is taken as it is.
    value = vocab_parallel.log_probabilities_at(
        own, ids, group, columns=columns, log_sum_exp=torch.zeros(2, 6)
    )
    assert_same(value, x.gather(-1, ids.clamp_min(0)).masked_fill(ids < 0, 0.0), own, x, columns)

    kept = torch.stack([torch.randperm(VOCAB, generator=generator)[:9] for _ in range(12)]).view(2, 6, 9)
    kept[..., 0] = torch.where(labels < 0, kept[..., 0], labels)
    kept[..., 1] = torch.where(kept[..., 1] == kept[..., 0], (kept[..., 1] + 1) % VOCAB, kept[..., 1])
    kept[..., 2:] = torch.where(kept[..., 2:] == kept[..., :1], -100, kept[..., 2:])
    kept[0, 0, 5] = -100
    value = vocab_parallel.kept_log_probabilities(own, labels, kept, group, columns=columns, temperature=0.8)
    mask = torch.zeros(2, 6, VOCAB + 1, dtype=torch.bool)
    mask.scatter_(-1, torch.where(kept < 0, VOCAB, kept), True)
    log_p = torch.log_softmax((x / 0.8).masked_fill(~mask[..., :VOCAB], -torch.inf), -1)
    expected = log_p.gather(-1, labels.clamp_min(0).unsqueeze(-1)).squeeze(-1).masked_fill(labels < 0, 0.0)
    assert_same(value, expected, own, x, columns)
    outside = vocab_parallel.kept_log_probabilities(
        own, labels, kept[..., 1:] * 0 - 100, group, columns=columns
    )
    assert outside[0, 0] == -torch.inf or outside[0, 0].isnan()
    other = labels.masked_fill(labels >= 0, int(kept[0, 0, 1]))
    outside = vocab_parallel.kept_log_probabilities(own, other, kept[..., :1], group, columns=columns)
    assert outside[0, 0] == -torch.inf and outside[0, 2] == 0.0


@pytest.mark.parametrize(("size", "backend"), WORLDS)
def test_logits(size, backend):
    run_ranks(size, logits_rank, backend=backend)


def divergence(p, q, beta):
    log_p, log_q = torch.log_softmax(p, -1), torch.log_softmax(q, -1)
    if beta == 0.0:
        return F.kl_div(log_q, log_p, reduction="none", log_target=True).sum(-1)
    if beta == 1.0:
        return F.kl_div(log_p, log_q, reduction="none", log_target=True).sum(-1)
    mixed = torch.log(beta * log_p.exp() + (1 - beta) * log_q.exp())
    return beta * F.kl_div(mixed, log_p, reduction="none", log_target=True).sum(-1) + (1 - beta) * F.kl_div(
        mixed, log_q, reduction="none", log_target=True
    ).sum(-1)


def divergence_rank(rank):
    group = dist.group.WORLD
    whole, _, columns, own = parts(group)
    teacher = torch.randn(2, 6, VOCAB, generator=torch.Generator().manual_seed(8)) * 2
    x = whole.double().requires_grad_(True)
    for beta in (0.0, 0.1, 0.5, 1.0):
        value = vocab_parallel.jensen_shannon_divergence(
            own, teacher[..., slice(*columns)], group, beta=beta, columns=columns, temperature=1.5
        )
        expected = divergence(teacher.double() / 1.5, x / 1.5, beta)
        assert_same(value, expected, own, x, columns)
    with pytest.raises(ValueError, match=r"a beta of 2\.0 is not between 0 and 1"):
        vocab_parallel.jensen_shannon_divergence(own, own, group, beta=2.0)


@pytest.mark.parametrize(("size", "backend"), WORLDS)
def test_divergences(size, backend):
    run_ranks(size, divergence_rank, backend=backend)


def hidden_rank(rank):
    group = dist.group.WORLD
    generator = torch.Generator().manual_seed(9)
    hidden = torch.randn(2, 5, 8, generator=generator)
    weight, bias = torch.randn(VOCAB, 8, generator=generator), torch.randn(VOCAB, generator=generator)
    ids = torch.randint(VOCAB, (2, 5, 3), generator=generator)
    ids[0, 1, 2] = -100
    columns = vocab_parallel.columns_of(VOCAB, group)
    for workspace in (None, 2000):
        h = hidden.clone().requires_grad_(True)
        w, b = (t[slice(*columns)].clone().requires_grad_(True) for t in (weight, bias))
        value = vocab_parallel.linear_log_probabilities_at(
            h, w, ids, group, columns=columns, temperature=0.7, workspace_bytes=workspace, local_bias=b
        )
        leaves = [t.double().requires_grad_(True) for t in (hidden, weight, bias)]
        logits = (leaves[0] @ leaves[1].t() + leaves[2]) / 0.7
        expected = torch.log_softmax(logits, -1).gather(-1, ids.clamp_min(0)).masked_fill(ids < 0, 0.0)
        torch.testing.assert_close(value.double(), expected.detach(), rtol=1e-5, atol=1e-4)
        factors = torch.arange(1.0, 31.0).view(2, 5, 3)
        (value * factors).sum().backward()
        (expected * factors).sum().backward()
        close = {"rtol": 1e-4, "atol": 1e-3}
        torch.testing.assert_close(h.grad.double(), leaves[0].grad, **close)
        torch.testing.assert_close(w.grad.double(), leaves[1].grad[slice(*columns)], **close)
        torch.testing.assert_close(b.grad.double(), leaves[2].grad[slice(*columns)], **close)


@pytest.mark.parametrize(("size", "backend"), WORLDS)
def test_hidden_states_at_ids(size, backend):
    run_ranks(size, hidden_rank, backend=backend)


def wrong_ids_rank(rank):
    group = dist.group.WORLD
    columns = vocab_parallel.columns_of(VOCAB, group)
    hidden, weight = torch.ones(2, 5, 8), torch.ones(columns[1] - columns[0], 8)
    right = torch.zeros(2, 5, 3, dtype=torch.long)
    right[0, 1, 2] = -100

    def scored(ids, **options):
        return vocab_parallel.linear_log_probabilities_at(
            hidden, weight, ids, group, columns=columns, **options
        )

    name = r"vocab\.linear_log_probabilities_at: "
    outside = name + r"id {} at position \[1, 3, 0\] is outside the vocabulary of {} ids\. Use -100 where"
    for wrong in (VOCAB, -1, 1000):
        ids = right.clone()
        ids[1, 3, 0] = wrong
        for vocab_size in (None, VOCAB):
            with pytest.raises(IndexError, match=outside.format(wrong, VOCAB)):
                scored(ids, vocab_size=vocab_size)
        unchecked = scored(ids, check_labels=False)
        assert unchecked[1, 3, 0].isnan() and unchecked.isnan().sum() == 1 and unchecked[0, 1, 2] == 0.0
        assert scored(ids, ignore_index=wrong, check_labels=False)[1, 3, 0] == 0.0
    ids = right.clone()
    ids[1, 3, 0] = 90
    assert scored(ids)[1, 3, 0] < 0.0
    with pytest.raises(IndexError, match=outside.format(90, 90)):  # padding
        scored(ids, vocab_size=90)
    with pytest.raises(IndexError, match=r"id -100 at position \[0, 1, 2\] .* Use -7 where there is no id"):
        scored(right, ignore_index=-7)
    with pytest.raises(ValueError, match=name + r"the ids have shape \[2, 4, 3\]"):
        scored(right[:, 1:])
    with pytest.raises(TypeError, match=name + r"the ids must be int64 or int32\."):
        scored(right.float())
    scored(right)  # the group goes on


@pytest.mark.parametrize(("size", "backend"), WORLDS)
def test_ids_outside_the_vocabulary(size, backend):
    run_ranks(size, wrong_ids_rank, backend=backend)


def other_ids_rank(rank):
    ids = torch.zeros(1, 2, 1, dtype=torch.long)
    ids[0, 1, 0] = rank
    with pytest.raises(ValueError, match=r"the labels of rank 1 are not those of rank 0\."):
        vocab_parallel.linear_log_probabilities_at(
            torch.ones(1, 2, 4), torch.ones(4, 4), ids, dist.group.WORLD
        )


def test_ids_that_differ_between_ranks():
    run_ranks(2, other_ids_rank)


def hidden_divergence_rank(rank):
    group = dist.group.WORLD
    generator = torch.Generator().manual_seed(11)

    def made(*shape):
        return torch.randn(*shape, generator=generator)

    hidden, weight, bias = made(2, 5, 8), made(VOCAB, 8), made(VOCAB)
    teacher, teacher_weight, teacher_bias = made(2, 5, 12), made(VOCAB, 12), made(VOCAB)
    columns = vocab_parallel.columns_of(VOCAB, group)
    own = slice(*columns)
    factors = torch.arange(1.0, 11.0).view(2, 5)
    for beta in (0.0, 0.1, 0.5, 1.0):
        # A workspace of one byte: every token is a part of its own. Ids from 90 on are padding.
        for workspace, vocab_size in ((None, VOCAB), (1, VOCAB), (8 * VOCAB * 4, 90)):
            h = hidden.clone().requires_grad_(True)
            w, b = (t[own].clone().requires_grad_(True) for t in (weight, bias))
            value = vocab_parallel.linear_jensen_shannon_divergence(
                h, w, teacher, teacher_weight[own], group, beta=beta, columns=columns, vocab_size=vocab_size,
                temperature=1.5, workspace_bytes=workspace, local_bias=b, local_target_bias=teacher_bias[own],
            )  # fmt: skip
            leaves = [t.double().requires_grad_(True) for t in (hidden, weight, bias)]
            student = (leaves[0] @ leaves[1].t() + leaves[2]) / 1.5
            target = (teacher.double() @ teacher_weight.double().t() + teacher_bias.double()) / 1.5
            expected = divergence(target[..., :vocab_size], student[..., :vocab_size], beta)
            torch.testing.assert_close(value.double(), expected.detach(), rtol=2e-5, atol=2e-5)
            (value * factors).sum().backward()
            (expected * factors).sum().backward()
            close = {"rtol": 1e-4, "atol": 1e-4}
            torch.testing.assert_close(h.grad.double(), leaves[0].grad, **close)
            torch.testing.assert_close(w.grad.double(), leaves[1].grad[own], **close)
            torch.testing.assert_close(b.grad.double(), leaves[2].grad[own], **close)
    divided = vocab_parallel.linear_jensen_shannon_divergence
    with pytest.raises(ValueError, match=r"a beta of -1 is not between 0 and 1"):
        divided(hidden, weight, hidden, weight, beta=-1)
    with pytest.raises(ValueError, match="Tokens and ids have to match"):
        divided(hidden, weight, hidden[:1], weight)


@pytest.mark.parametrize(("size", "backend"), WORLDS)
def test_divergence_of_hidden_states(size, backend):
    run_ranks(size, hidden_divergence_rank, backend=backend)


def test_divergence_of_hidden_states_holds_no_logits():
    sizes = []

    class Sizes(torch.utils._python_dispatch.TorchDispatchMode):
        def __torch_dispatch__(self, func, types, args=(), kwargs=None):
            found = func(*args, **(kwargs or {}))
            if isinstance(found, torch.Tensor):
                sizes.append(found.untyped_storage().nbytes())
            return found

    tokens, ids, workspace = 512, 2048, 2**18
    hidden, weight = torch.randn(tokens, 4, requires_grad=True), torch.randn(ids, 4, requires_grad=True)
    with Sizes():
        value = vocab_parallel.linear_jensen_shannon_divergence(
            hidden, weight, hidden.detach() + 1, weight.detach(), workspace_bytes=workspace
        )
        value.sum().backward()
    assert max(sizes) <= workspace < tokens * ids * 4
