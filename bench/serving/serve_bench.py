"""Times a server under load: HTTP alone, samples, JSON, overload, updates, slow clients. One core each.

Trains for some steps to have a model and versions of it, exports it, serves it on the first core, and asks
from the second with `tessera bench serve`. `--work DIR` keeps what was trained for the next run. Prints one
line of JSON per row; `median_us`, `p10_us`, `p90_us` are of good answers, `p99_us`, `rate` (good answers a
second), `unanswered` and `codes` stand beside them.
"""

from __future__ import annotations

import argparse
import contextlib
import http.client
import json
import os
import pathlib
import shutil
import socket
import subprocess
import tempfile
import threading
import time

ROOT = pathlib.Path(__file__).resolve().parents[2]
TESSERA = str(ROOT / "build/release/bin/tessera")
MODEL_BENCH = ROOT / "build/release/bin/model_bench"


def run(*words, core: int | None = None) -> str:
    command = [TESSERA, *map(str, words)]
    if core is not None:
        command = ["taskset", "-c", str(core), *command]
    result = subprocess.run(command, capture_output=True, text=True, check=False)
    if result.returncode not in (0, 75):
        raise SystemExit(f"{' '.join(command)}: {result.stderr}")
    return result.stdout


class Server:
    def __init__(self, package: pathlib.Path, core: int, *flags: str):
        self.process = subprocess.Popen(
            ["taskset", "-c", str(core), TESSERA, "serve", str(package), "--port", "0", "--admin-port", "0",
             "--json", *flags],
            stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True,
        )  # fmt: skip
        ready = json.loads(self.process.stdout.readline())
        self.port, self.admin_port = ready["port"], ready["admin_port"]

    def version(self) -> int:
        with contextlib.closing(http.client.HTTPConnection("127.0.0.1", self.admin_port)) as connection:
            connection.request("GET", "/admin/figures")
            return json.loads(connection.getresponse().read())["version"]

    def resident(self) -> int:
        for line in pathlib.Path(f"/proc/{self.process.pid}/status").read_text().splitlines():
            if line.startswith("RssAnon:"):
                return int(line.split()[1]) * 1024
        return 0

    def __enter__(self):
        return self

    def __exit__(self, *_):
        self.process.terminate()
        self.process.wait()


def print_row(name: str, report: dict, **more) -> None:
    times = report["good_milliseconds"]
    row = {
        "name": f"serving/{name}",
        "ranks": 1,
        "threads": 1,
        "device": "cpu",
        "state": "",
        "median_us": times["p50"] * 1e3,
        "p10_us": times["p50"] * 1e3,
        "p90_us": times["p90"] * 1e3,
        "p99_us": times["p99"] * 1e3,
        "bytes": 0,
        "repetitions": report["codes"].get("200", 0),
        "rate": report["good_per_second"],
        "samples_per_second": report["samples_per_second"],
        "unanswered": report["unanswered"],
        "codes": report["codes"],
        **more,
    }
    print(json.dumps(row), flush=True)


def steps_in(root: pathlib.Path) -> list[pathlib.Path]:
    return sorted(folder for folder in root.glob("step-*") if folder.name[5:].isdigit())


def link(folder: pathlib.Path, to: pathlib.Path) -> None:
    """A second place for a publication, where it appears whole."""
    draft = to / f".{folder.name}"
    shutil.copytree(folder, draft, copy_function=os.link)
    draft.rename(to / folder.name)


def prepare(work: pathlib.Path, rows: int, dtype: str) -> None:
    """A run, its package, and what it published: a whole version, then deltas of a step each."""
    live, kept = work / "live", work / "kept"
    kept.mkdir(parents=True)
    shape = ["--tables", 26, "--rows", rows, "--dim", 64, "--bottom", "512,256,64", "--top", "512,256,1"]
    step = ["--steps", 16, "--batch", 4096, "--eval-samples", 1000, "--eval-every", 0, "--keep-model", "none"]
    flags = ["--publish", live, "--publish-every", 0, "--runs", work / "runs"]
    training = threading.Thread(target=run, args=("train", "dlrm", "--ranks", 1, *step, *shape, *flags))
    training.start()
    while training.is_alive():
        for folder in steps_in(live):
            if not (kept / folder.name).exists():
                with contextlib.suppress(OSError, shutil.Error):  # removed meanwhile
                    link(folder, kept)
        time.sleep(0.01)
    first = int(steps_in(kept)[0].name[5:])
    run("export", kept, "--step", first, "--out", work / "pkg", "--dtype", dtype)


def replay(
    server: Server, work: pathlib.Path, watched: pathlib.Path, every: float, lags: list[float]
) -> None:
    """Lets one publication after the other appear, and looks when it is what answers."""
    for folder in steps_in(work / "kept")[1:]:
        begin = time.monotonic()
        link(folder, watched)
        while server.version() != int(folder.name[5:]) and time.monotonic() < begin + 10:
            time.sleep(0.005)
        lags.append(time.monotonic() - begin)
        time.sleep(max(0.0, every - lags[-1]))


