"""Communication hooks, against torch's own and against what they stand for, over Gloo and shm."""

from __future__ import annotations

import pickle

import numpy
import pytest
import torch
import torch.distributed as dist
from ranks import run_ranks, run_ranks_collecting
from tessera.distributed.algorithms.ddp_comm_hooks import (
    checking_hooks,
    ddp_zero_hook,
    debugging_hooks,
    default_hooks,
    optimizer_overlap_hooks,
    post_localSGD_hook,
    powerSGD_hook,
    quantization_hooks,
)
from tessera.distributed.algorithms.model_averaging import averagers, hierarchical_model_averager
from tessera.distributed.algorithms.replica_fingerprint import ReplicaFingerprint
from tessera.nn.parallel import DistributedDataParallel as TesseraDDP
from torch.distributed.algorithms.ddp_comm_hooks import default_hooks as torch_default
from torch.distributed.algorithms.ddp_comm_hooks import post_localSGD_hook as torch_local
from torch.distributed.algorithms.ddp_comm_hooks import powerSGD_hook as torch_power
from torch.distributed.algorithms.ddp_comm_hooks import quantization_hooks as torch_quantization
from torch.distributed.algorithms.model_averaging import averagers as torch_averagers
from torch.distributed.optim import ZeroRedundancyOptimizer
from torch.nn.parallel import DistributedDataParallel


def make_model(channels_last=False):
    torch.manual_seed(7)
    model = torch.nn.Sequential(
        torch.nn.Conv2d(3, 8, 3),
        torch.nn.ReLU(),
        torch.nn.Flatten(),
        torch.nn.Linear(8 * 6 * 6, 40),
        torch.nn.Linear(40, 40),
        torch.nn.Linear(40, 5),
    )
    return model.to(memory_format=torch.channels_last) if channels_last else model


def run_steps(rank, model, parallel, steps, after_backward=None):
    """Run backwards on this rank's own samples and return all gradients."""
    generator = torch.Generator().manual_seed(100 + rank)
    gradients = []
    for _ in range(steps):
        model.zero_grad()
        parallel(torch.randn(4, 3, 8, 8, generator=generator)).square().mean().backward()
        gradients.append([p.grad.clone() if p.grad is not None else None for p in model.parameters()])
        if after_backward is not None:
            after_backward()
    return gradients


def train(rank, state, hook, steps=3, channels_last=False, **options):
    model = make_model(channels_last)
    parallel = DistributedDataParallel(model, **options)
    parallel.register_comm_hook(state, hook)
    return run_steps(rank, model, parallel, steps)


def assert_same(ours, theirs, exact=True):
    for step, (mine, other) in enumerate(zip(ours, theirs, strict=True)):
        for a, b in zip(mine, other, strict=True):
            if exact:
                assert torch.equal(a, b), f"step {step}: differs by {(a - b).abs().max()}"
            else:
                torch.testing.assert_close(a, b, rtol=1e-4, atol=1e-6, msg=lambda m, s=step: f"step {s}: {m}")


PAIRS = {
    "allreduce": (default_hooks.allreduce_hook, torch_default.allreduce_hook),
    "fp16": (default_hooks.fp16_compress_hook, torch_default.fp16_compress_hook),
    "fp16 wrapper": (
        default_hooks.fp16_compress_wrapper(default_hooks.allreduce_hook),
        torch_default.fp16_compress_wrapper(torch_default.allreduce_hook),
    ),
}


def compare_with_torch(rank, name):
    ours, theirs = PAIRS[name]
    assert_same(train(rank, None, ours), train(rank, None, theirs))
    # Small buckets change neither (torch's quantization sees other ranges, but the same ones).
    if name != "per tensor":
        assert_same(
            train(rank, None, ours, bucket_cap_mb=0.01), train(rank, None, theirs, bucket_cap_mb=0.01)
        )


@pytest.mark.parametrize("name", PAIRS)
def test_the_bits_of_torch_on_gloo(name):
    run_ranks(2, compare_with_torch, name, backend="gloo")


