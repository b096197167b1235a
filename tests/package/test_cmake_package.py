"""`cmake --install` gives what find_package(tessera) needs, in a place of its own."""

from __future__ import annotations

import json
import os
import pathlib
import re
import subprocess

import pytest

HERE = pathlib.Path(__file__).resolve().parent
BUILD = pathlib.Path(os.environ.get("TESSERA_BUILD_DIR", HERE.parents[1] / "build/release"))


def run(*words, ok=True, **options) -> subprocess.CompletedProcess:
    result = subprocess.run(
        [str(word) for word in words], capture_output=True, text=True, timeout=280, **options
    )
    assert not ok or result.returncode == 0, result.stdout + result.stderr
    return result


@pytest.fixture(scope="module")
def prefix(tmp_path_factory) -> pathlib.Path:
    prefix = tmp_path_factory.mktemp("prefix")
    run("cmake", "--install", BUILD, "--prefix", prefix)
    return prefix


def test_headers_library_and_programs_are_installed(prefix):
    installed = {
        str(path.relative_to(prefix / "include"))
        for path in (prefix / "include").rglob("*")
        if path.is_file()
    }
    source = HERE.parents[1] / "include"
    names = [
        "data_error",
        "device",
        "event_file",
        "host_copy",
        "metrics",
        "run",
        "settings",
        "train",
        "workload",
    ]
    others = {f"tessera/trainer/{name}.h" for name in names} | {
        "tessera/trainer/workload.h",
        "tessera/settings/table.h",
        "tessera/data/click_api.h",
        "tessera/dlrm/click_file.h",
        "tessera/dlrm/click_log.h",
    }
    assert installed == {str(path.relative_to(source)) for path in source.rglob("*.h")} | others
    assert (prefix / "lib/libtessera.so").exists()
    assert not list(prefix.rglob("*.a")), "private libraries are installed"
    assert "0.1.0" in run(prefix / "bin/tessera", "--version").stdout


def test_consumer_builds_and_runs(prefix, tmp_path):
    run("cmake", "-S", HERE / "consumer", "-B", tmp_path, "-G", "Ninja",
        "-DCMAKE_BUILD_TYPE=Release", "-DCMAKE_CXX_COMPILER_LAUNCHER=ccache",
        f"-DCMAKE_PREFIX_PATH={prefix}")  # fmt: skip
    # Again, as an editor does: what the first time found is not taken for a wish.
    run("cmake", tmp_path)
    run("cmake", "--build", tmp_path)
    assert run(tmp_path / "my_program").stdout == "tessera 0.1.0: 3000 3000\n"
    # Logs of clicks from C++ and from C are the same, whole, and need no LibTorch.
    run(tmp_path / "writer", tmp_path / "a.click", tmp_path / "b.click")
    assert (tmp_path / "a.click").read_bytes() == (tmp_path / "b.click").read_bytes()
    run(prefix / "bin/tessera", "data", "check", tmp_path / "a.click")
    assert "2 in 1 blocks" in run(prefix / "bin/tessera", "data", "show", tmp_path / "a.click").stdout
    assert "torch" not in run("ldd", tmp_path / "writer").stdout


def bare_environment() -> dict[str, str]:
    """Without what may help a program to find the build or LibTorch."""
    hidden = ("LD_LIBRARY_PATH", "PYTHONPATH", "VIRTUAL_ENV", "TESSERA_WORKER", "TESSERA_BIN")
    return {
        **{name: value for name, value in os.environ.items() if name not in hidden},
        "PATH": "/usr/bin:/bin",
    }


def test_installed_programs_run(prefix, tmp_path):
    """The worker and the benchmark find LibTorch and the library by themselves."""
    small = [
        "--steps",
        "2",
        "--tables",
        "2",
        "--rows",
        "50",
        "--dim",
        "8",
        "--bottom",
        "16,8",
        "--top",
        "16,1",
    ]
    small += ["--batch", "32", "--eval-samples", "100", "--save", tmp_path / "run"]
    result = run(prefix / "bin/tessera", "train", "dlrm", "--ranks", "2", *small, env=bare_environment())
    assert f"report   {tmp_path}/run/report.html" in result.stdout
    for program in (prefix / "libexec/tessera").iterdir():
        found = run("ldd", program, env=bare_environment()).stdout
        assert "libtorch_cpu.so" in found and "not found" not in found, program
    assert {"tessera-worker", "collectives_bench"} <= {
        one.name for one in (prefix / "libexec/tessera").iterdir()
    }


