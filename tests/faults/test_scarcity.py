"""A rank is refused its n-th thread or descriptor: both ranks say so, or nothing is lost."""

import concurrent.futures
import json
import os
import re
import subprocess

import pytest
from fleet import WORKER

LIMIT = 2  # of the ranks' waits, in seconds: some never come
STEP = int(os.environ.get("TESSERA_DESCRIPTOR_STEP", "7"))  # 1: five to twelve minutes

REFUSED = {
    "threads": r"comm\.\w+.*: process PID on host .* is given no further thread: Resource temporarily",
    "descriptors": r"comm\.\w+.*([Tt]oo many open files|more open files)",
}


def jobs(engine, what, store, step):
    env = {
        **os.environ,
        "TESSERA_ENGINE": engine,
        "TESSERA_TIMEOUT": str(LIMIT),
        "OMP_NUM_THREADS": "1",
        "CUDA_VISIBLE_DEVICES": "",
    }
    command = [WORKER, "scarcity", f"what={what}", f"store={store}", f"step={step}"]
    limit = 250 * 7 / STEP if what == "descriptors" else 250
    done = subprocess.run(command, env=env, capture_output=True, text=True, timeout=limit)
    assert done.returncode == 0, done.stderr
    return [json.loads(line) for line in done.stdout.splitlines() if line.startswith("{")]


def check(job, what):
    """Whether the job ended well; fails if it ended in a way that it must not."""
    first, second = job["errors"]
    assert job["seconds"] < LIMIT + 4, job
    if all(job["done"]):
        assert job["statuses"] == [0, 0], job
        return True
    assert first is not None and second is not None, job
    assert first["kind"] == "unavailable" and re.match(
        REFUSED[what].replace("PID", str(job["pids"][0])), first["text"]
    ), job
    if second["kind"] == "unavailable":
        assert second["text"] == first["text"], job
    elif second["kind"] == "peer lost":
        assert f"rank 0 (pid {job['pids'][0]}," in second["text"], job
    else:  # before the ranks knew of each other
        assert second["kind"] == "rendezvous", job
        assert re.search(r"ranks? 0\b|found no store|lost the connection to another rank", second["text"]), (
            job
        )
    return False


def jobs_on_every_store(engine, what, step=1):
    """One line of jobs beside the other: they wait more than they work."""
    stores = ("launcher", "own", "open")
    with concurrent.futures.ThreadPoolExecutor(len(stores)) as pool:
        return list(pool.map(lambda store: jobs(engine, what, store, step), stores))


def check_all(found, what):
    for line in found:
        results = [check(job, what) for job in line]
        assert results[-3:] == [True] * 3
        assert results.count(False) > 2, results  # there was something to refuse


@pytest.mark.parametrize("engine", ["shm", "gloo"])
def test_every_thread_of_a_rank_may_be_refused(engine):
    check_all(jobs_on_every_store(engine, "threads"), "threads")


@pytest.mark.timeout(120 * 7 / STEP)
@pytest.mark.parametrize("engine", ["shm", "gloo"])
def test_every_lack_of_descriptors_of_a_rank_is_told(engine):
    check_all(jobs_on_every_store(engine, "descriptors", STEP), "descriptors")
