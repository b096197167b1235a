"""What training scripts and libraries ask of tessera.nn.parallel.DistributedDataParallel."""

from __future__ import annotations

import io

import pytest
import torch
import torch.distributed as dist
from ranks import run_ranks, run_ranks_collecting
from tessera.distributed.algorithms.ddp_comm_hooks import default_hooks
from tessera.nn.parallel import DistributedDataParallel
from test_data_parallel import make_model
from torch.nn.parallel import DistributedDataParallel as TorchDDP


def extras(rank):
    model = make_model()
    ddp = DistributedDataParallel(model, bucket_cap_mb=0.01)
    assert ddp.broadcast_buffers and not ddp.static_graph and not ddp.find_unused_parameters
    assert ddp.require_backward_grad_sync
    generator = torch.Generator().manual_seed(rank)
    for _ in range(3):
        ddp(torch.randn(4, 3, 8, 8, generator=generator)).sum().backward()
    data = ddp._get_ddp_logging_data()
    assert data["world_size"] == 2 and data["module_name"] == "Sequential"
    assert data["has_rebuilt_buckets"] == 1
    report = ddp.overlap_report()
    assert report["num_buckets"] > 1 and report["bytes"] == sum(p.nbytes for p in model.parameters())
    ddp._check_reducer_finalized()
    ddp._set_ddp_runtime_logging_sample_rate(2)
    with torch.no_grad():
        if rank == 0:  # buffers are not sent without gradients
            ddp.eval()(torch.randn(4, 3, 8, 8))
    dist.barrier()

    # Only the module goes into a file of one's own; a pickle rebuilds the wrapper.
    file = io.BytesIO()
    torch.save(ddp, file)
    file.seek(0)
    again = torch.load(file, weights_only=False)
    again.train()(torch.ones(2, 3, 8, 8)).sum().backward()
    with pytest.raises(RuntimeError, match="can only be called once"):
        hook = lambda state, bucket: None  # noqa: E731
        other = DistributedDataParallel(make_model())
        other.register_comm_hook(None, hook)
        other.register_comm_hook(None, hook)

    # Ignored names, also at the root.
    class Root(torch.nn.Module):
        def __init__(self):
            super().__init__()
            self.w, self.v = torch.nn.Parameter(torch.ones(2)), torch.nn.Parameter(torch.ones(2))

        def forward(self, x):
            return x * self.w * self.v

    root = Root()
    DistributedDataParallel._set_params_and_buffers_to_ignore_for_model(root, ["w"])
    DistributedDataParallel(root)(torch.full((2,), 1.0 + rank)).sum().backward()
    assert root.w.grad[0] == 1.0 + rank and root.v.grad[0] == 1.5

    # Delayed parameters.
    late = Root()
    named = [("v", late.v)]
    ddp = DistributedDataParallel(late, delay_all_reduce_named_params=named, param_to_hook_all_reduce=late.w)
    ddp(torch.full((2,), 1.0 + rank)).sum().backward()
    assert late.w.grad[0] == 1.5 and late.v.grad[0] == 1.5

    # Buffers by a hook of one's own.
    calls = []
    counted = DistributedDataParallel(make_model())
    counted._register_buffer_comm_hook(None, lambda state, buffers: calls.append(sorted(buffers)))
    counted(torch.ones(2, 3, 8, 8)).sum().backward()
    assert calls == [["1.num_batches_tracked", "1.running_mean", "1.running_var"]]


def test_the_rest_of_the_interface():
    run_ranks(2, extras)


