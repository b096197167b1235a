"""tessera.nn.parallel.DistributedDataParallel beside torch's, in processes over shm and Gloo."""

from __future__ import annotations

import collections
import dataclasses
import inspect
import warnings

import pytest
import torch
import torch.distributed as dist
from ranks import run_ranks, run_ranks_collecting
from tessera.nn.parallel import DistributedDataParallel
from torch.nn.parallel import DistributedDataParallel as TorchDDP


def make_model(seed=7):
    torch.manual_seed(seed)
    return torch.nn.Sequential(
        torch.nn.Conv2d(3, 8, 3).to(memory_format=torch.channels_last),
        torch.nn.BatchNorm2d(8),
        torch.nn.ReLU(),
        torch.nn.Flatten(),
        torch.nn.Linear(8 * 36, 33),
        torch.nn.Tanh(),
        torch.nn.Linear(33, 5, bias=False),
    )


def train(kind, rank, steps=5, accumulate=False, set_to_none=True, **options):
    model = make_model(7 + rank)
    parallel = kind(model, **options)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    generator = torch.Generator().manual_seed(100 + rank)
    gradients = []
    for step in range(steps):
        optimizer.zero_grad(set_to_none=set_to_none)
        for part in range(2 if accumulate and step else 1):
            x = torch.randn(4, 3, 8, 8, generator=generator)
            with parallel.no_sync() if accumulate and step and part == 0 else torch.enable_grad():
                parallel(x).square().mean().backward()
        gradients.append([p.grad.clone() for p in model.parameters()])
        optimizer.step()
    return gradients, parallel.state_dict()


OPTIONS = [
    {},
    {"gradient_as_bucket_view": True},
    {"gradient_as_bucket_view": True, "set_to_none": False},
    {"bucket_cap_mb": 0.01},
    {"bucket_cap_mb_list": [0.001, 0.02]},
    {"batched_grad_copy": True, "gradient_as_bucket_view": True},
    {"find_unused_parameters": True},
    {"static_graph": True, "bucket_cap_mb": 0.01},
    {"accumulate": True},
    {"forward_sync_buffers": False},
]
# Ours are those of torch 2.13 in every torch; an older one has fewer.
OWN_OPTIONS = {"set_to_none", "accumulate"}  # of train()
TORCH_OPTIONS = inspect.signature(TorchDDP.__init__).parameters.keys() | OWN_OPTIONS


def compare(rank):
    for options in [options for options in OPTIONS if options.keys() <= TORCH_OPTIONS]:
        mine, state = train(DistributedDataParallel, rank, **options)
        theirs, expected = train(TorchDDP, rank, process_group=torch_group(), **options)
        for step, (a, b) in enumerate(zip(mine, theirs, strict=True)):
            for x, y in zip(a, b, strict=True):
                assert torch.equal(x, y), f"{options}, step {step}: {(x - y).abs().max()}"
        assert state.keys() == expected.keys()
        for name in state:
            assert torch.equal(state[name], expected[name]), (options, name)


_torch_group = None


def torch_group():
    global _torch_group
    if _torch_group is None:
        _torch_group = dist.new_group(backend="gloo")
    return _torch_group


@pytest.mark.parametrize("backend", ["shm", "gloo"])
def test_two_ranks_train_as_with_torch_bit_for_bit(backend):
    run_ranks(2, compare, backend=backend)


class Wide(torch.nn.Module):
    """Gradients that are large enough to be computed in their buckets, by nodes of several kinds."""

    def __init__(self):
        super().__init__()
        torch.manual_seed(11)
        self.table = torch.nn.Embedding(300, 64)
        self.convolution = torch.nn.Conv2d(16, 64, 3).to(memory_format=torch.channels_last)
        self.first = torch.nn.Linear(256, 64)
        self.norm = torch.nn.LayerNorm(8192)
        self.shared = torch.nn.Linear(64, 64, bias=False)
        self.bilinear = torch.nn.Bilinear(64, 64, 8)

    def forward(self, x):
        x = self.convolution(x.to(memory_format=torch.channels_last)).relu().flatten(1)
        x = self.first(x).tanh() + self.table(x.abs().sum(1).long() % 300)
        x = self.shared(self.shared(x).tanh())
        x = self.norm(x.repeat(1, 128))[:, :64]
        return self.bilinear(x, x.flip(1))


