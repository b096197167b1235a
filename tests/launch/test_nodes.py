"""Several hosts, played by several launchers on this one."""

import contextlib
import json
import re
import signal
import socket
import time

import pytest
from jobs import Job, listening_addresses, run
from waiting import free_port, wait_until


def start_nodes(script, *flags, nodes=2, ranks=2, only=None, **options):
    endpoint = f"127.0.0.1:{free_port()}"
    return [
        Job(
            "run",
            "-n",
            ranks,
            "--nnodes",
            nodes,
            "--node-rank",
            node,
            "--rdzv-endpoint",
            endpoint,
            *flags,
            "--",
            "sh",
            "-c",
            script,
            **options,
        )
        for node in (range(nodes) if only is None else only)
    ]


def finish(jobs):
    try:
        results = [job.wait() for job in jobs]
        for job in jobs:
            assert job.processes() == []
        return results
    finally:
        for job in jobs:
            job.end()


def test_ranks_are_counted_over_all_nodes():
    results = finish(
        start_nodes(
            "echo $RANK $LOCAL_RANK $GROUP_RANK $WORLD_SIZE $LOCAL_WORLD_SIZE $GROUP_WORLD_SIZE "
            "$MASTER_ADDR:$MASTER_PORT $TESSERA_RUN_ID",
            nodes=3,
        )
    )
    assert [r.code for r in results] == [0, 0, 0], [r.err for r in results]
    words = sorted(line.split("] ")[1].split() for r in results for line in r.lines)
    assert [w[:6] for w in words] == [
        [str(rank), str(rank % 2), str(rank // 2), "6", "2", "3"] for rank in range(6)
    ]
    assert len({w[6] for w in words}) == 1  # one store
    assert len({w[7] for w in words}) == 1  # one run


def test_late_node_is_awaited():
    endpoint = f"127.0.0.1:{free_port()}"
    words = ["--nnodes", 2, "--rdzv-endpoint", endpoint, "--", "echo", "here"]
    member = Job("run", "--node-rank", 1, *words)
    time.sleep(0.5)
    leader = Job("run", "--node-rank", 0, *words)
    assert [r.code for r in finish([leader, member])] == [0, 0]


def test_node_that_is_done_waits_for_the_others():
    results = finish(start_nodes("[ $GROUP_RANK = 1 ] && sleep 0.5; exit 0"))
    assert [r.code for r in results] == [0, 0]
    assert all(r.seconds >= 0.5 for r in results)


@pytest.mark.parametrize("failing", [0, 3])
def test_failure_on_any_node_ends_all_with_its_code(failing):
    results = finish(
        start_nodes(f"[ $RANK = {failing} ] && {{ echo the cause >&2; exit 9; }}; exec sleep 60")
    )
    assert [r.code for r in results] == [9, 9]
    for result in results:
        assert f"error: rank {failing} failed first: the cause" in result.err


def test_killed_rank_gives_137_everywhere():
    results = finish(start_nodes("[ $RANK = 2 ] && kill -9 $$; exec sleep 60"))
    assert [r.code for r in results] == [137, 137]


def test_restart_restarts_all_nodes_with_a_new_store():
    results = finish(
        start_nodes(
            "echo attempt $TORCHELASTIC_RESTART_COUNT $MASTER_PORT;"
            "[ $TORCHELASTIC_RESTART_COUNT = 1 ] && exit 0; [ $RANK = 1 ] && exit 3; exec sleep 60",
            "--max-restarts",
            3,
        )
    )
    assert [r.code for r in results] == [0, 0], [r.err for r in results]
    ports = {0: set(), 1: set()}
    for result in results:
        assert "rank 1 failed (exit code 3); restart 1 of 3" in result.err
        for attempt, port in re.findall(r"attempt (\d) (\d+)", result.out):
            ports[int(attempt)].add(port)
        assert len(re.findall("attempt 1", result.out)) == 2
    assert len(ports[0] | ports[1]) == 2


def test_missing_node_is_named_after_the_timeout():
    results = finish(start_nodes("true", "--rdzv-timeout", 0.7, nodes=4, only=[0, 2]))
    leader, member = results
    assert leader.code == 69
    assert leader.err.splitlines()[0] == ("error: rendezvous: nodes 1, 3 of 4 did not join within 0.7 s")
    assert member.code == 69
    assert "nodes 1, 3 of 4 did not join within 0.7 s" in member.err or "node 0" in member.err
    assert leader.seconds < 10


def test_missing_node_0_is_said():
    (result,) = finish(start_nodes("true", "--rdzv-timeout", 0.5, only=[1]))
    assert result.code == 69
    assert re.match(
        r"error: rendezvous: node 0 at 127.0.0.1:\d+ was not reached within 0.5 s\n"
        r"  why: Connection refused\n  try: ",
        result.err,
    )


@pytest.mark.parametrize(
    "flags, text",
    [
        (["-n", 3], "was started with --nproc-per-node 3, node 0 with 2"),
        (["--nnodes", 3], "was started with --nnodes 3, node 0 with 2"),
        (["--rdzv-id", "other"], "belongs to the job 'other', this is 'mine'"),
    ],
)
def test_node_with_other_numbers_is_refused(flags, text):
    endpoint = f"127.0.0.1:{free_port()}"
    same = ["--nnodes", 2, "-n", 2, "--rdzv-id", "mine", "--rdzv-endpoint", endpoint]
    leader = Job("run", *same, "--rdzv-timeout", 1.5, "--node-rank", 0, "--", "true")
    member = Job("run", *same, *flags, "--node-rank", 1, "--", "true")
    results = finish([leader, member])
    assert [r.code for r in results] == [69, 69]
    assert text in results[1].err.splitlines()[0]
    assert text in results[0].err
    assert "node 1 of 2 did not join" in results[0].err


def test_duplicate_node_is_refused_and_the_job_goes_on():
    endpoint = f"127.0.0.1:{free_port()}"
    words = ["--nnodes", 2, "--rdzv-endpoint", endpoint, "--", "sh", "-c", "echo in; sleep 1"]
    leader = Job("run", "--node-rank", 0, *words)
    first = Job("run", "--node-rank", 1, *words)
    first.process.stdout.readline()
    second = Job("run", "--node-rank", 1, *words)
    results = finish([leader, first, second])
    assert [r.code for r in results] == [0, 0, 69]
    assert "is here already" in results[2].err


def test_a_host_that_comes_back_is_refused():
    # Node 0 still waits for ranks that ignore its signal.
    port = free_port()
    script = "trap '' TERM; echo ready; while :; do sleep 0.05; done"
    flags = ("--shutdown-timeout", 4)

    def start(node):
        words = ("--nnodes", 2, "--node-rank", node, "--rdzv-endpoint", f"127.0.0.1:{port}", *flags)
        return Job("run", "-n", 1, *words, "--", "sh", "-c", script)

    jobs = [start(0), start(1)]
    try:
        for job in jobs:
            assert "ready" in job.process.stdout.readline().decode()
        jobs[1].send(signal.SIGKILL)
        time.sleep(1)  # of the four seconds that node 0 waits
        jobs.append(start(1))
        results = [jobs[0].wait(), jobs[2].wait()]
    finally:
        for job in jobs:
            job.end()
    assert [r.code for r in results] == [75, 69], [r.err for r in results]
    assert "was here and is lost to this job; start the job again" in results[0].err
    assert "was here and is lost to this job; start the job again" in results[1].err


@pytest.mark.parametrize("victim, survivor", [(1, 0), (0, 1)])
def test_lost_launcher_ends_the_others_with_75(victim, survivor):
    jobs = start_nodes("echo ready; exec sleep 300")
    for job in jobs:
        job.process.stdout.readline()
    jobs[victim].send(signal.SIGKILL)
    result = jobs[survivor].wait()
    assert result.code == 75
    assert f"node {victim}" in result.err and "lost" in result.err
    jobs[victim].process.wait(timeout=10)
    for job in jobs:
        wait_until(lambda job=job: job.processes() == [], limit=5, what="the end of all processes")


@pytest.mark.parametrize("receiver", [0, 1])
def test_signal_to_one_launcher_drains_all_nodes(receiver):
    jobs = start_nodes("trap 'echo drained; exit 0' TERM; echo ready; while :; do sleep 0.05; done")
    for job in jobs:
        for _ in range(2):
            job.process.stdout.readline()
    jobs[receiver].send(signal.SIGTERM)
    results = finish(jobs)
    assert [r.code for r in results] == [0, 0]
    assert all(r.out.count("drained") == 2 for r in results)


def test_signal_while_waiting_for_nodes():
    (job,) = start_nodes("true", only=[0])
    wait_until(lambda: listening_addresses([job.process.pid]), what="the listener")
    job.send(signal.SIGTERM)
    assert job.wait().code == 143


def test_strangers_cannot_disturb_the_rendezvous():
    port = free_port()
    words = ["--nnodes", 2, "--rdzv-endpoint", f"127.0.0.1:{port}", "--", "echo", "x"]
    leader = Job("run", "--node-rank", 0, *words)
    wait_until(lambda: listening_addresses([leader.process.pid]), what="the listener")
    strangers = []
    hello = {
        "kind": "hello",
        "protocol": "tessera-launch-1",
        "rdzv_id": "",
        "nnodes": "2",
        "nproc": "1",
        "host": "h",
    }
    payloads = [
        b"",
        b"GET / HTTP/1.1\r\n\r\n",
        b"\n\n\n",
        b"[]\n",
        b"{\n",
        b"\xff" * 100 + b"\n",
        b"x" * 1_000_000,
        b'{"kind": 1}\n',
        b'{"kind": "gone", "failures": "[]"}\n',
    ]
    payloads += [
        json.dumps({**hello, "node": node}).encode() + b"\n" for node in ("-1", "0", "99999999999999")
    ]
    for payload in payloads:
        stranger = socket.create_connection(("127.0.0.1", port), timeout=10)
        with contextlib.suppress(OSError):  # may be closed in its face
            stranger.sendall(payload)
        strangers.append(stranger)
    member = Job("run", "--node-rank", 1, *words)
    results = finish([leader, member])
    for stranger in strangers:
        stranger.close()
    assert [r.code for r in results] == [0, 0], [r.err for r in results]


def test_every_listener_is_on_the_named_address():
    jobs = start_nodes("echo ready; exec sleep 300")
    for job in jobs:
        job.process.stdout.readline()
    pids = [pid for job in jobs for pid in job.processes()]
    assert set(listening_addresses(pids)) == {"127.0.0.1"}
    for job in jobs:
        job.send(signal.SIGTERM)
    finish(jobs)


def test_port_in_use_is_69():
    with socket.socket() as holder:
        holder.bind(("127.0.0.1", 0))
        holder.listen()
        result = run(
            "run",
            "--nnodes",
            2,
            "--node-rank",
            0,
            "--rdzv-endpoint",
            f"127.0.0.1:{holder.getsockname()[1]}",
            "--",
            "true",
        )
    assert result.code == 69 and "Address already in use" in result.err
