"""A trained run, its packages, and servers as processes of their own."""

from __future__ import annotations

import contextlib
import http.client
import json
import os
import pathlib
import signal
import subprocess
from dataclasses import dataclass

import pytest
from browser import browser  # noqa: F401  a fixture

TESSERA = os.environ.get("TESSERA_BIN", "build/release/bin/tessera")
NUM_TABLES = 12  # cat_10 comes after cat_9, not after cat_1
NUM_ROWS = 200


def tessera(*words, check=True, **options) -> subprocess.CompletedProcess:
    result = subprocess.run(
        [TESSERA, *map(str, words)], capture_output=True, text=True, timeout=120, **options
    )
    assert not check or result.returncode == 0, result.stderr
    return result


@pytest.fixture(scope="session")
def run(tmp_path_factory) -> pathlib.Path:
    """A short training on two ranks, with a checkpoint at its end."""
    folder = tmp_path_factory.mktemp("runs") / "run"
    tessera(
        "train", "dlrm", "--ranks", 2, "--steps", 40, "--batch", 256, "--tables", NUM_TABLES, "--rows",
        NUM_ROWS, "--dim", 16, "--bottom", "32,16", "--top", "32,1", "--eval-samples", 2000, "--save", folder,
    )  # fmt: skip
    return folder


@pytest.fixture(scope="session")
def package(run, tmp_path_factory) -> pathlib.Path:
    folder = tmp_path_factory.mktemp("packages") / "pkg"
    tessera("export", run, "--out", folder)
    return folder


@dataclass
class Server:
    process: subprocess.Popen
    port: int
    admin_port: int
    errors: pathlib.Path
    is_killed: bool = False

    def connect(self, port=None, timeout=30) -> http.client.HTTPConnection:
        return http.client.HTTPConnection("127.0.0.1", port or self.port, timeout=timeout)

    def ask(self, path, body=None, headers=None, method=None, port=None):
        """The code, the headers and the body of an answer."""
        with contextlib.closing(self.connect(port)) as connection:
            connection.request(method or ("GET" if body is None else "POST"), path, body, headers or {})
            answer = connection.getresponse()
            return answer.status, answer.headers, answer.read()

    def infer(self, request, headers=None):
        body = request if isinstance(request, bytes) else json.dumps(request).encode()
        code, _, answer = self.ask("/v2/models/dlrm/infer", body, headers)
        return code, json.loads(answer)

    def stop(self, number=signal.SIGTERM) -> int:
        self.process.send_signal(number)
        return self.process.wait(timeout=30)

    def kill(self) -> None:
        self.is_killed = True
        self.process.kill()
        self.process.wait()


@pytest.fixture
def serve(tmp_path):
    """Starts servers; they are gone after the test, and none of them has crashed."""
    servers = []

    def start(package, *flags) -> Server:
        errors = tmp_path / f"errors-{len(servers)}"
        process = subprocess.Popen(
            # A busy machine is no reason to refuse.
            [
                TESSERA, "serve", str(package), "--port", "0", "--admin-port", "0", "--json",
                *([] if "--latency-budget" in flags else ["--latency-budget", "20000"]), *map(str, flags),
            ],
            stdout=subprocess.PIPE,
            stderr=errors.open("wb"),
            text=True,
        )  # fmt: skip
        line = process.stdout.readline()
        assert line, errors.read_text()
        ready = json.loads(line)
        servers.append(Server(process, ready["port"], ready["admin_port"], errors))
        return servers[-1]

    yield start
    for server in servers:
        if server.process.poll() is None:
            server.kill()
        if server.is_killed:
            continue
        assert server.process.returncode in (0, 75), server.errors.read_text()


def request_of(samples: list[tuple[list[float], list[list[int]]]]) -> dict:
    """A request for samples, each its dense numbers and a bag of ids per feature."""
    inputs = [
        {
            "name": "dense",
            "shape": [len(samples), len(samples[0][0])],
            "datatype": "FP32",
            "data": [dense for dense, _ in samples],
        }
    ]
    for f in range(len(samples[0][1])):
        bags = [bags[f] for _, bags in samples]
        values = [id for bag in bags for id in bag]
        inputs.append(
            {"name": f"cat_{f}.values", "shape": [len(values)], "datatype": "INT64", "data": values}
        )
        inputs.append(
            {
                "name": f"cat_{f}.lengths",
                "shape": [len(bags)],
                "datatype": "INT32",
                "data": [len(bag) for bag in bags],
            }
        )
    return {"inputs": inputs}


def some_samples(count: int, seed: int = 1):
    import random

    draw = random.Random(seed)
    return [
        (
            [draw.uniform(-1, 1) for _ in range(13)],
            [[draw.randrange(NUM_ROWS) for _ in range(draw.randrange(4))] for _ in range(NUM_TABLES)],
        )
        for _ in range(count)
    ]
