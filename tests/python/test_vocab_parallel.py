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
            counts = keep.gather(-1, used).squeeze(-1) & (target != -100) & expected.isfinite()
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


def test_sixteen_bit_log_softmax_is_rounded_once():
    for dtype, half_unit in ((torch.bfloat16, 2**-8), (torch.float16, 2**-11)):
        whole, _ = sample(dtype=dtype)
        exact = torch.log_softmax(whole.double(), -1)
        value = model_utils._compute_distributed_log_softmax(whole, None)
        assert value.dtype == dtype
        assert ((value.double() - exact).abs() <= half_unit * exact.abs() + 1e-6).all()


def test_backward_returns_what_the_reference_page_says():
    logits, target = sample()

    class Context:
        pass

    ctx = Context()
    value = model_utils.DistributedLogprob.forward(ctx, logits, target, 0, VOCAB, None)
    gradients = model_utils.DistributedLogprob.backward(ctx, torch.ones_like(value))
    assert len(gradients) == 7 and gradients[1:] == (None,) * 6
    # Many tensors of one graph: numeric derivatives, in steps that float32 can tell apart.
    x = (torch.randn(3, 5) * 2).requires_grad_(True)
    ids = torch.tensor([1, 4, 0])
    for function in (
        lambda t: vocab_parallel.log_probabilities(t, ids),
        lambda t: vocab_parallel.cross_entropy(t, ids, label_smoothing=0.1, z_loss=0.01, reduction="none"),
        lambda t: vocab_parallel.token_scores(t, None, None, ("entropy",)).entropy,
        lambda t: vocab_parallel.log_softmax(t),
        lambda t: vocab_parallel.sampled_log_probabilities(t, ids, top_k=5),
    ):
        assert torch.autograd.gradcheck(function, x, eps=1e-2, atol=2e-3, rtol=1e-2, nondet_tol=0.0)


def test_sampling_errors():
    whole, labels = sample()
    with pytest.raises(ValueError, match=r"a top_p of 0 is not possible\. It lies in \(0, 1\]\."):
        vocab_parallel.sampled_log_probabilities(whole, labels, top_p=0.0)
    with pytest.raises(ValueError, match=r"a top_k of -2 is not possible\. Use 0 to keep all ids\."):
        vocab_parallel.smallest_kept_logit(whole, top_k=-2)
    with pytest.raises(IndexError, match=r"label 96 at position \[0, 0\]"):
        vocab_parallel.sampled_log_probabilities(whole, torch.full_like(labels, 96), top_k=2)


def parts_of(whole, rank, size, dim=1):
    """Pieces r and 2 n - 1 - r, by cutting."""
    pieces = whole.chunk(2 * size, dim)
    return torch.cat([pieces[rank], pieces[2 * size - 1 - rank]], dim)


