"""Losses by Automodel's and Liger's names, whole and sharded, against their formulas in one process."""

from __future__ import annotations

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from ranks import run_ranks
from tessera import vocab_parallel
from tessera.loss.chunked_ce import ChunkedCrossEntropy
from tessera.loss.grpo import FusedLinearGRPOLoss
from tessera.loss.kd_loss import KDLoss
from tessera.loss.linear_ce import FusedLinearCrossEntropy
from tessera.loss.masked_ce import MaskedCrossEntropy
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Shard, distribute_tensor

WORLDS = [(1, "shm"), (2, "gloo"), (3, "shm")]
VOCAB = 25  # two and three ranks do not divide it


def tokens(vocab):
    generator = torch.Generator().manual_seed(3)
    whole = torch.randn(2, 6, vocab, generator=generator) * 2
    labels = torch.randint(vocab, (2, 6), generator=generator)
    labels[0, 1] = -100
    mask = torch.ones(2, 6)
    mask[1, 3] = 0
    return whole, labels, mask


def both(whole, mesh):
    """The logits as a DTensor, and as equal shares if there are any."""
    yield distribute_tensor(whole, mesh, [Shard(-1)]).requires_grad_(True), None
    ranks = mesh.size()
    if whole.shape[-1] % ranks == 0:
        own = whole.chunk(ranks, -1)[mesh.get_local_rank()].clone().requires_grad_(True)
        yield own, mesh.get_group()


def gradient_of(logits, mesh):
    if hasattr(logits.grad, "full_tensor"):
        return logits.grad.full_tensor()
    return torch.cat(list(torch.distributed.nn.functional.all_gather(logits.grad, mesh.get_group())), -1)


def cross_entropy_rank(rank):
    mesh = init_device_mesh("cpu", (dist.get_world_size(),), mesh_dim_names=("tp",))
    for vocab in (VOCAB, 24):
        whole, labels, mask = tokens(vocab)
        for used, given in ((labels, None), (labels.masked_fill(mask == 0, -100), mask)):
            for reduction, nums in (("sum", (None, 7, 0)), ("mean", (None,)), ("none", (None,))):
                for num in nums if given is None else nums[:1]:
                    x = whole.double().requires_grad_(True)
                    expected = F.cross_entropy(
                        x.flatten(0, 1), used.flatten(), reduction=reduction, ignore_index=-100
                    )
                    if num is not None:
                        expected = expected / num if num else expected * 0.0
                    expected.sum().backward()
                    for kind in (MaskedCrossEntropy, ChunkedCrossEntropy):
                        for logits, group in both(whole, mesh):
                            kept = labels.clone()
                            loss = kind(reduction=reduction, tp_group=group)(logits, labels, given, num)
                            assert torch.equal(labels, kept)
                            torch.testing.assert_close(
                                loss.double().flatten(), expected.detach().flatten(), rtol=1e-5, atol=1e-5
                            )
                            loss.sum().backward()
                            gradient = gradient_of(logits, mesh)
                            torch.testing.assert_close(gradient.double(), x.grad, rtol=1e-4, atol=1e-5)
    factors = torch.rand(2, 6, generator=torch.Generator().manual_seed(9))
    x = whole.double().requires_grad_(True)
    losses = F.cross_entropy(x.flatten(0, 1), labels.flatten(), reduction="none", ignore_index=-100)
    expected = (losses * factors.flatten()).sum() / 7
    expected.backward()
    for logits, group in both(whole, mesh):
        # -100 is what data sets pad with, whatever else is ignored.
        loss = MaskedCrossEntropy(tp_group=group, ignore_index=-5)(logits, labels, None, 7, factors)
        torch.testing.assert_close(loss.double(), expected.detach(), rtol=1e-5, atol=1e-5)
        loss.backward()
        torch.testing.assert_close(gradient_of(logits, mesh).double(), x.grad, rtol=1e-4, atol=1e-5)
    with pytest.raises(ValueError, match="num_label_tokens divides a sum, and the reduction is 'mean'"):
        MaskedCrossEntropy(reduction="mean")(whole, labels, None, 3)
    with pytest.raises(ValueError, match=r"MaskedCrossEntropy: weights of shape \[3\] do not fit labels"):
        MaskedCrossEntropy()(whole, labels, loss_weights=torch.ones(3))


@pytest.mark.parametrize(("size", "backend"), WORLDS)
def test_masked_and_chunked_cross_entropy(size, backend):
    run_ranks(size, cross_entropy_rank, backend=backend)


