"""Whoever does not know the job's secret learns nothing, changes nothing, and costs little."""

import concurrent.futures
import contextlib
import hashlib
import hmac
import os
import random
import re
import signal
import socket
import struct
import subprocess
import time

import pytest
from jobs import SECRET, Job, listening_addresses, run
from waiting import free_port, wait_until

MAGIC = b"tessera\x01"


def node_words(port, *flags, node, program=("echo", "in")):
    return (
        *("run", "--nnodes", 2, "--node-rank", node, "--rdzv-endpoint", f"127.0.0.1:{port}"),
        *("--rdzv-id", "the-job", *flags, "--", *program),
    )


@pytest.fixture
def leader():
    """Node 0 of a job that waits for node 1, and its port."""
    port = free_port()
    job = Job(*node_words(port, node=0))
    try:
        wait_until(lambda: listening_addresses([job.process.pid]), what="the listener")
        yield job, port
    finally:
        job.end()


def finish(leader, port):
    """The true node 1 comes: the job must be as if nobody else had been there."""
    member = Job(*node_words(port, node=1))
    try:
        results = [leader.wait(), member.wait()]
        assert [r.code for r in results] == [0, 0], [r.err for r in results]
        assert all(r.out == f"[rank {i}] in\n" for i, r in enumerate(results))
        return results
    finally:
        member.end()


def key_of(text):
    return hashlib.sha256(text.encode()).digest()


def knock(port, key, purpose=b"launchers"):
    """A connection that says what the job's own would, with `key`; what came back at last."""
    connection = socket.create_connection(("127.0.0.1", port), timeout=10)
    greeting = connection.recv(40, socket.MSG_WAITALL)
    assert greeting[:8] == MAGIC and len(greeting) == 40
    number = os.urandom(32)
    signed = b"caller of " + purpose + b": " + greeting[8:] + number
    connection.sendall(MAGIC + number + hmac.new(key, signed, hashlib.sha256).digest())
    return connection, greeting[8:] + number, connection.recv(32, socket.MSG_WAITALL)


def frame(key, numbers, payload, count=0, purpose=b"launchers"):
    own = hmac.new(key, b"derive frames of the caller, " + purpose + b": " + numbers, hashlib.sha256)
    seal = hmac.new(own.digest(), struct.pack("<Q", count) + payload, hashlib.sha256).digest()
    return struct.pack("<I", len(payload)) + seal[:16] + payload


def memory_of(pid):
    with open(f"/proc/{pid}/status") as file:
        return int(re.search(r"VmRSS:\s+(\d+) kB", file.read())[1]) / 1024


def test_a_hello_without_the_secret_is_told_nothing(leader):
    job, port = leader
    hello = (
        b'{"kind":"hello","protocol":"tessera-launch-2","rdzv_id":"x","node":"1","nnodes":"2",'
        b'"nproc":"1","host":"\x1b[31mh"}'
    )
    said = b""
    for payload in (hello + b"\n", MAGIC + hello, MAGIC + bytes(64), b"GET / HTTP/1.1\r\n\r\n", b""):
        with socket.create_connection(("127.0.0.1", port), timeout=10) as stranger:
            stranger.sendall(payload)
            stranger.shutdown(socket.SHUT_WR)
            greeting = b""
            with contextlib.suppress(ConnectionResetError):
                while chunk := stranger.recv(4096):
                    greeting += chunk
        said += greeting[40:]
        assert greeting[:8] == MAGIC or greeting == b""
    assert said.strip(b"\0") == b""  # a refusal is zeros
    results = finish(job, port)
    assert "the-job" not in results[0].err and "\x1b" not in results[0].err


