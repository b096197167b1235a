"""Two hosts with a network between them, played by two network namespaces."""

import os
import shutil
import subprocess
import uuid

import pytest
from jobs import SECRET, TESSERA
from waiting import free_port


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


def start(host, *words):
    return subprocess.Popen(
        ["ip", "netns", "exec", host, TESSERA, "run", *map(str, words)],
        env={**os.environ, "TESSERA_JOB_SECRET": SECRET},
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
