"""The vocabulary's functions inside torch.compile(fullgraph=True), against themselves outside."""

from __future__ import annotations

import pytest
import torch
import torch.distributed as dist
from ranks import run_ranks
from tessera import _vocab_ops, vocab_parallel
from tessera.distributed import model_utils
from tessera.loss import te_parallel_ce
from vocab_sample import sample

VOCAB = 97  # three ranks do not divide it


def functions(group, columns):
    def scores(x, y):
        found = vocab_parallel.cross_entropy_with_scores(
            x,
            y,
            group,
            ("log_probability", "entropy", "argmax"),
            columns=columns,
            reduction="none",
            label_smoothing=0.1,
            z_loss=1e-3,
        )
        assert found.tokens.log_sum_exp is None
        return found.loss + 2 * found.tokens.entropy + found.tokens.log_probability * found.tokens.argmax

    ids = torch.tensor([3, 90, 3])
    return {
        "cross_entropy": lambda x, y: vocab_parallel.cross_entropy(x, y, group, columns=columns),
        "overwrite": lambda x, y: vocab_parallel.cross_entropy(
            x, y, group, columns=columns, reduction="sum", vocab_size=VOCAB - 1
        ),
        "scores": scores,
        "log_probabilities": lambda x, y: vocab_parallel.log_probabilities(
            x, y, group, columns=columns, temperature=0.7
        ),
        "at": lambda x, y: vocab_parallel.log_probabilities_at(
            x, ids.expand(2, 6, 3), group, columns=columns
        ),
        "logits_at": lambda x, y: vocab_parallel.logits_at(x, ids.expand(2, 6, 3), group, columns=columns),
        "log_softmax": lambda x, y: vocab_parallel.log_softmax(x, group, columns=columns),
        "soft": lambda x, y: vocab_parallel.soft_cross_entropy(x, x.detach() * 0.5, group, columns=columns),
        "sampled": lambda x, y: vocab_parallel.sampled_log_probabilities(
            x, y, group, top_k=VOCAB - 3, top_p=0.999, columns=columns
        ).clamp_min(-100.0),
        "next token": lambda x, y: model_utils.from_parallel_logits_to_logprobs(
            x, y.clamp_min(0), *columns, group
        ),
        "own token": lambda x, y: model_utils.from_parallel_logits_to_logprobs(
            x, y.clamp_min(0), *columns, group, shift_targets=False
        ),
        "linear": lambda x, y: vocab_parallel.linear_cross_entropy(
            x[..., :8], x[0, :, :8], y.clamp(0, 5), None, local_bias=x[0, :, 1], softcap=9.0
        ),
    }


def compiled_rank(rank, backend):
    group = dist.group.WORLD
    columns = vocab_parallel.columns_of(VOCAB, group)
    whole, labels = sample()
    whole = torch.cat([whole, whole[..., :1] - 1], -1)
    labels[0, 3] = -100
    for name, function in functions(group, columns).items():
        torch._dynamo.reset()
        gradients, values = [], []
        for run in (function, torch.compile(function, fullgraph=True, backend=backend)):
            x = whole[..., slice(*columns)].clone().requires_grad_(True)
            value = run(x, labels)
            weights = torch.arange(1.0, value.numel() + 1).view(value.shape)
            (value * weights).sum().backward()
            values.append(value.detach())
            gradients.append(x.grad)
        assert torch.equal(*values), name
        torch.testing.assert_close(
            *gradients, rtol=1e-6, atol=1e-7, msg=lambda text, name=name: f"{name}: {text}"
        )


@pytest.mark.parametrize(("size", "engine"), [(1, "gloo"), (2, "shm"), (3, "gloo")])
def test_full_graphs(size, engine):
    # Compiling takes seconds on every rank, more on a loaded machine.
    run_ranks(size, compiled_rank, "aot_eager", backend=engine, env={"LIMIT": "120"}, limit=180)


def test_losses_of_the_reference():
    whole, labels = sample()
    labels[0, 3] = -100
    mask = torch.ones(2, 6)
    mask[1, 1] = 0
    for function in (
        lambda x: te_parallel_ce.parallel_cross_entropy(x, labels, 0.1),
        lambda x: te_parallel_ce.parallel_cross_entropy(x, labels, 0.0, True),
        lambda x: te_parallel_ce.TEParallelCrossEntropy()(x, labels, mask, num_label_tokens=7),
        lambda x: te_parallel_ce.TEParallelCrossEntropy(reduction="mean")(x, labels, mask),
    ):
        torch._dynamo.reset()
        results = []
        for run in (function, torch.compile(function, fullgraph=True, backend="aot_eager")):
            x = whole.clone().requires_grad_(True)
            value = run(x)
            value.sum().backward()
            results.append((value.detach(), x.grad))
        torch.testing.assert_close(results[0], results[1])


def test_logits_are_not_overwritten():
    whole, labels = sample()
    kept = whole.clone()
    for overwrite in ("backward", "forward"):
        torch._dynamo.reset()
        function = torch.compile(
            lambda x, overwrite=overwrite: vocab_parallel.cross_entropy(x, labels, overwrite=overwrite),
            fullgraph=True,
            backend="aot_eager",
        )
        leaf = whole.detach().requires_grad_(True)
        function(leaf).backward()
        assert torch.equal(whole, kept)
        plain = kept.clone().requires_grad_(True)
        vocab_parallel.cross_entropy(plain, labels).backward()
        assert torch.equal(leaf.grad, plain.grad)


def test_operators_have_shapes_and_gradients():
    x = torch.randn(3, 8, requires_grad=True)
    y = torch.tensor([1, 7, -100])
    words = (x, y, None, [True] * 4, None, None, -100, 1.0, 0, None, "never", "none", 0.1, 0.01)
    tests = ("test_schema", "test_faketensor", "test_autograd_registration", "test_aot_dispatch_static")
    torch.library.opcheck(_vocab_ops.cross_entropy.operator, words, test_utils=tests)
    words = (x, None, None, [False, True, True, True], [0, 8], 7, -100, 0.5, 0, None, "never")
    torch.library.opcheck(_vocab_ops.token_scores.operator, words, test_utils=tests)
    words = (x, y.clamp_min(0), None, 3, 1.0, None, None, -100, 1.0, None)
    torch.library.opcheck(_vocab_ops.sampled_log_probabilities.operator, words, test_utils=tests)