def test_gradients_in_the_place_of_logits():
    whole, labels, _ = tokens(VOCAB)
    x = whole.clone().requires_grad_(True)
    MaskedCrossEntropy()(x, labels).backward()
    leaf = whole.clone().requires_grad_(True)
    logits = leaf * 1.0
    MaskedCrossEntropy(inplace_grad=True, chunk_size=4)(logits, labels).backward()
    torch.testing.assert_close(leaf.grad, x.grad)
    torch.testing.assert_close(logits.detach(), x.grad)


def distillation_rank(rank):
    mesh = init_device_mesh("cpu", (dist.get_world_size(),), mesh_dim_names=("tp",))
    for vocab in (VOCAB, 24):
        whole, labels, _ = tokens(vocab)
        teacher = torch.randn(2, 6, vocab, generator=torch.Generator().manual_seed(4))
        for temperature in (1.0, 2.5):
            for num in (None, 20):
                x = whole.double().requires_grad_(True)
                valid = labels != -100
                divergence = F.kl_div(
                    torch.log_softmax(x[valid] / temperature, -1),
                    torch.log_softmax(teacher.double()[valid] / temperature, -1),
                    reduction="none",
                    log_target=True,
                ).sum(-1) * (temperature**2)
                expected = divergence.mean() if num is None else divergence.sum() / num
                expected.backward()
                teachers = both(teacher, mesh)
                for (logits, group), (other, _) in zip(both(whole, mesh), teachers, strict=True):
                    loss = KDLoss(temperature=temperature, tp_group=group)(
                        logits, other.detach(), labels, num
                    )
                    torch.testing.assert_close(loss.double(), expected.detach(), rtol=1e-5, atol=1e-5)
                    loss.backward()
                    gradient = gradient_of(logits, mesh)
                    torch.testing.assert_close(gradient.double(), x.grad, rtol=1e-4, atol=1e-6)
    logits = distribute_tensor(whole, mesh, [Shard(-1)]).requires_grad_(True)
    loss = KDLoss()(logits, logits.detach(), torch.full_like(labels, -100))
    loss.backward()
    assert loss.item() == 0.0 and logits.grad.full_tensor().abs().max() == 0.0


@pytest.mark.parametrize(("size", "backend"), WORLDS)
def test_distillation(size, backend):
    run_ranks(size, distillation_rank, backend=backend)