def named_hooks(rank):
    from tessera.distributed.algorithms.ddp_comm_hooks import DDPCommHookType, register_ddp_comm_hook
    from torch.distributed.algorithms.ddp_comm_hooks import DDPCommHookType as TorchType

    assert [kind.name for kind in DDPCommHookType] == [kind.name for kind in TorchType]
    for kind in DDPCommHookType:
        layer = torch.nn.Linear(4, 4)
        ddp = DistributedDataParallel(layer)
        register_ddp_comm_hook(kind, ddp)
        ddp(torch.full((2, 4), rank + 1.0)).sum().backward()
        own = 2.0 * (rank + 1) if kind.name == "NOOP" else 3.0
        torch.testing.assert_close(layer.weight.grad, torch.full((4, 4), own), rtol=0.01, atol=0)
    kind = DDPCommHookType.BATCHED_POWER_SGD_RANK2
    ddp = DistributedDataParallel(torch.nn.Linear(4, 4))
    kind.value(model=ddp, state=None, start_powerSGD_iter=5)
    _, state = ddp._comm_hooks[0]
    assert (state.matrix_approximation_rank, state.start_powerSGD_iter) == (2, 5)


def test_hooks_can_be_registered_by_name():
    run_ranks(2, named_hooks)


def same_names(rank, kind_name):
    """What libraries ask a wrapper for, beside training."""
    kind = {"ours": DistributedDataParallel, "torch": TorchDDP}[kind_name]
    torch.manual_seed(rank)
    model = torch.nn.Sequential(torch.nn.Linear(2, 2), torch.nn.BatchNorm1d(2))
    ddp = kind(model)
    ddp(torch.randn(4, 2)).sum().backward()
    assert ddp.will_sync_module_buffers() and ddp._distributed_rank == rank
    ddp._sync_buffers()
    assert len(list(kind._get_data_parallel_params(model))) == 4
    moved, words = ddp.to_kwargs((torch.ones(2),), {"a": 1}, 0)
    assert torch.equal(moved[0][0], torch.ones(2)) and words[0] == {"a": 1}
    return dict(model.named_buffers())


def test_libraries_find_what_they_ask_for():
    ours, theirs = run_ranks(2, same_names, "ours"), run_ranks(2, same_names, "torch", backend="gloo")
    for name in ours[0]:
        assert all(torch.equal(theirs[0][name], found[name]) for found in (*ours, *theirs)), name
    import tessera.distributed.algorithms.join as join
    import tessera.nn.parallel.distributed as module

    for name in (
        "_BufferCommHookLocation",
        "_MixedPrecision",
        "_find_tensors",
        "_dump_DDP_relevant_env_vars",
    ):
        assert getattr(module, name) is getattr(torch.nn.parallel.distributed, name)
    assert join.Join is torch.distributed.algorithms.join.Join


def fused(rank):
    torch.manual_seed(3)
    model, plain = torch.nn.Linear(4, 4), torch.nn.Linear(4, 4)
    plain.load_state_dict(model.state_dict())
    ddp = DistributedDataParallel(model)
    ddp._register_fused_optim(torch.optim.SGD, lr=0.1, momentum=0.9)
    reference = DistributedDataParallel(plain)
    optimizer = torch.optim.SGD(plain.parameters(), lr=0.1, momentum=0.9)
    for step in range(4):
        x = torch.full((2, 4), 1.0 + rank + step)
        ddp(x).square().mean().backward()
        optimizer.zero_grad()
        reference(x).square().mean().backward()
        optimizer.step()
        torch.testing.assert_close(model.weight, plain.weight)
        ddp.zero_grad()
    with pytest.raises(ValueError, match="Adagrad cannot run in backward"):
        DistributedDataParallel(torch.nn.Linear(2, 2))._register_fused_optim(torch.optim.Adagrad)


def test_an_optimizer_may_run_in_backward():
    run_ranks(2, fused)


def is_torch_s(rank):
    """Code that looks for torch's class finds ours."""
    from torch.distributed.checkpoint.state_dict import get_model_state_dict

    model = torch.nn.Linear(2, 2)
    ddp = DistributedDataParallel(model)
    assert isinstance(ddp, TorchDDP) and issubclass(DistributedDataParallel, TorchDDP)
    assert sorted(get_model_state_dict(ddp)) == ["bias", "weight"]
    assert sorted(ddp.state_dict()) == ["module.bias", "module.weight"]
    # Both kinds side by side.
    torch.testing.assert_close(TorchDDP(torch.nn.Linear(2, 2))(torch.ones(1, 2)).shape, (1, 2))