def test_another_secret_does_not_get_in_even_with_the_right_words(leader):
    job, port = leader
    for text in ("x" * 64, "", SECRET[:-1] + ("0" if SECRET[-1] != "0" else "1")):
        connection, numbers, verdict = knock(port, key_of(text))
        assert verdict == bytes(32)
        hello = b'{"kind":"hello","protocol":"tessera-launch-2","rdzv_id":"the-job","node":"1",'
        hello += b'"nnodes":"2","nproc":"1","host":"h"}'
        with contextlib.suppress(OSError):  # may be closed in its face
            connection.sendall(frame(key_of(text), numbers, hello))
            assert connection.recv(100) == b""
        connection.close()
    finish(job, port)


def test_the_secret_opens(leader):
    # That the strangers of the other tests speak the protocol rightly, but for the secret.
    job, port = leader
    connection, numbers, verdict = knock(port, key_of(SECRET))
    expected = hmac.new(key_of(SECRET), b"listener of launchers: " + numbers, hashlib.sha256).digest()
    assert verdict == expected
    hello = b'{"kind":"hello","protocol":"tessera-launch-2","rdzv_id":"other","node":"1",'
    hello += b'"nnodes":"2","nproc":"1","host":"\\u001b[31mh"}'
    connection.sendall(frame(key_of(SECRET), numbers, hello))
    assert b"belongs to the job 'other', this is 'the-job'" in connection.recv(4096)
    connection.close()
    results = finish(job, port)
    assert r"node 1 (\x1b[31mh, 127.0.0.1) belongs to" in results[0].err


def test_an_overheard_proof_is_worth_nothing(leader):
    job, port = leader
    first = socket.create_connection(("127.0.0.1", port), timeout=10)
    greeting = first.recv(40, socket.MSG_WAITALL)
    number = os.urandom(32)
    proof = hmac.new(key_of(SECRET), b"caller of launchers: " + greeting[8:] + number, hashlib.sha256)
    overheard = MAGIC + number + proof.digest()
    with socket.create_connection(("127.0.0.1", port), timeout=10) as second:
        second.recv(40, socket.MSG_WAITALL)
        second.sendall(overheard)
        assert second.recv(32, socket.MSG_WAITALL) == bytes(32)
    first.close()
    finish(job, port)


def test_a_flood_costs_no_memory_and_one_line(leader):
    job, port = leader
    pid = job.process.pid
    before = memory_of(pid)
    for _ in range(4000):
        with (
            contextlib.suppress(OSError),
            socket.create_connection(("127.0.0.1", port), timeout=10) as stranger,
        ):
            stranger.sendall(b'{"kind":"hello","host":"\x1b[2J"}\n')
    assert memory_of(pid) - before < 2, "MB"
    results = finish(job, port)
    notes = [line for line in results[0].err.splitlines() if "refused" in line]
    assert 1 <= len(notes) <= 3, notes
    assert re.fullmatch(
        r"tessera: refused: \d+ connections? did not prove the job's secret, the last from 127\.0\.0\.1",
        notes[0],
    )
    assert "\x1b" not in results[0].err


def test_slow_strangers_do_not_delay_a_join(leader):
    job, port = leader
    strangers = [socket.create_connection(("127.0.0.1", port), timeout=10) for _ in range(600)]
    begin = time.monotonic()
    finish(job, port)
    assert time.monotonic() - begin < 5  # a stranger's own limit
    for stranger in strangers:
        stranger.close()


def test_strangers_are_dropped_after_their_time(leader):
    job, port = leader
    with socket.create_connection(("127.0.0.1", port), timeout=30) as stranger:
        stranger.sendall(MAGIC)  # right so far
        assert len(stranger.recv(40, socket.MSG_WAITALL)) == 40
        assert stranger.recv(1) == b""
    finish(job, port)