def torch_bytes(values, channel_size):
    """What torch's quantization makes of `values`: there and back."""
    if channel_size is None:
        observer = torch.ao.quantization.MinMaxObserver()
        observer(values)
        scale, zero = observer.calculate_qparams()
        coded = torch_quantization._quantize_per_tensor_backend(values, scale, zero)
        return torch_quantization._dequantize_per_tensor_backend(coded, scale, zero)
    padding = channel_size - len(values) % channel_size
    rows = torch.nn.functional.pad(values, (0, padding)).view(-1, channel_size)
    observer = torch.ao.quantization.PerChannelMinMaxObserver()
    observer(rows)
    scale, zero = observer.calculate_qparams()
    coded = torch_quantization._quantize_per_channel_backend(rows, scale, zero)
    decoded = torch_quantization._dequantize_per_channel_backend(coded, scale, zero)
    return decoded.flatten()[: len(values)]


def compare_bytes(rank, channel_size):
    # torch's own hooks fail on Gloo (they expect another future of all_gather); their formulas judge.
    expected = []

    def judged(state, bucket):
        everybody = [torch.zeros_like(bucket.buffer()) for _ in range(dist.get_world_size())]
        dist.all_gather(everybody, bucket.buffer().clone())
        total = sum(torch_bytes(values, channel_size) for values in everybody)
        expected.append(total / dist.get_world_size())
        if channel_size is None:
            return quantization_hooks.quantization_pertensor_hook(state, bucket)
        return quantization_hooks.quantization_perchannel_hook(state, bucket, channel_size)

    gradients = train(rank, None, judged, steps=1)
    flat = torch.cat([g.flatten() for g in gradients[0]])
    assert torch.equal(flat, expected[0])


@pytest.mark.parametrize("channel_size", [None, 512, 100])
def test_bytes_are_those_of_torchs_formulas(channel_size):
    run_ranks(3, compare_bytes, channel_size, backend="gloo")


def bf16(rank):
    exact = train(rank, None, default_hooks.allreduce_hook)
    # torch refuses the hook by its name; ours is called by another.
    low = train(rank, None, lambda state, bucket: default_hooks.bf16_compress_hook(state, bucket))
    for mine, other in zip(low[0], exact[0], strict=True):
        assert mine.dtype == torch.float32
        torch.testing.assert_close(mine, other, rtol=2**-7, atol=2**-9)


@pytest.mark.parametrize("backend", ["gloo", "shm"])
def test_bf16_works_where_torch_refuses(backend):
    run_ranks(2, bf16, backend=backend)


def torch_first_qs(bucket, rank, seed):
    """The random Qs that torch's PowerSGD starts with, by position in the bucket."""
    shapes = {}
    for i, gradient in enumerate(bucket.gradients()):
        matrix = gradient.view(gradient.shape[0], -1)
        n, m = matrix.shape
        r = min(n, m, rank)
        if (n + m) * r * 2 < n * m:
            shapes.setdefault((n, m), []).append((i, r))
    result = {}
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(numpy.random.RandomState(seed).randint(1_000_000_000))
        for (_, m), members in shapes.items():
            for (i, r), q in zip(members, torch.randn(len(members), m, members[0][1]), strict=True):
                assert q.shape == (m, r)
                result[i] = q
    return result


def compare_power_sgd(rank, approximation, start):
    numbers = {}

    def ours_from_the_same_start(state, bucket):
        for parameter in bucket.parameters():
            numbers.setdefault(id(parameter), len(numbers))
        if state.iter == start and not state.native(batched=False).state()[0]:
            qs = torch_first_qs(bucket, approximation, 0)
            named = {f"q/parameter {numbers[id(bucket.parameters()[i])]}": q for i, q in qs.items()}
            state.native(batched=False).load_state((named, {"step": start}))
        return powerSGD_hook.powerSGD_hook(state, bucket)

    options = {"matrix_approximation_rank": approximation, "start_powerSGD_iter": start}
    ours = train(rank, powerSGD_hook.PowerSGDState(None, **options), ours_from_the_same_start, steps=6)
    theirs = train(rank, torch_power.PowerSGDState(None, **options), torch_power.powerSGD_hook, steps=6)
    assert_same(ours, theirs, exact=False)


@pytest.mark.parametrize("approximation", [1, 4])
def test_power_sgd_in_one_bucket_is_torchs(approximation):
    run_ranks(2, compare_power_sgd, approximation, 2, backend="gloo")


