"""Every command in a block of a page is run, page by page, in a folder that holds what pages name.

Commands of tutorials are run by test_tutorials.py and test_your_data.py, with a look at what they print; here
it is enough that they end well. Trainings are made small; what other tests run is named in ELSEWHERE, and the
few commands that no test runs as they stand, with what is looked at instead, in NOT_RUN.
"""

from __future__ import annotations

import gzip
import importlib.metadata
import json
import os
import pathlib
import re
import shutil
import signal
import socket
import subprocess
import sys

import pytest

ROOT = pathlib.Path(__file__).resolve().parents[2]
TESSERA = os.environ.get("TESSERA_BIN", str(ROOT / "build/release/bin/tessera"))
HAS_GPU = pathlib.Path("/dev/nvidia0").exists()
LIMIT = 100.0  # seconds; for a loaded machine, not a figure
BLOCK = re.compile(r"^```(\w*)\n(.*?)^```$", re.DOTALL | re.MULTILINE)
PROGRAM = re.compile(
    r"(\w+=\S+ )*(tessera|python|make|cmake|ninja|pip|curl|head|zcat|until|\(umask|simulator)\b"
)

# Pages whose commands another test plays and watches.
PLAYED = {
    "tutorial_": "test_tutorials.py",
    "recipes": "test_tutorials.py",
    "first_run": "test_tutorials.py",
    "your_data": "test_your_data.py",
}
# Commands that take minutes, or the internet: which test does the same.
ELSEWHERE = {
    "make demo": "tests/examples/test_page_commands.py::test_the_demo_is_made",
    "cmake --install": "tests/package/test_cmake_package.py::test_headers_library_and_programs_are_installed",
    "pip install .": "tests/package/test_source_install.py::test_pip_install_from_source",
    "tessera bench collectives": "tests/cli/test_bench.py::test_the_real_one_has_rows_for_every_size",
    "tessera bench embedding": "tests/cli/test_bench.py::test_benchmarks_of_the_tree_run",
    "tessera doctor --profile --nnodes 2": (
        "tests/cli/test_plan_inputs.py::test_hosts_are_measured_with_what_lies_between_them"
    ),
    "tessera doctor --profile": "tests/cli/test_plan_inputs.py::test_a_machine_is_measured_kept_and_used",
    "tessera inspect nightly": "tests/launch/test_inspect.py::test_a_rank_that_others_wait_for_is_found",
}
# Commands that would run all tests, configure this build or install torch from the internet again: what is
# looked at instead.
NOT_RUN = {
    "make test": "test_make_test_runs_all_tests_and_this_one",
    "cmake --preset": "test_the_build_is_configured_as_the_page_says",
    "pip install torch": "test_the_page_names_the_torch_of_this_environment",
}
SMALL = {
    "dlrm": "--dim 8 --bottom 16,8 --top 16,1 --batch 32 --eval-samples 100",
    "lm": "--steps 2 --batch 4 --length 16 --layers 1 --width 32",
    "gnn": "--steps 2 --atoms 27 --structures 4 --features 8 --cutoff 1.7",
}


def pages() -> list[str]:
    names = ["README.md", *(f"docs/{path.name}" for path in sorted((ROOT / "docs").glob("*.md")))]
    names = [name for name in names if not name.removeprefix("docs/").startswith(tuple(PLAYED))]
    return [name for name in names if commands(name)]


def commands(page: str) -> list[str]:
    """Of the blocks without a language and those of a shell; what is behind three spaces or a # explains."""
    found = []
    for language, block in BLOCK.findall((ROOT / page).read_text()):
        if language not in ("", "sh"):
            continue
        # A word in quotes may go over several lines.
        for line in re.findall(r"(?:'[^']*'|\\\n|[^\n'])+", block):
            line = re.sub(r"^\$ ", "", line).replace(".venv/bin/", "").replace("build/release/bin/", "")
            if PROGRAM.match(line):
                found.append(line if "'" in line else re.split(r"   +|\s#", line)[0].strip())
    return found


