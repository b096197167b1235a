"""What arrives as logits: parts of a mesh, results on their way, tensors without memory, other groups."""

from __future__ import annotations

import contextlib

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from ranks import run_ranks
from tessera import _C, comm, regions, vocab_parallel
from tessera.distributed import model_utils
from tessera.integrations import megatron, trl, verl
from tessera.loss import te_parallel_ce
from torch._subclasses.fake_tensor import FakeTensorMode
from vocab_sample import reference_logprob


def whole_sample(vocab):
    generator = torch.Generator().manual_seed(7)
    logits = torch.randn(2, 6, vocab, generator=generator) * 3
    return logits, torch.randint(vocab, (2, 6), generator=generator)


# Each with logits [2, 6, V] and labels [2, 6], and what one process makes of them.
ON_LOGITS = {
    "cross_entropy": (
        lambda x, y, v: vocab_parallel.cross_entropy(x, y, reduction="none"),
        lambda x, y: -reference_logprob(x, y),
    ),
    "token_scores": (
        lambda x, y, v: vocab_parallel.token_scores(x, None, None, ("entropy",)).entropy,
        lambda x, y: torch.distributions.Categorical(logits=x).entropy(),
    ),
    "log_probabilities": (lambda x, y, v: vocab_parallel.log_probabilities(x, y), reference_logprob),
    "log_probabilities_at": (
        lambda x, y, v: vocab_parallel.log_probabilities_at(x, y.unsqueeze(-1)).squeeze(-1),
        reference_logprob,
    ),
    "logits_at": (
        lambda x, y, v: vocab_parallel.logits_at(x, y.unsqueeze(-1)).squeeze(-1),
        lambda x, y: x.gather(-1, y.unsqueeze(-1)).squeeze(-1),
    ),
    "sampled": (
        lambda x, y, v: vocab_parallel.sampled_log_probabilities(x, y, top_k=v),
        reference_logprob,
    ),
    "soft_cross_entropy": (
        lambda x, y, v: vocab_parallel.soft_cross_entropy(x, x.detach()),
        lambda x, y: -(torch.softmax(x.detach(), -1) * torch.log_softmax(x, -1)).sum(-1),
    ),
    "DistributedLogprob": (
        lambda x, y, v: model_utils.DistributedLogprob.apply(x, y, 0, v, None),
        reference_logprob,
    ),
    "ChunkedDistributedLogprob": (
        lambda x, y, v: model_utils.ChunkedDistributedLogprob.apply(x, y, 0, v, 3, None),
        reference_logprob,
    ),
    "DistributedLogprobWithSampling": (
        lambda x, y, v: model_utils.DistributedLogprobWithSampling.apply(x, y, None, v, 1.0),
        reference_logprob,
    ),
    "ChunkedDistributedGatherLogprob": (
        lambda x, y, v: model_utils.ChunkedDistributedGatherLogprob.apply(
            x, y.unsqueeze(-1), 0, v, 3, None
        ).squeeze(-1),
        reference_logprob,
    ),
    "ChunkedDistributedEntropy": (
        lambda x, y, v: model_utils.ChunkedDistributedEntropy.apply(x, 3, None),
        lambda x, y: -torch.distributions.Categorical(logits=x).entropy(),
    ),
    "DistributedCrossEntropy": (
        lambda x, y, v: model_utils.DistributedCrossEntropy.apply(x, x.detach(), None),
        lambda x, y: -(torch.softmax(x.detach(), -1) * torch.log_softmax(x, -1)).sum(-1),
    ),
    "from_parallel_logits_to_logprobs": (
        lambda x, y, v: model_utils.from_parallel_logits_to_logprobs(x, y, 0, v),
        lambda x, y: reference_logprob(x[:, :-1], y[:, 1:]),
    ),
    "dtensor_from_parallel_logits_to_logprobs": (
        lambda x, y, v: model_utils.dtensor_from_parallel_logits_to_logprobs(x, y, 0, v, None),
        lambda x, y: reference_logprob(x[:, :-1], y[:, 1:]),
    ),
    "get_next_token_logprobs_from_logits": (
        lambda x, y, v: model_utils.get_next_token_logprobs_from_logits(y, x),
        lambda x, y: reference_logprob(x[:, :-1], y[:, 1:]),
    ),
    "gather_logits_at_global_indices": (
        lambda x, y, v: model_utils.gather_logits_at_global_indices(
            x, y.unsqueeze(-1), vocab_start_index=0, vocab_end_index=v
        ).squeeze(-1),
        lambda x, y: x.gather(-1, y.unsqueeze(-1)).squeeze(-1),
    ),
    "vocab_parallel_full_log_softmax": (
        lambda x, y, v: model_utils.vocab_parallel_full_log_softmax(x, 1.0),
        lambda x, y: torch.log_softmax(x, -1),
    ),
    "vocab_parallel_gather_columns": (
        lambda x, y, v: model_utils.vocab_parallel_gather_columns(x, torch.tensor([2, 0])),
        lambda x, y: x[..., [2, 0]],
    ),
    "get_distillation_topk_logprobs_from_logits": (
        lambda x, y, v: model_utils.get_distillation_topk_logprobs_from_logits(
            x, torch.zeros(2, 6, 1), y.unsqueeze(-1), True, False
        )[0].squeeze(-1),
        lambda x, y: reference_logprob(x[:, :-1], y[:, :-1]),
    ),
    "parallel_cross_entropy": (
        lambda x, y, v: te_parallel_ce.parallel_cross_entropy(x, y),
        lambda x, y: -reference_logprob(x, y),
    ),
    "TEParallelCrossEntropy": (
        lambda x, y, v: te_parallel_ce.TEParallelCrossEntropy(reduction="none")(x, y),
        lambda x, y: -reference_logprob(x, y),
    ),
    "given log-sum-exp": (
        lambda x, y, v: vocab_parallel.log_probabilities_at(
            x,
            y.unsqueeze(-1),
            log_sum_exp=vocab_parallel.token_scores(x, None, None, ("log_sum_exp",)).log_sum_exp,
        ).squeeze(-1),
        reference_logprob,
    ),
    "class weights": (
        lambda x, y, v: vocab_parallel.cross_entropy(
            x, y, reduction="none", class_weights=torch.arange(1.0, v + 1)
        ),
        lambda x, y: -reference_logprob(x, y) * (y + 1),
    ),
    "sum_of_squared_probabilities": (
        lambda x, y, v: vocab_parallel.sum_of_squared_probabilities(x),
        lambda x, y: torch.softmax(x, -1).square().sum(-1),
    ),
    "kept_log_probabilities": (
        lambda x, y, v: vocab_parallel.kept_log_probabilities(x, y, torch.arange(v).expand(2, 6, v)),
        reference_logprob,
    ),
    "megatron": (
        lambda x, y, v: megatron.vocab_parallel_cross_entropy(x, y),
        lambda x, y: -reference_logprob(x, y),
    ),
    "megatron, fused": (
        lambda x, y, v: megatron.fused_vocab_parallel_cross_entropy(x, y),
        lambda x, y: -reference_logprob(x, y),
    ),
    "verl, entropy": (
        lambda x, y, v: verl.vocab_parallel_entropy(x),
        lambda x, y: torch.distributions.Categorical(logits=x).entropy(),
    ),
    "verl, log-probabilities": (
        lambda x, y, v: verl.vocab_parallel_log_probs_from_logits(x, y),
        reference_logprob,
    ),
    "verl, squares": (
        lambda x, y, v: verl.vocab_parallel_sum_pi_squared(x),
        lambda x, y: torch.softmax(x, -1).square().sum(-1),
    ),
    "trl": (lambda x, y, v: trl.selective_log_softmax(x, y), reference_logprob),
    "trl, entropy": (
        lambda x, y, v: trl.entropy_from_logits(x),
        lambda x, y: torch.distributions.Categorical(logits=x).entropy(),
    ),
}