def many_buckets(rank, batched):
    state = powerSGD_hook.PowerSGDState(
        None, matrix_approximation_rank=64, start_powerSGD_iter=0, min_compression_rate=0
    )
    hook = powerSGD_hook.batched_powerSGD_hook if batched else powerSGD_hook.powerSGD_hook
    compressed = train(rank, state, hook, bucket_cap_mb=0.001, channels_last=True)
    exact = train(rank, None, default_hooks.allreduce_hook, channels_last=True)
    if not batched:  # a full rank loses nothing
        for mine, other in zip(compressed, exact, strict=True):
            for a, b in zip(mine, other, strict=True):
                torch.testing.assert_close(a, b, rtol=1e-3, atol=1e-5)
    assert state.iter == 3
    rate, before, after = state.compression_stats()
    assert before > 0 and rate == before / after
    # Pickled without its group, as a checkpoint has it.
    restored = pickle.loads(pickle.dumps(state))
    assert restored.process_group is None and restored.matrix_approximation_rank == 64
    restored.native(batched)
    assert restored.iter == 3
    return [g.clone() for g in compressed[-1]]


@pytest.mark.parametrize("backend", ["gloo", "shm"])
@pytest.mark.parametrize("batched", [False, True], ids=["plain", "batched"])
def test_power_sgd_in_many_buckets(backend, batched):
    first, second = run_ranks(2, many_buckets, batched, backend=backend)
    for mine, other in zip(first, second, strict=True):
        assert torch.equal(mine, other)


def static_power_sgd(rank):
    # torch numbers all buckets 0 in the first step of a static graph.
    state = powerSGD_hook.PowerSGDState(None, matrix_approximation_rank=2, start_powerSGD_iter=0)
    gradients = train(
        rank, state, powerSGD_hook.powerSGD_hook, static_graph=True, bucket_cap_mb=0.01, steps=4
    )
    return gradients[-1]


def test_power_sgd_in_a_static_graph():
    first, second = run_ranks(2, static_power_sgd, backend="gloo")
    for mine, other in zip(first, second, strict=True):
        assert torch.equal(mine, other)


def int8(rank):
    state = quantization_hooks.Int8ErrorFeedbackState()
    ours = train(rank, state, quantization_hooks.int8_error_feedback_hook, bucket_cap_mb=0.01)
    exact = train(rank, None, default_hooks.allreduce_hook)
    for mine, other in zip(ours[0], exact[0], strict=True):
        assert (mine - other).abs().max() <= other.abs().max() / 60
    tensors, _ = pickle.loads(pickle.dumps(state)).native.state()
    assert set(tensors) == {f"error/parameter {i}" for i in range(8)}


def test_int8_with_error_feedback():
    run_ranks(2, int8)


def noop(rank):
    model = make_model()
    alone = run_steps(rank, model, model, 2)
    assert_same(train(rank, None, debugging_hooks.noop_hook, steps=2), alone)


def test_noop_leaves_gradients_alone():
    run_ranks(2, noop)


def compare_local_sgd(rank):
    alone = dist.new_subgroups(group_size=1)[0]
    ours = post_localSGD_hook.PostLocalSGDState(None, alone, 2)
    theirs = torch_local.PostLocalSGDState(None, alone, 2)
    assert_same(
        train(rank, ours, post_localSGD_hook.post_localSGD_hook, steps=4),
        train(rank, theirs, torch_local.post_localSGD_hook, steps=4),
    )
    assert ours.iter == 4
    for make in (averagers.PeriodicModelAverager, torch_averagers.PeriodicModelAverager):
        averager = make(period=2, warmup_steps=1)
        values = []
        for _ in range(4):
            parameter = torch.nn.Parameter(torch.full((2, 2), float(rank)))
            parameter.grad = torch.zeros(2, 2)
            averager.average_parameters([parameter])
            values.append(parameter[0, 0].item())
        assert values == [rank, 0.5, rank, 0.5] and averager.step == 4
    levels = hierarchical_model_averager.HierarchicalModelAverager({2: 1, 4: 2})
    values = []
    for _ in range(5):
        parameter = torch.nn.Parameter(torch.full((3,), float(rank)))
        levels.average_parameters([{"params": [parameter]}])
        values.append(parameter[0].item())
    assert values == [0.5, rank, rank, rank, 0.5]


def test_post_local_sgd_is_torchs():
    run_ranks(2, compare_local_sgd, backend="gloo")


def local_sgd_on_one_host(rank):
    state = post_localSGD_hook.PostLocalSGDState(None, None, 1)
    assert state.subgroup.size() == 2
    ours = train(rank, state, post_localSGD_hook.post_localSGD_hook)
    assert_same(ours, train(rank, None, default_hooks.allreduce_hook))