class StoreClient:
    """Asks the job's store as its ranks do, with their secret."""

    SET, GET, ADD, PUSH, LENGTH, LIST = 1, 2, 5, 10, 12, 13

    def __init__(self, port, key):
        self.key, self.count = key, 0
        self.connection, self.numbers, verdict = knock(port, key, b"store")
        proof = hmac.new(key, b"listener of store: " + self.numbers, hashlib.sha256).digest()
        assert verdict == proof

    def ask(self, operation, *parts):
        payload = bytes([operation]) + b"".join(struct.pack("<I", len(part)) + part for part in parts)
        self.connection.sendall(frame(self.key, self.numbers, payload, self.count, b"store"))
        self.count += 1
        size = struct.unpack("<I", self.connection.recv(20, socket.MSG_WAITALL)[:4])[0]
        answer = self.connection.recv(size, socket.MSG_WAITALL)
        assert len(answer) == size and answer[0] == 1, answer  # done
        found, at = [], 1
        while at < size:
            end = at + 4 + struct.unpack_from("<I", answer, at)[0]
            found.append(answer[at + 4 : end])
            at = end
        return found


def fill_store(port, key):
    """Something of each kind that the store keeps."""
    store = StoreClient(port, key)
    store.ask(StoreClient.SET, b"kept", b"as it was", b"empty", b"")
    store.ask(StoreClient.ADD, b"counter", b"41")
    store.ask(StoreClient.PUSH, b"queue", b"first")
    store.connection.close()


def look_into_store(port, key):
    """Its keys, the values of those that are no queue, and how long the queue is."""
    store = StoreClient(port, key)
    keys = sorted(store.ask(StoreClient.LIST))
    values = store.ask(StoreClient.GET, *(name for name in keys if name != b"queue"))
    length = store.ask(StoreClient.LENGTH, b"queue")
    store.connection.close()
    return keys, values, length


def attack(port, count, seed, at_once=1):
    """Requests of one stranger; how many were made, how many of them dropped unheard, and what came back
    that must not."""
    dice = random.Random(seed)
    made, dropped, learned = 0, 0, []
    while made < count:
        strangers = []
        for _ in range(min(at_once, count - made)):
            length = dice.choice([0, 1, 7, 8, 9, 71, 72, 73, 92, 500, 5000])
            body = dice.randbytes(length)
            if dice.random() < 0.7:
                body = MAGIC + body[8:]
            stranger = socket.socket()
            stranger.settimeout(30)
            # From many addresses: a port of one cannot be used again for a minute.
            stranger.bind((f"127.{dice.randrange(1, 250)}.{dice.randrange(250)}.{dice.randrange(1, 250)}", 0))
            made += 1
            strangers.append(stranger)
            try:
                stranger.connect(("127.0.0.1", port))
                stranger.sendall(body)
                stranger.shutdown(socket.SHUT_WR)
            except OSError:
                pass  # told below
        for stranger in strangers:
            answer = b""
            with stranger:
                try:
                    while chunk := stranger.recv(4096):
                        answer += chunk
                except OSError:
                    dropped += 1
            if len(answer) > 72 or answer[40:].strip(b"\0"):
                learned.append(answer)
    return made, dropped, learned


def become_another_user():
    os.setgroups([])
    os.setgid(65534)
    os.setuid(65534)


# Who asks for torch's store waits for the launcher to read the table of all connections, and that to rest.
MOST_TO_TORCHS = 10_000