def dtensor_rank(rank, vocab):
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.tensor import Replicate, Shard, distribute_tensor

    mesh = init_device_mesh("cpu", (dist.get_world_size(),), mesh_dim_names=("tp",))
    whole, labels = whole_sample(vocab)
    for name, (function, expected_of) in ON_LOGITS.items():
        logits = distribute_tensor(whole, mesh, [Shard(2)]).requires_grad_(True)
        value = function(logits, labels, vocab)
        x = whole.double().requires_grad_(True)
        expected = expected_of(x, labels)
        message = lambda text, name=name: f"{name}: {text}"  # noqa: E731
        torch.testing.assert_close(value.double(), expected.detach(), rtol=1e-5, atol=1e-5, msg=message)
        weights = torch.arange(1.0, value.numel() + 1).view(value.shape)
        (value * weights).sum().backward()
        (expected * weights).sum().backward()
        gradient = distribute_tensor(x.grad.float(), mesh, [Shard(2)])
        torch.testing.assert_close(
            logits.grad.to_local(), gradient.to_local(), rtol=1e-4, atol=1e-4, msg=message
        )
    # What has no gradient, and what is whole on every rank.
    logits = distribute_tensor(whole, mesh, [Shard(-1)])
    best = model_utils.distributed_vocab_topk(logits, 3, vocab_start_index=0, vocab_end_index=vocab)
    assert torch.equal(best[1], whole.topk(3, -1).indices)
    assert torch.equal(vocab_parallel.top_k(logits, 3)[1], whole.topk(3, -1).indices)
    assert torch.equal(model_utils.vocab_parallel_argmax(logits), whole.argmax(-1))
    smallest = vocab_parallel.smallest_kept_logit(logits, top_k=3)
    assert torch.equal(smallest, whole.topk(3, -1).values[..., -1])
    own = distribute_tensor(torch.log_softmax(whole, -1), mesh, [Shard(2)]).to_local()
    for value in (
        vocab_parallel.log_softmax(logits),
        model_utils.vocab_parallel_log_softmax(logits, 1.0),
        model_utils._compute_distributed_log_softmax(logits, None),
        model_utils._compute_distributed_log_softmax_with_grad(logits, None),
        model_utils._compute_distributed_softmax(logits, None).log(),
    ):
        torch.testing.assert_close(value, own, rtol=1e-5, atol=1e-5)
    replicated = distribute_tensor(whole, mesh, [Replicate()])
    value = vocab_parallel.log_probabilities(replicated, distribute_tensor(labels, mesh, [Replicate()]))
    torch.testing.assert_close(value.double(), reference_logprob(whole, labels), rtol=1e-5, atol=1e-5)
    # A last layer with its output left as it is.
    linear_rank(mesh, vocab)


