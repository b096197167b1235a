"""The vocabulary's functions inside torch.compile(fullgraph=True), against themselves outside."""

from __future__ import annotations

import pathlib
import re

import pytest
import torch
import torch.distributed as dist
from ranks import run_ranks
from tessera import _vocab_ops, vocab_parallel
from tessera.distributed import model_utils
from tessera.loss import te_parallel_ce
from vocab_sample import sample

VOCAB = 97  # three ranks do not divide it
WITHOUT_GRADIENT = {"columns_of", "top_k", "smallest_kept_logit", "TokenScores", "CrossEntropyScores"}


def functions(group, columns):
    def scores(x, y, h):
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
        "cross_entropy": lambda x, y, h: vocab_parallel.cross_entropy(x, y, group, columns=columns),
        "overwrite": lambda x, y, h: vocab_parallel.cross_entropy(
            x, y, group, columns=columns, reduction="sum", vocab_size=VOCAB - 1
        ),
        "scores": scores,
        "log_probabilities": lambda x, y, h: vocab_parallel.log_probabilities(
            x, y, group, columns=columns, temperature=0.7
        ),
        "at": lambda x, y, h: vocab_parallel.log_probabilities_at(
            x, ids.expand(2, 6, 3), group, columns=columns
        ),
        "logits_at": lambda x, y, h: vocab_parallel.logits_at(x, ids.expand(2, 6, 3), group, columns=columns),
        "log_softmax": lambda x, y, h: vocab_parallel.log_softmax(x, group, columns=columns),
        "soft": lambda x, y, h: vocab_parallel.soft_cross_entropy(
            x, x.detach() * 0.5, group, columns=columns
        ),
        "sampled": lambda x, y, h: vocab_parallel.sampled_log_probabilities(
            x, y, group, top_k=VOCAB - 3, top_p=0.999, columns=columns
        ).clamp_min(-100.0),
        "next token": lambda x, y, h: model_utils.from_parallel_logits_to_logprobs(
            x, y.clamp_min(0), *columns, group
        ),
        "own token": lambda x, y, h: model_utils.from_parallel_logits_to_logprobs(
            x, y.clamp_min(0), *columns, group, shift_targets=False
        ),
        "linear": lambda x, y, h: vocab_parallel.linear_cross_entropy(
            x[..., :8], x[0, :, :8], y.clamp(0, 5), None, local_bias=x[0, :, 1], softcap=9.0
        ),
    }


def made_of_others(group, columns):
    """Functions in Python, and the linear forms of hidden states `h`; their weight is made of `x`."""
    generator = torch.Generator().manual_seed(3)
    teacher = torch.randn(2, 6, VOCAB, generator=generator)[..., slice(*columns)]
    other = torch.randn(2, 4, 5, generator=generator)
    rows = torch.randn(VOCAB, 5, generator=generator)[slice(*columns)]
    addend = torch.randn(VOCAB, generator=generator)[slice(*columns)]
    factors = torch.rand(VOCAB, generator=generator)
    ids = torch.tensor([3, 90, -100])
    shared = {"columns": columns, "temperature": 0.7}

    def last_layer(x, y, h):
        found = vocab_parallel.linear_cross_entropy_with_scores(
            h, x[0].t(), y[:, :4], group, ("entropy",), reduction="none", local_bias=x[1, 1], **shared
        )
        return found.loss + 2 * found.tokens.entropy

    def given_sum(x, y, h):
        lse = vocab_parallel.token_scores(x, None, group, ("log_sum_exp",), **shared).log_sum_exp
        return vocab_parallel.log_probabilities_at(x, ids.expand(2, 6, 3), group, log_sum_exp=lse, **shared)

    return {
        "linear_cross_entropy_with_scores": last_layer,
        "token_scores": given_sum,
        "class weights": lambda x, y, h: vocab_parallel.cross_entropy(
            x, y, group, class_weights=factors, **shared
        ),
        "sum_of_squared_probabilities": lambda x, y, h: vocab_parallel.sum_of_squared_probabilities(
            x, group, **shared
        ),
        "kept_log_probabilities": lambda x, y, h: vocab_parallel.kept_log_probabilities(
            x, torch.full((2, 6), 3), ids.expand(2, 6, 3), group, **shared
        ),
        "jensen_shannon_divergence": lambda x, y, h: vocab_parallel.jensen_shannon_divergence(
            x, teacher, group, beta=0.3, vocab_size=VOCAB - 2, **shared
        ),
        "linear_log_probabilities_at": lambda x, y, h: vocab_parallel.linear_log_probabilities_at(
            h, x[0].t(), ids.expand(2, 4, 3), group, local_bias=x[1, 1], workspace_bytes=500, **shared
        ),
        "linear_jensen_shannon_divergence": lambda x, y, h: vocab_parallel.linear_jensen_shannon_divergence(
            h, x[0].t(), other, rows, group, beta=0.3, vocab_size=VOCAB - 2, workspace_bytes=500,
            local_bias=x[1, 1], local_target_bias=addend, **shared,
        ),
    }  # fmt: skip


