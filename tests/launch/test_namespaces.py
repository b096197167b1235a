"""Two hosts with a network between them, played by two network namespaces."""

import os
import shutil
import subprocess
import sys
import uuid

import pytest
from jobs import SECRET, TESSERA
from waiting import free_port, wait_until


def can_make_namespaces():
    if os.geteuid() != 0 or shutil.which("ip") is None:
        return False
    name = f"tsr{uuid.uuid4().hex[:6]}"
    made = subprocess.run(["ip", "netns", "add", name], capture_output=True).returncode == 0
    if made:
        subprocess.run(["ip", "netns", "del", name], check=True)
    return made


pytestmark = pytest.mark.skipif(not can_make_namespaces(), reason="needs root and namespaces")


@pytest.fixture
def hosts():
    """Names of two namespaces; the first has 10.77.0.1, the second 10.77.0.2."""
    tag = uuid.uuid4().hex[:6]
    names = [f"tsr{tag}a", f"tsr{tag}b"]
    commands = [
        f"netns add {names[0]}",
        f"netns add {names[1]}",
        f"link add v{tag}a netns {names[0]} type veth peer name v{tag}b netns {names[1]}",
    ]
    for i, name in enumerate(names):
        device = f"v{tag}{'ab'[i]}"
        commands += [
            f"-n {name} addr add 10.77.0.{i + 1}/24 dev {device}",
            f"-n {name} link set {device} up",
            f"-n {name} link set lo up",
        ]
    try:
        for command in commands:
            subprocess.run(["ip", *command.split()], check=True, timeout=10)
        yield names
    finally:
        for name in names:
            subprocess.run(["ip", "netns", "del", name], capture_output=True, timeout=10)


def start(host, *words, env=None):
    return subprocess.Popen(
        ["ip", "netns", "exec", host, TESSERA, "run", *map(str, words)],
        env={**os.environ, "TESSERA_JOB_SECRET": SECRET, **(env or {})},
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )


