"""The names of other projects against those projects' formulas, written out in plain torch."""

from __future__ import annotations

import inspect
import sys
import types

import pytest
import torch
import torch.distributed as dist
from ranks import run_ranks
from tessera import regions
from tessera.distributed import model_utils
from tessera.integrations import megatron, nemo_rl, trl, verl
from vocab_sample import VOCAB, group_and_range, sample, shard

WORLDS = [(1, "shm"), (2, "gloo"), (3, "shm")]


def assert_same(value, expected, leaf, x, start, end, rounding=1e-5):
    torch.testing.assert_close(value.double(), expected.detach(), rtol=rounding, atol=rounding)
    weights = torch.arange(1.0, value.numel() + 1).view(value.shape)
    leaf.grad, x.grad = None, None
    (value * weights).sum().backward()
    (expected * weights).sum().backward()
    torch.testing.assert_close(
        leaf.grad.double(), x.grad[..., start:end], rtol=10 * rounding, atol=10 * rounding
    )


def megatron_formula(logits, target, label_smoothing, vocab):
    """Of the whole vocabulary; Megatron's K is that of a rank."""
    log_p = torch.log_softmax(logits, -1)
    loss = -log_p.gather(-1, target.unsqueeze(-1)).squeeze(-1)
    if label_smoothing > 0:
        smoothing = label_smoothing * vocab / (vocab - 1)
        loss = (1.0 - smoothing) * loss - smoothing * log_p.mean(-1)
    return loss


def projects_rank(rank):
    whole, target = sample()
    group, start, end = group_and_range(rank)
    own = shard(whole, start, end)
    x = whole.double().requires_grad_(True)
    for smoothing in (0.0, 0.1):
        value = megatron.vocab_parallel_cross_entropy(own, target, smoothing, group)
        assert value.dtype == torch.float32 and value.shape == target.shape
        assert_same(value, megatron_formula(x, target, smoothing, VOCAB), own, x, start, end)
    # The label keeps what is left, and the others share the rest.
    share = torch.full((VOCAB,), 0.1 / (VOCAB - 1), dtype=torch.float64)
    share[target[0, 0]] = 0.9
    expected = -(share * torch.log_softmax(whole[0, 0].double(), -1)).sum()
    torch.testing.assert_close(value[0, 0].double(), expected, rtol=1e-5, atol=1e-5)
    value = megatron.fused_vocab_parallel_cross_entropy(own, target, group)
    assert_same(value, megatron_formula(x, target, 0.0, VOCAB), own, x, start, end)
    with pytest.raises(ValueError, match=r"a label smoothing of 1\.5 is not between 0 and 1"):
        megatron.vocab_parallel_cross_entropy(own, target, 1.5, group)

    p = torch.softmax(x, -1)
    assert_same(
        verl.vocab_parallel_entropy(own, group), torch.logsumexp(x, -1) - (p * x).sum(-1), own, x, start, end
    )
    assert torch.equal(
        verl.vocab_parallel_entropy_with_chunking(own, 3, group), verl.vocab_parallel_entropy(own, group)
    )
    p = torch.softmax(x, -1)
    assert_same(verl.vocab_parallel_sum_pi_squared(own, group), (p * p).sum(-1), own, x, start, end)
    log_p = torch.log_softmax(x, -1).gather(-1, target.unsqueeze(-1)).squeeze(-1)
    assert_same(verl.vocab_parallel_log_probs_from_logits(own, target, group), log_p, own, x, start, end)

    log_p = torch.log_softmax(x, -1).gather(-1, target.unsqueeze(-1)).squeeze(-1)
    assert_same(trl.selective_log_softmax(own, target, group=group), log_p, own, x, start, end)
    several = torch.stack([target, (target + 1) % VOCAB], -1)
    log_p = torch.log_softmax(x, -1).gather(-1, several)
    assert_same(trl.selective_log_softmax(own, several, group=group), log_p, own, x, start, end)
    used = torch.ones_like(target)
    used[0, 1:] = 0
    log_p = torch.log_softmax(x / 0.7, -1).gather(-1, target.unsqueeze(-1)).squeeze(-1) * used
    options = {"temperature": 0.7, "row_mask": used, "group": group}
    assert_same(trl.selective_log_softmax(own, target, **options), log_p, own, x, start, end)
    entropy = torch.distributions.Categorical(logits=x / 0.7).entropy() * used
    log_p = torch.log_softmax(x / 0.7, -1).gather(-1, target.unsqueeze(-1)).squeeze(-1) * used
    both = trl.selective_log_softmax_and_entropy(own, target, **options)
    assert_same(torch.stack(both), torch.stack([log_p, entropy]), own, x, start, end)
    alone = trl.selective_log_softmax_and_entropy(own, target, False, **options)
    assert alone[0].requires_grad and not alone[1].requires_grad
    with pytest.raises(ValueError, match="temperature must be positive, not 0"):
        trl.selective_log_softmax(own, target, 0.0, group=group)
    entropy = torch.distributions.Categorical(logits=x).entropy()
    assert_same(trl.entropy_from_logits(own, group=group), entropy, own, x, start, end)

    generator = torch.Generator().manual_seed(2)
    hidden, weight = torch.randn(7, 8, generator=generator), torch.randn(VOCAB, 8, generator=generator)
    labels = torch.randint(VOCAB, (7,), generator=generator)
    h, w = hidden.double().requires_grad_(True), weight.double().requires_grad_(True)
    log_p = torch.log_softmax(h @ w.t() / 0.8, -1)
    expected = log_p.gather(-1, labels.unsqueeze(-1)).squeeze(-1)
    entropy = -(log_p.exp() * log_p).sum(-1)
    for reduction in ("none", "mean", "sum"):
        states = hidden.clone().requires_grad_(True)
        rows = weight[start:end].clone().requires_grad_(True)
        value, own_entropy = verl.linear_cross_entropy(states, rows, labels, 0.8, reduction, group)
        wanted = expected if reduction == "none" else getattr(expected, reduction)()
        torch.testing.assert_close(value.double(), wanted.detach(), rtol=1e-5, atol=1e-5)
        torch.testing.assert_close(own_entropy.double(), entropy.detach(), rtol=1e-5, atol=1e-5)
        h.grad, w.grad = None, None
        (value.sum() + 0.3 * own_entropy.sum()).backward()
        (wanted.sum() + 0.3 * entropy.sum()).backward(retain_graph=True)
        torch.testing.assert_close(states.grad.double(), h.grad, rtol=1e-4, atol=1e-4)
        torch.testing.assert_close(rows.grad.double(), w.grad[start:end], rtol=1e-4, atol=1e-4)

    # Megatron's own group, where there is Megatron.
    state = types.ModuleType("megatron.core.parallel_state")
    state.model_parallel_is_initialized = lambda: True
    state.get_tensor_model_parallel_group = lambda: group
    sys.modules["megatron.core.parallel_state"] = state
    try:
        assert torch.equal(
            verl.vocab_parallel_entropy(own), verl.vocab_parallel_entropy(own, dist.group.WORLD)
        )
        assert torch.equal(
            megatron.vocab_parallel_cross_entropy(own, target),
            megatron.vocab_parallel_cross_entropy(own, target, tp_group=group),
        )
    finally:
        del sys.modules["megatron.core.parallel_state"]


