"""`make wheel`'s wheel, installed into an empty environment, is the package and the programs.

It is packed from the build that is tested. The environment has torch and what torch needs, by links instead
of unpacking it again, and nothing else: no pip, and no compiler on the path.
"""

from __future__ import annotations

import json
import os
import pathlib
import re
import sys
import sysconfig
import zipfile

import pyarrow.csv
import pyarrow.parquet
import pytest
import torch
from empty_environment import make_environment, run

ROOT = pathlib.Path(__file__).resolve().parents[2]
TORCH = pathlib.Path(torch.__file__).parent


@pytest.fixture(scope="module")
def wheel(tmp_path_factory) -> pathlib.Path:
    folder = tmp_path_factory.mktemp("wheels")
    run(sys.executable, ROOT / "cmake/make_wheel.py", os.environ["TESSERA_BUILD_DIR"], folder)
    (packed,) = folder.iterdir()
    return packed


@pytest.fixture(scope="module")
def environment(wheel, tmp_path_factory) -> pathlib.Path:
    environment = make_environment(tmp_path_factory.mktemp("environment"))
    # The pip of the tests, for the environment; it looks at no index, so torch must satisfy the wheel.
    run(sys.executable, "-m", "pip", "--python", environment / "bin/python", "install", "--no-index", wheel)
    return environment


def in_environment(environment, *words, **options):
    """Runs a program with the environment's own programs on the path, and nothing else."""
    return run(*words, path=environment / "bin", **options)


def test_package_imports_from_the_environment(environment):
    result = in_environment(
        environment, environment / "bin/python", "-c",
        "import tessera, tessera.distributed.comm; print(tessera.__file__, tessera.__version__)",
    )  # fmt: skip
    path, version = result.stdout.split()
    assert path.startswith(str(environment))
    assert version == "0.1.0"


def test_wheel_asks_for_the_torch_it_was_built_with(wheel):
    with zipfile.ZipFile(wheel) as archive:
        (name,) = [name for name in archive.namelist() if name.endswith(".dist-info/METADATA")]
        metadata = archive.read(name).decode()
    assert "Name: tessera-parallel\n" in metadata and "Version: 0.1.0\n" in metadata
    wanted, arrow = re.findall(r"^Requires-Dist: (.+)$", metadata, re.MULTILINE)
    assert wanted == f"torch=={torch.__version__.partition('+')[0]}"
    assert re.fullmatch(r"""pyarrow==[\d.]+; extra == ["']parquet["']""", arrow)


def test_package_holds_no_foreign_file(environment):
    package = next(environment.glob("lib/python3*/site-packages/tessera"))
    names = {str(path.relative_to(package)) for path in package.rglob("*") if path.is_file()}
    suffix = sysconfig.get_config_var("EXT_SUFFIX")
    assert {"py.typed", "_C.pyi", f"_C{suffix}", "lib/libtessera.so.0", "bin/tessera-worker"} <= names
    allowed = (".py", ".pyi", ".pyc", "py.typed", f"_C{suffix}", "libtessera.so.0", "tessera-worker")
    others = {name for name in names if not name.endswith(allowed)}
    libraries = r"lib/lib((metis|zstd)\.so\.\d|tessera_(data|parquet)\.so)"
    assert all(re.fullmatch(libraries, name) for name in others), others


def test_what_it_links_is_on_a_bare_system_or_comes_along(environment):
    """Only libraries that Python and torch need too; torch's; its own; for Parquet also Arrow's."""
    package = next(environment.glob("lib/python3*/site-packages/tessera"))
    bare = (
        r"(libc|libm|libgcc_s|libstdc\+\+|ld-linux-x86-64|libpthread|libdl|librt|libz|libssl|libcrypto)"
        r"\.so[.\d]*"
    )
    theirs = {path.name for path in (TORCH / "lib").iterdir()} | {
        path.name for path in (package / "lib").iterdir()
    }
    programs = [environment / "bin/tessera", package / "bin/tessera-worker", *package.glob("_C*.so")]
    for file in [*programs, *(package / "lib").iterdir()]:
        dynamic = run("readelf", "-d", file).stdout
        # Nothing of the machine that built it.
        for places in re.findall(r"RUNPATH.*\[(.+)\]", dynamic):
            assert all(place.startswith("$ORIGIN") for place in places.split(":")), (file, places)
        needed = re.findall(r"NEEDED.*\[(.+)\]", dynamic)
        assert needed, file
        foreign = [name for name in needed if not re.fullmatch(bare, name) and name not in theirs]
        if file.name == "libtessera_parquet.so":
            foreign = [name for name in foreign if not name.startswith(("libarrow.so", "libparquet.so"))]
        assert foreign == [], file


