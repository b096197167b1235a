"""`tessera ps`: the jobs that run, and no others."""

import json
import os
import pathlib
import signal

import pytest
from jobs import Job, run
from waiting import free_port

READY_THEN_SLEEP = ("sh", "-c", "echo ready; exec sleep 300")


def listed(env):
    return json.loads(run("ps", "--json", env=env).out)


def test_jobs_are_listed_while_they_run(tmp_path):
    env = {"TMPDIR": str(tmp_path)}
    assert listed(env) == []
    assert run("ps", env=env).out == "no job of this user runs on this host\n"
    first = Job("run", "-n", 2, "--rdzv-id", "first", "--", *READY_THEN_SLEEP, env=env)
    first.process.stdout.readline()
    second = Job("run", "--", *READY_THEN_SLEEP, env=env)
    second.process.stdout.readline()
    try:
        jobs = listed(env)
        assert [job["pid"] for job in jobs] == [first.process.pid, second.process.pid]
        assert jobs[0]["name"] == "first" and jobs[0]["local_ranks"] == 2
        assert jobs[0]["command"] == list(READY_THEN_SLEEP)
        assert (jobs[0]["nodes"], jobs[0]["node_rank"], jobs[0]["attempt"]) == (1, 0, 0)
        assert 0 <= jobs[0]["seconds"] < 60
        lines = run("ps", env=env).out.splitlines()
        assert lines[0].split()[:3] == ["job", "pid", "ranks"] and len(lines) == 3
        assert lines[1].startswith("first ") and "sh -c echo ready" in lines[1]
        first.send(signal.SIGKILL)
        first.process.communicate(timeout=10)
        assert [job["pid"] for job in listed(env)] == [second.process.pid]
        second.send(signal.SIGTERM)
        second.wait()
        assert listed(env) == []
    finally:
        first.end()
        second.end()


def test_a_restart_and_several_hosts_are_shown(tmp_path):
    env = {"TMPDIR": str(tmp_path)}
    words = ["--nnodes", 2, "--rdzv-endpoint", f"127.0.0.1:{free_port()}", "--max-restarts", 1]
    script = "echo ready; [ $TORCHELASTIC_RESTART_COUNT = 0 ] && exit 3; exec sleep 300"
    jobs = [Job("run", *words, "--node-rank", i, "--", "sh", "-c", script, env=env) for i in (0, 1)]
    try:
        for job in jobs:
            for _ in range(2):
                job.process.stdout.readline()
        found = {job["node_rank"]: job for job in listed(env)}
        assert sorted(found) == [0, 1]
        assert all(job["nodes"] == 2 and job["attempt"] == 1 for job in found.values())
        jobs[0].send(signal.SIGTERM)
        for job in jobs:
            job.wait()
    finally:
        for job in jobs:
            job.end()


@pytest.mark.skipif(os.geteuid() != 0, reason="becoming another user needs root")
def test_another_user_neither_hides_jobs_nor_invents_any(tmp_path):
    # They are quicker to take the names of the launchers' folder, with a job of theirs in it.
    env = {"TMPDIR": str(tmp_path)}
    start_time = pathlib.Path("/proc/self/stat").read_text().rpartition(")")[2].split()[19]
    for number, name in enumerate([f"tessera-{os.geteuid()}", f"tessera-{os.geteuid()}.1"]):
        fake = tmp_path / name / f"{os.getpid()}.{start_time}.abcdef"
        fake.mkdir(parents=True)
        if number == 0:
            job = {"name": "theirs", "pid": os.getpid(), "begin_ns": 1, "local_ranks": 1, "nodes": 1}
            job |= {"node_rank": 0, "attempt": 0, "command": ["\x1b[2J"], "live": str(fake), "pids": [1]}
            (fake / "job.json").write_text(json.dumps(job))
        else:
            os.mkfifo(fake / "job.json")  # whoever opens it waits
        for path in (fake, fake.parent):
            os.chown(path, 65534, 65534)
            path.chmod(0o777)
    assert listed(env) == []
    own = Job("run", "--rdzv-id", "own", "--", *READY_THEN_SLEEP, env=env)
    try:
        own.process.stdout.readline()
        assert [job["name"] for job in listed(env)] == ["own"]
        assert (tmp_path / f"tessera-{os.geteuid()}.2").stat().st_mode & 0o777 == 0o700
        own.send(signal.SIGTERM)
        own.wait()
    finally:
        own.end()
    assert sorted(path.name for path in tmp_path.iterdir()) == [
        f"tessera-{os.geteuid()}",
        f"tessera-{os.geteuid()}.1",
    ]


def test_words_are_refused():
    result = run("ps", "everything")
    assert result.code == 2 and "takes flags only" in result.err