def linear_rank(mesh, vocab):
    from torch.distributed.tensor import Replicate, Shard, distribute_tensor
    from torch.distributed.tensor.parallel import ColwiseParallel, parallelize_module

    generator = torch.Generator().manual_seed(1)
    hidden = torch.randn(5, 4, generator=generator)
    weight = torch.randn(vocab, 4, generator=generator)
    labels = torch.randint(vocab, (5,), generator=generator)
    w, h = weight.clone().requires_grad_(True), hidden.clone().requires_grad_(True)
    expected = F.cross_entropy(h @ w.t(), labels)
    expected.backward()
    layer = torch.nn.Linear(4, vocab, bias=False)
    layer.weight.data = weight.clone()
    parallelize_module(layer, mesh, ColwiseParallel(use_local_output=False))
    loss = vocab_parallel.cross_entropy(layer(hidden), labels)
    torch.testing.assert_close(loss, expected.detach(), rtol=1e-5, atol=1e-5)
    loss.backward()
    torch.testing.assert_close(layer.weight.grad.full_tensor(), w.grad, rtol=1e-4, atol=1e-5)
    for placement in (Replicate(), Shard(0)):
        states = distribute_tensor(hidden, mesh, [placement]).requires_grad_(True)
        rows = distribute_tensor(weight, mesh, [Shard(0)]).requires_grad_(True)
        loss = vocab_parallel.linear_cross_entropy(states, rows, labels)
        torch.testing.assert_close(loss, expected.detach(), rtol=1e-5, atol=1e-5)
        loss.backward()
        torch.testing.assert_close(rows.grad.full_tensor(), w.grad, rtol=1e-4, atol=1e-5)
        torch.testing.assert_close(states.grad.full_tensor(), h.grad, rtol=1e-4, atol=1e-5)
        values_rank(mesh, placement, hidden, weight, labels)


