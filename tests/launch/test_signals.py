"""Signals to the launcher, and what becomes of the ranks."""

import fcntl
import os
import pathlib
import random
import signal
import subprocess
import time

import pytest
from jobs import TESSERA, Job, python
from waiting import wait_until

READY_THEN_SLEEP = "echo ready; exec sleep 300"


def read_lines(job, count):
    return [job.process.stdout.readline().decode() for _ in range(count)]


def started(script, *flags, ranks=2, **options):
    job = Job("run", "-n", ranks, *flags, "--", "sh", "-c", script, **options)
    lines = read_lines(job, ranks)
    assert all("ready" in line for line in lines), lines
    return job


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGQUIT])
def test_signal_ends_ranks_and_gives_128_plus_n(number):
    job = started(READY_THEN_SLEEP)
    job.send(number)
    result = job.wait()
    assert result.code == 128 + number
    assert "failed first" not in result.err
    assert job.processes() == []


@pytest.mark.parametrize("number, name", [(signal.SIGTERM, "TERM"), (signal.SIGINT, "INT")])
def test_ranks_that_drain_decide_the_code(number, name):
    for code in (0, 7):
        trap = f"trap 'echo drained; exit {code}' {name}"
        job = started(f"{trap}; echo ready; while :; do sleep 0.05; done")
        job.send(number)
        result = job.wait()
        assert result.out.count("drained") == 2
        assert result.code == code


def test_ranks_that_ignore_sigterm_are_killed_after_the_timeout():
    job = started("trap '' TERM; echo ready; while :; do sleep 0.1; done", "--shutdown-timeout", 0.5)
    begin = time.monotonic()
    job.send(signal.SIGTERM)
    result = job.wait()
    assert time.monotonic() - begin >= 0.5
    assert result.code == 143
    assert "2 rank(s) did not end in time and were killed" in result.err
    assert job.processes() == []


def test_second_interrupt_kills_at_once():
    job = started("trap '' INT; echo ready; while :; do sleep 0.1; done", "--shutdown-timeout", 60)
    job.send(signal.SIGINT)
    assert b"Ctrl-C again" in job.process.stderr.readline()
    begin = time.monotonic()
    job.send(signal.SIGINT)
    result = job.wait()
    assert time.monotonic() - begin < 10
    assert result.code == 130


def test_no_restart_after_a_signal():
    job = started(READY_THEN_SLEEP, "--max-restarts", 5)
    job.send(signal.SIGTERM)
    result = job.wait()
    assert (result.code, result.out) == (143, "")


def test_ignored_hangup_stays_ignored():
    job = started(READY_THEN_SLEEP, preexec_fn=lambda: signal.signal(signal.SIGHUP, signal.SIG_IGN))
    job.send(signal.SIGHUP)
    job.send(signal.SIGTERM)
    assert job.wait().code == 143


def test_stopped_rank_ends_with_the_others():
    code = """
import os, signal, time
if os.environ['RANK'] == '1':
    os.kill(os.getpid(), signal.SIGSTOP)
    time.sleep(300)
while True:  # until the other rank is stopped, then fail
    for name in os.listdir('/proc'):
        try:
            stat = open(f'/proc/{name}/stat').read().rpartition(')')[2].split()
        except (OSError, ValueError):
            continue
        if stat[0] == 'T' and int(stat[1]) == os.getppid():
            os._exit(5)
    time.sleep(0.01)
"""
    job = Job("run", "-n", 2, "--shutdown-timeout", 20, "--", *python(code))
    result = job.wait()
    assert result.code == 5
    assert result.seconds < 15
    assert job.processes() == []


def test_killed_launcher_leaves_no_orphans():
    # Ranks, what they started in their own group, and the launcher's scratch folder.
    def kill_once():
        job = started("sleep 300 & echo ready; wait")
        wait_until(lambda: len(job.processes()) >= 6, what="the children of the ranks")
        job.send(signal.SIGKILL)
        job.process.wait(timeout=10)
        wait_until(lambda: job.processes() == [], limit=5, what="the end of all processes")

    for _ in range(10):
        kill_once()