def test_hosts_meet_at_the_named_address_and_nowhere_else(hosts):
    port = free_port()
    script = "ss -Hltn; echo rank $RANK of $WORLD_SIZE"
    words = ["-n", 2, "--nnodes", 2, "--rdzv-endpoint", f"10.77.0.1:{port}"]
    nodes = [start(host, *words, "--node-rank", i, "--", "sh", "-c", script) for i, host in enumerate(hosts)]
    results = [node.communicate(timeout=60) for node in nodes]
    assert [node.returncode for node in nodes] == [0, 0], results
    for rank in range(4):
        assert f"[rank {rank}] rank {rank} of 4\n" in results[rank // 2][0]
    # A namespace holds nothing but this job, so every listener in it is ours.
    listeners = {
        line.split()[5].rsplit(":", 1)[0]
        for out, _ in results
        for line in out.splitlines()
        if "LISTEN" in line
    }
    assert listeners == {"10.77.0.1"}


def test_failure_crosses_the_network(hosts):
    words = ["--nnodes", 2, "--rdzv-endpoint", f"10.77.0.1:{free_port()}"]
    nodes = [
        start(host, *words, "--node-rank", i, "--", "sh", "-c", "[ $RANK = 1 ] && exit 17; exec sleep 60")
        for i, host in enumerate(hosts)
    ]
    results = [node.communicate(timeout=60) for node in nodes]
    assert [node.returncode for node in nodes] == [17, 17], results


def test_default_job_is_invisible_from_outside(hosts):
    job = start(hosts[0], "-n", 2, "--", "sh", "-c", "echo $MASTER_PORT; exec sleep 60")
    try:
        port = job.stdout.readline().split()[-1]
        probe = [
            "ip",
            "netns",
            "exec",
            hosts[1],
            "python3",
            "-c",
            f"import socket; socket.create_connection(('10.77.0.1', {port}), 5)",
        ]
        done = subprocess.run(probe, capture_output=True, text=True, timeout=60)
        assert "ConnectionRefusedError" in done.stderr
    finally:
        job.terminate()
        job.communicate(timeout=60)


# Connects from an address and tells how that ended.
CALL = """
import socket, sys
s = socket.create_connection((sys.argv[1], int(sys.argv[2])), 20, (sys.argv[3], 0))
try:
    print('answer', s.recv(1))
except OSError as error:
    print(type(error).__name__)
"""


def call(host, port, source):
    words = ["ip", "netns", "exec", host, sys.executable, "-S", "-E", "-u", "-c", CALL]
    return subprocess.Popen(
        [*words, "10.77.0.1", str(port), source], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    )


def test_torchs_store_is_started_for_the_jobs_hosts_alone(hosts, tmp_path):
    # In the place of tessera-worker: waits for the end of the job and serves nobody.
    worker = tmp_path / "worker"
    worker.write_text(f"#!/bin/sh\ntouch {tmp_path}/started\nexec cat\n")
    worker.chmod(0o755)
    device = f"v{hosts[1][3:-1]}b"
    more = lambda address: subprocess.run(  # noqa: E731
        ["ip", "-n", hosts[1], "addr", "add", f"{address}/24", "dev", device], check=True, timeout=10
    )
    more("10.77.0.3")  # the second host's, which its launcher does not use
    words = ["--nnodes", 2, "--rdzv-endpoint", f"10.77.0.1:{free_port()}"]
    script = "echo $MASTER_PORT; exec sleep 600"
    env = {"TESSERA_WORKER": str(worker)}
    nodes = [
        start(host, *words, "--node-rank", i, "--", "sh", "-c", script, env=env)
        for i, host in enumerate(hosts)
    ]
    try:
        ports = {int(node.stdout.readline().split()[-1]) for node in nodes}
        assert len(ports) == 1
        port = ports.pop()
        more("10.77.0.4")  # of a host that is none of the job's, as node 0 sees it
        stranger = call(hosts[1], port, "10.77.0.4")
        assert stranger.communicate(timeout=60)[0] == "ConnectionResetError\n"
        assert not (tmp_path / "started").exists()
        of_the_job = call(hosts[1], port, "10.77.0.3")
        wait_until((tmp_path / "started").exists, what="the store")
        nodes[0].terminate()
        results = [node.communicate(timeout=60) for node in nodes]
        assert [node.returncode for node in nodes] == [143, 143], results
        err = results[0][1]
        assert "1 connection to MASTER_PORT came from no user or host of this job" in err
        assert "the last from 10.77.0.4\n" in err
        assert err.index("refused: ") < err.index("a program uses torch's own store")
        of_the_job.communicate(timeout=60)
    finally:
        for node in nodes:
            node.kill()
            node.communicate()


def test_a_neighbour_on_another_host_of_the_job_ends_nothing(hosts):
    # The network shows his address alone, which is also a rank's.
    words = ["--nnodes", 2, "--rdzv-endpoint", f"10.77.0.1:{free_port()}"]
    script = "echo $MASTER_PORT; exec sleep 600"
    nodes = [
        start(host, *words, "--node-rank", i, "--", "sh", "-c", script, env={"TESSERA_WORKER": "/nowhere"})
        for i, host in enumerate(hosts)
    ]
    try:
        port = int(nodes[0].stdout.readline().split()[-1])
        nodes[1].stdout.readline()
        neighbour = call(hosts[1], port, "10.77.0.2")
        assert "there is no tessera-worker program" in nodes[0].stderr.readline()
        assert nodes[0].poll() is None
        # A program of node 0's own host is known by its user, and is told that there is no store.
        rank = call(hosts[0], port, "10.77.0.1")
        results = [node.communicate(timeout=60) for node in nodes]
        assert [node.returncode for node in nodes] == [78, 78], results
        for caller in (neighbour, rank):
            caller.communicate(timeout=60)
    finally:
        for node in nodes:
            node.kill()
            node.communicate()
