"""verl's own log-probabilities and entropies against ours of the same names."""

from __future__ import annotations

import pytest
import torch
import torch.distributed as dist
from projects import need, only_files_of, stand_in
from two_sides import OURS  # noqa: F401  # finds the helpers of the other tests

from ranks import run_ranks  # isort: skip

need("verl")
need("megatron")
VOCAB = 48


def verl():
    """Return verl's two modules, Megatron's groups being all ranks."""
    torch._dynamo.config.disable = True
    torch.cuda.current_device = lambda: "cpu"
    from megatron.core import parallel_state

    parallel_state.initialize_model_parallel(tensor_model_parallel_size=dist.get_world_size())
    only_files_of("verl", "utils", "utils.megatron")
    for name in ("transformers", "tensordict", "verl.utils.device"):
        stand_in(name)
    import verl.utils.megatron.tensor_parallel as sharded
    import verl.utils.torch_functional as whole

    return sharded, whole


def agree(ours, theirs, logits, *rest):
    """Compare values and gradients; the logits they get are their own, which theirs may destroy."""
    found = []
    for function in (ours, theirs):
        leaf = logits.clone().requires_grad_(True)
        value = function(leaf * 1.0, *rest)
        weights = torch.arange(1.0, value.numel() + 1).view(value.shape)
        (value * weights).sum().backward()
        found.append((value.detach(), leaf.grad))
    for mine, expected in zip(*found, strict=True):
        torch.testing.assert_close(mine, expected, rtol=1e-5, atol=1e-5)


def compare(rank):
    sharded, whole = verl()
    from tessera.integrations import verl as ours

    generator = torch.Generator().manual_seed(3)
    logits = torch.randn(2, 7, VOCAB, generator=generator) * 3
    labels = torch.randint(VOCAB, (2, 7), generator=generator)
    mine = logits.chunk(dist.get_world_size(), -1)[rank]
    agree(ours.vocab_parallel_entropy, sharded.vocab_parallel_entropy, mine)
    agree(
        ours.vocab_parallel_log_probs_from_logits, sharded.vocab_parallel_log_probs_from_logits, mine, labels
    )
    agree(ours.logprobs_from_logits, whole.logprobs_from_logits, logits, labels)
    agree(ours.entropy_from_logits, whole.entropy_from_logits, logits)
    # These two have no gradient of their own in verl: values alone.
    for name, theirs, own in (
        ("vocab_parallel_entropy_with_chunking", sharded, mine),
        ("vocab_parallel_sum_pi_squared", sharded, mine),
        ("entropy_from_logits_with_chunking", whole, logits.flatten(0, 1)),
    ):
        found = [getattr(side, name)(own.clone()) for side in (ours, theirs)]
        torch.testing.assert_close(*found, rtol=1e-5, atol=1e-5)

    done = ours.install()
    assert {
        f"verl.utils.megatron.tensor_parallel.{name}" for name in vars(sharded) if name in ours.__all__
    } <= set(done)
    assert sharded.vocab_parallel_entropy is ours.vocab_parallel_entropy
    assert whole.logprobs_from_logits is ours.logprobs_from_logits


@pytest.mark.parametrize("world", [1, 2, 3])
def test_functions_agree(world):
    run_ranks(world, compare, backend="gloo")
