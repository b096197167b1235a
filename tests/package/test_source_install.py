"""`pip install .` compiles the package for the torch of the environment, and fetches no other.

ccache has the objects of the build that is tested, so it takes moments; without it, it would take as long as
that build, and is not tried.
"""

from __future__ import annotations

import os
import pathlib
import re
import shutil
import subprocess
import sys
import venv

import pytest
import torch
from empty_environment import make_environment, run

ROOT = pathlib.Path(__file__).resolve().parents[2]
PIP = [sys.executable, "-m", "pip"]


@pytest.fixture(scope="module", autouse=True)
def index(tmp_path_factory):
    """What builds it comes from an index of packages, as for every user."""
    words = [*PIP, "download", "--no-deps", "--quiet", "scikit-build-core>=1.1"]
    folder = tmp_path_factory.mktemp("index")
    if subprocess.run(words, cwd=folder, capture_output=True, timeout=100).returncode != 0:
        pytest.skip("no index of packages can be reached")


def test_without_torch_it_says_so_before_anything_is_fetched(tmp_path):
    venv.create(tmp_path / "bare", with_pip=False)
    words = [*PIP, "--python", tmp_path / "bare/bin/python", "install", "--dry-run", ROOT]
    said = run(*words, expected=1)
    text = said.stdout + said.stderr
    assert "tessera is compiled against the torch it will run with, and this environment has none" in text
    assert "pip install torch==" in text and "Downloading torch" not in text


@pytest.mark.timeout(900)
@pytest.mark.skipif(shutil.which("ccache") is None, reason="without ccache it takes as long as the build")
def test_pip_install_from_source(tmp_path):
    environment = make_environment(tmp_path / "environment")
    build = pathlib.Path(os.environ["TESSERA_BUILD_DIR"])
    (compiler,) = re.findall(
        r"^CMAKE_CXX_COMPILER:\w+=(.+)$", (build / "CMakeCache.txt").read_text(), re.MULTILINE
    )
    more = {
        # As in the build that filled the cache.
        "CXX": compiler,
        "CMAKE_CXX_COMPILER_LAUNCHER": "ccache",
        "CCACHE_BASEDIR": str(ROOT),
        "CCACHE_SLOPPINESS": "pch_defines,time_macros,include_file_mtime,include_file_ctime",
    }
    words = [*PIP, "--python", environment / "bin/python", "install", "-C", "cmake.define.TESSERA_WERROR=ON"]
    said = run(*words, ROOT, limit=850, more=more)
    assert "Successfully installed tessera-parallel-0.1.0" in said.stdout
    assert "Downloading torch" not in said.stdout
    code = "import tessera, torch; print(tessera.__file__, torch.__version__)"
    path, version = run(environment / "bin/python", "-c", code, path=environment / "bin").stdout.split()
    assert path.startswith(str(environment)) and version == torch.__version__
    words = ["train", "lm", "--ranks", "2", "--steps", "2", "--batch", "4", "--length", "16", "--layers", "1"]
    words += ["--width", "16", "--heads", "2", "--save", tmp_path / "run"]
    run(environment / "bin/tessera", *words, path=environment / "bin")
    assert (tmp_path / "run/report.html").exists()