def test_what_is_run_elsewhere_is_there():
    for test in {*ELSEWHERE.values()}:
        file, name = test.split("::")
        assert f"def {name}(" in (ROOT / file).read_text()
    for name in PLAYED.values():
        assert (ROOT / "tests/examples" / name).exists()
    for name in NOT_RUN.values():
        assert name in globals()
    shown = [command for page in pages() for command in commands(page)]
    for command in (*ELSEWHERE, *NOT_RUN):
        assert [one for one in shown if one.startswith(command)], f"{command}: no page shows it"


# make works in this tree and on its own build; nothing is installed or configured again here.
BUILD = ROOT / "build/release"


@pytest.mark.skipif(
    pathlib.Path(TESSERA).resolve() != BUILD / "bin/tessera", reason="make demo runs another build"
)
@pytest.mark.timeout(200)
def test_the_demo_is_made(shell):
    """`make demo` as it is typed, on a build that is up to date: the training, README.md's AUC, a package."""
    words = [
        "make",
        "--no-print-directory",
        "-C",
        ROOT,
        "-o",
        BUILD.relative_to(ROOT) / "build.ninja",
        "demo",
    ]
    # Not with the flags of a make around this test.
    hidden = ("MAKEFLAGS", "MFLAGS", "MAKELEVEL")
    env = {name: value for name, value in os.environ.items() if name not in hidden}
    child = subprocess.Popen(
        words, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, env=env, start_new_session=True
    )
    try:
        told, _ = child.communicate(timeout=180)
    finally:
        if child.poll() is None:  # with what it has started
            os.killpg(child.pid, signal.SIGKILL)
    assert child.returncode == 0, told
    assert float(re.findall(r"^judged .*auc ([\d.]+)", told, re.MULTILINE)[-1]) >= 0.75
    report = ROOT / re.search(r"^report +(runs/\S+/report\.html)", told, re.MULTILINE)[1]
    assert report.exists()
    try:
        # As docs/serving.md goes on. What rounding to 8 bits may cost is a promise.
        shell.run(f"tessera export {report.parent} --out pkg --eval synthetic --max-auc-drop 0.0002")
        port = free_port()
        shell.start(f"tessera serve pkg --port {port} --admin-port -1 --latency-budget 20000")
        address = f"http://127.0.0.1:{port}/v2/models/dlrm"
        shell.run(f"curl -sf --retry 50 --retry-connrefused --retry-delay 1 {address}")
        shell.run(f"curl -sf {address}/infer -d @{ROOT}/examples/demo_request.json | grep probability")
    finally:
        shutil.rmtree(report.parent)


def test_make_test_runs_all_tests_and_this_one(request):
    """Of `make test`: its recipe ends in ctest, by a preset that has all tests, of which this is one."""
    recipe = re.search(
        r"^test: everything lint.*\n((?:\t.*\n)+)", (ROOT / "Makefile").read_text(), re.MULTILINE
    )
    (preset,) = re.findall(r"^\tctest --preset (\w+) ", recipe[1], re.MULTILINE)
    (chosen,) = (
        one
        for one in json.loads((ROOT / "CMakePresets.json").read_text())["testPresets"]
        if one["name"] == preset
    )
    assert "filter" not in chosen and chosen["configurePreset"] == "release"
    listed = (ROOT / "tests/examples/CMakeLists.txt").read_text()
    assert f"page_commands PATHS {request.path.name}" in listed


@pytest.mark.skipif(
    pathlib.Path(TESSERA).resolve() != BUILD / "bin/tessera", reason="another build is tested"
)
def test_the_build_is_configured_as_the_page_says():
    """CMake reads the preset and what it set before; ninja goes through what it would do."""
    (command,) = (one for one in commands("docs/building.md") if one.startswith("cmake --preset"))
    words = command.replace("cmake --preset release", "cmake --preset release -N").replace(
        "ninja -C", "ninja -n -C"
    )
    assert words.count(" -N ") == words.count("ninja -n ") == 1
    done = subprocess.run(["bash", "-c", words], cwd=ROOT, capture_output=True, text=True, timeout=LIMIT)
    assert done.returncode == 0, done.stdout + done.stderr


def test_the_page_names_the_torch_of_this_environment():
    (command,) = (one for one in commands("docs/python.md") if one.startswith("pip install torch"))
    assert command.split("==")[1] == importlib.metadata.version("torch").partition("+")[0]