def test_it_is_torch_s_class_to_those_who_ask():
    run_ranks(2, is_torch_s, backend="gloo")


# Methods of torch's class that work on our attributes as they are.
INHERITED = {
    "_assign_modules_buffers",
    "_build_debug_param_to_name_mapping",
    "_build_params_for_reducer",
    "_check_default_group",
    "_distributed_broadcast_coalesced",
    "_find_common_rank",
    "_get_active_ddp_module",
    "_get_parameters",
    "_inside_ddp_forward",
    "train",
}


def test_no_method_of_torch_s_is_inherited_by_accident():
    from tessera.nn.parallel._library_methods import _STEPS_OF_TORCH

    ours = {name for kind in DistributedDataParallel.__mro__ for name in vars(kind) if kind is not TorchDDP}
    theirs = {name for name, value in vars(TorchDDP).items() if callable(getattr(TorchDDP, name))}
    assert {name for name in theirs - ours if not name.startswith("__")} <= INHERITED
    with pytest.raises(NotImplementedError, match="_lazy_init is a step of torch's own engine"):
        DistributedDataParallel._lazy_init(object())
    assert set(_STEPS_OF_TORCH) <= ours


def inherited(rank):
    model = make_model()
    ddp = DistributedDataParallel(model, bucket_cap_mb=2)
    assert ddp.bucket_bytes_cap == 2 * 1024 * 1024
    assert DistributedDataParallel(torch.nn.Linear(2, 2)).bucket_bytes_cap == 25 * 1024 * 1024
    parameters, is_sparse = ddp._build_params_for_reducer()
    assert len(parameters) == len(is_sparse) == len(list(model.parameters()))
    assert ddp._build_debug_param_to_name_mapping(parameters)[0] == "0.weight"
    assert ddp._find_common_rank(rank, rank == 1) == 1
    with ddp._inside_ddp_forward():
        assert DistributedDataParallel._get_active_ddp_module() is ddp
    value = torch.full((3,), float(rank))
    ddp._distributed_broadcast_coalesced([value], 1024, 1)
    assert value[0] == 1
    with pytest.raises(KeyError, match="some text"):
        ddp._log_and_throw(KeyError, "some text")
    with ddp.no_sync():
        ddp(torch.ones(2, 3, 8, 8))
        assert not ddp.require_forward_param_sync
    ddp.require_forward_param_sync = True
    assert ddp.require_forward_param_sync


def test_private_names_that_libraries_use():
    run_ranks(2, inherited)


def late_choice(rank, kind_name):
    """What torch.distributed.pipelining does: all forwards without sync, the last backward with it."""
    kind = {"ours": DistributedDataParallel, "torch": TorchDDP}[kind_name]
    torch.manual_seed(3)
    ddp = kind(torch.nn.Sequential(torch.nn.Linear(4, 4), torch.nn.Tanh(), torch.nn.Linear(4, 2)))
    seen = []
    for step in range(3):
        ddp.zero_grad()
        with ddp.no_sync():
            outputs = [ddp(torch.full((2, 4), 1.0 + rank + part + step)) for part in range(3)]
        for part, output in enumerate(outputs):
            if part == 2:
                ddp.reducer.prepare_for_backward([output])
                output.square().sum().backward()
            else:
                with ddp.no_sync():
                    output.square().sum().backward()
        seen += [p.grad.clone() for p in ddp.parameters()]
    return seen


def test_the_last_of_several_backwards_may_be_chosen_late():
    ours = run_ranks(2, late_choice, "ours")
    theirs = run_ranks(2, late_choice, "torch", backend="gloo")
    for mine, expected in zip(ours, theirs, strict=True):
        assert all(torch.equal(a, b) for a, b in zip(mine, expected, strict=True))