def test_post_local_sgd_takes_the_host_for_a_subgroup():
    run_ranks(2, local_sgd_on_one_host, env={"LOCAL_WORLD_SIZE": "2"})


OPTIMIZERS = {
    "sgd": (torch.optim.SGD, {"lr": 0.1, "momentum": 0.9, "weight_decay": 0.01, "nesterov": True}),
    "adam": (torch.optim.Adam, {"lr": 0.01, "weight_decay": 0.01, "amsgrad": True}),
    "adamw": (torch.optim.AdamW, {"lr": 0.01, "betas": (0.8, 0.9)}),
}


def optimizer_in_backward(rank, name):
    make, options = OPTIMIZERS[name]
    plain = make_model(channels_last=True)
    parallel = DistributedDataParallel(plain, bucket_cap_mb=0.01)
    optimizer = make(plain.parameters(), **options)
    run_steps(rank, plain, parallel, 5, optimizer.step)

    stepped = make_model(channels_last=True)
    state = optimizer_overlap_hooks.OptimizerState(name, **options)
    parallel = DistributedDataParallel(stepped, bucket_cap_mb=0.01)
    parallel.register_comm_hook(state, optimizer_overlap_hooks.optimizer_hook)
    run_steps(rank, stepped, parallel, 5)
    for a, b in zip(stepped.parameters(), plain.parameters(), strict=True):
        torch.testing.assert_close(a, b, rtol=1e-5, atol=1e-6)
    # Eight parameters, remembered by name and restored.
    saved = state.state_dict()
    assert sum(key.endswith("/step") for key in saved["tensors"]) == 8
    optimizer_overlap_hooks.OptimizerState(name, **options).load_state_dict(saved)


@pytest.mark.parametrize("name", OPTIMIZERS)
def test_optimizers_in_backward_are_the_plain_ones(name):
    run_ranks(2, optimizer_in_backward, name)


def zero_steps(rank, name):
    make, options = OPTIMIZERS[name]
    plain = make_model(channels_last=True)
    optimizer = make(plain.parameters(), **options)
    run_steps(rank, plain, DistributedDataParallel(plain, bucket_cap_mb=0.01), 5, optimizer.step)

    def expect_plain(model):
        for a, b in zip(model.parameters(), plain.parameters(), strict=True):
            torch.testing.assert_close(a, b, rtol=1e-5, atol=1e-6)

    stepped = make_model(channels_last=True)
    state = ddp_zero_hook.ZeroStepState(name, **options)
    parallel = TesseraDDP(stepped, bucket_cap_mb=0.01)
    parallel.register_comm_hook(state, ddp_zero_hook.zero_step_hook)
    run_steps(rank, stepped, parallel, 5)
    expect_plain(stepped)
    saved = state.state_dict()  # of all ranks, on each
    assert sum(key.endswith("/step") for key in saved["tensors"]) == 8
    ddp_zero_hook.ZeroStepState(name, **options).load_state_dict(saved)

    # With torch's wrapper and torch's optimizer, which would need NCCL for it.
    theirs = make_model(channels_last=True)
    parallel = DistributedDataParallel(theirs, bucket_cap_mb=0.01)
    zero = ZeroRedundancyOptimizer(theirs.parameters(), make, overlap_with_ddp=True, **options)
    for make_hook in (ddp_zero_hook.hook_with_zero_step, ddp_zero_hook.hook_with_zero_step_interleaved):
        hook = make_hook(default_hooks.allreduce_hook, parallel, zero)
        assert hook.step_state.lr == options["lr"]
    parallel.register_comm_hook(None, hook)
    run_steps(rank, theirs, parallel, 5)
    expect_plain(theirs)


@pytest.mark.parametrize("backend", ["shm", "gloo"])
@pytest.mark.parametrize("name", OPTIMIZERS)
def test_ranks_share_the_step(name, backend):
    run_ranks(2, zero_steps, name, backend=backend)


def zero_mistakes(rank):
    model = make_model()
    parallel = TesseraDDP(model)
    plain = ZeroRedundancyOptimizer(model.parameters(), torch.optim.SGD, lr=0.1)
    with pytest.raises(ValueError, match="the optimizer was not made with overlap_with_ddp=True"):
        ddp_zero_hook.hook_with_zero_step(default_hooks.allreduce_hook, parallel, plain)
    other = ZeroRedundancyOptimizer(model.parameters(), torch.optim.RMSprop, overlap_with_ddp=True, lr=0.1)
    with pytest.raises(ValueError, match="RMSprop cannot step in backward"):
        ddp_zero_hook.hook_with_zero_step(default_hooks.allreduce_hook, parallel, other)