def context_rank(rank, tp_size):
    """A world of context x vocabulary ranks; the vocabulary's are neighbours."""
    world = dist.get_world_size()
    cp_size = world // tp_size
    tp_groups = [dist.new_group(range(i * tp_size, (i + 1) * tp_size)) for i in range(cp_size)]
    cp_groups = [dist.new_group(range(i, world, tp_size)) for i in range(tp_size)]
    cp_rank, tp_rank = divmod(rank, tp_size)
    tp, cp = tp_groups[cp_rank], cp_groups[tp_rank]
    share = VOCAB // tp_size
    start, end = tp_rank * share, (tp_rank + 1) * share

    length = 12 * cp_size // 2  # two more than the tokens
    whole, _ = sample((2, length))
    target = torch.randint(VOCAB, (2, length - 2), generator=torch.Generator().manual_seed(8))
    weights = torch.rand(2, length - 3, generator=torch.Generator().manual_seed(9))
    x = whole.double().requires_grad_(True)
    expected = reference_logprob(x[:, : length - 3], target[:, 1:])
    (expected * weights).sum().backward()

    def own_gradient(logits, gradient):
        expected_part = parts_of(gradient, cp_rank, cp_size)[..., start:end]
        torch.testing.assert_close(logits.grad.double(), expected_part, rtol=1e-5, atol=1e-6)

    part = parts_of(whole, cp_rank, cp_size)
    logits = shard(part, start, end)
    value = model_utils.from_parallel_logits_to_logprobs(logits, target, start, end, tp, cp_group=cp)
    torch.testing.assert_close(value.double(), expected.detach(), rtol=1e-5, atol=1e-5)
    # Every context rank computes the same loss, and their gradients are added up.
    ((value * weights).sum() / cp_size).backward()
    own_gradient(logits, x.grad)
    filtered = model_utils.from_parallel_logits_to_logprobs(
        logits, target, start, end, tp, True, cp, None, model_utils.TrainingSamplingParams(top_k=VOCAB - 1)
    )
    one = model_utils.from_parallel_logits_to_logprobs(
        whole[:, : length - 2],
        target,
        0,
        VOCAB,
        sampling_params=model_utils.TrainingSamplingParams(top_k=VOCAB - 1),
    )
    torch.testing.assert_close(filtered, one, rtol=1e-5, atol=1e-5)

    # Packed: every sequence is cut by itself.
    lengths = [2 * cp_size, 6 * cp_size, 4 * cp_size]
    starts = torch.tensor([0, *torch.tensor(lengths).cumsum(0).tolist()])
    packed, tokens = sample((1, sum(lengths)), seed=11)
    own = torch.cat([parts_of(s, cp_rank, cp_size) for s in packed.split(lengths, 1)], 1)
    logits = shard(own, start, end)
    width = 6 * cp_size
    arguments = (starts, width, start, end, tp)
    value = model_utils.from_parallel_logits_to_logprobs_packed_sequences(
        logits, tokens, *arguments, cp_group=cp
    )
    alone = model_utils.from_parallel_logits_to_logprobs_packed_sequences(
        packed, tokens, starts, width, 0, VOCAB
    )
    torch.testing.assert_close(value, alone, rtol=1e-5, atol=1e-5)
    (value.sum() / cp_size).backward()
    x = packed.clone().requires_grad_(True)
    model_utils.from_parallel_logits_to_logprobs_packed_sequences(
        x, tokens, starts, width, 0, VOCAB
    ).sum().backward()
    gradient = torch.cat([parts_of(s, cp_rank, cp_size) for s in x.grad.split(lengths, 1)], 1)
    torch.testing.assert_close(logits.grad, gradient[..., start:end], rtol=1e-5, atol=1e-6)
    rolled = torch.cat([parts_of(s.roll(-1, 1), cp_rank, cp_size) for s in tokens.split(lengths, 1)], 1)
    again = model_utils.from_parallel_logits_to_logprobs_packed_sequences(
        logits, rolled, *arguments, cp_group=cp, target_is_pre_rolled=True
    )
    assert torch.equal(again, value)

    # Ids of the whole sequence, logits of a part of it.
    ids = torch.randint(VOCAB, (2, length - 2, 3), generator=torch.Generator().manual_seed(5))
    logits = shard(part, start, end)
    picked = model_utils.gather_logits_at_global_indices(
        logits, ids, tp, cp, vocab_start_index=start, vocab_end_index=end
    )
    assert torch.equal(picked, whole[:, : length - 2].gather(-1, ids))
    (picked.sum() / cp_size).backward()
    x = whole.double().requires_grad_(True)
    x[:, : length - 2].gather(-1, ids).sum().backward()
    own_gradient(logits, x.grad)

    # Distillation: over the whole vocabulary, and among the ids.
    teacher = torch.randn(2, length - 2, 3, generator=torch.Generator().manual_seed(6))
    for outside in (True, False):
        logits = shard(part, start, end)
        student, teacher_logprobs, minus_entropy = model_utils.get_distillation_topk_logprobs_from_logits(
            logits, teacher, ids, outside, outside, tp_rank, tp, cp
        )
        x = whole.double().requires_grad_(True)
        log_p = torch.log_softmax(x[:, : length - 2], -1)
        expected = log_p.gather(-1, ids)
        if not outside:
            expected = torch.log_softmax(x[:, : length - 2].gather(-1, ids), -1)
        expected = expected[:, :-1]
        torch.testing.assert_close(student.double(), expected.detach(), rtol=1e-5, atol=1e-5)
        torch.testing.assert_close(teacher_logprobs, torch.log_softmax(teacher, -1)[:, :-1])
        loss, expected_loss = student.sum(), expected.sum()
        if outside:
            expected = (log_p.exp() * log_p).sum(-1)[:, :-1]
            torch.testing.assert_close(minus_entropy.double(), expected.detach(), rtol=1e-5, atol=1e-5)
            loss, expected_loss = loss + minus_entropy.sum(), expected_loss + expected.sum()
        else:
            assert minus_entropy is None
        (loss / cp_size).backward()
        expected_loss.backward()
        expected_part = parts_of(x.grad, cp_rank, cp_size)[..., start:end]
        torch.testing.assert_close(logits.grad.double(), expected_part, rtol=1e-4, atol=1e-5)

    # Hidden states, sharded over context and vocabulary ranks.
    generator = torch.Generator().manual_seed(4)
    hidden = torch.randn(length, 2, 8, generator=generator)
    weight = torch.randn(VOCAB, 8, generator=generator) * 0.3
    mine = parts_of(hidden, cp_rank, cp_size, 0).chunk(tp_size, 0)[tp_rank].clone().requires_grad_(True)
    value = model_utils.from_parallel_hidden_states_to_logprobs(
        mine, weight[start:end], False, target, start, end, tp, cp_group=cp
    )
    h = hidden.double().requires_grad_(True)
    expected = reference_logprob((h @ weight.double().t()).transpose(0, 1)[:, : length - 3], target[:, 1:])
    torch.testing.assert_close(value.double(), expected.detach(), rtol=1e-4, atol=1e-4)
    (value.sum() / cp_size).backward()
    expected.sum().backward()
    own = parts_of(h.grad, cp_rank, cp_size, 0).chunk(tp_size, 0)[tp_rank]
    torch.testing.assert_close(mine.grad.double(), own, rtol=1e-4, atol=1e-4)

    # Layouts.
    rows = torch.arange(2.0 * length).view(2, length)
    assert torch.equal(
        model_utils._get_tokens_on_this_cp_rank(rows, cp_rank, cp_size), parts_of(rows, cp_rank, cp_size)
    )
    leaf = parts_of(rows, cp_rank, cp_size).requires_grad_(True)
    gathered = model_utils.AllGatherCPTensor.apply(leaf, cp, 1)
    assert torch.equal(gathered, rows)
    seed = torch.ones_like(gathered) * (cp_rank + 1)
    gathered.backward(seed)
    assert torch.equal(leaf.grad, torch.full_like(leaf, cp_size * (cp_size + 1) / 2))
    assert torch.equal(seed, torch.full_like(seed, cp_rank + 1))
    window = model_utils.cp_load_balanced_to_contiguous(leaf, cp_group=cp)
    assert torch.equal(window, rows.chunk(cp_size, 1)[cp_rank])
    after = model_utils.cp_shift_next(rows.chunk(cp_size, 1)[cp_rank], cp, fill=-1)
    shifted = torch.cat([rows[:, 1:], torch.full((2, 1), -1.0)], 1)
    assert torch.equal(after, shifted.chunk(cp_size, 1)[cp_rank])
    if cp_size > 1:
        text = r"sequence 0 has \d+ places, which \d ranks cannot share in two pieces each"
        with pytest.raises(ValueError, match=text):
            model_utils._get_tokens_on_this_cp_rank(rows[:, :-1], cp_rank, cp_size)
        text = r"logits of shape .* on \d context ranks do not fit tokens of shape"
        with pytest.raises(ValueError, match=text):
            model_utils.from_parallel_logits_to_logprobs(part[:, :1], target, start, end, tp, cp_group=cp)