def compiled(rank, is_outer, bucket_cap_mb):
    torch.manual_seed(3)
    plain = torch.nn.Sequential(torch.nn.Linear(8, 8), torch.nn.Tanh(), torch.nn.Linear(8, 8))
    model = torch.compile(plain, backend="aot_eager")
    ddp = DistributedDataParallel(plain if is_outer else model, bucket_cap_mb=bucket_cap_mb)
    call = torch.compile(ddp, backend="aot_eager") if is_outer else ddp
    for step in range(3):
        expected = 0
        for other in range(2):
            x = torch.full((2, 8), 1.0 + other + step)
            expected += torch.autograd.grad(plain(x).square().mean(), plain[0].weight)[0] / 2
        ddp.zero_grad()
        call(torch.full((2, 8), 1.0 + rank + step)).square().mean().backward()
        torch.testing.assert_close(plain[0].weight.grad, expected)


@pytest.mark.parametrize("is_outer", [False, True], ids=["inside", "outside"])
@pytest.mark.parametrize("bucket_cap_mb", [0.0001, None])
def test_torch_compile(is_outer, bucket_cap_mb):
    run_ranks(2, compiled, is_outer, bucket_cap_mb)


def cut_short(rank, has_all):
    torch.manual_seed(3)
    model = torch.nn.Sequential(*(torch.nn.Linear(8, 8) for _ in range(3)))
    ddp = DistributedDataParallel(model, bucket_cap_mb=0.0001)
    x = torch.full((2, 8), 1.0 + rank)
    for _ in range(3):
        ddp.zero_grad()
        ddp(x).sum().backward()
    expected = [p.grad.clone() for p in ddp.parameters()]

    def throw(gradient):
        handle.remove()
        raise KeyError("half-way")

    if rank == 0 or has_all:
        handle = model[1].weight.register_hook(throw)
        with pytest.raises(KeyError):
            ddp(x).sum().backward()
    ddp.zero_grad()
    ddp(x).sum().backward()
    return all(torch.equal(p.grad, g) for p, g in zip(ddp.parameters(), expected, strict=True))


@pytest.mark.parametrize("backend", ["shm", "gloo"])
def test_a_backward_that_all_ranks_cut_short_is_forgotten(backend):
    assert run_ranks(2, cut_short, True, backend=backend) == [True, True]


@pytest.mark.parametrize("backend", ["shm", "gloo"])
def test_a_backward_that_one_rank_cut_short_is_an_error_on_all(backend):
    first, second = run_ranks_collecting(2, cut_short, False, backend=backend, env={"LIMIT": "2"})
    text = "an exception ended the backward on rank 0 after 1 of 3 buckets"
    assert text in first.error and "go on in another group" in first.error
    assert second.error


