"""The store outside the ranks: there when a rank asks, on loopback only, gone with the job."""

import os
import pathlib
import re
import signal
import socket
import subprocess
import time

import pytest
from jobs import (
    TESSERA,
    TORCH_PYTHON,
    Job,
    command_of,
    listening_addresses,
    python,
    run,
)
from waiting import wait_until

needs_worker = pytest.mark.skipif(
    not any(
        (pathlib.Path(TESSERA).parent / place).exists()
        for place in ("tessera-worker", "../libexec/tessera/tessera-worker")
    ),
    reason="tessera-worker is not built",
)
needs_torch = pytest.mark.skipif(
    not pathlib.Path(TORCH_PYTHON).exists(), reason="there is no Python with torch"
)
WITH_TORCH = {"PYTHON_EXEC": TORCH_PYTHON}
TORCH_LIMIT = 120.0  # seconds; importing torch on a loaded machine


def store_of(job):
    found = [pid for pid in job.processes() if "tessera-worker" in command_of(pid)]
    assert len(found) <= 1
    return found[0] if found else None


def test_program_that_never_asks_gets_no_helper():
    job = Job("run", "-n", 2, "--", "sh", "-c", "echo ready; exec sleep 300")
    job.process.stdout.readline()
    time.sleep(0.2)
    assert store_of(job) is None
    assert listening_addresses(job.processes()) == ["127.0.0.1"]  # the launcher's, and no other
    job.send(signal.SIGTERM)
    assert job.wait().code == 143


CONNECT = """
import os, socket, time
s = socket.create_connection((os.environ['MASTER_ADDR'], int(os.environ['MASTER_PORT'])))
print('connected', flush=True)
"""


@needs_worker
def test_first_connection_starts_one_helper_and_its_end_is_only_a_warning():
    # A store that dies before it has accepted resets the connection instead of closing it.
    wait = "try: s.recv(1)\nexcept ConnectionError: pass\n"
    code = CONNECT + wait + "print('store gone'); time.sleep(300)"
    job = Job("run", "-n", 2, "--", *python(code))
    try:
        for _ in range(2):
            job.process.stdout.readline()
        store = wait_until(lambda: store_of(job), what="the store")
        wait_until(lambda: len(os.listdir(f"/proc/{store}/task")) > 1, limit=60, what="its threads")
        os.kill(store, signal.SIGKILL)
        assert b"store gone" in job.process.stdout.readline()
        warnings = [job.process.stderr.readline() for _ in range(2)]
        assert b"warning: a program uses torch's own store" in warnings[0]
        assert b"warning: the store ended by SIGKILL; the ranks go on" in warnings[1]
        assert store_of(job) is None
        job.send(signal.SIGTERM)
        assert job.wait().code == 143
    finally:
        job.end()


@needs_worker
def test_killed_launcher_takes_the_store_with_it():
    job = Job("run", "-n", 2, "--", *python(CONNECT + "time.sleep(300)"))
    try:
        job.process.stdout.readline()
        wait_until(lambda: store_of(job), what="the store")
        job.send(signal.SIGKILL)
        job.process.wait(timeout=10)
        wait_until(lambda: job.processes() == [], limit=5, what="the end of all processes")
    finally:
        job.end()


@pytest.mark.parametrize(
    ("worker", "code", "why"),
    [
        (None, 78, "there is no tessera-worker program beside tessera"),
        ("#!/bin/sh\nexit 3\n", 69, "tessera-worker ended with exit code 3"),
        ("#!/nowhere/sh\n", 69, ""),
    ],
)
def test_a_store_that_cannot_start_ends_the_job_at_once(tmp_path, worker, code, why):
    # As torch's client does, which would go on for half an hour.
    patient = CONNECT.replace("s = ", "while True:\n  s = ").replace(
        "print(", "  s.settimeout(5)\n  try: s.recv(1)\n  except OSError: pass\n  time.sleep(0.2); print("
    )
    if worker is not None:
        (tmp_path / "worker").write_text(worker)
        (tmp_path / "worker").chmod(0o755)
    result = run("run", "-n", 2, "--", *python(patient), env={"TESSERA_WORKER": str(tmp_path / "worker")})
    assert result.code == code, result.err
    assert "error: run: " in result.err and why in result.err
    assert result.seconds < 20


USE_GROUP = """
import os, sys, time
import torch, torch.distributed as dist
dist.init_process_group('gloo')
rank, size = dist.get_rank(), dist.get_world_size()
value = torch.full((4,), float(rank + 1))
dist.all_reduce(value)
assert value.tolist() == [size * (size + 1) / 2] * 4
print('reduced', flush=True)
"""


def script(tmp_path, code):
    path = tmp_path / "program.py"
    path.write_text(code)
    return path


@needs_worker
@needs_torch
def test_torchs_own_init_process_group_works_and_everything_is_on_loopback(tmp_path):
    program = script(
        tmp_path,
        USE_GROUP
        + """
while not os.path.exists(sys.argv[1]): time.sleep(0.01)
dist.barrier(); dist.destroy_process_group()
""",
    )
    job = Job("run", "-n", 2, program, tmp_path / "go", env=WITH_TORCH)
    try:
        for _ in range(2):
            assert b"reduced" in job.process.stdout.readline()
        addresses = listening_addresses(job.processes())
        assert len(addresses) >= 3  # the store, and Gloo's in every rank
        assert set(addresses) <= {"127.0.0.1", "::1"}
        assert store_of(job) is not None
        (tmp_path / "go").touch()
        result = job.wait(TORCH_LIMIT)
        assert result.code == 0, result.err
        assert job.processes() == []
    finally:
        job.end()


