"""Starts the ranks of `fault_worker`, breaks them, and reads what they reported.

Ranks and this driver share the monotonic clock, so times between them can be compared.
"""

from __future__ import annotations

import contextlib
import json
import os
import pathlib
import secrets
import shutil
import signal
import statistics
import subprocess
import tempfile
import time
import uuid
from typing import ClassVar

from waiting import LIMIT, free_port, wait_until

ROOT = pathlib.Path(__file__).resolve().parents[2]
TESSERA = os.environ.get("TESSERA_BIN", str(ROOT / "build/release/bin/tessera"))
WORKER = os.environ.get("TESSERA_FAULT_WORKER", str(pathlib.Path(TESSERA).with_name("fault_worker")))
PYTHON = os.environ.get("TESSERA_TEST_PYTHON", str(ROOT / ".venv/bin/python"))
MARK = "TESSERA_FAULT_MARK"
SECRET = secrets.token_hex(32)  # of all jobs here, however they are started

# Seconds from a death or a mismatch to the error on a survivor.
PROMPT = 1.0

LAUNCHER_VARIABLES = (
    "RANK",
    "WORLD_SIZE",
    "LOCAL_RANK",
    "LOCAL_WORLD_SIZE",
    "GROUP_RANK",
    "MASTER_ADDR",
    "MASTER_PORT",
    "OMP_NUM_THREADS",
    "NO_COLOR",
)


def state_of(pid: int) -> str:
    """The state letter of a process, '' if there is none."""
    try:
        return pathlib.Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]
    except OSError:
        return ""


def is_alive(pid: int) -> bool:
    return state_of(pid) not in ("", "Z", "X")


def listens(port: int) -> bool:
    """Whether any process of this network namespace listens on the port."""
    for table in ("tcp", "tcp6"):
        for row in pathlib.Path(f"/proc/net/{table}").read_text().splitlines()[1:]:
            words = row.split()
            if words[3] == "0A" and int(words[1].rpartition(":")[2], 16) == port:
                return True
    return False