def test_mistakes_with_shared_steps_are_named():
    run_ranks(2, zero_mistakes)


def clipping(rank):
    plain = make_model()
    parallel = DistributedDataParallel(plain)
    norms = []

    def clip():
        norms.append(torch.nn.utils.clip_grad_norm_(plain.parameters(), 0.05))

    generator = torch.Generator().manual_seed(100 + rank)
    parallel(torch.randn(4, 3, 8, 8, generator=generator)).square().mean().backward()
    clip()

    clipped = make_model()
    state = checking_hooks.GradientClippingState(0.05)
    parallel = DistributedDataParallel(clipped)
    parallel.register_comm_hook(state, checking_hooks.gradient_clipping_hook)
    run_steps(rank, clipped, parallel, 1)
    assert norms[0] > 0.05
    assert state.total_norm == pytest.approx(norms[0].item(), rel=1e-6)
    for a, b in zip(clipped.parameters(), plain.parameters(), strict=True):
        torch.testing.assert_close(a.grad, b.grad, rtol=1e-6, atol=1e-9)


def test_clipping_is_torchs():
    run_ranks(2, clipping)


class Poison(torch.autograd.Function):
    @staticmethod
    def forward(_, x):
        return x.clone()

    @staticmethod
    def backward(_, gradient):
        return gradient * float("nan")


class PoisonedModel(torch.nn.Module):
    def __init__(self, is_poisoned):
        super().__init__()
        torch.manual_seed(1)
        self.first, self.second = torch.nn.Linear(4, 4), torch.nn.Linear(4, 4)
        self.is_poisoned = is_poisoned

    def forward(self, x):
        x = self.first(x)
        return self.second(Poison.apply(x) if self.is_poisoned else x)


def poisoned(rank, policy):
    model = PoisonedModel(rank == 1)
    state = checking_hooks.FiniteCheckState(policy)
    parallel = DistributedDataParallel(model)
    parallel.register_comm_hook(state, checking_hooks.finite_check_hook)
    parallel(torch.ones(2, 4)).sum().backward()
    return state.skip_step, state.found, model.first.weight.grad


@pytest.mark.parametrize("size", [2, 3])
def test_nan_on_one_rank_is_named_on_all(size):
    for outcome in run_ranks_collecting(size, poisoned, "raise"):
        assert outcome.error.startswith(
            "RuntimeError: ddp.finite_check: step 1: rank 1 has NaN in the gradient of 'parameter 0'. "
            "It has not reached the other ranks; this step's gradients are void."
        ), outcome.error


def test_nan_on_one_rank_skips_the_step_on_all():
    for skip, found, gradient in run_ranks(2, poisoned, "skip"):
        assert skip and found == [(1, "parameter 0", "NaN")]
        assert gradient.isfinite().all()


def test_nan_on_one_rank_counts_as_zeros():
    for skip, found, gradient in run_ranks(2, poisoned, "zero"):
        assert not skip and found == [(1, "parameter 0", "NaN")]
        assert gradient.isfinite().all()


def python_hook(rank):
    """A hook in Python inside one in C++, whose futures hold Python objects."""

    def doubled(state, bucket):
        state.append((bucket.index(), bucket.is_last(), bucket.names(), bucket.divisor()))
        assert [g.shape for g in bucket.gradients()] == [p.shape for p in bucket.parameters()]
        future = dist.all_reduce(bucket.buffer(), async_op=True).get_future()
        return future.then(lambda done: done.value()[0] * 2 / dist.get_world_size())

    calls = []
    state = checking_hooks.FiniteCheckState("raise", doubled, calls)
    ours = train(rank, state, checking_hooks.finite_check_hook, steps=1)
    exact = train(rank, None, default_hooks.allreduce_hook, steps=1)
    for mine, other in zip(ours[0], exact[0], strict=True):
        torch.testing.assert_close(mine, 2 * other)
    assert calls[0][0] == 0 and calls[0][1] and calls[0][3] == 2.0 and len(calls[0][2]) == 8


def test_hooks_in_python_inside_hooks_in_cpp():
    run_ranks(2, python_hook)


