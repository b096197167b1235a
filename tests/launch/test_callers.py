"""Torch's store at MASTER_PORT is started for users and hosts of the job, and for nobody else."""

import os
import pathlib
import re
import resource
import shutil
import signal
import socket
import subprocess
import sys
import time

import pytest
from jobs import TESSERA, Job, python
from waiting import wait_until

becomes_another = pytest.mark.skipif(os.geteuid() != 0, reason="becoming another user needs root")
NOBODY = 65534
STARTS = b"a program uses torch's own store at MASTER_PORT"

# A rank that says where the store is and asks for it when a file is there, as often as need be.
RANK = """
import os, socket, sys, time
address = os.environ['MASTER_ADDR'], int(os.environ['MASTER_PORT'])
print(address[1], flush=True)
while not os.path.exists(sys.argv[1]): time.sleep(0.01)
print('asks', flush=True)
if len(sys.argv) > 2: os.setuid(int(sys.argv[2]))
while True:
    try:
        s = socket.socket()
        s.connect(address)
        s.recv(1)
    except OSError:
        time.sleep(0.1)
"""

# Connects many times at once: leaves, says something, or stays for what comes back, which is a reset.
STRANGER = f"""
import os, socket, sys
os.setgroups([]); os.setgid({NOBODY}); os.setuid({NOBODY})
port, count = int(sys.argv[1]), int(sys.argv[2])
waiting = []
for i in range(count):
    s = socket.socket()
    s.settimeout(30)
    try:
        s.connect(('127.0.0.1', port))
        if i % 3 == 2: s.send(b'\\x1b[31m' * 50)
        if i % 3 != 1: waiting.append(s)
    except ConnectionResetError:
        pass  # already
    if i % 3 == 1: s.close()
for s in waiting:
    try:
        raise SystemExit(f'got {{s.recv(1)}}')
    except ConnectionResetError:
        pass
"""


def stranger(port, count=1):
    done = subprocess.run(
        [sys.executable, "-S", "-E", "-c", STRANGER, str(port), str(count)],
        capture_output=True,
        text=True,
        timeout=100,
    )
    assert done.returncode == 0, done.stderr


def worker_of(tmp_path, text="#!/bin/sh\nexec cat\n"):
    """A program in the place of tessera-worker; this one waits for the end of the job and serves nobody."""
    path = tmp_path / "worker"
    path.write_text(text)
    path.chmod(0o755)
    return {"TESSERA_WORKER": str(path)}


def start(tmp_path, *flags, env, more=()):
    job = Job("run", "-n", 2, *flags, "--", *python(RANK), tmp_path / "go", *more, env=env)
    ports = {int(job.process.stdout.readline().split()[-1]) for _ in range(2)}
    assert len(ports) == 1
    return job, ports.pop()


def finish(job):
    assert job.process.poll() is None, job.wait().err
    job.send(signal.SIGTERM)
    result = job.wait()
    assert result.code == 143, result.err
    return result.err


@becomes_another
def test_another_user_starts_no_store_and_a_rank_does(tmp_path):
    job, port = start(tmp_path, env=worker_of(tmp_path))
    try:
        before = sorted(job.processes())
        stranger(port, count=9)
        assert sorted(job.processes()) == before
        (tmp_path / "go").touch()
        wait_until(lambda: len(job.processes()) == len(before) + 1, what="the store")
        err = finish(job)
        refused, starts = err.index("refused: "), err.index(STARTS.decode())
        assert refused < starts
        assert re.fullmatch(
            rf"tessera: refused: 1 connection to MASTER_PORT came from no user or host of this job, "
            rf"the last from 127\.0\.0\.1 \(user {NOBODY}\)",
            err.splitlines()[0],
        ), err
    finally:
        job.end()


@becomes_another
def test_another_user_does_not_end_a_job_that_has_no_worker(tmp_path):
    job, port = start(tmp_path, env={"TESSERA_WORKER": "/nowhere"})
    try:
        stranger(port, count=9)
        stranger(port)  # who would find nobody, had the first ended anything
        (tmp_path / "go").touch()
        assert b"asks" in job.process.stdout.readline()
        result = job.wait()  # a rank that asks is told that there is none
        assert result.code == 78, result.err
        assert "there is no tessera-worker program" in result.err
    finally:
        job.end()


@becomes_another
def test_a_flood_of_another_user_costs_one_line(tmp_path):
    job, port = start(tmp_path, env=worker_of(tmp_path))
    try:
        before = sorted(job.processes())
        stranger(port, count=600)
        assert sorted(job.processes()) == before
        err = finish(job)
        assert 1 <= err.count("refused: ") <= 3, err
        assert "\x1b" not in err and STARTS.decode() not in err
    finally:
        job.end()