def train_wide(kind, rank, keep=None, **options):
    model = Wide()
    parallel = kind(model, gradient_as_bucket_view=True, bucket_cap_mb=0.1, **options)
    if keep is not None:  # by the parameter's hook, and after accumulation
        model.first.weight.register_hook(lambda g: keep.append((g, g.clone())))
        model.shared.weight.register_post_accumulate_grad_hook(
            lambda p: keep.append((p.grad.detach(), p.grad.clone()))
        )
    optimizer = torch.optim.SGD(model.parameters(), lr=0.001)
    generator = torch.Generator().manual_seed(50 + rank)
    gradients = []
    for _ in range(5):
        optimizer.zero_grad()
        parallel(torch.randn(64, 16, 4, 4, generator=generator)).square().mean().backward()
        gradients.append([p.grad.clone() for p in model.parameters()])
        optimizer.step()
    return gradients, parallel


def direct(rank):
    theirs, _ = train_wide(TorchDDP, rank, process_group=torch_group())
    for options in ({}, {"direct_gradients": False}, {"static_graph": True}, {"keep": []}):
        mine, ddp = train_wide(DistributedDataParallel, rank, **options)
        for step, (a, b) in enumerate(zip(mine, theirs, strict=True)):
            for i, (x, y) in enumerate(zip(a, b, strict=True)):
                assert torch.equal(x, y), f"{options.keys()}, step {step}, parameter {i}"
        count = ddp._get_ddp_logging_data().get("num_gradients_in_place", 0)
        assert count == 0 if "direct_gradients" in options else count >= 4, count
        for kept, then in options.get("keep", ()):
            assert torch.equal(kept, then)  # this rank's own, not the average


@pytest.mark.parametrize("backend", ["shm", "gloo"])
def test_gradients_in_place_are_torch_s_bit_for_bit(backend):
    run_ranks(2, direct, backend=backend)


def compare_three(rank):
    mine, _ = train(DistributedDataParallel, rank)
    theirs, _ = train(TorchDDP, rank, process_group=torch_group())
    for a, b in zip(mine, theirs, strict=True):
        for x, y in zip(a, b, strict=True):
            torch.testing.assert_close(x, y, rtol=1e-5, atol=1e-7)


@pytest.mark.parametrize("size", [1, 3])
def test_other_worlds_train_as_with_torch(size):
    run_ranks(size, compare_three)


def test_the_signature_is_torch_s():
    ours = list(inspect.signature(DistributedDataParallel.__init__).parameters.values())
    theirs = list(inspect.signature(TorchDDP.__init__).parameters.values())
    if tuple(int(word) for word in torch.__version__.split(".")[:2]) >= (2, 13):
        assert [(p.name, p.default) for p in ours[: len(theirs)]] == [(p.name, p.default) for p in theirs]
    else:  # an older torch has a part of them, in the same order
        names = {p.name for p in theirs}
        assert [p.name for p in ours if p.name in names] == [p.name for p in theirs]
    for name in ("join", "no_sync", "register_comm_hook", "join_hook", "train"):
        a, b = (inspect.signature(getattr(c, name)).parameters for c in (DistributedDataParallel, TorchDDP))
        assert list(a) == list(b), name


