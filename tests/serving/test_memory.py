"""How much memory exporting and serving take, beside the files they map."""

from __future__ import annotations

import json
import os
import pathlib
import resource
import subprocess
import sys

import pytest
from conftest import TESSERA, request_of, some_samples, tessera

ROOT = pathlib.Path(__file__).resolve().parents[2]

MEBI = 1 << 20


@pytest.fixture(scope="module")
def large_run(tmp_path_factory) -> pathlib.Path:
    """Two tables of 49 MiB each in float32."""
    folder = tmp_path_factory.mktemp("runs") / "large"
    tessera(
        "train", "dlrm", "--steps", 1, "--batch", 64, "--tables", 2, "--rows", 200000, "--dim", 64,
        "--bottom", "16,64", "--top", "16,1", "--eval-samples", 100, "--save", folder,
    )  # fmt: skip
    return folder


def held(process: int) -> dict[str, int]:
    """Bytes of memory of a process, by kind: RssAnon is its own, RssFile mapped from files."""
    found = {}
    for line in pathlib.Path(f"/proc/{process}/status").read_text().splitlines():
        if line.startswith("Rss"):
            found[line.split(":")[0]] = int(line.split()[1]) << 10
    return found


def limit_own_memory() -> None:
    resource.setrlimit(resource.RLIMIT_DATA, (32 * MEBI, 32 * MEBI))


@pytest.mark.parametrize("dtype", ["int8", "fp32"])
def test_an_export_holds_no_table_in_memory(large_run, tmp_path, dtype):
    out = tmp_path / "pkg"
    tessera("export", large_run, "--out", out, "--dtype", dtype, preexec_fn=limit_own_memory)
    assert (out / "MANIFEST.json").exists()


def test_a_package_is_mapped_and_not_copied(large_run, serve, tmp_path):
    tessera("export", large_run, "--out", tmp_path / "pkg", "--dtype", "fp32")
    size = sum(file.stat().st_size for file in (tmp_path / "pkg").iterdir())
    assert size > 97 * MEBI
    server = serve(tmp_path / "pkg", "--warm-bytes", "0", "--no-verify")
    assert server.infer(request_of([(dense, bags[:2]) for dense, bags in some_samples(20)]))[0] == 200
    memory = held(server.process.pid)
    assert memory["RssAnon"] + memory["RssShmem"] < size / 10, memory


def test_memory_stays_flat_under_overload(package, serve):
    """Twice what the server can, three times: after the first nothing more is asked for."""
    server = serve(package, "--latency-budget", "50")
    load = ["bench", "serve", package, "--port", server.port, "--samples", 16, "--connections", 200, "--json"]
    first = json.loads(tessera(*load, "--times-peak", 2, "--seconds", 1.5).stdout)
    before = held(server.process.pid)["RssAnon"]
    for _ in range(2):
        again = tessera(*load, "--rate", int(first["offered_per_second"]), "--seconds", 1.5)
        assert json.loads(again.stdout)["unanswered"] == 0
    assert held(server.process.pid)["RssAnon"] - before <= 4 * MEBI


def test_four_processes_take_hardly_more_than_one():
    """Of a package of a gigabyte, all in memory: a shared page is counted once, page tables for each."""
    words = [sys.executable, ROOT / "bench/serving/large_package.py", "--starts", "0", "--processes", "4"]
    environment = {**os.environ, "TESSERA_BIN": str(pathlib.Path(TESSERA).resolve())}
    told = subprocess.run(words, check=True, capture_output=True, text=True, timeout=120, env=environment)
    row = json.loads(told.stdout)
    assert row["bytes_of_one"] > 10**9
    assert row["ratio"] <= 1.05, row