def linear_rank(rank):
    size = dist.get_world_size()
    mesh = init_device_mesh("cpu", (size,), mesh_dim_names=("tp",))
    _, labels, _ = tokens(VOCAB)
    generator = torch.Generator().manual_seed(5)
    hidden = torch.randn(2, 6, 4, generator=generator)
    weight = torch.randn(VOCAB, 4, generator=generator)
    factors = torch.rand(2, 6, generator=generator)
    for cap in (0, 3.0):
        for given in (None, factors):
            w = weight.double().requires_grad_(True)
            logits = hidden.double() @ w.t()
            logits = cap * torch.tanh(logits / cap) if cap else logits
            losses = F.cross_entropy(logits.flatten(0, 1), labels.flatten(), reduction="none")
            expected = (losses * (1.0 if given is None else given.flatten())).sum() / 9
            expected.backward()
            rows = distribute_tensor(weight, mesh, [Shard(0)]).requires_grad_(True)
            kinds = [FusedLinearCrossEntropy(logit_softcapping=cap)]
            kinds += [] if cap else [ChunkedCrossEntropy(chunk_len=5)]
            for kind in kinds:
                rows.grad = None
                loss = kind(hidden, labels, rows, num_label_tokens=9, loss_weights=given)
                torch.testing.assert_close(loss.double(), expected.detach(), rtol=1e-5, atol=1e-5)
                loss.backward()
                torch.testing.assert_close(rows.grad.full_tensor().double(), w.grad, rtol=1e-4, atol=1e-5)
    kept = ChunkedCrossEntropy()(hidden, labels, rows, mask=labels == labels[0, 0])
    w = (hidden.double() @ weight.double().t()).flatten(0, 1)
    wanted = F.cross_entropy(w, labels.where(labels == labels[0, 0], -100).flatten(), reduction="sum")
    torch.testing.assert_close(kept.double().detach(), wanted, rtol=1e-5, atol=1e-5)
    # Ranks with tokens of their own, and a weight that only rests in shards.
    w = weight.double().requires_grad_(True)
    total = 0.0
    for other in range(size):
        own = labels.clamp_min(0).roll(other, 1)
        total = total + F.cross_entropy(
            (hidden.double() @ w.t()).flatten(0, 1), own.flatten(), reduction="sum"
        )
    (total / size).backward()
    rows = distribute_tensor(weight, mesh, [Shard(0)]).requires_grad_(True)
    own = labels.clamp_min(0).roll(rank, 1)
    FusedLinearCrossEntropy()(hidden, own, rows, grad_reduce_group=mesh.get_group()).backward()
    torch.testing.assert_close(rows.grad.full_tensor().double(), w.grad, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize(("size", "backend"), WORLDS)
def test_fused_linear_cross_entropy(size, backend):
    run_ranks(size, linear_rank, backend=backend)


def policy_loss(log_p, old, reference, gains, mask, beta, kind):
    """The formula of the project, one token after another."""
    rows = []
    for b in range(log_p.shape[0]):
        losses = []
        for t in range(log_p.shape[1]):
            if not mask[b, t]:
                continue
            ratio = torch.exp(log_p[b, t] - old[b, t])
            loss = -torch.min(ratio * gains[b], ratio.clamp(0.9, 1.3) * gains[b])
            distance = reference[b, t] - log_p[b, t]
            losses.append(loss + beta * (distance.exp() - distance - 1))
        rows.append(torch.stack(losses))
    if kind == "grpo":
        return torch.stack([row.mean() for row in rows]).mean()
    return torch.cat(rows).sum() / (mask.sum() if kind == "bnpo" else log_p.shape[0] * 10)


def policy_rank(rank):
    group = dist.group.WORLD
    size = group.size()
    mesh = init_device_mesh("cpu", (size,), mesh_dim_names=("tp",))
    generator = torch.Generator().manual_seed(6)
    hidden = torch.randn(3, 5, 4, generator=generator)
    weight, bias = torch.randn(VOCAB, 4, generator=generator), torch.randn(VOCAB, generator=generator)
    ids = torch.randint(VOCAB, (3, 5), generator=generator)
    mask = torch.ones(3, 5)
    mask[0, 3:] = 0
    gains = torch.tensor([1.0, -0.5, 0.3])
    old, reference = (
        torch.log_softmax(
            (hidden + 0.3 * torch.randn(3, 5, 4, generator=generator)) @ weight.t() + bias, -1
        ).gather(-1, ids.unsqueeze(-1)).squeeze(-1)
        for _ in range(2)
    )  # fmt: skip
    for kind in ("grpo", "bnpo", "dr_grpo"):
        for beta in (0.0, 0.2):
            h, w = hidden.double().requires_grad_(True), weight.double().requires_grad_(True)
            log_p = torch.log_softmax((h @ w.t() + bias.double()) / 0.9, -1)
            log_p = log_p.gather(-1, ids.unsqueeze(-1)).squeeze(-1)
            expected = policy_loss(log_p, old.double(), reference.double(), gains, mask, beta, kind)
            expected.backward()
            states = hidden.clone().requires_grad_(True)
            rows = distribute_tensor(weight, mesh, [Shard(0)]).requires_grad_(True)
            module = FusedLinearGRPOLoss(
                beta=beta,
                epsilon_low=0.1,
                epsilon_high=0.3,
                loss_type=kind,
                max_completion_length=10,
                temperature=0.9,
            )
            loss, metrics = module(
                states, rows, ids, mask, gains, distribute_tensor(bias, mesh, [Shard(0)]), reference, old
            )
            assert len(metrics) == (2 if beta else 1)
            torch.testing.assert_close(loss.double(), expected.detach(), rtol=1e-5, atol=1e-5)
            loss.backward()
            torch.testing.assert_close(states.grad.double(), h.grad, rtol=1e-4, atol=1e-5)
            torch.testing.assert_close(rows.grad.full_tensor().double(), w.grad, rtol=1e-4, atol=1e-5)
    module = FusedLinearGRPOLoss(beta=0.1)
    with pytest.raises(ValueError, match=r"a beta of 0\.1 needs ref_per_token_logps, or ref_input"):
        module(hidden, weight, ids, mask, gains)
    alike, _ = module(hidden, weight, ids, mask, gains, ref_input=hidden, ref_weight=weight)
    given = -vocab_parallel.linear_cross_entropy(hidden, weight, ids, reduction="none")
    assert torch.equal(alike, module(hidden, weight, ids, mask, gains, ref_per_token_logps=given)[0])
    with pytest.raises(ValueError, match="there is no loss type 'ppo'"):
        FusedLinearGRPOLoss(loss_type="ppo")


@pytest.mark.parametrize(("size", "backend"), WORLDS)
def test_policy_loss(size, backend):
    run_ranks(size, policy_rank, backend=backend)