@pytest.mark.parametrize(("size", "tp_size", "backend"), [(2, 1, "shm"), (4, 2, "shm"), (3, 1, "gloo")])
def test_context_parallel(size, tp_size, backend):
    run_ranks(size, context_rank, tp_size, backend=backend)


def whole_row_rank(rank):
    whole, _ = sample()
    group, start, end = group_and_range(rank)
    weights = torch.randn(2, 6, VOCAB, generator=torch.Generator().manual_seed(1))
    x = whole.double().requires_grad_(True)
    expected = torch.log_softmax(x / 0.7, -1)
    (expected * weights).sum().backward()
    for full in (False, True):
        logits = shard(whole, start, end)
        if full:
            value = model_utils.vocab_parallel_full_log_softmax(logits, 0.7, tp_group=group)
            torch.testing.assert_close(value.double(), expected.detach(), rtol=1e-5, atol=1e-5)
            (value * weights).sum().backward()
        else:
            value = model_utils.vocab_parallel_log_softmax(logits, 0.7, tp_group=group)
            torch.testing.assert_close(
                value.double(), expected.detach()[..., start:end], rtol=1e-5, atol=1e-5
            )
            (value * weights[..., start:end]).sum().backward()
        torch.testing.assert_close(logits.grad.double(), x.grad[..., start:end], rtol=1e-4, atol=1e-5)
    ids = torch.tensor([5, 90, 5, 47])
    columns = model_utils.vocab_parallel_gather_columns(logits, ids, tp_group=group)
    assert torch.equal(columns, whole[..., ids])
    assert torch.equal(model_utils.vocab_parallel_argmax(logits, tp_group=group), whole.argmax(-1))
    p = model_utils._compute_distributed_softmax(logits, group)
    torch.testing.assert_close(p, torch.softmax(whole, -1)[..., start:end], rtol=1e-5, atol=1e-7)
    assert model_utils._compute_distributed_log_softmax_with_grad(logits, group).requires_grad

    rows = whole.reshape(-1, VOCAB)
    leaf = shard(rows, start, end)
    dealt = model_utils.all_to_all_vp2sq(leaf, group)
    size = group.size()
    assert torch.equal(dealt, rows.chunk(size, 0)[rank])
    assert torch.equal(model_utils.all_to_all_sq2vp(dealt, group), leaf)
    factors = torch.arange(12.0).view(12, 1).expand(12, VOCAB)
    dealt.backward(factors.chunk(size, 0)[rank])
    assert torch.equal(leaf.grad, factors[:, start:end])

    addend = torch.full((2,), rank + 1.0, requires_grad=True)
    total = model_utils.group_all_reduce_sum_with_grad(addend, group)
    assert total.tolist() == [size * (size + 1) / 2] * 2
    total.sum().backward()
    assert addend.grad.tolist() == [1.0, 1.0]
    assert not model_utils.group_all_reduce_sum(addend, group).requires_grad or size == 1
    assert addend.tolist() == [rank + 1.0] * 2
    if size > 1:
        with pytest.raises(ValueError, match=r"cannot be dealt out to \d ranks"):
            model_utils.all_to_all_vp2sq(rows[:-1, start:end], group)


