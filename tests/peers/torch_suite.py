"""torch's own tests of data parallelism and collectives, on tessera's wrapper and the backend "shm".

The tests are installed with torch. Most ask for GPUs; here a mode puts what they make on the CPU, and the
wrapper leaves out `device_ids`. Every test has to pass, be skipped by torch, or be in EXPLAINED.

    python tests/peers/torch_suite.py [word ...]    # tests with one of these words in their names
    python tests/peers/torch_suite.py --called gloo test_    # those too that ask for the name "gloo"
    BACKEND=gloo python tests/peers/torch_suite.py --wrapper torch --json out.json test_    # what torch holds
"""

from __future__ import annotations

import argparse
import collections
import json
import os
import sys
import tempfile
import time
import types
import unittest

# torch's test cases stand on a package that only writes expected output into sources.
if "expecttest" not in sys.modules:
    sys.modules["expecttest"] = types.SimpleNamespace(TestCase=unittest.TestCase, ACCEPT=False)

import tessera.nn.parallel
import torch
import torch.distributed as dist
from torch.overrides import TorchFunctionMode

LIMIT = int(os.environ.get("TESSERA_SUITE_LIMIT", "60"))  # seconds for one test, on a loaded machine

# Part of a test's name, and the first cell of the row of docs/deviations.md that says why it fails.
EXPLAINED = {
    "test_ddp_native_mixed_precision": "`mixed_precision` on the CPU",
    "test_ddp_control_flow": "parameters without a gradient",
    "test_ddp_multiple_nested_unused_params_err": "parameters without a gradient",
    "test_ddp_unused_params_rebuild_buckets_exception": "parameters without a gradient",
    "test_invalid_static_graph": "a hook that throws, or any exception in backward, on all ranks",
    "test_monitored_barrier_failure_order": "a monitored barrier that some ranks do not reach, on ranks "
    "other than 0",
}
# torch's own wrapper does not hold these without a GPU either.
NEEDS_A_GPU = {
    "test_average_parameters",
    "test_ddp_compile_static_graph",
    "test_ddp_device",
    "test_ddp_inference",
    "test_ddp_uneven_inputs",
    "test_ddp_uneven_inputs_stop_iteration_sync_bn",
    "test_sync_bn_logged",
}
WORDS = (
    "test_ddp", "test_static", "test_accumulate", "test_verify", "test_all_reduce", "test_all_gather",
    "test_broadcast", "test_barrier",
)  # fmt: skip


def without_devices(base: type) -> type:
    class DistributedDataParallel(base):
        def __init__(self, module, device_ids=None, output_device=None, *args, **kwargs):
            super().__init__(module, None, None, *args, **kwargs)

    # Some tests pickle the wrapper, which has to be found by its name then.
    DistributedDataParallel.__qualname__ = f"Wrapper{len(WRAPPERS)}"
    globals()[DistributedDataParallel.__qualname__] = DistributedDataParallel
    return DistributedDataParallel


WRAPPERS: dict[str, type] = {}
WRAPPERS["tessera"] = without_devices(tessera.nn.parallel.DistributedDataParallel)
WRAPPERS["torch"] = without_devices(torch.nn.parallel.DistributedDataParallel)


class OnCpu(TorchFunctionMode):
    """Makes what is asked for on a GPU on the CPU."""

    def __torch_function__(self, func, types, args=(), kwargs=None):
        kwargs = dict(kwargs or {})
        if is_gpu(kwargs.get("device")):
            kwargs["device"] = "cpu"
        if func is torch.Tensor.to and len(args) > 1 and is_gpu(args[1]):
            args = (args[0], "cpu", *args[2:])
        return func(*args, **kwargs)


def is_gpu(device) -> bool:
    if isinstance(device, int) and not isinstance(device, bool):
        return True
    return str(device).startswith("cuda") if isinstance(device, (str, torch.device)) else False


class Nothing:
    """A stream, an event, a device guard: does nothing."""

    def __init__(self, *args, **kwargs):
        pass

    def __enter__(self):
        return self

    def __exit__(self, *args):
        return False

    def __getattr__(self, name):
        return lambda *args, **kwargs: None


def put_everything_on_the_cpu() -> None:
    module_to = torch.nn.Module.to

    def to(self, *args, **kwargs):
        args = ("cpu" if is_gpu(value) else value for value in args)
        return module_to(self, *args, **{k: "cpu" if is_gpu(v) else v for k, v in kwargs.items()})

    torch.nn.Module.to = to
    torch.nn.Module.cuda = lambda self, *args: self
    torch.Tensor.cuda = lambda self, *args, **kwargs: self
    torch.cuda.set_device = torch.cuda.synchronize = lambda *args, **kwargs: None
    torch.cuda.device = torch.cuda.Stream = torch.cuda.stream = torch.cuda.Event = Nothing
    torch.cuda.current_stream = lambda *args: Nothing()
    torch.cuda.current_device = lambda: "cpu"


def explanation_of(name: str) -> str | None:
    """The row of docs/deviations.md that says why this test ends differently."""
    return next((row for part, row in EXPLAINED.items() if part in name), None)


