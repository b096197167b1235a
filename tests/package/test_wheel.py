"""`pip install .` in a fresh environment gives the package and the programs.

torch is linked in from the environment the tests run in, instead of being unpacked again.
"""

from __future__ import annotations

import os
import pathlib
import subprocess
import sysconfig
import venv

import pytest
import torch

ROOT = pathlib.Path(__file__).resolve().parents[2]
TORCH = pathlib.Path(torch.__file__).parent


def run(*words, limit=1400, **options) -> subprocess.CompletedProcess:
    # Nothing of the environment around the tests may help.
    hidden = ("PYTHONPATH", "VIRTUAL_ENV", "TESSERA_WORKER", "TESSERA_BIN")
    env = {name: value for name, value in os.environ.items() if name not in hidden}
    env |= {"CCACHE_BASEDIR": str(ROOT), "PIP_DISABLE_PIP_VERSION_CHECK": "1"}
    # Otherwise the compiler is the one that Python was built with, whose objects ccache does not know.
    env.setdefault("CXX", "c++")
    env["CCACHE_SLOPPINESS"] = "pch_defines,time_macros,include_file_mtime,include_file_ctime"
    result = subprocess.run(
        [str(word) for word in words],
        capture_output=True, text=True, timeout=limit, cwd="/", env=env, **options,
    )  # fmt: skip
    assert result.returncode == 0, result.stdout + result.stderr
    return result


@pytest.fixture(scope="module")
def environment(tmp_path_factory) -> pathlib.Path:
    environment = tmp_path_factory.mktemp("environment")
    venv.create(environment, with_pip=False)
    packages = pathlib.Path(
        sysconfig.get_path("purelib", vars={"base": str(environment), "platbase": str(environment)})
    )
    # torch itself by a link, so that it lies beside tessera as it would after pip install torch; what
    # torch, pip and the build need through the path.
    (packages / "torch").symlink_to(TORCH)
    (packages / "outer.pth").write_text(f"{TORCH.parent}\n")
    run(
        environment / "bin/python", "-m", "pip", "install", "--no-build-isolation", "--no-deps",
        "--config-settings=cmake.define.CMAKE_CXX_COMPILER_LAUNCHER=ccache",
        "--config-settings=cmake.define.TESSERA_WERROR=ON",
        f"--config-settings=cmake.define.TESSERA_TORCH_DIR={TORCH}",
        ROOT,
    )  # fmt: skip
    return environment


@pytest.mark.timeout(1450)
def test_package_imports_from_the_environment(environment):
    result = run(
        environment / "bin/python", "-c",
        "import tessera, tessera.distributed.comm; print(tessera.__file__, tessera.__version__)",
    )  # fmt: skip
    path, version = result.stdout.split()
    assert path.startswith(str(environment))
    assert version == "0.1.0"
    listed = run(environment / "bin/python", "-m", "pip", "show", "tessera-parallel").stdout
    assert "Name: tessera-parallel" in listed
    assert "Version: 0.1.0" in listed
    assert "Requires: torch" in listed


def test_package_holds_no_foreign_file(environment):
    package = next(environment.glob("lib/python3*/site-packages/tessera"))
    names = {str(path.relative_to(package)) for path in package.rglob("*") if path.is_file()}
    suffix = sysconfig.get_config_var("EXT_SUFFIX")
    assert {"py.typed", "_C.pyi", f"_C{suffix}", "lib/libtessera.so", "bin/tessera-worker"} <= names
    allowed = (".py", ".pyi", ".pyc", "py.typed", f"_C{suffix}", "libtessera.so", "tessera-worker")
    assert all(name.endswith(allowed) for name in names), names


def test_program_runs_a_job(environment):
    assert "tessera run" in run(environment / "bin/tessera", "--help").stdout
    code = (
        "import tessera, torch; world = tessera.comm.init(timeout=60);"
        "print('sum', int(tessera.comm.all_reduce(torch.tensor([world.rank() + 1]))),"
        " tessera.comm.engine(), flush=True)"
    )
    result = run(environment / "bin/tessera", "run", "-n", "2", "--", environment / "bin/python", "-c", code)
    assert result.stdout.count("sum 3 shm") == 2, result.stdout + result.stderr


def test_module_and_script_run_under_the_same_python(environment, tmp_path):
    script = tmp_path / "train.py"
    script.write_text(
        "import sys, tessera, torch.distributed as dist\n"
        "dist.init_process_group('shm')\n"
        "print(dist.get_rank(), sys.prefix, flush=True)\n"
        "dist.destroy_process_group()\n"
    )
    result = run(environment / "bin/tessera", "run", "-n", "2", script)
    assert result.stdout.count(str(environment)) == 2, result.stdout + result.stderr