def test_program_runs_a_job(environment):
    assert "tessera run" in in_environment(environment, environment / "bin/tessera", "--help").stdout
    code = (
        "import tessera, torch; world = tessera.comm.init(timeout=60);"
        "print('sum', int(tessera.comm.all_reduce(torch.tensor([world.rank() + 1]))),"
        " tessera.comm.engine(), flush=True)"
    )
    words = ["run", "-n", "2", "--", environment / "bin/python", "-c", code]
    result = in_environment(environment, environment / "bin/tessera", *words)
    assert result.stdout.count("sum 3 shm") == 2, result.stdout + result.stderr


def test_module_and_script_run_under_the_same_python(environment, tmp_path):
    script = tmp_path / "train.py"
    script.write_text(
        "import sys, tessera, torch.distributed as dist\n"
        "dist.init_process_group('shm')\n"
        "print(dist.get_rank(), sys.prefix, flush=True)\n"
        "dist.destroy_process_group()\n"
    )
    result = in_environment(environment, environment / "bin/tessera", "run", "-n", "2", script)
    assert result.stdout.count(str(environment)) == 2, result.stdout + result.stderr


def test_tables_are_read(environment, tmp_path):
    """zstd comes along; Arrow is wanted only for Parquet, and is found in the package pyarrow."""
    program, packages = environment / "bin/tessera", next(environment.glob("lib/python3*/site-packages"))
    table = pyarrow.table({"clicked": [0, 1, 1, 0], "site": ["a", "b", "a", "c"]})
    pyarrow.csv.write_csv(table, tmp_path / "clicks.csv")
    pyarrow.parquet.write_table(table, tmp_path / "clicks.parquet")
    text = (tmp_path / "clicks.csv").read_bytes()
    (tmp_path / "clicks.csv.zst").write_bytes(pyarrow.compress(text, "zstd", asbytes=True))

    def schema(name: str, expected=0) -> str:
        words = [program, "data", "schema", tmp_path / name]
        return in_environment(environment, *words, expected=expected)

    guessed = schema("clicks.csv.zst").stdout
    assert 'column = "clicked"' in guessed
    assert "tessera-parallel[parquet]" in schema("clicks.parquet", expected=65).stderr
    (packages / "pyarrow").symlink_to(pathlib.Path(pyarrow.__file__).parent)
    try:
        assert 'column = "clicked"' in schema("clicks.parquet").stdout
    finally:
        (packages / "pyarrow").unlink()


def test_python_writes_logs(environment, tmp_path):
    """tessera.data finds its library in the package."""
    code = "import tessera.data; print(tessera.data._library()._name)"
    result = in_environment(environment, environment / "bin/python", "-c", code, cwd=tmp_path)
    assert result.stdout.strip().endswith("site-packages/tessera/lib/libtessera_data.so")


@pytest.mark.timeout(400)
def test_the_demo_trains(environment, tmp_path):
    """What `make demo` trains reaches the same AUC, and its model can be used."""
    program = environment / "bin/tessera"
    words = ["train", "dlrm", "--config", ROOT / "examples/demo.toml", "--save", "run", "--json"]
    result = json.loads(in_environment(environment, program, *words, limit=360, cwd=tmp_path).stdout)
    assert result["ranks"] == 2 and result["auc"] > 0.75
    assert "tessera" in (tmp_path / "run/report.html").read_text()
    judged = in_environment(environment, program, "eval", "run", "--json", limit=120, cwd=tmp_path)
    assert json.loads(judged.stdout)["auc"] == pytest.approx(result["auc"], abs=1e-6)
