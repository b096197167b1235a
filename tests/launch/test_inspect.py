"""`tessera inspect`: what each rank does, seen from outside, for programs in C++ and Python."""

import json
import os
import pathlib
import signal

from jobs import TESSERA, TORCH_PYTHON, Job, run
from waiting import wait_until

WORKER = os.environ.get("TESSERA_FAULT_WORKER", str(pathlib.Path(TESSERA).with_name("fault_worker")))

SCRIPT = """
import sys, time
import torch
import tessera.comm as comm

def wait_for_the_others(world):
    comm.barrier(world)

world = comm.init()
comm.all_reduce_(torch.ones(4), group=world)
comm.set_step(3)
print("ready", flush=True)
if world.rank() == 1:
    def sleep_for_long():
        time.sleep(300)
    sleep_for_long()
wait_for_the_others(world)
"""


def look(env, *words):
    result = run("inspect", *words, "--json", env=env)
    assert result.code == 0, result.err
    return json.loads(result.out)


def states(env):
    return [rank["state"] for rank in look(env)["ranks"]]


def test_a_rank_that_others_wait_for_is_found(tmp_path):
    env = {"TMPDIR": str(tmp_path), "FAULT_REPORT": str(tmp_path), "TESSERA_TIMEOUT": "60"}
    words = ("loop", "count=1000", "victim=1", "action=sleep", "milliseconds=60000", "at=40")
    job = Job("run", "-n", 3, "--rdzv-id", "looked-at", "--", WORKER, *words, env=env)
    try:
        wait_until(
            lambda: any("injected" in path.read_text() for path in tmp_path.glob("*.jsonl")),
            30,
            "rank 1 to fall asleep",
        )
        wait_until(lambda: states(env) == ["waiting", "sleeping", "waiting"], 10, "the others to wait")
        seen = look(env, "looked-at")
        assert seen["name"] == "looked-at" and seen["pid"] == job.process.pid and seen["attempt"] == 0
        assert [rank["rank"] for rank in seen["ranks"]] == [0, 1, 2]
        for rank in seen["ranks"]:
            operation = rank["operations"][0]
            assert rank["recorded"] and rank["step"] == 40
            assert rank["memory_bytes"] > rank["shared_bytes"] > 0 and rank["threads"] >= 1
            assert (operation["operation"], operation["group"]) == ("all_reduce", "world")
            if rank["rank"] == 1:
                assert not operation["under_way"] and operation["waiting_for"] == []
            else:
                assert operation["under_way"] and operation["details"] == "float32 [1000]"
                assert operation["waiting_for"] == [1] and 0 < operation["seconds"] < 60
        # Looking changes nothing: they wait in the same operation, and for longer.
        again = look(env, str(job.process.pid), "--rank", "0")["ranks"]
        assert len(again) == 1
        first, second = seen["ranks"][0]["operations"][0], again[0]["operations"][0]
        assert first["sequence"] == second["sequence"] and first["seconds"] <= second["seconds"]
        text = run("inspect", env=env).out
        assert "all_reduce #" in text and "rank 1" in text and "job looked-at" in text

        stacks = look(env, "--stacks", "--rank", "1")["ranks"][0]["stacks"]
        assert stacks[0]["thread"] == seen["ranks"][1]["pid"]
        # Where it sleeps, and who called that.
        assert stacks[0]["frames"].splitlines()[0].count("nanosleep") == 1, stacks[0]["frames"]
        assert "fault_worker(" in stacks[0]["frames"] and "__libc_start_main" in stacks[0]["frames"]
        text = run("inspect", "--stacks", env=env).out
        assert text.count("\n  thread ") >= 3
        assert states(env) == ["waiting", "sleeping", "waiting"]

        # One that does not run says so, and does not hold up the look.
        os.kill(seen["ranks"][1]["pid"], signal.SIGSTOP)
        wait_until(lambda: states(env)[1] == "stopped", 10, "rank 1 to stop")
        stopped = look(env, "--stacks", "--rank", "1")["ranks"][0]
        assert stopped["stacks"][0]["frames"] == ""
        os.kill(seen["ranks"][1]["pid"], signal.SIGCONT)
        assert job.process.poll() is None
    finally:
        job.end()


def test_python_ranks_show_their_lines(tmp_path):
    script = tmp_path / "train.py"
    script.write_text(SCRIPT)
    env = {"TMPDIR": str(tmp_path), "PYTHONPATH": os.environ.get("PYTHONPATH", "")}
    job = Job("run", "-n", 2, "--", TORCH_PYTHON, script, env=env)
    try:
        for _ in range(2):
            assert b"ready" in job.process.stdout.readline()
        wait_until(lambda: states(env) == ["waiting", "sleeping"], 20, "rank 0 to wait")
        ranks = look(env, "--stacks")["ranks"]
        assert ranks[0]["step"] == ranks[1]["step"] == 3
        assert ranks[0]["operations"][0]["operation"] == "barrier"
        assert ranks[0]["operations"][0]["waiting_for"] == [1]
        assert "in wait_for_the_others" in ranks[0]["python_stacks"]
        assert "in sleep_for_long" in ranks[1]["python_stacks"]
        assert str(script) in ranks[1]["python_stacks"]
        # The sleep goes on, and a second look gets a second answer.
        assert "in sleep_for_long" in look(env, "--stacks")["ranks"][1]["python_stacks"]
        assert states(env) == ["waiting", "sleeping"]
    finally:
        job.end()


def test_programs_without_groups_and_jobs_that_are_not_there(tmp_path):
    env = {"TMPDIR": str(tmp_path)}
    result = run("inspect", env=env)
    assert result.code == 2 and "no job of this user runs on this host" in result.err
    ready = ("sh", "-c", "echo ready; exec sleep 300")
    jobs = [Job("run", "-n", 2, "--rdzv-id", name, "--", *ready, env=env) for name in ("first", "second")]
    try:
        for job in jobs:
            for _ in range(2):
                job.process.stdout.readline()
        wait_until(
            lambda: all(rank["state"] == "sleeping" for rank in look(env, "second")["ranks"]), 10, "sleep"
        )
        seen = look(env, "second", "--stacks")
        assert seen["pid"] == jobs[1].process.pid
        for rank in seen["ranks"]:
            assert not rank["recorded"] and rank["step"] is None and rank["operations"] == []
            assert rank["state"] == "sleeping" and rank["memory_bytes"] > 0 and rank["stacks"] == []
        result = run("inspect", env=env)
        assert result.code == 2 and "several jobs run here" in result.err and "first (" in result.err
        result = run("inspect", "secnd", env=env)
        assert result.code == 2 and "no job 'secnd' runs here" in result.err and "second" in result.err
        result = run("inspect", "second", "--rank", "7", env=env)
        assert result.code == 2 and "rank 7 is not on this host; ranks 0 to 1 are" in result.err
        # Nobody was sent a signal that would have ended it.
        assert all(job.process.poll() is None for job in jobs)
    finally:
        for job in jobs:
            job.end()