def check_errors(rank):
    def text(kind, **options):
        module = options.pop("module", None)
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            with pytest.raises(Exception) as caught:
                kind(module if module is not None else torch.nn.Linear(2, 2), **options)
        return type(caught.value), str(caught.value).split("\n")[0]

    frozen = torch.nn.Linear(2, 2).requires_grad_(False)
    linear = torch.nn.Linear(2, 2)
    for options in (
        {"delay_all_reduce_named_params": [("weight", linear.weight)], "module": linear},
        {"param_to_hook_all_reduce": linear.weight, "module": linear},
        {"module": frozen},
        {"device_ids": [0, 1]},
        {"module": torch.nn.LazyLinear(3)},
        {"module": torch.nn.Sequential(linear, torch.nn.SyncBatchNorm(2))},
    ):
        assert text(DistributedDataParallel, **options) == text(TorchDDP, **options), options
    kind, message = text(DistributedDataParallel, device_ids=[0])
    assert kind is ValueError
    assert message.startswith("DistributedDataParallel device_ids and output_device arguments only work")
    mesh = dist.init_device_mesh("cpu", (1,))
    for kind in (DistributedDataParallel, TorchDDP):
        with pytest.raises(RuntimeError, match="Cannot specify both process_group and device_mesh"):
            kind(linear, process_group=dist.group.WORLD, device_mesh=mesh)
    assert DistributedDataParallel(linear, device_mesh=mesh).process_group.size() == 1
    with pytest.warns(FutureWarning, match="`broadcast_buffers` is deprecated"):
        DistributedDataParallel(torch.nn.Linear(2, 2), broadcast_buffers=True)
    with pytest.warns(FutureWarning, match="its value is ignored"):
        DistributedDataParallel(torch.nn.Linear(2, 2), broadcast_buffers=True, forward_sync_buffers=True)
    with pytest.warns(FutureWarning, match="`check_reduction` argument"):
        DistributedDataParallel(torch.nn.Linear(2, 2), check_reduction=True)
    ddp = DistributedDataParallel(torch.nn.Linear(2, 2))
    with pytest.raises(TypeError, match=r"Communication hook must be callable\."):
        ddp.register_comm_hook(None, 3)

    def wrong_bucket(state, bucket: int) -> torch.futures.Future[torch.Tensor]: ...

    def wrong_return(state, bucket: dist.GradBucket) -> int: ...

    for hook, match in ((wrong_bucket, "bucket annotation should be"), (wrong_return, "return annotation")):
        hook.__annotations__ = {k: eval(v) for k, v in hook.__annotations__.items()}
        with pytest.raises(ValueError, match=match):
            ddp.register_comm_hook(None, hook)


def test_arguments_are_checked_as_torch_does():
    run_ranks(1, check_errors)


def differ(rank, case):
    if case == "dtype":
        model = torch.nn.Linear(2, 2, dtype=torch.float64 if rank else torch.float32)
    elif case == "order":
        parts = {"a": torch.nn.Linear(2, 2), "b": torch.nn.Linear(2, 2)}
        model = torch.nn.ModuleDict({k: parts[k] for k in (("b", "a") if rank else ("a", "b"))})
    else:
        model = torch.nn.Linear(2 + rank, 2)
    DistributedDataParallel(model)


@pytest.mark.parametrize("backend", ["shm", "gloo"])
@pytest.mark.parametrize(
    "case, text",
    [
        ("dtype", "parameter 0: 'weight' Float [2, 2] on rank 0; 'weight' Double [2, 2] on rank 1"),
        ("order", "parameter 0: 'a.weight' Float [2, 2] on rank 0; 'b.weight' Float [2, 2] on rank 1"),
        ("shape", "parameter 0: 'weight' Float [2, 2] on rank 0; 'weight' Float [2, 3] on rank 1"),
    ],
)
def test_models_that_differ_are_named_on_all_ranks(case, text, backend):
    outcomes = run_ranks_collecting(2, differ, case, backend=backend)
    assert outcomes[0].error == outcomes[1].error
    assert outcomes[0].error.startswith("CommError: ") and text in outcomes[0].error


def static_and_local(rank):
    """What torch 2.13 cannot: a static graph that begins with no_sync, or ignores an output."""
    torch.manual_seed(1)
    model = torch.nn.Linear(4, 3)
    ddp = DistributedDataParallel(model, static_graph=True)
    torch.manual_seed(1)
    alone = torch.nn.Linear(4, 3)
    for step in range(4):
        for network in (ddp, alone):
            network.zero_grad()
            scope = ddp.no_sync() if network is ddp else torch.enable_grad()
            with scope:
                network(torch.full((2, 4), 1.0 + step)).sum().backward()
            network(torch.ones(2, 4)).sum().backward()
        assert torch.allclose(model.weight.grad, alone.weight.grad)


