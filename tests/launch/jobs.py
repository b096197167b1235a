"""Starts jobs of the `tessera` program and looks at what they are and what they leave behind."""

from __future__ import annotations

import contextlib
import os
import pathlib
import secrets
import signal
import socket
import subprocess
import sys
import time
import uuid
from dataclasses import dataclass

ROOT = pathlib.Path(__file__).resolve().parents[2]
TESSERA = os.environ.get("TESSERA_BIN", str(ROOT / "build/release/bin/tessera"))
# The Python that has torch; the tests themselves need none of it.
TORCH_PYTHON = os.environ.get("TESSERA_TEST_PYTHON", str(ROOT / ".venv/bin/python"))
MARK = "TESSERA_TEST_MARK"
SECRET = secrets.token_hex(32)  # of all jobs here, since several launchers may make one
LIMIT = 30.0  # seconds; for a loaded machine, not a figure


@dataclass
class Result:
    code: int
    out: str
    err: str
    seconds: float

    @property
    def lines(self) -> list[str]:
        return self.out.splitlines()


class Job:
    """A running `tessera` process; every descendant carries the same mark in its environment."""

    def __init__(self, *words, env=None, cwd=None, stdin=subprocess.DEVNULL, **options):
        self.mark = uuid.uuid4().hex
        full = {k: v for k, v in os.environ.items() if k not in ("OMP_NUM_THREADS", "NO_COLOR")}
        full.update({MARK: self.mark, "PYTHONDONTWRITEBYTECODE": "1", "TESSERA_JOB_SECRET": SECRET})
        full.update(env or {})
        self.begin = time.monotonic()
        options.setdefault("stdout", subprocess.PIPE)
        options.setdefault("stderr", subprocess.PIPE)
        self.process = subprocess.Popen(
            [TESSERA, *map(str, words)], env=full, cwd=cwd, stdin=stdin, **options
        )

    def wait(self, limit: float = LIMIT) -> Result:
        try:
            out, err = self.process.communicate(timeout=limit)
        except subprocess.TimeoutExpired:
            self.end()
            raise
        seconds = time.monotonic() - self.begin
        return Result(self.process.returncode, (out or b"").decode(), (err or b"").decode(), seconds)

    def send(self, number: int) -> None:
        os.kill(self.process.pid, number)

    def processes(self) -> list[int]:
        """Living processes that carry the mark, the launcher included; zombies are not alive."""
        found = []
        for entry in pathlib.Path("/proc").iterdir():
            if not entry.name.isdigit():
                continue
            try:
                if f"{MARK}={self.mark}".encode() not in (entry / "environ").read_bytes():
                    continue
                state = (entry / "stat").read_text().rpartition(")")[2].split()[0]
            except OSError:
                continue
            if state not in "ZX":
                found.append(int(entry.name))
        return found

    def end(self) -> None:
        """Kills whatever is left; for clean-up after a failed test."""
        for pid in self.processes():
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        if self.process.poll() is None:
            self.process.wait(timeout=LIMIT)


def run(*words, limit: float = LIMIT, **options) -> Result:
    job = Job(*words, **options)
    try:
        result = job.wait(limit)
        assert job.processes() == [], "processes are left behind"
        return result
    finally:
        job.end()


def python(code: str) -> list[str]:
    """The words that run `code` with a Python without site packages, which starts quickly."""
    return [sys.executable, "-S", "-E", "-u", "-c", code]


def command_of(pid: int) -> str:
    try:
        return pathlib.Path(f"/proc/{pid}/cmdline").read_bytes().replace(b"\0", b" ").decode()
    except OSError:
        return ""


def listening_addresses(pids) -> list[str]:
    """The local addresses of all listening TCP sockets held by these processes."""
    inodes = set()
    for pid in pids:
        try:
            for entry in pathlib.Path(f"/proc/{pid}/fd").iterdir():
                target = os.readlink(entry)
                if target.startswith("socket:["):
                    inodes.add(target[8:-1])
        except OSError:
            continue
    found = []
    for table, family in (("tcp", socket.AF_INET), ("tcp6", socket.AF_INET6)):
        try:
            rows = pathlib.Path(f"/proc/net/{table}").read_text().splitlines()[1:]
        except OSError:
            continue
        for row in rows:
            words = row.split()
            if words[3] != "0A" or words[9] not in inodes:
                continue
            digits = words[1].split(":")[0]
            raw = b"".join(bytes.fromhex(digits[i : i + 8])[::-1] for i in range(0, len(digits), 8))
            found.append(socket.inet_ntop(family, raw))
    return found