def small(command: str) -> str:
    """A training of a moment, on this machine."""
    if not HAS_GPU:
        command = command.replace("--device cuda", "--device cpu").replace(" --share-gpus", "")
    kind = re.search(r"tessera train (\w+)", command)
    if not kind:
        return command
    command = re.sub(r"--steps \d+", "", command)
    flags = SMALL[kind[1]]
    if kind[1] == "dlrm":
        flags += "" if "--epochs" in command else " --steps 3"
        flags += "" if "--data" in command else " --tables 4 --rows 500"
    return command.replace(kind[0], f"{kind[0]} {flags}") if "--data" not in command else f"{command} {flags}"


def free_port() -> str:
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        return str(free.getsockname()[1])


class Shell:
    """A folder and a shell whose `tessera` and `python` are those of this tree."""

    def __init__(self, folder: pathlib.Path):
        self.folder = folder
        self.children: list[subprocess.Popen] = []
        bins = folder / "bin"
        bins.mkdir()
        simulator = pathlib.Path(TESSERA).parent / "simulator"
        for name, program in {"tessera": TESSERA, "python": sys.executable, "simulator": simulator}.items():
            (bins / name).write_text(f'#!/bin/sh\nexec "{program}" "$@"\n')
            (bins / name).chmod(0o755)
        self.environment = {
            **os.environ, "PATH": f"{bins}:{os.environ['PATH']}", "OMP_NUM_THREADS": "1",
            "TESSERA_PROFILE": "assume", "TESSERA_CACHE": str(folder / "cache"),
        }  # fmt: skip

    def start(self, command: str) -> subprocess.Popen:
        child = subprocess.Popen(
            ["bash", "-c", f"exec {command}" if command.startswith("tessera") else command],
            cwd=self.folder, env=self.environment, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True,
        )  # fmt: skip
        self.children.append(child)
        return child

    def run(self, command: str) -> None:
        out, error = (child := self.start(command)).communicate(timeout=LIMIT)
        assert child.returncode == 0, f"{command}\n{out}{error}"

    def run_until_steps(self, command: str) -> None:
        """What ends only when it is told to."""
        child = self.start(command)
        for line in child.stdout:
            if line.startswith("step "):
                break
        child.send_signal(signal.SIGTERM)
        child.communicate(timeout=LIMIT)
        assert child.returncode == 0, command

    def close(self) -> None:
        for child in self.children:
            if child.poll() is None:
                child.terminate()
        for child in self.children:
            child.communicate(timeout=30)


@pytest.fixture
def shell(tmp_path):
    shell = Shell(tmp_path)
    yield shell
    shell.close()


def furnish(folder: pathlib.Path, run) -> None:
    """What the pages take for granted."""
    (folder / "examples").symlink_to(ROOT / "examples")
    rows = "".join(f"{n % 2},{n % 7},u-{n % 30}\n" for n in range(400))
    schema = '[label]\ncolumn = "clicked"\n[[dense]]\ncolumn = "visits"\n[[feature]]\ncolumn = "user"\n'
    (folder / "clicks.toml").write_text(schema + 'kind = "hash"\nrows = 100\n')
    for name in ("clicks.csv", "live.csv"):
        (folder / name).write_text("clicked,visits,user\n" + rows)
    # Files of one stream: one line of names.
    (folder / "day_0.gz").write_bytes(gzip.compress(("clicked,visits,user\n" + rows).encode()))
    (folder / "day_1.gz").write_bytes(gzip.compress(rows.encode()))
    atoms = "".join(f"H {x} {y} {z}\n" for x in range(6) for y in range(6) for z in range(6))
    (folder / "cube.xyz").write_text(f'216\nLattice="6 0 0 0 6 0 0 0 6"\n{atoms}')
    for name in ("train", "my_program"):
        (folder / name).write_text('#!/bin/sh\necho "rank $RANK of $WORLD_SIZE: $*"\n')
        (folder / name).chmod(0o755)
    (folder / "train.py").write_text("import os\nprint('rank', os.environ['RANK'])\n")
    (folder / "job.toml").write_text("tables = 2\nrows = 100\n")
    tables = [{"name": f"t{n}", "rows": 10_000_000 + n, "dim": 64, "ids": 20} for n in range(12)]
    (folder / "tables.json").write_text(json.dumps({"tables": tables}))
    (folder / "job.secret").write_text("x" * 32)
    (folder / "job.secret").chmod(0o600)
    run("tessera data synth day_0.tsv --format text --samples 2000")