@pytest.mark.parametrize("size", [1, 2, 3])
def test_whole_rows_and_layouts(size):
    run_ranks(size, whole_row_rank)


def dtensor_rank(rank):
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.tensor import DTensor, Replicate, Shard

    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("cp", "tp"))
    cp_rank, tp_rank = divmod(rank, 2)
    whole, target = sample((2, 8))
    share = VOCAB // 2
    start, end = tp_rank * share, (tp_rank + 1) * share
    expected = reference_logprob(whole[:, :-1], target[:, 1:])
    logits = DTensor.from_local(whole[..., start:end].contiguous(), mesh["tp"], [Shard(2)], run_check=False)
    value = model_utils.get_logprobs_from_vocab_parallel_logits(logits, target)
    torch.testing.assert_close(value.double(), expected, rtol=1e-5, atol=1e-5)
    # Columns of the sequence in an order of their own, cut over the axis "cp".
    seq_index = torch.tensor([0, 1, 6, 7, 2, 3, 4, 5])
    places = seq_index.chunk(2)[cp_rank]
    own = whole[:, places][..., start:end].contiguous().requires_grad_(True)
    tokens = DTensor.from_local(target[:, places].contiguous(), mesh["cp"], [Shard(1)], run_check=False)
    value = model_utils.dtensor_from_parallel_logits_to_logprobs(
        own, tokens, start, end, mesh.get_group("tp"), seq_index=seq_index
    )
    torch.testing.assert_close(value.double(), expected, rtol=1e-5, atol=1e-5)
    value.sum().backward()
    x = whole.double().requires_grad_(True)
    reference_logprob(x[:, :-1], target[:, 1:]).sum().backward()
    torch.testing.assert_close(own.grad.double(), x.grad[:, places][..., start:end], rtol=1e-5, atol=1e-6)
    assert DTensor.from_local(target, mesh["cp"], [Replicate()]).shape == target.shape
    with pytest.raises(ValueError, match="a target sharded over 'cp' needs seq_index"):
        model_utils.dtensor_from_parallel_logits_to_logprobs(own, tokens, start, end, mesh.get_group("tp"))


def test_dtensors():
    run_ranks(4, dtensor_rank, backend="gloo")


def test_patched_gpt_model(monkeypatch):
    import sys
    import types

    with pytest.raises(ImportError, match=r"there is no megatron\.core to patch"):
        model_utils.patch_gpt_model_forward_for_linear_ce_fusion(chunk_size=4)

    class GPTModel:
        """Stands in for Megatron's: hidden states are the tokens' rows of a table."""

        post_process = True
        config = types.SimpleNamespace(sequence_parallel=False)
        pg_collection = types.SimpleNamespace(tp=None)

        def __init__(self):
            self.table = torch.randn(VOCAB, 4)
            self.output_layer = types.SimpleNamespace(weight=torch.randn(VOCAB, 4))

        def forward(self, input_ids, position_ids, attention_mask, labels=None):
            hidden = self.table[input_ids].transpose(0, 1)
            return hidden if not self.post_process else hidden @ self.output_layer.weight.t()

    module = types.ModuleType("megatron.core.models.gpt")
    module.GPTModel = GPTModel
    for name in ("megatron", "megatron.core", "megatron.core.models"):
        monkeypatch.setitem(sys.modules, name, types.ModuleType(name))
    monkeypatch.setitem(sys.modules, "megatron.core.models.gpt", module)
    for chunk_size in (2, 4):
        model_utils.patch_gpt_model_forward_for_linear_ce_fusion(chunk_size=chunk_size)
    model = GPTModel()
    tokens = torch.randint(VOCAB, (2, 5))
    logits = model.forward(tokens, None, None)
    assert logits.shape == (5, 2, VOCAB)
    value = model.forward(tokens, None, None, return_logprobs_for_linear_ce_fusion=True)
    expected = reference_logprob(logits.transpose(0, 1)[:, :-1], tokens[:, 1:])
    torch.testing.assert_close(value.double(), expected, rtol=1e-5, atol=1e-5)


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