def torchs_attributes(rank):
    class Part(torch.nn.Module):
        def __init__(self):
            super().__init__()
            self.used, self.spare, self.own = (torch.nn.Linear(3, 3) for _ in range(3))

        def forward(self, x, is_all):
            y = self.used(x)
            return self.spare(y) if is_all else y

    module = Part()
    DistributedDataParallel._set_params_and_buffers_to_ignore_for_model(
        module=module, params_and_buffers_to_ignore=["own.weight", "own.bias"]
    )
    ddp = DistributedDataParallel(module, bucket_cap_mb_list=[1, 2], find_unused_parameters=True)
    assert ddp.parameters_to_ignore == {"own.weight", "own.bias"}
    assert ddp.bucket_bytes_cap_list == [1 << 20, 2 << 20] and ddp.bucket_bytes_cap == 2 << 20
    assert not ddp.bucket_bytes_cap_default and DistributedDataParallel(make_model()).bucket_bytes_cap_default
    assert ddp.broadcast_bucket_size == 250 << 20
    ddp(torch.ones(2, 3), is_all=rank == 1).sum().backward()
    # used.weight, used.bias, spare.weight, spare.bias: by how many ranks.
    assert ddp.reducer._get_local_used_map().tolist() == [2, 2, 1, 1]

    plain = DistributedDataParallel(make_model())
    assert not plain._has_rebuilt_buckets
    for _ in range(3):
        plain(torch.ones(2, 3, 8, 8)).sum().backward()
    assert plain._has_rebuilt_buckets

    data = plain._get_ddp_logging_data()
    assert not {"has_error", "join_uneven_inputs", "comm_hook"} & set(data)
    with pytest.raises(TypeError, match="must be callable"):
        plain.register_comm_hook(None, 5)
    data = plain._get_ddp_logging_data()
    assert data["has_error"] == 1 and "Communication hook must be callable" in data["error"]
    with plain.join():
        for _ in range(rank + 1):
            plain(torch.ones(2, 3, 8, 8)).sum().backward()
    assert plain._get_ddp_logging_data()["join_uneven_inputs"] == 1
    assert plain._authoritative_rank == 1

    hooked = DistributedDataParallel(make_model())
    hooked.register_comm_hook(None, default_hooks.fp16_compress_hook)
    assert hooked._get_ddp_logging_data()["comm_hook"] == "fp16_compress_hook"
    hooked = DistributedDataParallel(make_model())
    hooked._register_builtin_comm_hook(dist.BuiltinCommHookType.ALLREDUCE)
    assert hooked._get_ddp_logging_data()["comm_hook"] == "BuiltinCommHookType.ALLREDUCE"

    tensor = torch.full((3,), float(rank))
    plain._default_broadcast_coalesced(bufs=[tensor], authoritative_rank=1)
    assert tensor.tolist() == [1.0] * 3


def test_attributes_and_logging_data_of_torchs_wrapper():
    run_ranks(2, torchs_attributes)


def leaves_some_out(rank, options):
    model = torch.nn.ModuleList([torch.nn.Linear(2, 2), torch.nn.Linear(2, 2)])
    model.forward = lambda x, num: sum(layer(x) for layer in list(model)[:num])
    ddp = DistributedDataParallel(model, **options)
    for num in (2, 2, 1):
        ddp(torch.ones(1, 2), num).sum().backward()
    ddp(torch.ones(1, 2), 2)


@pytest.mark.parametrize("is_static", [False, True])
def test_unused_parameters_are_told_in_torchs_words(is_static):
    for rank, outcome in enumerate(run_ranks_collecting(2, leaves_some_out, {"static_graph": is_static})):
        assert "Expected to have finished reduction" in outcome.error, outcome.error
        assert f"did not receive grad for rank {rank}: 1.weight, 1.bias (numbers 2 3)" in outcome.error
        assert "`forward` function outputs participate in calculating loss" in outcome.error
        advice = "passing the keyword argument `find_unused_parameters=True`"
        assert (advice in outcome.error) != is_static
        assert ("or `static_graph=True`" in outcome.error) != is_static


def uses_one_head(rank):
    """Rank 1 has a batch fewer, so that rank 0 takes its last one under join alone."""
    model = torch.nn.ModuleList([torch.nn.Linear(2, 2), torch.nn.Linear(2, 2)])
    model.forward = lambda x, head: model[head](x)
    ddp = DistributedDataParallel(model, find_unused_parameters=True)
    found = []
    with ddp.join():
        for step in range(3 - rank):
            ddp(torch.ones(1, 2), step % 2).sum().backward()
            found.append([parameter.grad is not None for parameter in model.parameters()])
            ddp.zero_grad()
    return found


def test_what_no_rank_uses_gets_no_gradient_under_join_either():
    first, second = [True, True, False, False], [False, False, True, True]
    assert run_ranks(2, uses_one_head) == [[first, second, first], [first, second]]