def test_killed_launcher_leaves_no_folder(tmp_path):
    job = started(READY_THEN_SLEEP, env={"TMPDIR": str(tmp_path)})
    assert len(list(tmp_path.iterdir())) == 1
    job.send(signal.SIGKILL)
    job.process.wait(timeout=10)
    wait_until(lambda: not list(tmp_path.iterdir()), limit=5, what="the end of the folder")


def test_killed_process_group_leaves_no_orphans():
    job = started("setsid sleep 0; sleep 300 & echo ready; wait", start_new_session=True)
    os.killpg(job.process.pid, signal.SIGKILL)
    job.process.wait(timeout=10)
    wait_until(lambda: job.processes() == [], limit=5, what="the end of all processes")


def test_interrupt_of_a_terminal_reaches_the_ranks_once():
    """Ctrl-C in a terminal: the ranks sit in groups of their own, so only the launcher forwards."""
    script = "trap 'echo got one; exit 0' INT; echo ready; while :; do sleep 0.05; done"
    primary, secondary = os.openpty()
    process = subprocess.Popen(
        ["setsid", "--ctty", "--wait", TESSERA, "run", "-n", "2", "--", "sh", "-c", script],
        stdin=secondary,
        stdout=secondary,
        stderr=secondary,
    )
    os.close(secondary)
    text = b""
    while text.count(b"ready") < 2:
        text += os.read(primary, 4096)
    os.write(primary, b"\x03")
    assert process.wait(timeout=30) == 0
    text += os.read(primary, 65536)
    os.close(primary)
    assert text.count(b"got one") == 2


def test_launcher_killed_at_any_moment_of_its_start_leaves_nothing(tmp_path):
    dice = random.Random(7)
    for _ in range(60):
        job = Job(
            *("run", "-n", 2, "--", "sh", "-c", "sleep 300 & sleep 300 & wait"), env={"TMPDIR": str(tmp_path)}
        )
        time.sleep(dice.random() * 0.03)
        job.send(signal.SIGKILL)
        job.process.communicate(timeout=10)
        try:
            wait_until(lambda job=job: job.processes() == [], limit=5, what="the end of all processes")
            wait_until(lambda: not list(tmp_path.iterdir()), limit=5, what="the end of the folder")
        finally:
            job.end()


def command_name(pid):
    return pathlib.Path(f"/proc/{pid}/comm").read_text().strip()


def scratch_folders(parent):
    return sorted(entry.name for entry in parent.glob("tessera-*/*"))


def test_folders_of_dead_launchers_are_removed_and_of_living_ones_kept(tmp_path):
    env = {"TMPDIR": str(tmp_path)}
    living = started(READY_THEN_SLEEP, env=env)
    (own,) = scratch_folders(tmp_path)
    parent = tmp_path / f"tessera-{os.geteuid()}"
    assert own.startswith(f"{living.process.pid}.")
    assert parent.stat().st_mode & 0o777 == 0o700
    # The guard too is killed: nobody is left to clean up.
    dead = started(READY_THEN_SLEEP, env=env)
    (guard,) = [pid for pid in dead.processes() if command_name(pid) == "tessera-guard"]
    os.kill(guard, signal.SIGKILL)
    dead.send(signal.SIGKILL)
    dead.process.communicate(timeout=10)
    wait_until(lambda: dead.processes() == [], limit=5, what="the end of all processes")
    # A number that was given away again: alive, but not the process that made the folder.
    (parent / f"{os.getpid()}.1.abcdef").mkdir()
    (parent / f"{os.getpid()}.1.abcdef" / "lock").touch()
    # A lock that is held by somebody this process cannot see.
    (parent / "999999999.1.abcdef").mkdir()
    with (parent / "999999999.1.abcdef" / "lock").open("w") as held:
        fcntl.flock(held, fcntl.LOCK_EX)
        assert len(scratch_folders(tmp_path)) == 4
        assert Job("run", "--", "true", env=env).wait().code == 0
        assert scratch_folders(tmp_path) == sorted([own, "999999999.1.abcdef"])
    living.send(signal.SIGTERM)
    assert living.wait().code == 143