def mixed_divergence(p, q):
    """The Jensen-Shannon divergence of logits, half of each."""
    p, q = torch.softmax(p, -1), torch.softmax(q, -1)
    mixed = (p + q) / 2
    return 0.5 * (p * (p / mixed).log() + q * (q / mixed).log()).sum(-1)


def values_rank(mesh, placement, hidden, weight, labels):
    """Values of several tokens: from a last layer whose parts are all of the mesh, and from its logits."""
    from torch.distributed.tensor import Replicate, Shard, distribute_tensor

    def laid_out(tensor, where):
        return distribute_tensor(tensor, mesh, [where]).requires_grad_(True)

    generator = torch.Generator().manual_seed(2)
    bias = torch.randn(weight.shape[0], generator=generator)
    teacher = torch.randn(5, 3, generator=generator), torch.randn(weight.shape[0], 3, generator=generator)
    ids = torch.stack([labels, (labels + 1) % weight.shape[0]], -1)
    of_teacher = [
        distribute_tensor(t, mesh, [at]) for t, at in zip(teacher, (placement, Shard(0)), strict=True)
    ]
    target = (teacher[0] @ teacher[1].t()).double()
    for taken, function, expected_of in (
        (
            3,
            lambda h, w, b: vocab_parallel.linear_log_probabilities_at(
                h, w, distribute_tensor(ids, mesh, [Replicate()]), local_bias=b
            ),
            lambda x: torch.log_softmax(x, -1).gather(-1, ids),
        ),
        (
            3,
            lambda h, w, b: vocab_parallel.linear_jensen_shannon_divergence(h, w, *of_teacher, local_bias=b),
            lambda x: mixed_divergence(target, x),
        ),
        (
            2,
            lambda h, w, b: verl.linear_cross_entropy(h, w, labels)[0],
            lambda x: reference_logprob(x - bias, labels),
        ),
    ):
        leaves = [laid_out(hidden, placement), laid_out(weight, Shard(0)), laid_out(bias, Shard(0))]
        value = function(*leaves)
        h, w, b = (t.double().requires_grad_(True) for t in (hidden, weight, bias))
        expected = expected_of(h @ w.t() + b)
        torch.testing.assert_close(value.double(), expected.detach(), rtol=1e-5, atol=1e-5)
        factors = torch.arange(1.0, value.numel() + 1).view(value.shape)
        (value * factors).sum().backward()
        (expected * factors).sum().backward()
        for leaf, plain in zip(leaves[:taken], (h, w, b), strict=False):
            torch.testing.assert_close(leaf.grad.full_tensor().double(), plain.grad, rtol=1e-4, atol=1e-4)
    logits = laid_out(hidden @ weight.t(), Shard(1))
    value = vocab_parallel.jensen_shannon_divergence(
        logits, distribute_tensor(target.float(), mesh, [Shard(1)])
    )
    x = (hidden @ weight.t()).double().requires_grad_(True)
    expected = mixed_divergence(target, x)
    torch.testing.assert_close(value.double(), expected.detach(), rtol=1e-5, atol=1e-5)
    (value * factors).sum().backward()
    (expected * factors).sum().backward()
    torch.testing.assert_close(logits.grad.full_tensor().double(), x.grad, rtol=1e-4, atol=1e-4)


