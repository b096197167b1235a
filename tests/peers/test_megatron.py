"""Megatron's own losses, and a GPTModel of its, against ours of the same names."""

from __future__ import annotations

import contextlib

import pytest
import torch
import torch.distributed as dist
from projects import need
from two_sides import OURS  # noqa: F401  # finds the helpers of the other tests

from ranks import run_ranks  # isort: skip

need("megatron")
VOCAB = 48


def megatron(context=1):
    """Set Megatron up on the CPU, its ranks for tensor parallelism and context; return the former's group."""
    torch._dynamo.config.disable = True  # its kernels are compiled where there is a GPU
    torch.cuda.current_device = lambda: "cpu"
    from megatron.core import parallel_state
    from megatron.core.tensor_parallel import random

    random.CudaRNGStatesTracker.fork = lambda self, name=None: contextlib.nullcontext()
    parallel_state.initialize_model_parallel(
        tensor_model_parallel_size=dist.get_world_size() // context, context_parallel_size=context
    )
    return parallel_state.get_tensor_model_parallel_group()


def own_part(whole, rank):
    return whole.chunk(dist.get_world_size(), -1)[rank].clone().requires_grad_(True)


def value_and_gradient(loss, leaf):
    weights = torch.arange(1.0, loss.numel() + 1).view(loss.shape)
    (loss * weights).sum().backward()
    return loss.detach(), leaf.grad


def losses(rank):
    group = megatron()
    from megatron.core.fusions.fused_cross_entropy import fused_vocab_parallel_cross_entropy as fused
    from megatron.core.tensor_parallel.cross_entropy import vocab_parallel_cross_entropy as plain
    from tessera.integrations import megatron as ours

    generator = torch.Generator().manual_seed(3)
    target = torch.randint(VOCAB, (7, 2), generator=generator)
    for dtype in (torch.float32, torch.bfloat16):
        whole = (torch.randn(7, 2, VOCAB, generator=generator) * 3).to(dtype)
        rounding = 1e-5 if dtype == torch.float32 else 2**-7
        # Megatron smooths by the ids of a rank, which is right on one.
        for smoothing in (0.0, 0.1) if dist.get_world_size() == 1 else (0.0,):
            leaf, mine = own_part(whole, rank), own_part(whole, rank)
            theirs = value_and_gradient(plain(leaf * 1.0, target, smoothing), leaf)
            found = value_and_gradient(ours.vocab_parallel_cross_entropy(mine, target, smoothing), mine)
            for a, b in zip(found, theirs, strict=True):
                torch.testing.assert_close(a.float(), b.float(), rtol=rounding, atol=rounding)
        leaf, mine = own_part(whole, rank), own_part(whole, rank)
        theirs = value_and_gradient(fused(leaf * 1.0, target, group), leaf)
        found = value_and_gradient(ours.fused_vocab_parallel_cross_entropy(mine, target, group), mine)
        assert found[1].dtype == theirs[1].dtype
        torch.testing.assert_close(found[0], theirs[0], rtol=1e-5, atol=1e-5)
        # Megatron's goes through bfloat16, whatever the logits are.
        torch.testing.assert_close(found[1].float(), theirs[1].float(), rtol=2**-7, atol=1e-5)


@pytest.mark.parametrize("world", [1, 2, 3])
def test_losses_agree(world):
    run_ranks(world, losses, backend="gloo")


def model_of(group):
    from megatron.core.models.gpt import GPTModel
    from megatron.core.models.gpt.gpt_layer_specs import get_gpt_layer_local_spec
    from megatron.core.transformer.transformer_config import TransformerConfig

    config = TransformerConfig(
        num_layers=2,
        hidden_size=16,
        num_attention_heads=4,
        tensor_model_parallel_size=group.size(),
        use_cpu_initialization=True,
        attention_dropout=0.0,
        hidden_dropout=0.0,
    )
    torch.manual_seed(5)
    return GPTModel(config, get_gpt_layer_local_spec(), vocab_size=VOCAB, max_sequence_length=8)


def step(model, ids, labels, **options):
    """Return a loss of every token and the gradients of all parameters."""
    model.zero_grad()
    places = torch.arange(ids.shape[1]).expand(ids.shape)
    hidden = torch.ones(1, 1, ids.shape[1], ids.shape[1]).tril() < 0.5
    value = model(ids, places, hidden, labels=labels, **options)
    weights = torch.arange(1.0, value.numel() + 1).view(value.shape)
    (value * weights).sum().backward()
    return value.detach(), [parameter.grad.clone() for parameter in model.parameters()]


def a_model(rank):
    group = megatron()
    from megatron.core import tensor_parallel
    from tessera.distributed.model_utils import patch_gpt_model_forward_for_linear_ce_fusion
    from tessera.integrations import megatron as ours

    model = model_of(group)
    generator = torch.Generator().manual_seed(4)
    ids = torch.randint(VOCAB, (2, 8), generator=generator)
    following = ids.roll(-1, 1)
    theirs = step(model, ids, following)
    assert "megatron.core.tensor_parallel.vocab_parallel_cross_entropy" in ours.install()
    assert tensor_parallel.vocab_parallel_cross_entropy is ours.vocab_parallel_cross_entropy
    found = step(model, ids, following)
    torch.testing.assert_close(found[0], theirs[0], rtol=2e-6, atol=2e-6)
    for a, b in zip(found[1], theirs[1], strict=True):
        torch.testing.assert_close(a, b, rtol=1e-4, atol=1e-5)

    # Without logits: what NeMo-RL makes of the model.
    patch_gpt_model_forward_for_linear_ce_fusion(chunk_size=4)
    fused = step(model, ids, ids, return_logprobs_for_linear_ce_fusion=True)
    torch.testing.assert_close(-fused[0], theirs[0][:, :-1], rtol=2e-6, atol=2e-6)
    untouched = step(model, ids, following)
    torch.testing.assert_close(untouched[0], theirs[0], rtol=2e-6, atol=2e-6)


@pytest.mark.parametrize("world", [1, 2])
def test_a_model_agrees(world):
    run_ranks(world, a_model, backend="gloo")


def a_cut_sequence(rank):
    group = megatron(context=2)
    from tessera.distributed.model_utils import patch_gpt_model_forward_for_linear_ce_fusion

    patch_gpt_model_forward_for_linear_ce_fusion(chunk_size=4)
    ids = torch.randint(VOCAB, (2, 8), generator=torch.Generator().manual_seed(4))
    with pytest.raises(ValueError, match="the model's sequences are cut over 2 context ranks"):
        step(model_of(group), ids, ids, return_logprobs_for_linear_ce_fusion=True)


def test_context_parallelism_is_refused():
    run_ranks(2, a_cut_sequence, backend="gloo")