@pytest.mark.parametrize(("size", "backend"), WORLDS)
def test_formulas(size, backend):
    run_ranks(size, projects_rank, backend=backend)


def test_whole_logits_and_their_memory():
    whole, target = sample()
    x = whole.clone().requires_grad_(True)
    expected = torch.log_softmax(x, -1).gather(-1, target.unsqueeze(-1)).squeeze(-1)
    expected.sum().backward()
    for inplace in (True, False):
        leaf = whole.clone().requires_grad_(True)
        logits = leaf * 1.0
        value = verl.logprobs_from_logits(logits, target, inplace_backward=inplace)
        torch.testing.assert_close(value, expected.detach(), rtol=1e-5, atol=1e-5)
        value.sum().backward()
        torch.testing.assert_close(leaf.grad, x.grad, rtol=1e-4, atol=1e-5)
        assert torch.equal(logits.detach(), whole) is not inplace
    entropy = torch.distributions.Categorical(logits=whole).entropy()
    torch.testing.assert_close(verl.entropy_from_logits(whole), entropy, rtol=1e-5, atol=1e-5)
    half = trl.selective_log_softmax(whole.bfloat16(), target)
    assert half.dtype == torch.bfloat16


def test_signatures():
    for function, names in {
        megatron.vocab_parallel_cross_entropy: "vocab_parallel_logits target label_smoothing tp_group",
        megatron.fused_vocab_parallel_cross_entropy: "vocab_parallel_logits target tp_group",
        verl.vocab_parallel_entropy: "vocab_parallel_logits",
        verl.vocab_parallel_log_probs_from_logits: "logits labels",
        verl.logprobs_from_logits: "logits labels inplace_backward",
        verl.linear_cross_entropy: "hidden weight labels temperature reduction dist_process_group",
        trl.selective_log_softmax: "logits index temperature row_mask",
        trl.selective_log_softmax_and_entropy: "logits index entropy_requires_grad temperature row_mask",
        trl.entropy_from_logits: "logits chunk_size",
    }.items():
        wanted = names.split()
        assert list(inspect.signature(function).parameters)[: len(wanted)] == wanted