class Called(types.ModuleType):
    """torch.distributed for tests that ask for a backend by another name and are told that one."""

    def __init__(self, name: str, backend: str) -> None:
        super().__init__(dist.__name__)
        self._names = name, backend

    def __getattr__(self, name: str):
        return getattr(dist, name)

    def _true(self, backend):
        name, own = self._names
        return own if backend is not None and str(backend).lower() == name else backend

    def init_process_group(self, backend=None, *args, **kwargs):
        return dist.init_process_group(self._true(backend), *args, **kwargs)

    def new_group(self, ranks=None, timeout=None, backend=None, *args, **kwargs):
        return dist.new_group(ranks, timeout, self._true(backend), *args, **kwargs)

    def get_backend(self, group=None):
        name, own = self._names
        found = dist.get_backend(group)
        return dist.Backend(name) if found == own else found


def make_suite(wrapper: type, called: str | None = None) -> type:
    """Return torch's tests on this wrapper; they take the backend for the one that it is `called`."""
    from torch.testing._internal import common_distributed

    for name in ("skip_if_lt_x_gpu", "nccl_skip_if_lt_x_gpu", "require_n_gpus_for_nccl_backend"):
        setattr(common_distributed, name, lambda *args, **kwargs: lambda test: test)
    common_distributed.get_timeout = lambda *args: LIMIT
    common_distributed.DistTestCases.backend_feature["plugin"].add("shm")
    for backends in common_distributed.DistTestCases.backend_feature.values():
        if "gloo" in backends:
            backends.add("shm")
    torch.nn.parallel.DistributedDataParallel = wrapper
    backend = os.environ["BACKEND"]
    os.environ["BACKEND"] = called or backend  # tests are left out while the module is read
    from torch.testing._internal.distributed import distributed_test

    # Events of profilers are looked at, too; they have the name that the backend really has.
    for kind in ("", "CUDA_", "SEND_RECV_"):
        getattr(distributed_test, f"{kind}PROFILING_SUPPORTED_BACKENDS").append(backend)
    if called:
        distributed_test.dist = Called(called, backend)
        find = distributed_test.get_profiling_event
        distributed_test.get_profiling_event = lambda event, *args, **kwargs: find(
            event.replace(f"{called}:", f"{backend}:"), *args, **kwargs
        )
    distributed_test.DistributedDataParallel = wrapper
    # Ranks meet in files before and after every test. Torch gives that ten seconds, which a rank that gets no
    # processor for a while, or a machine that stands still, uses up.
    meet = distributed_test.Barrier.sync
    distributed_test.Barrier.sync = lambda wait_for=None, timeout=LIMIT: meet(wait_for, timeout)
    distributed_test.init_multigpu_helper = lambda world, backend: {rank: [rank] for rank in range(world)}

    class Suite(distributed_test.TestDistBackend, distributed_test.DistributedTest._DistTestBase):
        def setUp(self):
            super().setUp()
            self._start_processes(torch.multiprocessing.get_context("fork").Process)

        def run_test(self, name, pipe):
            with OnCpu():
                super().run_test(name, pipe)

    return Suite


def run(suite: type, name: str) -> tuple[str, str]:
    """Run one test and return how it ended, and what its ranks printed or why torch skips it."""
    result = unittest.TestResult()
    with tempfile.TemporaryFile() as file:
        kept = [os.dup(1), os.dup(2)]
        try:
            for stream in (1, 2):
                os.dup2(file.fileno(), stream)
            suite(name).run(result)
        finally:
            for stream, copy in zip((1, 2), kept, strict=True):
                os.dup2(copy, stream)
                os.close(copy)
        file.seek(0)
        text = file.read().decode(errors="replace")
    if result.failures or result.errors:
        return "failed", text + "".join(trace for _, trace in result.failures + result.errors)
    return ("skipped", result.skipped[0][1]) if result.skipped else ("passed", text)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("words", nargs="*", default=WORDS, help="parts of names")
    parser.add_argument("--wrapper", choices=WRAPPERS, default="tessera", help="whose wrapper the tests get")
    parser.add_argument("--called", help="the name that tests take the backend to have")
    parser.add_argument("--json", help="write how each test ended into this file, and judge nothing")
    parser.add_argument("--verbose", action="store_true", help="print what failed tests printed")
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    # Here, not where this file is imported: who asks it for names starts other programs from its environment.
    os.environ.setdefault("BACKEND", "shm")
    os.environ.setdefault("WORLD_SIZE", "2")
    with tempfile.TemporaryDirectory(prefix="tessera-torch-") as folder:
        os.environ["TEMP_DIR"] = folder
        suite = make_suite(WRAPPERS[arguments.wrapper], arguments.called)
        put_everything_on_the_cpu()
        names = unittest.TestLoader().getTestCaseNames(suite)
        counts: collections.Counter[str] = collections.Counter()
        wrong, ended = [], {}
        for name in names:
            if not any(word in name for word in arguments.words):
                continue
            begin = time.monotonic()
            outcome, text = run(suite, name)
            ended[name] = {"outcome": outcome, "why": "" if outcome == "passed" else text[-6000:]}
            if outcome == "failed" and (explanation_of(name) or name in NEEDS_A_GPU):
                outcome = "explained"
            elif outcome == "failed":
                wrong.append(name)
                print(f"{name}: failed ({time.monotonic() - begin:.1f} s)", flush=True)
                if arguments.verbose:
                    print(text[-6000:], flush=True)
            counts[outcome] += 1
    print(", ".join(f"{count} {outcome}" for outcome, count in sorted(counts.items())))
    if arguments.json:
        with open(arguments.json, "w") as file:
            json.dump(ended, file, indent=1)
        return 0
    return 1 if wrong else 0


if __name__ == "__main__":
    sys.exit(main())