class Fleet:
    """The ranks of one job, whoever starts them."""

    def __init__(self, mode: str, *words, env=None):
        self.mode = [WORKER, mode, *(str(word) for word in words)]
        self.mark = uuid.uuid4().hex
        self.folder = pathlib.Path(tempfile.mkdtemp(prefix="tessera-faults-"))
        self.environment = {
            k: v
            for k, v in os.environ.items()
            if k not in LAUNCHER_VARIABLES and not k.startswith(("TORCHELASTIC_", "SLURM_", "OMPI_"))
        }
        self.environment.update(
            {
                MARK: self.mark,
                "FAULT_REPORT": str(self.folder),
                "OMP_NUM_THREADS": "1",
                "TESSERA_TIMEOUT": "30",
                "TESSERA_JOB_SECRET": SECRET,
            }
        )
        self.environment.update(env or {})
        self.processes: list[subprocess.Popen] = []
        self.files = contextlib.ExitStack()
        self.ports: set[int] = set()

    def __enter__(self) -> Fleet:
        return self

    def __exit__(self, *_) -> None:
        self.end()

    def start(self, command, env=None) -> subprocess.Popen:
        index = len(self.processes)
        files = [
            self.files.enter_context((self.folder / f"{index}.{name}").open("wb")) for name in ("out", "err")
        ]
        process = subprocess.Popen(
            [str(word) for word in command],
            env={**self.environment, **(env or {})},
            stdin=subprocess.DEVNULL,
            stdout=files[0],
            stderr=files[1],
            start_new_session=True,
        )
        self.processes.append(process)
        return process

    # Three ways to start the same ranks.

    def run(self, size: int, *flags, prefix=()) -> Fleet:
        """By `tessera run`. Ranks get time to report before the launcher ends them."""
        if "--failure-grace" not in flags:
            flags = ("--failure-grace", 20, *flags)
        self.start([*prefix, TESSERA, "run", "-n", size, *flags, "--", *self.mode])
        return self

    def bare(self, size: int, ranks=None, prefix=(), port=None, **variables) -> Fleet:
        """One process per rank, told by hand who it is; the index in `processes` is the rank."""
        port = port or free_port()
        self.ports.add(port)
        for rank in range(size) if ranks is None else ranks:
            self.start(
                [*prefix, *self.mode],
                {
                    "RANK": str(rank),
                    "WORLD_SIZE": str(size),
                    "MASTER_ADDR": "127.0.0.1",
                    "MASTER_PORT": str(port),
                    **variables,
                },
            )
        return self

    def torchrun(self, size: int) -> Fleet:
        """By torchrun, which looks after its ranks rarely: it ends survivors before they can report."""
        self.start(
            [
                PYTHON,
                "-m",
                "torch.distributed.run",
                "--standalone",
                "--no-python",
                "--monitor-interval",
                "5",
                "--nproc-per-node",
                size,
                *self.mode,
            ]
        )
        return self

    # What the ranks said.

    def events(self, name=None) -> list[dict]:
        found = []
        for path in self.folder.glob("*.jsonl"):
            for line in path.read_text().splitlines():
                event = json.loads(line)
                if name is None or event["event"] == name:
                    found.append(event)
        return sorted(found, key=lambda event: event["ns"])

    def by_rank(self, name: str) -> dict[int, dict]:
        return {event["rank"]: event for event in self.events(name)}

    def await_events(self, name: str, count: int, limit: float = LIMIT) -> dict[int, dict]:
        def ready():
            # Asked before the events are read: who ends in between has left them all.
            have_ended = all(process.poll() is not None for process in self.processes)
            found = self.by_rank(name)
            if len(found) >= count:
                return found
            if have_ended:
                raise AssertionError(f"all processes ended before '{name}':\n{self.err()}")
            return None

        return wait_until(ready, limit, f"'{name}' of {count} ranks")

    def warm(self, size: int) -> dict[int, int]:
        """Waits until the ranks are in the middle of their loop; returns their pids."""
        events = self.await_events("warm", size)
        return {rank: event["pid"] for rank, event in events.items()}

    def say(self, name: str) -> None:
        """Lets ranks go on that wait for the driver."""
        (self.folder / name).touch()

    def kill(self, pid: int, number=signal.SIGKILL) -> int:
        """Sends a signal; returns when, in nanoseconds."""
        now = time.monotonic_ns()
        os.kill(pid, number)
        return now

    # How it ended.

    def wait(self, limit: float = LIMIT) -> list[int]:
        """Exit codes of what was started here, in that order; negative for signals."""
        end = time.monotonic() + limit
        for process in self.processes:
            try:
                process.wait(timeout=max(0.1, end - time.monotonic()))
            except subprocess.TimeoutExpired:
                raise AssertionError(f"still running after {limit} s: {process.args}\n{self.err()}") from None
        return [process.returncode for process in self.processes]

    def out(self) -> str:
        return "".join(p.read_text(errors="replace") for p in sorted(self.folder.glob("*.out")))

    def err(self) -> str:
        return "".join(p.read_text(errors="replace") for p in sorted(self.folder.glob("*.err")))

    def members(self) -> list[int]:
        """Living processes of the job, launchers and helpers included."""
        found = []
        for entry in pathlib.Path("/proc").iterdir():
            if not entry.name.isdigit():
                continue
            try:
                if f"{MARK}={self.mark}".encode() in (entry / "environ").read_bytes():
                    found.append(int(entry.name))
            except OSError:
                continue
        return [pid for pid in found if is_alive(pid)]

    def segments(self, directory="/dev/shm") -> list[str]:
        """Segments made by a process of the job: their names hold the maker's pid."""
        pids = {str(event["pid"]) for event in self.events()}
        return [
            name
            for name in os.listdir(directory)
            if name.startswith("tessera-") and len(name.split(".")) > 1 and name.split(".")[1] in pids
        ]

    def assert_nothing_left(self, limit: float = 3.0) -> None:
        wait_until(lambda: not self.members(), limit, f"the end of all processes {self.members()}")
        assert self.segments() == []
        ports = self.ports | {event["port"] for event in self.events("ready")}
        wait_until(
            lambda: not any(listens(port) for port in ports if port),
            limit,
            f"the end of all listeners on {ports}",
        )

    def errors_of(self, ranks, limit: float = LIMIT) -> dict[int, dict]:
        """The errors of these ranks, which must all say the same."""
        errors = self.await_events("error", len(list(ranks)), limit)
        assert sorted(errors) == sorted(ranks), (sorted(errors), self.err())
        texts = {error["text"] for error in errors.values()}
        assert len(texts) == 1, texts
        return errors

    def end(self) -> None:
        for pid in self.members():
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        for process in self.processes:
            process.wait(timeout=LIMIT)
        self.files.close()
        shutil.rmtree(self.folder, ignore_errors=True)


class Times:
    """Collects delays and prints them at the end of the tests: median and maximum."""

    rows: ClassVar[dict[str, list[float]]] = {}

    @classmethod
    def add(cls, name: str, since_ns: int, errors: dict[int, dict]) -> float:
        delays = [(error["ns"] - since_ns) / 1e9 for error in errors.values()]
        cls.rows.setdefault(name, []).extend(delays)
        return max(delays)

    @classmethod
    def table(cls) -> list[str]:
        return [
            f"{name:45s} n={len(values):3d}  p50 {statistics.median(values) * 1e3:7.1f} ms  "
            f"max {max(values) * 1e3:7.1f} ms"
            for name, values in sorted(cls.rows.items())
        ]