def test_random_requests_while_the_job_runs_change_nothing():
    port = free_port()
    count = int(os.environ.get("TESSERA_FUZZ_REQUESTS", "2000"))  # a million in a longer run
    show = "echo $(cat $TESSERA_JOB_SECRET_FILE) $MASTER_PORT $TESSERA_STORE; exec sleep 3600"
    # At MASTER_PORT a stranger is who has another user.
    can_be_another = os.geteuid() == 0
    jobs = [Job(*node_words(port, node=node, program=("sh", "-c", show))) for node in (0, 1)]
    try:
        lines = [job.process.stdout.readline().decode() for job in jobs]
        key = bytes.fromhex(lines[0].split()[-3].removeprefix("key:"))
        # Of the launchers, of the store, and of torch's store.
        ports = [port, int(lines[0].rpartition(":")[2])]
        of_port = [count - count // 2, count // 2]
        if can_be_another:
            to_torchs = min(count // 3, MOST_TO_TORCHS)
            ports.append(int(lines[0].split()[-2]))
            of_port = [count - to_torchs - (count - to_torchs) // 2, (count - to_torchs) // 2, to_torchs]
        num_ports = len(ports)
        # How many strangers are at each.
        per_port = [max(1, (min(len(os.sched_getaffinity(0)) - 2, 12) - 1) // 2)] * 2 + [1]
        strangers = [
            (which, of_port[which] // n + (i < of_port[which] % n))
            for which, n in enumerate(per_port[:num_ports])
            for i in range(n)
        ]
        initializer = become_another_user if can_be_another else None
        fill_store(ports[1], key)
        before = look_into_store(ports[1], key)
        assert before[0] == [b"counter", b"empty", b"kept", b"queue"]
        assert before[1:] == ([b"41", b"", b"as it was"], [b"1"])
        processes = [sorted(job.processes()) for job in jobs]
        with concurrent.futures.ProcessPoolExecutor(len(strangers), initializer=initializer) as pool:
            targets = [ports[which] for which, _ in strangers]
            shares = [share for _, share in strangers]
            # Torch's store resets whoever waits, all at once, and rests between.
            at_once = [500 if which == 2 else 1 for which, _ in strangers]
            told = list(pool.map(attack, targets, shares, range(len(strangers)), at_once))
        made = [0] * num_ports
        for (which, _), (number, _, _) in zip(strangers, told, strict=True):
            made[which] += number
        dropped = sum(t[1] for (which, _), t in zip(strangers, told, strict=True) if which < 2)
        print(
            f"{made[0]} requests to the launcher, {made[1]} to the store, {sum(made[2:])} to torch's, "
            f"{dropped} dropped unheard by the first two; the store's {len(before[0])} keys are as before"
        )
        assert made == of_port and sum(made) == count
        assert dropped < sum(made[:2]) / 2
        assert [answer for t in told for answer in t[2]] == []
        assert look_into_store(ports[1], key) == before
        # Torch's store among them: it was not started.
        assert not any(set(job.processes()) - set(old) for job, old in zip(jobs, processes, strict=True))
        for job in jobs:
            assert job.process.poll() is None
        jobs[0].send(signal.SIGTERM)
        results = [job.wait() for job in jobs]
        assert [r.code for r in results] == [143, 143], [r.err for r in results]
    finally:
        for job in jobs:
            job.end()


# Where the secret comes from.


def nodes(*flags, envs, ranks=1):
    port = free_port()
    jobs = [
        Job(*node_words(port, "--rdzv-timeout", 20, *flags, node=node), env=env)
        for node, env in enumerate(envs)
    ]
    try:
        return [job.wait() for job in jobs]
    finally:
        for job in jobs:
            job.end()


NO_SECRET = {"TESSERA_JOB_SECRET": ""}


def test_several_hosts_without_a_secret_are_refused():
    result = run(*node_words(free_port(), node=0), env=NO_SECRET)
    assert result.code == 2
    assert result.err.splitlines()[0] == "error: run: --nnodes 2 needs a secret"
    assert "head -c 32 /dev/urandom" in result.err and "--secret-file" in result.err


def test_several_hosts_may_be_told_to_go_without():
    results = nodes("--insecure-no-auth", envs=[NO_SECRET, NO_SECRET])
    assert [r.code for r in results] == [0, 0], [r.err for r in results]


def test_a_host_with_another_secret_is_told_so_at_once():
    port = free_port()
    first = Job(*node_words(port, "--rdzv-timeout", 4, node=0))
    other = Job(*node_words(port, "--rdzv-timeout", 20, node=1), env={"TESSERA_JOB_SECRET": "o" * 32})
    try:
        result = other.wait()
        assert result.code == 69
        assert re.match(
            rf"error: rendezvous: node 0 at 127.0.0.1:{port} does not accept this host's secret\n"
            r"  why: .*\n  try: ",
            result.err,
        ), result.err
        result = first.wait()
        assert result.code == 69
        assert "1 connection did not prove the job's secret, the last from 127.0.0.1" in result.err
    finally:
        first.end()
        other.end()


def test_node_0_that_does_not_know_the_secret_gets_nothing_from_a_member():
    with socket.socket() as impostor:
        impostor.bind(("127.0.0.1", 0))
        impostor.listen()
        port = impostor.getsockname()[1]
        member = Job(*node_words(port, "--rdzv-timeout", 1, node=1))
        try:
            connection, _ = impostor.accept()
            connection.sendall(MAGIC + os.urandom(32))
            proof = connection.recv(72, socket.MSG_WAITALL)
            assert proof[:8] == MAGIC and len(proof) == 72
            connection.sendall(proof[40:])  # its own proof back
            assert connection.recv(100) == b""
            connection.close()
            result = member.wait()
            assert result.code == 69
            assert "it does not know the job's secret" in result.err or "was not reached" in result.err
        finally:
            member.end()


@pytest.mark.parametrize("by", ["flag", "environment"])
def test_the_secret_may_be_a_file(tmp_path, by):
    file = tmp_path / "job.secret"
    subprocess.run(
        ["sh", "-c", f"umask 077; head -c 32 /dev/urandom | base64 > {file}"], check=True, timeout=10
    )
    env = dict(NO_SECRET) if by == "flag" else {"TESSERA_JOB_SECRET_FILE": str(file)}
    flags = ["--secret-file", file] if by == "flag" else []
    results = nodes(*flags, envs=[env, env])
    assert [r.code for r in results] == [0, 0], [r.err for r in results]


@pytest.mark.parametrize(
    "text, mode, why",
    [
        ("x" * 40, 0o644, "can be read or written by other users. Run: chmod 600"),
        ("short", 0o600, "holds 5 bytes; a secret has 32 to 4096"),
        (None, 0, "cannot be opened: No such file or directory"),
    ],
)
def test_a_secret_file_that_cannot_be_used_is_78(tmp_path, text, mode, why):
    file = tmp_path / "job.secret"
    if text is not None:
        file.write_text(text)
        file.chmod(mode)
    result = run("run", "--secret-file", file, "--", "true")
    assert result.code == 78
    assert why in result.err


SHOW_SECRET = 'stat -c "%a %u" $TESSERA_JOB_SECRET_FILE; cat $TESSERA_JOB_SECRET_FILE; echo; env | sort'


def test_ranks_get_a_file_of_their_own_and_nobody_the_secret_itself():
    result = run("run", "-n", 2, "--", "sh", "-c", SHOW_SECRET)
    assert result.code == 0, result.err
    lines = [line.split("] ", 1)[1] for line in result.lines]
    keys = {line for line in lines if line.startswith("key:")}
    assert len(keys) == 1 and lines.count(f"600 {os.geteuid()}") == 2
    key = keys.pop()
    assert len(key) == 4 + 64
    rest = [line for line in lines if line != key]
    assert not any(key[4:] in line or SECRET in line for line in rest)
    again = run("run", "-n", 2, "--", "sh", "-c", SHOW_SECRET)
    assert key not in again.out  # a new one for every job


def test_the_secret_is_on_no_command_line():
    job = Job("run", "-n", 2, "--", "sh", "-c", "cat $TESSERA_JOB_SECRET_FILE; echo; exec sleep 300")
    try:
        key = job.process.stdout.readline().decode().split()[-1][4:]
        assert len(key) == 64
        for pid in job.processes():
            with open(f"/proc/{pid}/cmdline") as file:
                assert key not in file.read()
            with open(f"/proc/{pid}/environ") as file:
                assert key not in file.read()
    finally:
        job.end()
