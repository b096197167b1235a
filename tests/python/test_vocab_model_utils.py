"""The names of distributed.model_utils in Python against one process in float64."""

from __future__ import annotations

import pytest
import torch
from ranks import run_ranks
from tessera import vocab_parallel
from tessera.distributed import model_utils
from vocab_sample import VOCAB, group_and_range, reference_logprob, sample, shard


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

    # Every place scores its own token, also behind shorter tokens.
    for function in ("from_parallel_logits_to_logprobs", "dtensor_from_parallel_logits_to_logprobs"):
        for count in (6, 5):
            logits = shard(whole, start, end)
            value = getattr(model_utils, function)(
                logits, target[:, :count], start, end, group, shift_targets=False
            )
            expected = reference_logprob(whole[:, :count], target[:, :count])
            torch.testing.assert_close(value.double(), expected, rtol=1e-5, atol=1e-5)
            (value * weights[:, :count]).sum().backward()
            x = whole.double().requires_grad_(True)
            (reference_logprob(x[:, :count], target[:, :count]) * weights[:, :count]).sum().backward()
            torch.testing.assert_close(logits.grad.double(), x.grad[..., start:end], rtol=1e-5, atol=1e-6)

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

    logits = shard(whole, start, end)
    value = model_utils.gather_vocab_parallel_logprobs_at_indices(
        logits, ids, group, vocab_start_index=start, vocab_end_index=end
    )
    torch.testing.assert_close(value.double(), log_p.gather(-1, ids), rtol=1e-5, atol=1e-5)
    value.sum().backward()
    torch.testing.assert_close(logits.grad.double(), x.grad[..., start:end], rtol=1e-4, atol=1e-5)
    with pytest.raises(IndexError, match="gather_vocab_parallel_logprobs_at_indices"):
        model_utils.gather_vocab_parallel_logprobs_at_indices(
            logits, ids + VOCAB, group, vocab_start_index=start, vocab_end_index=end
        )


@pytest.mark.parametrize("size", [1, 2, 4])
def test_scores_and_choices(size):
    run_ranks(size, scores_rank)


def test_sixteen_bit_log_softmax_is_rounded_once():
    for dtype, half_unit in ((torch.bfloat16, 2**-8), (torch.float16, 2**-11)):
        whole, _ = sample(dtype=dtype)
        exact = torch.log_softmax(whole.double(), -1)
        value = model_utils._compute_distributed_log_softmax(whole, None)
        assert value.dtype == dtype
        assert ((value.double() - exact).abs() <= half_unit * exact.abs() + 1e-6).all()


def test_sixteen_bit_gradients_are_rounded_once():
    for dtype in (torch.bfloat16, torch.float16):
        generator = torch.Generator().manual_seed(11)
        logits = (torch.randn(32, 4096, generator=generator) * 3).to(dtype).requires_grad_(True)
        target = torch.randint(4096, (32,), generator=generator)
        model_utils.DistributedLogprob.apply(logits, target, 0, 4096, None).sum().backward()
        exact = -torch.softmax(logits.detach().double(), -1)
        exact[torch.arange(32), target] += 1
        # In float32 an exponential is off by 2e-7, which moves a few in 100,000 over a tie.
        differs = logits.grad != exact.to(dtype)
        assert differs.double().mean() < 1e-4
        steps = logits.grad.view(torch.int16).int() - exact.to(dtype).view(torch.int16).int()
        assert steps.abs().max() <= 1


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
    # Labels of a part of the sequence do not say what follows it.
    for cut in (
        {"pg_collection": types.SimpleNamespace(tp=None, cp=types.SimpleNamespace(size=lambda: 2))},
        {"config": types.SimpleNamespace(sequence_parallel=False, context_parallel_size=2)},
    ):
        one = GPTModel()
        vars(one).update(cut)
        with pytest.raises(ValueError, match=r"cut over 2 context ranks, .* Use context_parallel_size=1"):
            one.forward(tokens, None, None, return_logprobs_for_linear_ce_fusion=True)
        assert one.forward(tokens, None, None).shape == (5, 2, VOCAB)