def compiled_rank(rank, backend, functions):
    group = dist.group.WORLD
    columns = vocab_parallel.columns_of(VOCAB, group)
    whole, labels = sample()
    whole = torch.cat([whole, whole[..., :1] - 1], -1)
    labels[0, 3] = -100
    hidden = torch.randn(2, 4, 6, generator=torch.Generator().manual_seed(4))
    for name, function in functions(group, columns).items():
        torch._dynamo.reset()
        gradients, values = [], []
        for run in (function, torch.compile(function, fullgraph=True, backend=backend)):
            x = whole[..., slice(*columns)].clone().requires_grad_(True)
            h = hidden.clone().requires_grad_(True)
            value = run(x, labels, h)
            weights = torch.arange(1.0, value.numel() + 1).view(value.shape)
            (value * weights).sum().backward()
            values.append(value.detach())
            gradients.append((x.grad, torch.zeros(()) if h.grad is None else h.grad))
        assert torch.equal(*values), name
        torch.testing.assert_close(
            *gradients, rtol=1e-6, atol=1e-7, msg=lambda text, name=name: f"{name}: {text}"
        )


@pytest.mark.timeout(240)
@pytest.mark.parametrize("of", [functions, made_of_others])
@pytest.mark.parametrize(("size", "engine"), [(1, "gloo"), (2, "shm"), (3, "gloo")])
def test_full_graphs(size, engine, of):
    # Compiling takes seconds on every rank, more on a loaded machine.
    run_ranks(size, compiled_rank, "aot_eager", of, backend=engine, env={"LIMIT": "120"}, limit=180)


def test_every_function_with_a_gradient_is_compiled():
    text = pathlib.Path(__file__).read_text()
    used = set(re.findall(r"vocab_parallel\.(\w+)\(", text))
    assert set(vocab_parallel.__all__) - WITHOUT_GRADIENT <= used


def test_a_wrong_id_of_a_graph_is_told():
    function = torch.compile(vocab_parallel.linear_log_probabilities_at, fullgraph=True, backend="aot_eager")
    with pytest.raises(IndexError, match=r"id 8 at position \[0, 1\] is outside the vocabulary of 8 ids"):
        function(torch.ones(1, 4), torch.ones(8, 4), torch.tensor([[1, 8]]))


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
    h, w, b = (torch.randn(*shape, requires_grad=True) for shape in ((3, 4), (8, 4), (8,)))
    words = (h, w, y[:, None], None, None, None, -100, 1.0, None, None, b)
    torch.library.opcheck(
        torch.ops.tessera.vocab_linear_log_probabilities_at.default, words, test_utils=tests
    )
    words = (x, x.detach() * 2, None, None, None, 1.0, 0.5)
    torch.library.opcheck(torch.ops.tessera.vocab_jensen_shannon_divergence.default, words, test_utils=tests)
    words = (h, w, h.detach() * 2, w.detach(), None, None, None, 1.0, 0.5, 1, b, None)
    torch.library.opcheck(
        torch.ops.tessera.vocab_linear_jensen_shannon_divergence.default, words, test_utils=tests
    )
