"""Plans have the same bytes if clang compiled the planner.

An entry of its own, so that ctest says that it was skipped where there is no clang.
"""

import shutil

import pytest
from test_same_bytes import LEVELS, check_compiler, pytestmark  # noqa: F401 (the mark is this module's too)

CLANG = next((name for name in ("clang++", "clang++-19") if shutil.which(name)), "")


@pytest.mark.skipif(not CLANG, reason="clang is not installed: its plans are not compared with those of GCC")
@pytest.mark.parametrize("level", LEVELS)
def test_clang_changes_nothing(level, tmp_path):
    check_compiler(f"{CLANG} {level}", tmp_path)