def wrong_python_hook(rank, kind):
    hooks = {
        "raises": lambda _, bucket: 1 / 0,
        "no future": lambda _, bucket: bucket.buffer(),
        "no tensor": lambda _, bucket: (
            dist.all_reduce(bucket.buffer(), async_op=True).get_future().then(lambda done: "nothing")
        ),
    }
    state = checking_hooks.FiniteCheckState("raise", hooks[kind])
    train(rank, state, checking_hooks.finite_check_hook, steps=1)


@pytest.mark.parametrize(
    ("kind", "text"),
    [
        ("raises", "ZeroDivisionError: division by zero"),
        ("no future", "returned <class 'torch.Tensor'>. It must return a torch.futures.Future."),
        ("no tensor", "holds <class 'str'>, not a tensor."),
    ],
)
def test_errors_in_python_hooks_surface(kind, text):
    for outcome in run_ranks_collecting(2, wrong_python_hook, kind):
        assert text in outcome.error, outcome.error


def deterministic(rank):
    one = train(rank, None, checking_hooks.deterministic_hook, steps=3)
    many = train(rank, None, checking_hooks.deterministic_hook, steps=3, bucket_cap_mb=0.001)
    assert_same(one, many)


@pytest.mark.parametrize(
    ("size", "backend"), [(1, "gloo"), (2, "gloo"), (3, "gloo"), (4, "gloo"), (3, "shm")]
)
def test_deterministic_whatever_the_buckets(size, backend):
    run_ranks(size, deterministic, backend=backend)


def fingerprints(rank):
    model = make_model()
    check = ReplicaFingerprint(every=2)
    assert not check.check(model) and check.check(model)
    if rank == 1:
        with torch.no_grad():
            model[4].bias[3] += 1e-6
    assert not check.check(model)
    check.check(model)


def test_replicas_that_differ_are_named():
    outcomes = run_ranks_collecting(3, fingerprints)
    for outcome in outcomes:
        assert outcome.error == outcomes[0].error
        assert outcome.error.startswith(
            "RuntimeError: ddp.fingerprint: the replicas differ in step 4: '4.bias' (ranks 0, 2 hold "
        ), outcome.error


def test_wrong_arguments_are_named():
    with pytest.raises(ValueError, match="'lion' is none of 'sgd', 'adam', 'adamw'"):
        optimizer_overlap_hooks.OptimizerState("lion")
    with pytest.raises(ValueError, match="'panic' is none of 'raise', 'skip', 'zero'"):
        checking_hooks.FiniteCheckState("panic")
    state = powerSGD_hook.PowerSGDState(None)
    state.native(batched=False)
    with pytest.raises(ValueError, match="cannot serve both"):
        state.native(batched=True)


def train_ours(rank, state, hook, steps=3, **options):
    model = make_model()
    parallel = TesseraDDP(model, **options)
    parallel.register_comm_hook(state, hook)
    return run_steps(rank, model, parallel, steps)


def compare_wrappers(rank):
    small = {"bucket_cap_mb": 0.01}
    for ours, theirs in PAIRS.values():
        assert_same(train_ours(rank, None, ours, **small), train(rank, None, theirs, **small))
    # With a group of its own the hook is called from Python; the values stay.
    group = dist.new_group(backend="gloo")
    ours, theirs = PAIRS["fp16"]
    assert_same(train_ours(rank, group, ours, **small), train(rank, group, theirs, **small))


def test_in_our_wrapper_the_bits_are_torchs():
    run_ranks(2, compare_wrappers, backend="gloo")


def power_sgd_in_our_wrapper(rank):
    state = powerSGD_hook.PowerSGDState(
        None, matrix_approximation_rank=64, start_powerSGD_iter=0, min_compression_rate=0
    )
    wrapped = default_hooks.bf16_compress_wrapper(powerSGD_hook.powerSGD_hook)
    train_ours(rank, state, wrapped, bucket_cap_mb=0.001, static_graph=True)
    assert state.iter == 3
    assert "error/0.weight" in state.native(batched=False).state()[0]


def test_power_sgd_keeps_its_state_by_name():
    run_ranks(2, power_sgd_in_our_wrapper)


