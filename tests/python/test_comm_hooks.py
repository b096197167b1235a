"""Communication hooks, against torch's own and against what they stand for, over Gloo and shm."""

from __future__ import annotations

import pickle

import numpy
import pytest
import torch
import torch.distributed as dist
from hook_training import assert_same, make_model, run_steps, train
from ranks import run_ranks, run_ranks_collecting
from tessera.distributed.algorithms.ddp_comm_hooks import (
    checking_hooks,
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


@pytest.mark.skipif(
    torch.cuda.is_available(),
    reason="torch's own hook asks a CPU's gradients for their GPU where there is one",
)
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


def padded(_, bucket):
    """Sum a bucket that is longer for as long, as torch's batched PowerSGD makes it a square."""
    buffer = bucket.buffer()
    size = buffer.numel()
    buffer.resize_(size + 1000)
    buffer[size:].fill_(0)
    dist.all_reduce(buffer)
    future = torch.futures.Future()
    future.set_result(buffer.resize_(size).div_(dist.get_world_size()))
    return future


def compare_padded(rank):
    for views in (False, True):
        options = {"bucket_cap_mb": 0.01, "gradient_as_bucket_view": views}
        expected = train(rank, None, torch_default.allreduce_hook, **options)
        assert_same(train(rank, None, padded, **options), expected)
        model = make_model()
        parallel = TesseraDDP(model, **options)
        parallel.register_comm_hook(None, padded)
        assert_same(run_steps(rank, model, parallel, 3), expected)


@pytest.mark.parametrize("disable", ["0", "1"])
@pytest.mark.parametrize("backend", ["gloo", "shm"])
def test_a_hook_may_resize_its_bucket(backend, disable):
    run_ranks(2, compare_padded, backend=backend, env={"DDP_DISABLE_COMM_MEM": disable})


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