def measure(work: pathlib.Path, seconds: float) -> None:
    cores = sorted(os.sched_getaffinity(0))
    server_core, load_core = cores[0], cores[-1]
    package = work / "pkg"
    short = max(1.0, seconds / 4)

    # The library alone, on the core that the server has later.
    library = subprocess.run(
        ["taskset", "-c", str(server_core), str(MODEL_BENCH), str(package), "--seconds", "1"],
        capture_output=True, text=True, check=True,
    )  # fmt: skip
    print(library.stdout, end="", flush=True)
    rows = {row["name"]: row for row in map(json.loads, library.stdout.splitlines())}
    bare = 64e6 / rows["serving/library/predict/s64"]["median_us"]  # samples a second

    def bench(server, *words, seconds=seconds):
        to = ["--port", server.port, "--seconds", seconds]
        return json.loads(run("bench", "serve", *words, *to, "--json", core=load_core))

    with Server(package, server_core, "--latency-budget", "1000", "--max-connections", "2000") as server:
        peak = bench(server, "--floor", seconds=short)
        print_row("http/peak/b512", peak)
        print_row("http/half/b512", bench(server, "--floor", "--rate", peak["good_per_second"] / 2))
        print_row("http/r30000/b512", bench(server, "--floor", "--rate", 30_000))
        for samples in (1, 64):
            for form in ("binary", "json"):
                words = [package, "--samples", samples, "--format", form]
                peak = bench(server, *words, seconds=short)
                share = {"of_library": peak["samples_per_second"] / bare} if samples == 64 else {}
                print_row(f"infer_{form}/peak/s{samples}", peak, **share)
                half = bench(server, *words, "--rate", peak["good_per_second"] / 2)
                print_row(f"infer_{form}/half/s{samples}", half)
        # Clients that send a byte and then nothing.
        words = [package, "--samples", 1, "--rate", 1000]
        print_row("infer_binary/r1000/s1", bench(server, *words))
        with contextlib.ExitStack() as stack:
            for _ in range(1000):
                raw = stack.enter_context(socket.create_connection(("127.0.0.1", server.port)))
                raw.sendall(b"P")
            print_row("infer_binary/r1000/s1_slow1000", bench(server, *words))
    with Server(package, server_core, "--latency-budget", "1000", "--batch-wait", "1000") as server:
        words = [package, "--samples", 1]
        peak = bench(server, *words, seconds=short)
        print_row("infer_binary/peak/s1_wait1ms", peak)
        rate = peak["good_per_second"] / 2
        print_row("infer_binary/half/s1_wait1ms", bench(server, *words, "--rate", rate))
    with Server(package, server_core) as server:
        # The peak of requests that have time: those with a budget are refused long before.
        words = [package, "--samples", 16]
        peak = bench(server, *words, "--timeout", 10_000, seconds=short)["good_per_second"]
        bench(server, *words, "--rate", 2 * peak, "--connections", 512, seconds=short)
        before = server.resident()
        report = bench(server, *words, "--rate", 2 * peak, "--connections", 512)
        print_row(
            "infer_binary/overload/s16",
            report,
            peak=peak,
            goodput=report["good_per_second"] / peak,
            grown_bytes=server.resident() - before,
        )
    watched = work / "watched"
    shutil.rmtree(watched, ignore_errors=True)
    watched.mkdir()
    link(steps_in(work / "kept")[0], watched)
    with Server(package, server_core, "--latency-budget", "1000", "--watch", str(watched)) as server:
        words = [package, "--samples", 16, "--rate", 200, "--timeout", 1000]
        print_row("infer_binary/r200/s16", bench(server, *words))
        lags: list[float] = []
        updates = threading.Thread(target=replay, args=(server, work, watched, 0.5, lags))
        updates.start()
        report = bench(server, *words, seconds=max(seconds, 0.5 * len(steps_in(work / "kept"))))
        updates.join()
        lags.sort()
        print_row(
            "infer_binary/r200/s16_updates",
            report,
            updates=len(lags),
            visible_ms_median=1e3 * lags[len(lags) // 2],
            visible_ms_max=1e3 * lags[-1],
        )
    started = time.monotonic()
    with Server(package, server_core, "--warm-bytes", "0"):
        ready = time.monotonic() - started
    size = sum(file.stat().st_size for file in package.iterdir())
    row = {
        "name": "serving/start",
        "ranks": 1,
        "threads": 1,
        "device": "cpu",
        "state": "mapped",
        "bytes": size,
    }
    row |= dict.fromkeys(("median_us", "p10_us", "p90_us"), 1e6 * ready) | {"repetitions": 1}
    print(json.dumps(row), flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--seconds", type=float, default=10.0)
    parser.add_argument("--rows", type=int, default=100_000)
    parser.add_argument("--dtype", default="int4")
    parser.add_argument("--work", type=pathlib.Path)
    parser.add_argument("--prepare", action="store_true", help="only that, into --work")
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        work = options.work or pathlib.Path(folder)
        if not (work / "pkg").exists():
            prepare(work, options.rows, options.dtype)
        if not options.prepare:
            measure(work, options.seconds)


if __name__ == "__main__":
    main()