@pytest.mark.parametrize(
    ("integration", "place", "name"),
    [
        (trl, "trl.trainer.utils", "selective_log_softmax"),
        (verl, "verl.utils.megatron.tensor_parallel", "vocab_parallel_entropy"),
        (megatron, "megatron.core.tensor_parallel.cross_entropy", "vocab_parallel_cross_entropy"),
        (nemo_rl, "nemo_rl.distributed.model_utils", "from_parallel_logits_to_logprobs"),
    ],
)
def test_install(integration, place, name, monkeypatch):
    with pytest.raises(ImportError, match="integrations: none of the modules"):
        integration.install()

    def original():
        """What the project has."""

    words = place.split(".")
    for count in range(1, len(words) + 1):
        module = types.ModuleType(".".join(words[:count]))
        module.__path__ = []
        monkeypatch.setitem(sys.modules, module.__name__, module)
    user = types.ModuleType(f"{words[0]}.user")
    stranger = types.ModuleType("stranger")
    monkeypatch.setitem(sys.modules, user.__name__, user)
    monkeypatch.setitem(sys.modules, "stranger", stranger)
    for module in (sys.modules[place], user, stranger):
        setattr(module, name, original)
    assert integration.install() == sorted([f"{place}.{name}", f"{words[0]}.user.{name}"])
    own = getattr(integration, name)
    assert getattr(sys.modules[place], name) is own and getattr(user, name) is own
    assert getattr(stranger, name) is original
    assert integration.install() == []


def test_nemo_rl_has_every_name():
    assert set(model_utils.__all__) < set(nemo_rl.__all__)
    assert nemo_rl.DistributedLogprob is model_utils.DistributedLogprob


class HookedModel(torch.nn.Module):
    """Calls the hook as Megatron's GPTModel does, with all its words."""

    def __init__(self, group, start, end, is_tied, sequence_parallel, bias):
        super().__init__()
        generator = torch.Generator().manual_seed(4)
        self.table = torch.nn.Parameter(torch.randn(VOCAB, 8, generator=generator))
        weight = torch.randn(VOCAB, 8, generator=generator)
        own = torch.nn.Parameter(weight[start:end].clone())
        self.whole = weight
        self.whole_bias = torch.randn(VOCAB, generator=generator) if bias else None
        self.output_layer = types.SimpleNamespace(
            weight=None if is_tied else own,
            bias=self.whole_bias[start:end] if bias else None,
            tp_group=group,
        )
        self.tied = own if is_tied else None
        self.config = types.SimpleNamespace(sequence_parallel=sequence_parallel, use_mup=False)
        self.group = group

    def forward(self, input_ids, *, labels=None, output_processor=None, output_processor_context=None):
        hidden = self.table[input_ids].transpose(0, 1)
        if self.config.sequence_parallel and self.group is not None:
            hidden = regions.scatter(hidden, self.group, 0)
        return output_processor(
            hidden_states=hidden,
            output_layer=self.output_layer,
            output_weight=self.tied,
            labels=labels,
            loss_mask=None,
            input_ids=input_ids,
            position_ids=None,
            attention_mask=None,
            decoder_input=None,
            inference_context=None,
            packed_seq_params=None,
            runtime_gather_output=None,
            context=output_processor_context,
            compute_language_model_loss=None,
            scale_logits=lambda logits: logits,
            config=self.config,
        )


def hook_rank(rank):
    group, start, end = group_and_range(rank)
    generator = torch.Generator().manual_seed(7)
    ids = torch.randint(VOCAB, (2, 6), generator=generator)
    labels = torch.randint(VOCAB, (2, 6), generator=generator)
    labels[1, 3] = -100
    for is_tied, sequence_parallel, bias in ((False, False, False), (True, True, False), (False, True, True)):
        model = HookedModel(group, start, end, is_tied, sequence_parallel, bias)
        table = model.table.detach().double().requires_grad_(True)
        logits = table[ids] @ model.whole.double().t()
        if bias:
            logits = logits + model.whole_bias.double()
        log_p = torch.log_softmax(logits / 0.7, -1)
        expected = log_p.gather(-1, labels.clamp(min=0).unsqueeze(-1)).squeeze(-1)
        expected = torch.where(labels == -100, 0.0, expected)
        entropy = -(log_p.exp() * log_p).sum(-1)
        value, found = model(
            ids,
            labels=labels,
            output_processor=megatron.output_processor,
            output_processor_context=megatron.OutputProcessorContext(0.7, wants_entropy=True),
        )
        torch.testing.assert_close(value.double(), expected.detach(), rtol=1e-4, atol=1e-4)
        torch.testing.assert_close(found.double(), entropy.detach(), rtol=1e-4, atol=1e-4)
        weights = torch.arange(1.0, 13.0).view(2, 6)
        (value * weights).sum().backward()
        (expected * weights).sum().backward()
        torch.testing.assert_close(model.table.grad.double(), table.grad, rtol=1e-4, atol=1e-4)
        alone = model(ids, labels=labels, output_processor=megatron.output_processor)
        assert alone.shape == (2, 6) and alone.dtype == torch.float32
    with pytest.raises(ValueError, match="there are no labels"):
        model(ids, output_processor=megatron.output_processor)
    model.config.use_mup = True
    with pytest.raises(ValueError, match="use_mup"):
        model(ids, labels=labels, output_processor=megatron.output_processor)


@pytest.mark.parametrize(("size", "backend"), WORLDS)
def test_hook_of_a_megatron_model(size, backend):
    run_ranks(size, hook_rank, backend=backend)
