"""The launcher dies or is told to end: no rank outlives it."""

import signal
import statistics
import subprocess
import time

import pytest
from fleet import TESSERA, Fleet, Times, is_alive
from waiting import LIMIT, wait_until


def await_end_of(pid):
    wait_until(lambda: not is_alive(pid), 1.0, f"the end of rank {pid}")


def test_no_orphans_after_the_launcher_is_killed():
    # Four at a time: what counts is that not one of twenty leaves an orphan.
    delays = []
    for _ in range(5):
        fleets = [
            Fleet("loop", "count=1000", env={"TESSERA_ENGINE": engine}).run(2)
            for engine in ("shm", "gloo", "shm", "gloo")
        ]
        try:
            for fleet in fleets:
                fleet.warm(2)
            for fleet in fleets:
                killed = fleet.kill(fleet.processes[0].pid)
                for event in fleet.events("ready"):
                    await_end_of(event["pid"])
                delays.append((time.monotonic_ns() - killed) / 1e9)
                fleet.assert_nothing_left(limit=1.0)
        finally:
            for fleet in fleets:
                fleet.end()
    Times.rows["launcher SIGKILLed to last rank gone"] = delays
    assert len(delays) == 20 and statistics.median(delays) < 0.5


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_signal_ends_the_job(number):
    with Fleet("loop", "count=1000").run(3) as fleet:
        fleet.warm(3)
        begin = time.monotonic()
        fleet.kill(fleet.processes[0].pid, number)
        assert fleet.wait(10) == [128 + number]
        assert time.monotonic() - begin < 5
        fleet.assert_nothing_left()


def test_second_interrupt_does_not_wait():
    with Fleet("loop", "count=1000", "deaf=1").run(2, "--shutdown-timeout", 60) as fleet:
        fleet.warm(2)
        fleet.kill(fleet.processes[0].pid, signal.SIGINT)
        time.sleep(0.3)
        begin = time.monotonic()
        fleet.kill(fleet.processes[0].pid, signal.SIGINT)
        assert fleet.wait(10) == [128 + signal.SIGINT]
        assert time.monotonic() - begin < 2
        fleet.assert_nothing_left()


def test_ranks_that_ignore_the_signal_are_killed():
    with Fleet("loop", "count=1000", "deaf=1").run(2, "--shutdown-timeout", 1) as fleet:
        fleet.warm(2)
        begin = time.monotonic()
        fleet.kill(fleet.processes[0].pid, signal.SIGTERM)
        assert fleet.wait(10) == [128 + signal.SIGTERM]
        assert 0.9 < time.monotonic() - begin < 4
        fleet.assert_nothing_left()


def test_stopped_ranks_end_with_the_job():
    with Fleet("loop", "count=1000").run(2) as fleet:
        for pid in fleet.warm(2).values():
            fleet.kill(pid, signal.SIGSTOP)
        fleet.kill(fleet.processes[0].pid, signal.SIGTERM)
        assert fleet.wait(20) == [128 + signal.SIGTERM]
        fleet.assert_nothing_left()


def run_with_limit(limit, size, command):
    """Runs the command as every rank, with few open files allowed."""
    line = f'ulimit {limit}; exec "$0" "$@"'
    return subprocess.run(
        ["sh", "-c", line, TESSERA, "run", "-n", str(size), "--", "sh", "-c", command],
        capture_output=True,
        text=True,
        timeout=LIMIT,
        check=False,
    )


def test_too_few_open_files_are_called_that():
    for limit in (6, 8, 12):
        result = run_with_limit(f"-n {limit}", 2, "true")
        assert result.returncode != 0
        assert "Too many open files" in result.stderr and "ulimit" in result.stderr, result.stderr