# 7 ids on 2 ranks are 4 and 3, 41 on 4 are 11, 11, 11 and 8, and 5 on 4 leave the last rank none.
@pytest.mark.parametrize(
    ("vocab", "size", "backend"),
    [
        (7, 2, "gloo"),
        (7, 2, "shm"),
        (8, 2, "shm"),
        (9, 1, "gloo"),
        (10, 3, "shm"),
        (41, 4, "gloo"),
        (5, 4, "shm"),
    ],
)
def test_dtensors_say_what_they_hold(vocab, size, backend):
    run_ranks(size, dtensor_rank, vocab, backend=backend)


def odd_mesh_rank(rank):
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.tensor import DTensor, Partial, Shard, distribute_tensor

    whole, labels = whole_sample(8)
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "tp"))
    # The batch is cut by one axis, the vocabulary by the other.
    logits = distribute_tensor(whole, mesh, [Shard(0), Shard(2)])
    value = vocab_parallel.log_probabilities(logits, labels[rank // 2 : rank // 2 + 1])
    expected = reference_logprob(whole, labels)[rank // 2 : rank // 2 + 1]
    torch.testing.assert_close(value.double(), expected, rtol=1e-5, atol=1e-5)
    partial = DTensor.from_local(whole, mesh["tp"], [Partial()], run_check=False)
    with pytest.raises(TypeError, match=r"log_probabilities.*|token_scores: a DTensor .* holds addends"):
        vocab_parallel.log_probabilities(partial, labels)
    twice = distribute_tensor(whole, mesh, [Shard(2), Shard(2)])
    with pytest.raises(TypeError, match="cut by more than one axis of its mesh"):
        vocab_parallel.log_probabilities(twice, labels)
    with pytest.raises(
        ValueError, match="the group has 4 ranks, the vocabulary of the DTensor is cut over 2"
    ):
        vocab_parallel.log_probabilities(logits, labels[:1], dist.group.WORLD)
    with pytest.raises(TypeError, match=r"cross_entropy: a DeviceMesh is not a group\. Pass the group"):
        vocab_parallel.cross_entropy(whole, labels, mesh)
    with pytest.raises(TypeError, match="DistributedLogprob: a str is not a group"):
        model_utils.DistributedLogprob.apply(whole, labels, 0, 8, "tp")
    group = dist.new_group([0, 1])
    if rank > 1:
        with pytest.raises(ValueError, match="token_scores: this rank does not belong to the group"):
            vocab_parallel.log_probabilities(whole, labels, group)


def test_placements_and_groups_that_do_not_fit():
    run_ranks(4, odd_mesh_rank, backend="gloo")


def waited_rank(rank):
    import torch.distributed._functional_collectives as funcol

    whole, labels = whole_sample(8)
    mine = (whole / 2).clone().requires_grad_(True)
    logits = funcol.all_reduce(mine, "sum", dist.group.WORLD)
    assert type(logits) is funcol.AsyncCollectiveTensor
    value = vocab_parallel.log_probabilities(logits, labels)
    torch.testing.assert_close(value.double(), reference_logprob(whole, labels), rtol=1e-5, atol=1e-5)
    gathered = funcol.all_gather_tensor_autograd(mine[rank : rank + 1], 0, dist.group.WORLD)
    assert type(gathered) is funcol.AsyncCollectiveTensor and gathered.requires_grad
    model_utils.DistributedLogprob.apply(gathered, labels, 0, 8, None).sum().backward()
    x = (whole / 2).requires_grad_(True)
    reference_logprob(x, labels).sum().backward()
    torch.testing.assert_close(mine.grad[rank], 2 * x.grad[rank].float(), rtol=1e-4, atol=1e-5)


def test_collectives_on_their_way_are_waited_for():
    run_ranks(2, waited_rank, backend="gloo")


class Wrapper(torch.Tensor):
    """A tensor that stands for another and has no memory of its own."""

    @staticmethod
    def __new__(cls, inner):
        return torch.Tensor._make_wrapper_subclass(cls, inner.shape, dtype=inner.dtype)

    def __init__(self, inner):
        self.inner = inner

    @classmethod
    def __torch_dispatch__(cls, function, types, args=(), kwargs=None):
        assert function is torch.ops.aten.detach.default, "nothing is computed with it"
        return args[0]


def without_memory(kind, like):
    if kind == "fake":
        with FakeTensorMode() as mode:
            return mode.from_tensor(like)
    if kind == "freed":
        tensor = like.clone()
        tensor.untyped_storage().resize_(0)
        return tensor
    return Wrapper(like)


@pytest.mark.parametrize("kind", ["fake", "wrapper", "freed"])
def test_tensors_without_memory_are_refused(kind):
    whole, labels = whole_sample(8)
    logits = without_memory(kind, whole)
    for function, _ in ON_LOGITS.values():
        with pytest.raises(TypeError, match="has no memory that can be read here"):
            function(logits, labels, 8)
    with pytest.raises(TypeError, match=r"of shape \[2, 6\] has no memory that can be read here"):
        vocab_parallel.cross_entropy(whole, without_memory(kind, labels))


def test_logits_of_the_meta_device_are_refused():
    whole, labels = whole_sample(8)
    for function, _ in ON_LOGITS.values():
        with pytest.raises(TypeError, match=r"on the meta device has no values\."):
            function(whole.to("meta"), labels, 8)
    with pytest.raises(TypeError, match=r"on the meta device has no values\."):
        vocab_parallel.cross_entropy(whole.to("meta"), labels.to("meta"))
    weight = torch.empty(8, 4, device="meta")
    with pytest.raises(TypeError, match=r"vocab\.linear_cross_entropy: .* on the meta device"):
        vocab_parallel.linear_cross_entropy(
            torch.empty(3, 4, device="meta"), weight, labels[0, :3].to("meta")
        )


def every_function():
    """Every function and constructor that the bindings have."""
    for module in (_C, _C.regions, *(v for v in vars(_C).values() if type(v) is type(_C))):
        for name, member in vars(module).items():
            if name.startswith("__"):
                continue
            if isinstance(member, type):
                for method, value in vars(member).items():
                    if type(value).__name__ == "instancemethod":
                        yield f"{name}.{method}", value
            elif callable(member):
                yield name, member


def test_no_binding_takes_a_tensor_without_memory():
    # Whatever the function, the tensor is looked at before anything is done with it: nothing crashes.
    tensor = without_memory("fake", torch.ones(4))
    refused = set()
    for name, function in every_function():
        for count in range(1, 18):
            for words in ((tensor,) * count, ([tensor],) * count, (tensor, *(None,) * (count - 1))):
                with contextlib.suppress(TypeError, ValueError, AttributeError, RuntimeError):
                    try:
                        function(*words)
                    except TypeError as error:
                        if "has no memory that can be read here" in str(error):
                            refused.add(name)
                        raise
    assert len(refused) > 40
    assert {"all_reduce", "vocab_cross_entropy", "distributed_logprob"} <= refused


def comm_rank(rank):
    tensor = without_memory("fake", torch.ones(4))
    for function in (comm.all_reduce, comm.all_gather, regions.copy, regions.reduce, regions.gather):
        with pytest.raises(TypeError, match="a FakeTensor of shape"):
            function(tensor)


def test_collectives_refuse_tensors_without_memory():
    run_ranks(2, comm_rank)
