"""Plans have the same bytes whatever compiled the planner and whatever order the tables come in.

The planner is compiled anew: without optimisation, and for the processor at hand; by clang in
test_same_bytes_of_clang.py. TESSERA_PLANNER_COMPILERS="g++-12 -O3;clang++ -O1" names others.
"""

import json
import os
import pathlib
import platform
import random
import shutil
import subprocess

import pytest
from test_proofs import PLAN_LINES, random_problem

ROOT = pathlib.Path(__file__).resolve().parents[2]
LEVELS = ("-O0", "-O2 -march=native")
COMPILERS = os.environ.get("TESSERA_PLANNER_COMPILERS") or ";".join(
    f"g++ {level}" for level in LEVELS if shutil.which("g++")
)
JSON_INCLUDE = os.environ.get("TESSERA_JSON_INCLUDE", "/usr/include")
pytestmark = pytest.mark.skipif(not PLAN_LINES, reason="TESSERA_PLAN_LINES is not set: run by ctest")


def bytes_of(program, problems, threads=1, **variables):
    lines = "".join(json.dumps(problem) + "\n" for problem in problems)
    environment = {**os.environ, "OMP_NUM_THREADS": str(threads), **variables}
    return subprocess.run(
        [program], input=lines.encode(), capture_output=True, check=True, env=environment
    ).stdout


def problems():
    return [random_problem(seed) for seed in range(60)]


def test_the_order_of_tables_and_the_number_of_threads_change_nothing():
    shuffled = problems()
    for seed, problem in enumerate(shuffled):
        random.Random(seed).shuffle(problem["tables"])
    assert bytes_of(PLAN_LINES, problems()) == bytes_of(PLAN_LINES, shuffled, threads=4)


# Where a processor has fused multiply-add, the C library's functions of real numbers use it, and end in other
# bits for some arguments: nothing of a plan may hang on them.
@pytest.mark.skipif(platform.machine() != "x86_64", reason="names of an x86 processor's instructions")
@pytest.mark.parametrize(
    "without", ["-FMA,-FMA4", "-AVX2,-FMA,-FMA4", "-AVX512F,-AVX2,-AVX,-FMA,-FMA4,-SSE4_1"]
)
def test_the_instructions_of_the_processor_change_nothing(without):
    changed = bytes_of(PLAN_LINES, problems(), GLIBC_TUNABLES=f"glibc.cpu.hwcaps={without}")
    assert changed == bytes_of(PLAN_LINES, problems())


def check_compiler(compiler, tmp_path):
    program, whole = tmp_path / "plan_lines", tmp_path / "whole.cpp"
    sources = [*sorted((ROOT / "src/planner").glob("*.cpp")), ROOT / "tests/planner/plan_lines.cpp"]
    whole.write_text("".join(f'#include "{source}"\n' for source in sources))  # sooner than one by one
    flags = ["-std=c++20", "-ffp-contract=off", "-w", f"-I{ROOT}/include", f"-I{ROOT}/src"]
    flags.append(f"-I{JSON_INCLUDE}")
    subprocess.run([*compiler.split(), *flags, whole, "-o", program], check=True)
    some = problems()[::4]  # without optimisation all take a minute
    assert bytes_of(program, some) == bytes_of(PLAN_LINES, some)


@pytest.mark.parametrize("compiler", [one for one in COMPILERS.split(";") if one])
def test_the_compiler_changes_nothing(compiler, tmp_path):
    check_compiler(compiler, tmp_path)