def processor_seconds(pid):
    words = pathlib.Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    return (int(words[11]) + int(words[12])) / os.sysconf("SC_CLK_TCK")


@becomes_another
def test_without_descriptors_strangers_wait_and_the_launcher_rests(tmp_path):
    # It can neither look who they are, nor turn them away, nor start anything.
    job, port = start(tmp_path, env=worker_of(tmp_path))
    pid = job.process.pid
    try:
        before = resource.prlimit(pid, resource.RLIMIT_NOFILE)
        used = {int(name) for name in os.listdir(f"/proc/{pid}/fd")}
        first_free = min(set(range(len(used) + 1)) - used)
        resource.prlimit(pid, resource.RLIMIT_NOFILE, (first_free, before[1]))
        words = [sys.executable, "-S", "-E", "-c", STRANGER, str(port), "1"]
        waiting = subprocess.Popen(words, stderr=subprocess.PIPE, text=True)
        assert b"it is not known who asks, so the job goes on" in job.process.stderr.readline()
        worked = processor_seconds(pid)
        time.sleep(0.6)
        assert processor_seconds(pid) - worked < 0.2
        resource.prlimit(pid, resource.RLIMIT_NOFILE, before)
        _, err = waiting.communicate(timeout=60)
        assert waiting.returncode == 0, err
        assert STARTS.decode() not in finish(job)
    finally:
        job.end()


@becomes_another
def test_a_rank_that_became_another_user_is_of_the_job(tmp_path):
    job, _ = start(tmp_path, env=worker_of(tmp_path), more=[NOBODY])
    try:
        before = len(job.processes())
        (tmp_path / "go").touch()
        wait_until(lambda: len(job.processes()) == before + 1, what="the store")
        err = finish(job)
        assert STARTS.decode() in err and "refused" not in err
    finally:
        job.end()


def test_who_asks_and_leaves_at_once_starts_nothing(tmp_path):
    job, port = start(tmp_path, env=worker_of(tmp_path))
    try:
        before = sorted(job.processes())
        for _ in range(20):
            socket.create_connection(("127.0.0.1", port)).close()
        with socket.create_connection(("127.0.0.1", port)):
            wait_until(lambda: len(job.processes()) == len(before) + 1, what="the store")
        assert "refused" not in finish(job)
    finally:
        job.end()


def test_a_store_that_lacks_something_is_a_warning(tmp_path):
    # Whoever reaches its port may have taken what it lacks.
    job, _ = start(tmp_path, env=worker_of(tmp_path, "#!/bin/sh\nexit 69\n"))
    try:
        (tmp_path / "go").touch()
        lines = [job.process.stderr.readline() for _ in range(2)]
        assert STARTS in lines[0]
        assert b"warning: the store ended by exit code 69; the ranks go on" in lines[1]
        finish(job)
    finally:
        job.end()


def can_hide_tables():
    hide = ["unshare", "-m", "sh", "-c", "mount -t tmpfs none /proc"]
    return shutil.which("unshare") is not None and subprocess.run(hide, capture_output=True).returncode == 0


@pytest.mark.skipif(not can_hide_tables(), reason="hiding /proc needs root")
@pytest.mark.parametrize("has_worker", [True, False])
def test_where_the_kernel_does_not_tell_who_asks(tmp_path, has_worker):
    env = worker_of(tmp_path) if has_worker else {"TESSERA_WORKER": "/nowhere"}
    words = [TESSERA, "run", "-n", "2", "--", *python(RANK), str(tmp_path / "go")]
    hide = 'mount -t tmpfs none /proc && exec "$@"'
    job = subprocess.Popen(
        ["unshare", "-m", "sh", "-c", hide, "sh", *words],
        env={**os.environ, **env},
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
    )
    try:
        for _ in range(2):
            job.stdout.readline()
        (tmp_path / "go").touch()
        line = job.stderr.readline()
        if has_worker:
            assert STARTS in line
        else:
            assert line == (
                b"tessera: warning: run: a rank asks for torch's store, and there is none (there is no "
                b"tessera-worker program beside tessera); it is not known who asks, so the job goes on\n"
            )
        assert job.poll() is None
        job.send_signal(signal.SIGTERM)
        _, err = job.communicate(timeout=30)
        assert job.returncode == 143, err
        assert err.count(b"warning") == 0  # said once
    finally:
        job.kill()
        job.communicate()
