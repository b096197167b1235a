"""Times a server under load: HTTP alone, one sample, many, JSON, overload, updates. One core each.

Trains for a step to have a model, exports it, serves it on the first core, and asks from the second with
`tessera bench serve`. Prints one line of JSON per row; `median_us`, `p10_us`, `p90_us` are of good answers,
`p99_us`, `rate` (good answers a second), `unanswered` and `codes` stand beside them.
"""

from __future__ import annotations

import argparse
import json
import os
import pathlib
import subprocess
import tempfile

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
        self.port = json.loads(self.process.stdout.readline())["port"]

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


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--seconds", type=float, default=10.0)
    parser.add_argument("--rows", type=int, default=100_000)
    parser.add_argument("--dtype", default="int4")
    options = parser.parse_args()
    cores = sorted(os.sched_getaffinity(0))
    server_core, load_core = cores[0], cores[-1]
    with tempfile.TemporaryDirectory() as folder:
        work = pathlib.Path(folder)
        shape = ["--tables", 26, "--rows", options.rows, "--dim", 64]
        layers = ["--bottom", "512,256,64", "--top", "512,256,1"]
        step = ["--steps", 1, "--batch", 256, "--eval-samples", 1000]
        run("train", "dlrm", "--ranks", 1, *step, *shape, *layers, "--save", work / "run")
        package = work / "pkg"
        run("export", work / "run", "--out", package, "--dtype", options.dtype)

        # The library alone, on the core that the server has later.
        library = subprocess.run(
            ["taskset", "-c", str(server_core), str(MODEL_BENCH), str(package), "--seconds", "1"],
            capture_output=True, text=True, check=True,
        )  # fmt: skip
        print(library.stdout, end="", flush=True)

        def bench(server, *words, seconds=options.seconds):
            to = ["--port", server.port, "--seconds", seconds]
            return json.loads(run("bench", "serve", *words, *to, "--json", core=load_core))

        with Server(package, server_core, "--latency-budget", "1000") as server:
            peak = bench(server, "--floor", seconds=max(1.0, options.seconds / 4))
            print_row("http/peak/b512", peak)
            print_row("http/half/b512", bench(server, "--floor", "--rate", peak["good_per_second"] / 2))
            for samples in (1, 64):
                for form in ("binary", "json"):
                    words = [package, "--samples", samples, "--format", form]
                    peak = bench(server, *words, seconds=max(1.0, options.seconds / 4))
                    print_row(f"infer_{form}/peak/s{samples}", peak)
                    rate = peak["good_per_second"] / 2
                    print_row(f"infer_{form}/half/s{samples}", bench(server, *words, "--rate", rate))
        with Server(package, server_core, "--latency-budget", "1000", "--batch-wait", "1000") as server:
            words = [package, "--samples", 1]
            peak = bench(server, *words, seconds=max(1.0, options.seconds / 4))
            print_row("infer_binary/peak/s1_wait1ms", peak)
            rate = peak["good_per_second"] / 2
            print_row("infer_binary/half/s1_wait1ms", bench(server, *words, "--rate", rate))
        with Server(package, server_core, "--latency-budget", "20") as server:
            before = server.resident()
            report = bench(server, package, "--samples", 16, "--times-peak", 2, "--connections", 256)
            print_row(
                "infer_binary/overload/s16",
                report,
                peak=report["peak_per_second"],
                goodput=report["good_per_second"] / report["peak_per_second"],
                grown_bytes=server.resident() - before,
            )


if __name__ == "__main__":
    main()