@pytest.mark.timeout(400)
def test_a_workload_of_ones_own_trains_stops_and_goes_on(prefix, tmp_path):
    """The example's one header and one source, against the installed package."""
    run("cmake", "-S", HERE.parents[1] / "examples/own_workload", "-B", tmp_path, "-G", "Ninja",
        "-DCMAKE_BUILD_TYPE=Release", "-DCMAKE_CXX_COMPILER_LAUNCHER=ccache",
        f"-DCMAKE_PREFIX_PATH={prefix}")  # fmt: skip
    run("cmake", "--build", tmp_path)

    def train(*flags):
        words = [prefix / "bin/tessera", "run", "-n", "2", "--", tmp_path / "line", "--json", *flags]
        result = run(*words)
        output = result.stdout
        return json.loads(output[output.index("{") : output.rindex("}") + 1]), result.stderr

    whole, told = train("--steps", "200", "--save", tmp_path / "whole", "--tell")
    # The callback: every step once, on one rank, and the evaluation.
    losses = re.findall(r"\b(\d+) loss ([\d.e+-]+)$", told, re.MULTILINE)
    assert [int(step) for step, _ in losses] == list(range(1, 201))
    assert float(losses[-1][1]) == pytest.approx(whole["loss"], rel=1e-5)
    assert re.search(r"\b200 error [\d.e+-]+$", told, re.MULTILINE)
    assert whole["slope"] == pytest.approx(2, abs=0.05) and whole["offset"] == pytest.approx(-1, abs=0.05)
    _, told = train("--steps", "80", "--save", tmp_path / "cut")
    assert "loss" not in told
    rest, _ = train("--resume", tmp_path / "cut", "--steps", "200")
    assert rest["first_step"] == 80
    for key in ("fingerprint", "loss", "error"):
        assert rest[key] == whole[key]
    assert "error" in (tmp_path / "cut/report.html").read_text()
    assert "--noise X" in run(tmp_path / "line", "--help").stdout
    # As many threads as the mask has cores, not the machine.
    one_core = ["taskset", "-c", str(min(os.sched_getaffinity(0)))]
    words = [prefix / "bin/tessera", "run", "-n", "1", "--", tmp_path / "line", "--steps", "1"]
    env = {name: value for name, value in os.environ.items() if name != "OMP_NUM_THREADS"}
    run(*one_core, *words, "--save", tmp_path / "narrow", env=env)
    head = json.loads((tmp_path / "narrow/metrics.jsonl").read_text().splitlines()[0])
    assert head["machine"]["threads per rank"] == 1
    refused = run(tmp_path / "line", "--resume", tmp_path / "cut", "--noise", "0.5", ok=False)
    assert refused.returncode == 78
    assert f"{tmp_path}/cut has --noise 0.1; this call has --noise 0.5" in refused.stderr


def test_other_versions_are_refused_with_a_reason(prefix, tmp_path):
    project = tmp_path / "CMakeLists.txt"
    project.write_text(
        "cmake_minimum_required(VERSION 3.25)\nproject(p LANGUAGES CXX)\nfind_package(tessera REQUIRED)\n"
    )
    torch = tmp_path / "torch"
    header = torch / "include/torch/csrc/api/include/torch/version.h"
    header.parent.mkdir(parents=True)
    header.write_text('#define TORCH_VERSION "1.2.3"\n')
    (torch / "version.py").write_text("__version__ = '1.2.3'\n")
    words = ["cmake", "-S", tmp_path, "-B", tmp_path / "build", "-G", "Ninja"]
    words.append(f"-Dtessera_DIR={prefix}/lib/cmake/tessera")
    result = run(*words, f"-DTESSERA_TORCH_DIR={torch}", ok=False)
    assert result.returncode != 0
    assert "holds 1.2.3" in " ".join(result.stderr.split())
    result = run(*words, f"-DTESSERA_TORCH_DIR={tmp_path}/nowhere", ok=False)
    assert result.returncode != 0
    assert "LibTorch was not found" in " ".join(result.stderr.split())
