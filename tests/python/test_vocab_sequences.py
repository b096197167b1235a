"""Sequences that are packed, or cut over a context group, in Python."""

from __future__ import annotations

import pytest
import torch
import torch.distributed as dist
from ranks import run_ranks
from tessera.distributed import model_utils
from vocab_sample import VOCAB, group_and_range, reference_logprob, sample, shard


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

    # Every place scores its own token.
    x = whole.double().requires_grad_(True)
    expected = reference_logprob(x[:, : length - 2], target)
    logits = shard(part, start, end)
    value = model_utils.from_parallel_logits_to_logprobs(
        logits, target, start, end, tp, cp_group=cp, shift_targets=False
    )
    torch.testing.assert_close(value.double(), expected.detach(), rtol=1e-5, atol=1e-5)
    (value.sum() / cp_size).backward()
    expected.sum().backward()
    own_gradient(logits, x.grad)

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
    own.grad = None
    value = model_utils.dtensor_from_parallel_logits_to_logprobs(
        own, tokens, start, end, mesh.get_group("tp"), seq_index=seq_index, shift_targets=False
    )
    torch.testing.assert_close(value.double(), reference_logprob(whole, target), rtol=1e-5, atol=1e-5)
    value.sum().backward()
    x = whole.double().requires_grad_(True)
    reference_logprob(x, target).sum().backward()
    torch.testing.assert_close(own.grad.double(), x.grad[:, places][..., start:end], rtol=1e-5, atol=1e-6)
    assert DTensor.from_local(target, mesh["cp"], [Replicate()]).shape == target.shape
    with pytest.raises(ValueError, match="a target sharded over 'cp' needs seq_index"):
        model_utils.dtensor_from_parallel_logits_to_logprobs(own, tokens, start, end, mesh.get_group("tp"))


def test_dtensors():
    run_ranks(4, dtensor_rank, backend="gloo")


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


class Sharder:
    """Parts of a sequence as a context group has them, padded to fit."""

    def __init__(self, length, group):
        self.group, self.length = group, length
        step = 2 * group.size()
        self.padded = -(-length // step) * step

    def shard_token_tensor(self, tensor, *, seq_dim, fill):
        padding = tensor.new_full((tensor.shape[0], self.padded - self.length), fill)
        whole = torch.cat([tensor, padding], seq_dim)
        return parts_of(whole, self.group.rank(), self.group.size(), seq_dim)

    def gather_token_tensor(self, tensor, *, seq_dim, trim):
        whole = model_utils.allgather_cp_sharded_tensor(tensor, self.group, seq_dim)
        return whole[:, : self.length] if trim else whole


def sharder_rank(rank):
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.tensor import DTensor, Shard

    size = dist.get_world_size()
    tp_size = 2 if size == 4 else 1
    mesh = init_device_mesh("cpu", (size // tp_size, tp_size), mesh_dim_names=("cp", "tp"))
    cp, cp_rank = mesh.get_group("cp"), mesh.get_local_rank("cp")
    tp_rank = mesh.get_local_rank("tp")
    whole, target = sample((2, 11))
    sharder = Sharder(11, cp)
    padded = torch.cat([whole, torch.zeros(2, sharder.padded - 11, VOCAB)], 1)
    share = VOCAB // tp_size
    own = parts_of(padded, cp_rank, cp.size())[..., tp_rank * share : (tp_rank + 1) * share]
    own = own.clone().requires_grad_(True)
    x = padded.double().requires_grad_(True)
    expected = reference_logprob(x[:, :10], target[:, 1:])
    expected.sum().backward()
    logits = DTensor.from_local(own, mesh["tp"], [Shard(2)], run_check=False) if tp_size > 1 else own
    for params in (None, model_utils.TrainingSamplingParams(top_k=VOCAB)):
        own.grad = None
        value = model_utils.get_cp_sharded_next_token_logprobs(
            logits, target, sharder, sampling_params=params
        )
        torch.testing.assert_close(value.double(), expected.detach(), rtol=1e-5, atol=1e-5)
        (value.sum() / cp.size()).backward()
        part = parts_of(x.grad, cp_rank, cp.size())[..., tp_rank * share : (tp_rank + 1) * share]
        torch.testing.assert_close(own.grad.double(), part, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("size", [1, 2, 4])
def test_a_layout_of_its_own(size):
    run_ranks(size, sharder_rank, backend="gloo")
