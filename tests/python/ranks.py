"""Ranks for tests: processes of their own, forked from one that has loaded torch already."""

from __future__ import annotations

import datetime
import multiprocessing
import multiprocessing.connection
import os
import pickle
import tempfile
import time
import traceback
import warnings
from dataclasses import dataclass
from typing import Any

LIMIT = 60.0  # seconds for one job; for a loaded machine, not a figure

# What most tests import: half a second of every rank otherwise, longer than most of them take.
_PRELOADED = (
    "pytest",
    "torch._dynamo",
    "torch.distributed",
    "tessera.checkpoint",
    "tessera.distributed.model_parallel",
    "tessera.distributed.planner",
    "tessera.distributed.train_pipeline",
    "tessera.metrics.metric_module",
    "tessera.modules.mc_modules",
    "tessera.nn.parallel",
    "tessera.quant.embedding_modules",
    "tessera.vocab_parallel",
)
_context = multiprocessing.get_context("forkserver")
_context.set_forkserver_preload(list(_PRELOADED))


# Groups of a rank that ends. Whoever lets go of torch's Gloo last waits for its threads, and one of those may
# be the last, for a callback: "Resource deadlock avoided" ended ranks whose work was done.
_kept: list[Any] = []


def preload(*modules: str) -> None:
    """Have ranks find these there as well; before the first of them."""
    _context.set_forkserver_preload([*_PRELOADED, *modules])


@dataclass
class Outcome:
    value: Any = None
    error: str = ""  # "Type: text", empty if the rank returned
    trace: str = ""


def _main(connection, body, rank, size, store, backend, env, environment, args):
    # The process that forks the ranks has the environment of the test that asked for the first one.
    os.environ.clear()
    os.environ.update(environment | env)
    import tessera  # noqa: F401
    import torch
    import torch.distributed as dist

    torch.set_num_threads(1)
    warnings.simplefilter("ignore", FutureWarning)  # names that newer torch spells otherwise
    try:
        if backend is not None:
            dist.init_process_group(
                backend,
                init_method=f"file://{store}",
                rank=rank,
                world_size=size,
                timeout=datetime.timedelta(seconds=float(env.get("LIMIT", 20))),
            )
        outcome = Outcome(body(rank, *args))
        if dist.is_initialized():
            _kept.extend(dist.distributed_c10d._world.pg_map)
            dist.destroy_process_group()
    except BaseException as error:
        outcome = Outcome(error=f"{type(error).__name__}: {error}", trace="".join(traceback.format_exc()))
    # Plainly pickled: a connection of its own would hand tensors over in shared memory of this process.
    connection.send_bytes(pickle.dumps(outcome))
    connection.close()


def run_ranks_collecting(
    size: int, body, *args, backend: str | None = "shm", env=None, limit: float = LIMIT
) -> list[Outcome]:
    """Runs `body(rank, *args)` in `size` processes and returns what each one returned or raised."""
    with tempfile.TemporaryDirectory(prefix="tessera-test-") as folder:
        ranks = []
        for rank in range(size):
            ours, theirs = _context.Pipe(duplex=False)
            words = (theirs, body, rank, size, f"{folder}/store", backend, env or {}, dict(os.environ), args)
            process = _context.Process(target=_main, args=words)
            process.start()
            theirs.close()
            ranks.append((process, ours))
        end = time.monotonic() + limit
        outcomes = []
        try:
            for rank, (process, ours) in enumerate(ranks):
                if not ours.poll(max(0.0, end - time.monotonic())):
                    raise AssertionError(f"rank {rank} has not ended within {limit} s")
                try:
                    outcomes.append(pickle.loads(ours.recv_bytes()))
                except EOFError:
                    process.join(5)
                    outcomes.append(Outcome(error=f"ended with code {process.exitcode}"))
            for process, _ in ranks:
                process.join(max(0.1, end - time.monotonic()))
                assert process.exitcode is not None, "a rank does not end"
        finally:
            for process, ours in ranks:
                if process.is_alive():
                    process.kill()
                    process.join()
                ours.close()
    return outcomes


def run_ranks(size: int, body, *args, **options) -> list[Any]:
    """Runs `body(rank, *args)` in `size` processes and returns the values; none may raise."""
    outcomes = run_ranks_collecting(size, body, *args, **options)
    errors = [f"rank {rank}: {o.error}\n{o.trace}" for rank, o in enumerate(outcomes) if o.error]
    assert not errors, "\n".join(errors)
    return [outcome.value for outcome in outcomes]