def python_hook_in_our_wrapper(rank):
    names = []

    def doubled(state, bucket):
        if state == "fails" and len(names) == 2:
            names.append([])
            raise KeyError("not today")
        names.append(bucket.names())
        future = dist.all_reduce(bucket.buffer(), async_op=True).get_future()
        return future.then(lambda done: done.value()[0] * 2 / bucket.divisor())

    exact = train(rank, None, default_hooks.allreduce_hook, steps=3)
    doubles = train_ours(rank, None, doubled)
    for mine, other in zip(doubles[2], exact[2], strict=True):
        torch.testing.assert_close(mine, 2 * other)
    assert set(names[0]) == {f"{i}.{what}" for i in (0, 3, 4, 5) for what in ("weight", "bias")}

    # An exception surfaces as itself, and the next step works.
    names.clear()
    model = make_model()
    parallel = TesseraDDP(model)
    parallel.register_comm_hook("fails", doubled)
    run_steps(rank, model, parallel, 2)
    with pytest.raises(Exception, match="not today"):
        run_steps(rank, model, parallel, 1)
    again = run_steps(rank, model, parallel, 1)
    for mine, other in zip(again[0], exact[0], strict=True):
        torch.testing.assert_close(mine, 2 * other)


@pytest.mark.parametrize("backend", ["shm", "gloo"])
def test_hooks_in_python_in_our_wrapper(backend):
    run_ranks(2, python_hook_in_our_wrapper, backend=backend)


def optimizer_with_accumulation(rank):
    plain, stepped = make_model(), make_model()
    optimizer = torch.optim.AdamW(plain.parameters(), lr=0.01)
    theirs = DistributedDataParallel(plain)
    ours = TesseraDDP(stepped, gradient_as_bucket_view=True, bucket_cap_mb=0.01)
    state = optimizer_overlap_hooks.OptimizerState("adamw", lr=0.01)
    ours.register_comm_hook(state, optimizer_overlap_hooks.optimizer_hook)
    generator = torch.Generator().manual_seed(rank)
    for _ in range(3):
        optimizer.zero_grad()
        batches = torch.randn(2, 4, 3, 8, 8, generator=generator)
        for parallel in (theirs, ours):
            with parallel.no_sync():
                parallel(batches[0]).square().mean().backward()
            parallel(batches[1]).square().mean().backward()
        optimizer.step()
        assert all(p.grad is None for p in stepped.parameters())
    for a, b in zip(stepped.parameters(), plain.parameters(), strict=True):
        torch.testing.assert_close(a, b, rtol=1e-4, atol=1e-5)
    assert "optimizer/0.weight/exp_avg" in state.state_dict()["tensors"]


def test_optimizer_in_backward_with_accumulation():
    run_ranks(2, optimizer_with_accumulation)


def mixed_precision(rank):
    precision = torch.nn.parallel.distributed._MixedPrecision(
        param_dtype=torch.bfloat16, reduce_dtype=torch.bfloat16, buffer_dtype=torch.bfloat16
    )
    model = torch.nn.Sequential(torch.nn.BatchNorm2d(3, affine=False), make_model())
    parallel = TesseraDDP(model, mixed_precision=precision)
    assert model[0].running_mean.dtype == torch.bfloat16
    exact = torch.nn.Sequential(torch.nn.BatchNorm2d(3, affine=False), make_model())
    reference = DistributedDataParallel(exact)
    x = torch.randn(16, 3, 8, 8, generator=torch.Generator().manual_seed(rank))
    for _ in range(2):
        model.zero_grad()
        exact.zero_grad()
        out = parallel(x)
        assert out.dtype == torch.bfloat16
        out.float().square().mean().backward()
        reference(x).square().mean().backward()
        assert all(p.dtype == p.grad.dtype == torch.float32 for p in model.parameters())
        ours = torch.cat([p.grad.flatten() for p in model.parameters()])
        theirs = torch.cat([p.grad.flatten() for p in exact.parameters()])
        # Eight bits of mantissa through seven layers and back.
        assert (ours - theirs).norm() <= 0.05 * theirs.norm()
        assert not torch.equal(ours, theirs)


def test_mixed_precision_on_the_cpu():
    run_ranks(2, mixed_precision)


def poisoned_in_our_wrapper(rank):
    model = PoisonedModel(rank == 1)
    parallel = TesseraDDP(model)
    parallel.register_comm_hook(checking_hooks.FiniteCheckState(), checking_hooks.finite_check_hook)
    parallel(torch.ones(2, 4)).sum().backward()


def test_nan_is_named_by_parameter():
    for outcome in run_ranks_collecting(2, poisoned_in_our_wrapper):
        assert outcome.error.startswith(
            "RuntimeError: ddp.finite_check: step 1: rank 1 has NaN in the gradient of 'first."
        ), outcome.error
