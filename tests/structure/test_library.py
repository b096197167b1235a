"""What the built library shows and what it was built from."""

import os
import re
import subprocess
from pathlib import Path

import pytest

BUILD = Path(os.environ["TESSERA_BUILD_DIR"])
LIBRARY = BUILD / "lib" / "libtessera.so"


def run(*command):
    return subprocess.run(command, check=True, capture_output=True, text=True, timeout=120).stdout


def test_the_library_defines_no_symbol_of_gloo():
    symbols = run("nm", "-DC", "--defined-only", str(LIBRARY))
    ours = [line for line in symbols.splitlines() if re.search(r"gloo::|GlooStore", line)]
    assert ours == []


def test_the_gloo_file_was_built_from_our_declarations_only():
    dependencies = run("ninja", "-C", str(BUILD), "-t", "deps")
    # Benchmarks compile the file once more, for a peer of their own.
    name = "tessera_module_comm.dir/gloo/gloo_backend.cpp.o:"
    blocks = [b for b in dependencies.split("\n\n") if name in b.split("\n", 1)[0]]
    assert len(blocks) == 1
    gloo = [
        line.strip() for line in blocks[0].splitlines() if "/gloo/" in line and line.strip().endswith(".h")
    ]
    assert gloo, "the file includes no Gloo declaration at all"
    assert all("src/comm/gloo/" in line for line in gloo), gloo


def test_only_api_symbols_are_exported():
    symbols = run("nm", "-DC", "--defined-only", str(LIBRARY))
    internals = [
        line for line in symbols.splitlines() if re.search(r" T tessera::(comm::shm|kernels)::", line)
    ]
    assert internals == []


# What LibTorch reads pickles and TorchScript with. `nn::Module::load`, a virtual function, is in every
# module's table; the archive that it is given is read by one of these.
READS_CODE = re.compile(r"[Uu]npickle|pickle_load|jit::(load|import)|InputArchive::load_from")


def test_nothing_is_read_that_may_hold_code():
    programs = [LIBRARY, *(p for p in (BUILD / "bin").glob("tessera*") if p.is_file())]
    programs += (Path(__file__).parents[2] / "python" / "tessera").glob("_C*.so")
    for program in programs:
        wanted = run("nm", "-DC", "--undefined-only", str(program))
        assert "__cxa" in wanted or "libc" in wanted.lower(), program  # that it was read
        assert [line for line in wanted.splitlines() if READS_CODE.search(line)] == [], program


@pytest.mark.skipif(not (BUILD / "bin" / "tessera").exists(), reason="the programs were not built")
def test_the_program_links_no_libtorch():
    libraries = run("ldd", str(BUILD / "bin" / "tessera"))
    assert "libtorch" not in libraries and "libc10" not in libraries


@pytest.mark.skipif(not (BUILD / "lib" / "libtessera_serving.so").exists(), reason="it was not built")
def test_the_serving_library_links_neither_libtorch_nor_python():
    libraries = run("ldd", str(BUILD / "lib" / "libtessera_serving.so"))
    assert "libc.so" in libraries  # that it was read
    for name in ("libtorch", "libc10", "libpython", "libtessera.so", "libgomp", "not found"):
        assert name not in libraries, libraries
