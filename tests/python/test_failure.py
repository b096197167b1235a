"""Uncaught exceptions under `tessera run`: peers, error files, exit codes."""

from __future__ import annotations

import json
import os
import pathlib
import subprocess
import sys
import textwrap
import time

import pytest
from waiting import free_port

ROOT = pathlib.Path(__file__).resolve().parents[2]
TESSERA = os.environ.get("TESSERA_BIN", str(ROOT / "build/release/bin/tessera"))


def launch(tmp_path, code: str, *flags: str, size: int = 2, env=None):
    """Runs `code` as every rank of a job."""
    script = tmp_path / "job.py"
    script.write_text(textwrap.dedent(code))
    full = {**os.environ, "PYTHONPATH": str(ROOT / "python"), "OMP_NUM_THREADS": "1", **(env or {})}
    begin = time.monotonic()
    result = subprocess.run(
        [TESSERA, "run", "-n", str(size), *flags, "--", sys.executable, str(script)],
        capture_output=True, text=True, timeout=100, env=full, cwd=tmp_path,
    )  # fmt: skip
    return result, time.monotonic() - begin


ONE_FAILS = """
    import os, torch, torch.distributed as dist, tessera
    os.environ["TORCHELASTIC_ERROR_FILE"] = f"error-{os.environ['RANK']}.json"
    tessera.comm.init(timeout=60)
    tessera.comm.set_step(3)
    dist.barrier()
    if dist.get_rank() == 1:
        raise ArithmeticError("loss is nan")
    dist.all_reduce(torch.ones(4))
"""


def test_uncaught_exception_reaches_peers_and_error_files(tmp_path):
    result, seconds = launch(tmp_path, ONE_FAILS)
    assert seconds < 60
    assert result.returncode in (1, 75), result.stderr  # the launcher sees no file and trusts the clock
    first = json.loads((tmp_path / "error-1.json").read_text())["message"]
    assert first["message"] == "ArithmeticError: loss is nan"
    assert 'raise ArithmeticError("loss is nan")' in first["extraInfo"]["py_callstack"]
    assert "secondary" not in first["extraInfo"]
    second = json.loads((tmp_path / "error-0.json").read_text())["message"]
    assert second["message"].startswith("torch.distributed.DistBackendError: comm: rank 1 (pid ")
    assert second["message"].endswith("failed in step 3: ArithmeticError: loss is nan")
    assert second["extraInfo"]["secondary"] == "true"


def test_launcher_names_the_root_cause(tmp_path):
    code = "\n".join(line for line in ONE_FAILS.splitlines() if "ERROR_FILE" not in line)
    result, _ = launch(tmp_path, code)
    assert result.returncode == 1
    assert "ArithmeticError: loss is nan" in result.stderr


PEER_IS_TOLD = """
    import os, sys, time, torch, torch.distributed as dist, tessera
    dist.init_process_group({backend!r})
    rank = dist.get_rank()
    dist.barrier()
    if rank == 1:
        try:
            with tessera.comm.guard():
                raise ArithmeticError("loss is nan")
        except ArithmeticError:
            pass
        time.sleep(20)  # lives on, so that only the report can tell the peer
    else:
        dist.all_reduce(torch.ones(4))
"""


@pytest.mark.parametrize("backend", ["shm", "cpu:shm"])
def test_rank_that_only_lost_its_peer_ends_with_code_75(tmp_path, backend):
    result, seconds = launch(tmp_path, PEER_IS_TOLD.format(backend=backend))
    assert seconds < 20
    assert result.returncode == 75, result.stderr
    assert "failed: ArithmeticError: loss is nan" in result.stderr


CLEANS_UP = """
    import atexit, os, torch, torch.distributed as dist, tessera
    tessera.comm.init(timeout=60)
    dist.barrier()
    atexit.register(lambda: open("cleaned", "w").write("yes"))
    if dist.get_rank() == 1:
        os._exit(0)
    tessera.comm.all_reduce(torch.ones(4))
"""


def test_exit_handlers_run_before_code_75(tmp_path):
    script = tmp_path / "job.py"
    script.write_text(textwrap.dedent(CLEANS_UP))
    # Without a launcher, which would end the peers itself.
    env = {**os.environ, "PYTHONPATH": str(ROOT / "python"), "WORLD_SIZE": "2",
           "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(free_port())}  # fmt: skip
    ranks = [
        subprocess.Popen(
            [sys.executable, str(script)],
            cwd=tmp_path,
            text=True,
            stderr=subprocess.PIPE,
            env={**env, "RANK": str(rank)},
        )
        for rank in range(2)
    ]
    try:
        errors = [rank.communicate(timeout=60)[1] for rank in ranks]
    finally:
        for rank in ranks:
            rank.kill()
    assert ranks[0].returncode == 75, errors[0]
    assert ranks[1].returncode == 0
    assert (tmp_path / "cleaned").read_text() == "yes"
    assert "CommError: comm.all_reduce #" in errors[0]
    assert "rank 1 (pid" in errors[0]


def test_ranks_that_do_not_meet_end_with_code_69(tmp_path):
    env = {**os.environ, "PYTHONPATH": str(ROOT / "python"), "WORLD_SIZE": "2", "RANK": "0",
           "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(free_port()), "TESSERA_TIMEOUT": "1"}  # fmt: skip
    result = subprocess.run(
        [sys.executable, "-c", "import tessera; tessera.comm.init()"],
        capture_output=True, text=True, timeout=60, env=env, cwd=tmp_path,
    )  # fmt: skip
    assert "CommError: comm.init: rank 1 of 2 did not join group 'world' within 1.0" in result.stderr
    assert result.returncode == 69


def test_own_exit_codes_are_kept(tmp_path):
    code = """
        import sys, tessera
        world = tessera.comm.init(timeout=60)
        tessera.comm.barrier()
        sys.exit(7 if world.rank() == 1 else 0)
    """
    result, _ = launch(tmp_path, code)
    assert result.returncode == 7, result.stderr


def test_plain_torch_program_works_with_gloo_beside_us(tmp_path):
    code = """
        import time, tessera, torch, torch.distributed as dist
        dist.init_process_group("gloo")
        tensor = torch.ones(2)
        dist.all_reduce(tensor)
        print("sum", int(tensor[0]), tessera.comm.engine(), flush=True)
        time.sleep(0.2)  # torch's Gloo may abort while Python ends; docs/python.md says why
        dist.destroy_process_group()
    """
    result, _ = launch(tmp_path, code)
    assert result.returncode == 0, result.stderr
    assert result.stdout.count("sum 2 gloo") == 2


def test_fall_back_to_gloo_says_why(tmp_path):
    # A file-size limit of 64 KiB leaves no room for a segment.
    code = """
        import resource
        import signal
        signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
        import torch, torch.distributed as dist, tessera
        resource.setrlimit(resource.RLIMIT_FSIZE, (65536, 65536))
        dist.init_process_group("shm")
        tensor = torch.ones(2)
        dist.all_reduce(tensor)
        print("sum", int(tensor[0]), tessera.comm.engine(), flush=True)
        dist.destroy_process_group()
    """
    result, _ = launch(tmp_path, code)
    assert result.returncode == 0, result.stderr
    assert result.stdout.count("sum 2 gloo") == 2, result.stdout + result.stderr
    warning = "uses Gloo over TCP instead of shared memory, which is slower: comm.shm:"
    assert (result.stderr + result.stdout).count(warning) == 1