@pytest.mark.parametrize("page", [page for page in pages() if page != "docs/serving.md"])
def test_commands_run(page, shell):
    furnish(shell.folder, shell.run)
    if page == "docs/report.md":
        shell.run(small("tessera train dlrm --ranks 2 --save runs/2026-11-15-1"))
        for rank in range(2):
            event = {"name": "step", "ph": "X", "ts": 1, "dur": 2, "pid": rank, "tid": 0}
            (shell.folder / f"rank{rank}.json").write_text(json.dumps({"traceEvents": [event]}))
    if page == "docs/bench.md":
        shell.run(small("tessera train dlrm --save runs/small"))
        shell.run("tessera export runs/small --out pkg")
    for command in commands(page):
        if command.startswith((*ELSEWHERE, *NOT_RUN)):
            continue
        if "--nnodes 2" in command:
            # The same on a second host, which is this one.
            command = command.replace("...", "-n 1 -- ./train").replace("-n 8", "-n 1")
            where = f"--rdzv-endpoint 127.0.0.1:{free_port()} "
            command = re.sub(r"--rdzv-endpoint \S+ ", "", command).replace(
                "--nnodes 2 ", f"--nnodes 2 {where}"
            )
            command = (
                command if "--node-rank" in command else command.replace("--nnodes", "--node-rank 0 --nnodes")
            )
            other = shell.start(command.replace("--node-rank 0", "--node-rank 1"))
            shell.run(command)
            assert other.wait(LIMIT) == 0
        elif "--follow" in command:
            shell.run_until_steps(small(command))
        elif command.startswith("tessera bench serve"):
            server = shell.start(f"tessera serve pkg --port {(port := free_port())} --admin-port -1")
            shell.run(
                f"curl -sf --retry 50 --retry-connrefused --retry-delay 1 127.0.0.1:{port}/v2/health/live"
            )
            shell.run(f"{command} --seconds 1 --port {port}")
            server.terminate()
        elif command.startswith("simulator"):
            shell.run(command.replace("1000000", "1000") + ("" if "--" in command else " --count 100"))
        else:
            shell.run(small(command))


def test_commands_of_the_serving_page_run(shell):
    """A server, a training that publishes, and requests: in one session, as they stand there."""
    page = "docs/serving.md"
    ports = [free_port(), free_port()]
    server = None
    (shell.folder / "examples").symlink_to(ROOT / "examples")
    demo = "--tables 26 --rows 2000 --dim 8 --bottom 16,8 --top 16,1 --batch 32 --steps 3 --eval-samples 100"
    shell.run(f"tessera train dlrm --ranks 2 {demo} --save runs/2026-11-15-1")
    for command in commands(page):
        if command == "make demo":  # test_the_demo_is_made goes on as this page does
            continue
        for old, new in zip(("8000", "8001"), ports, strict=True):
            command = command.replace(f"127.0.0.1:{old}", f"127.0.0.1:{new}")
        if command.startswith("tessera serve"):
            if server:
                server.terminate()
                server.communicate(timeout=30)
            where = f" --port {ports[0]} --admin-port {ports[1]}"
            server = shell.start(command.removesuffix(" &") + where)
            shell.run(
                f"curl -sf --retry 50 --retry-connrefused --retry-delay 1 127.0.0.1:{ports[0]}/v2/health/live"
            )
        elif command.endswith(" &"):
            flags = "--dim 8 --bottom 16,8 --top 16,1 --batch 32 --eval-samples 100"
            shell.start(f"{command.removesuffix(' &')} {flags}")
        else:
            body = re.search(r"-d '(.*)'", command, re.DOTALL)
            if body:
                (shell.folder / "request.json").write_text(body[1])
            shell.run(small(re.sub(r"curl -s\b", "curl -sf", command)))