def own_store_of(job):
    found = [pid for pid in job.processes() if name_of(pid) == "tessera-store"]
    assert len(found) <= 1
    return found[0] if found else None


def name_of(pid):
    try:
        return pathlib.Path(f"/proc/{pid}/comm").read_text().strip()
    except OSError:
        return ""


USE_OWN_STORE = "import tessera\n" + USE_GROUP


@needs_torch
def test_a_program_with_our_runtime_meets_on_a_store_that_asks_for_the_secret(tmp_path):
    program = script(
        tmp_path,
        USE_OWN_STORE
        + """
print(os.environ["TESSERA_STORE"].split("=unix:")[1], flush=True)
while not os.path.exists(sys.argv[1]): time.sleep(0.01)
dist.barrier(); dist.destroy_process_group()
""",
    )
    job = Job("run", "-n", 2, program, tmp_path / "go", env=WITH_TORCH)
    try:
        lines = [job.process.stdout.readline().decode() for _ in range(4)]
        path = pathlib.Path(next(line.split()[-1] for line in lines if "/store." in line))
        assert store_of(job) is None and own_store_of(job) is not None
        assert path.parent.stat().st_mode & 0o777 == 0o700
        assert path.stat().st_mode & 0o777 == 0o600
        if os.geteuid() == 0:
            attempt = f"import os, socket; os.setuid(65534); socket.socket(1).connect({str(path)!r})"
            stranger = subprocess.run(python(attempt), capture_output=True, text=True, timeout=60)
            assert "PermissionError" in stranger.stderr
        (tmp_path / "go").touch()
        result = job.wait(TORCH_LIMIT)
        assert result.code == 0, result.err
        assert "secret" not in result.err
        assert job.processes() == []
    finally:
        job.end()


@needs_worker
@needs_torch
def test_a_program_on_torchs_own_store_is_warned_of_once(tmp_path):
    program = script(tmp_path, USE_GROUP + "dist.barrier(); dist.destroy_process_group()")
    result = run("run", "-n", 2, program, env=WITH_TORCH, limit=TORCH_LIMIT)
    assert result.code == 0, result.err
    assert result.err.count("torch's own store at MASTER_PORT, which asks for no secret") == 1


@needs_torch
def test_a_long_path_gives_a_store_on_loopback(tmp_path):
    folder = tmp_path / ("x" * 100)
    folder.mkdir()
    program = script(
        tmp_path, USE_OWN_STORE + "print(os.environ['TESSERA_STORE']); dist.destroy_process_group()"
    )
    env = {**WITH_TORCH, "TMPDIR": str(folder)}
    result = run("run", "-n", 2, program, env=env, limit=TORCH_LIMIT)
    assert result.code == 0, result.err
    assert re.search(r"=tcp:127\.0\.0\.1:\d+\n", result.out)


@needs_worker
@needs_torch
def test_restarted_job_finds_a_fresh_store(tmp_path):
    program = script(
        tmp_path,
        USE_GROUP
        + """
store = dist.distributed_c10d._get_default_store()
print('count', store.add('visits', 1), flush=True)
if os.environ['TORCHELASTIC_RESTART_COUNT'] == '0':
    dist.barrier()
    os._exit(3 if rank == 1 else 0)
dist.barrier(); dist.destroy_process_group()
""",
    )
    result = run("run", "-n", 2, "--max-restarts", 1, program, env=WITH_TORCH, limit=TORCH_LIMIT)
    assert result.code == 0, result.err
    counts = [int(n) for n in re.findall(r"count (\d)", result.out)]
    assert max(counts) == 2


@needs_worker
@needs_torch
def test_survivors_of_a_killed_rank_report_and_the_kill_is_the_cause(tmp_path):
    program = script(
        tmp_path,
        USE_GROUP
        + """
if rank == 1: os.kill(os.getpid(), 9)
for _ in range(100000): dist.all_reduce(value)
""",
    )
    result = run("run", "-n", 2, program, env=WITH_TORCH, limit=TORCH_LIMIT)
    assert result.code == 137
    assert "error: rank 1 failed first: SIGKILL" in result.err


@needs_worker
@needs_torch
def test_error_recorded_by_torch_is_shown(tmp_path):
    program = script(
        tmp_path,
        """
from torch.distributed.elastic.multiprocessing.errors import record
@record
def main():
    raise ValueError('from record')
main()
""",
    )
    result = run("run", program, env=WITH_TORCH, limit=TORCH_LIMIT)
    assert result.code == 1
    assert "error: rank 0 failed first: ValueError: from record" in result.err


@needs_worker
@needs_torch
@pytest.mark.parametrize("own", [True, False], ids=["own", "torch"])
def test_store_is_shared_by_nodes(tmp_path, own):
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        endpoint = f"127.0.0.1:{probe.getsockname()[1]}"
    code = USE_OWN_STORE if own else USE_GROUP
    program = script(tmp_path, code + "dist.barrier(); dist.destroy_process_group()")
    words = ["--nnodes", 2, "--rdzv-endpoint", endpoint, program]
    jobs = [Job("run", "--node-rank", node, *words, env=WITH_TORCH) for node in (0, 1)]
    try:
        results = [job.wait(TORCH_LIMIT) for job in jobs]
        assert [r.code for r in results] == [0, 0], [r.err for r in results]
    finally:
        for job in jobs:
            job.end()


@needs_worker
def test_store_verb_refuses_wrong_words():
    worker = pathlib.Path(TESSERA).parent / "tessera-worker"
    for words in ([], ["store"], ["store", "--fd", "0", "--host", "127.0.0.1"], ["nonsense"]):
        done = subprocess.run([worker, *words], stdin=subprocess.DEVNULL, capture_output=True, timeout=60)
        assert done.returncode == 2 and done.stderr.startswith(b"error: ")