def test_a_static_graph_may_begin_without_sync():
    run_ranks(2, static_and_local)


@dataclasses.dataclass
class Result:
    y: torch.Tensor
    extra: dict
    note: str = "n"


class Two(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.a, self.b = torch.nn.Linear(4, 4), torch.nn.Linear(4, 4)

    def forward(self, x, wrap):
        return wrap(self.a(x), self.b(x))


class Named(dict):
    """As model outputs of some libraries are: a dict with more to it."""


class Several(list):
    pass


class Fixed(collections.namedtuple("Fixed", "b a")):
    __slots__ = ()


class Opaque:
    def __init__(self, value):
        self.value = value


def outputs(rank):
    for wrap, pick in (
        (lambda a, b: Named(a=a, b=b), lambda r: r["a"]),
        (lambda a, b: [Several([b, a])], lambda r: r[0][1]),
        (lambda a, b: {"both": Fixed(b, a)}, lambda r: r["both"].a),
        (lambda a, b: {"a": a, "b": [b]}, lambda r: r["a"]),
        (lambda a, b: (a, b, "text"), lambda r: r[0]),
        (lambda a, b: Result(a, {"b": b}), lambda r: r.y),
    ):
        ddp = DistributedDataParallel(Two(), find_unused_parameters=True)
        pick(ddp(torch.full((2, 4), rank + 1.0), wrap=wrap)).sum().backward()
        assert torch.equal(ddp.module.a.weight.grad, torch.full((4, 4), 3.0))
        assert ddp.module.b.weight.grad is None
    ddp = DistributedDataParallel(Two())
    with pytest.raises(RuntimeError, match=r"2 of 4 parameters of Two got no gradient.*b\.weight, b\.bias"):
        ddp(torch.ones(2, 4), wrap=lambda a, b: a).sum().backward()


def test_any_output_and_unused_parameters():
    run_ranks(2, outputs)


def hidden_losses(rank):
    """A static graph is learned from its first backward, wherever the loss of that came from."""
    for wrap, pick in (
        (Opaque, lambda r: r.value),
        (lambda y: lambda: y, lambda r: r()),
        (lambda y: (y.mean(), Opaque(y)), lambda r: r[1].value),
    ):
        flags = ("gradient_as_bucket_view", "static_graph", "find_unused_parameters", "automatic_graph")
        for options in ({}, *({flag: True} for flag in flags)):
            layer = torch.nn.Linear(4, 4)
            layer.forward = lambda x, layer=layer, wrap=wrap: wrap(torch.nn.Linear.forward(layer, x))
            ddp = DistributedDataParallel(layer, **options)
            for step in range(1, 9):
                ddp.zero_grad(set_to_none=step % 2 == 0)
                pick(ddp(torch.full((2, 4), step * (rank + 1.0)))).sum().backward()
                assert torch.equal(layer.weight.grad, torch.full((4, 4), 3.0 * step)), (options, step)
    two = DistributedDataParallel(Two(), find_unused_parameters=True)
    with pytest.raises(RuntimeError, match=r"2 of 4 parameters of Two got no gradient.*b\.weight, b\.bias"):
        two(torch.ones(2, 4), wrap=lambda a, b: Opaque(a)).value.sum().backward()


def test_losses_that_the_wrapper_does_not_see():
    run_ranks(2, hidden_losses)


def gradients_of_inputs(rank):
    """A gradient penalty differentiates for the inputs before the loss is complete."""
    layer = torch.nn.Linear(4, 4)
    torch.nn.init.ones_(layer.weight)
    ddp = DistributedDataParallel(layer, static_graph=True)
    for _ in range(4):
        ddp.zero_grad()
        x = torch.full((2, 4), rank + 1.0, requires_grad=True)
        y = ddp(x)
        (slope,) = torch.autograd.grad(y.sum(), x, create_graph=True)
        assert torch.equal(slope, torch.full((2, 4), 4.0))
        (y.sum() + slope.sum()).backward()
        assert torch.equal(layer.weight.grad, torch.full((4, 4), 3.0 + 2.0))


def test_a_static_graph_may_begin_with_gradients_of_inputs():
    run_ranks(2, gradients_of_inputs)


def joined(rank, kind_name):
    kind = {"ours": DistributedDataParallel, "torch": TorchDDP}[kind_name]
    torch.manual_seed(3)
    model = torch.nn.Sequential(torch.nn.Linear(3, 3), torch.nn.BatchNorm1d(3))
    ddp = kind(model)
    generator = torch.Generator().manual_seed(rank)
    with ddp.join(divide_by_initial_world_size=False):
        for _ in range(2 + 2 * rank):
            ddp.zero_grad()
            ddp(torch.randn(4, 3, generator=generator)).square().sum().backward()
            with torch.no_grad():
                for parameter in model.parameters():
                    parameter -= 0.01 * parameter.grad
    return model.state_dict()


def test_join_ends_with_torch_s_model():
    ours, theirs = run_ranks(2, joined, "ours"), run_ranks(2, joined, "torch", backend="gloo")
    for a, b in zip(ours, theirs, strict=True):
        for name in a:
            torch.testing.assert_close(a[name], b[name], rtol=1e-6, atol=1e-7)


def join_throws(rank):
    ddp = DistributedDataParallel(torch.nn.Linear(2, 2))
    with ddp.join(throw_on_early_termination=True):
        for _ in range(2 + rank):
            ddp(torch.ones(1, 2)).sum().backward()


def test_join_throws_early_if_asked():
    first, second = run_ranks_collecting(2, join_throws)
    assert "Rank 0 exhausted all inputs." in first.error
    assert "Detected at least one rank that exhausted inputs." in second.error


def mixed(rank):
    from torch.nn.parallel.distributed import _MixedPrecision

    torch.manual_seed(3)
    model = torch.nn.Sequential(torch.nn.Linear(8, 8), torch.nn.BatchNorm1d(8))
    precision = _MixedPrecision(
        param_dtype=torch.bfloat16, reduce_dtype=torch.bfloat16, buffer_dtype=torch.bfloat16
    )
    ddp = DistributedDataParallel(model, mixed_precision=precision)
    y = ddp(torch.full((4, 8), 1.0 + rank) * torch.arange(4).reshape(4, 1))
    assert y.dtype == torch.bfloat16
    y.float().square().sum().backward()
    assert model[0].weight.dtype == torch.float32 and model[0].weight.grad.dtype == torch.float32
    return model[0].weight.grad


def test_mixed_precision_runs_on_the_cpu():
    first, second = run_ranks(2, mixed)
    assert torch.equal(first, second) and first.abs().sum() > 0


def segment_bytes() -> int:
    """This rank's share of the memory of shared segments."""
    total, is_ours = 0, False
    with open("/proc/self/smaps") as lines:
        for line in lines:
            word = line.split()
            if not word[0].endswith(":"):
                is_ours = "/tessera-" in line
            elif is_ours and word[0] == "Pss:":
                total += 1024 * int(word[1])
    return total


def memory(rank):
    model = torch.nn.Sequential(*(torch.nn.Linear(512, 512) for _ in range(24)))
    before = segment_bytes()
    ddp = DistributedDataParallel(model, gradient_as_bucket_view=True, bucket_cap_mb=4)
    for _ in range(4):
        ddp.zero_grad()
        ddp(torch.ones(2, 512)).sum().backward()
    dist.barrier()
    used = segment_bytes() - before
    dist.barrier()
    storages = {p.grad.untyped_storage().data_ptr(): p.grad.untyped_storage() for p in model.parameters()}
    held = sum(storage.nbytes() for storage in storages.values())
    return used, held, sum(p.nbytes for p in model.parameters()), len(storages)


def test_gradients_live_once_in_the_segment():
    for used, held, gradients, num_buckets in run_ranks(2, memory):
        assert held == gradients  # what .grad keeps alive is the buckets and nothing else
        assert num_buckets > 1
        assert used <= 1.05 * gradients
