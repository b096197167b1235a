"""What a wheel asks of pip: the torch that its extension was compiled against, and no other.

`import tessera` refuses another torch (docs/decisions/0007-built-for-one-torch.md); pip must bring none.
Parquet is an extra, `tessera-parallel[parquet]`: Arrow's C++ library has another name in every release.
"""

from __future__ import annotations

import subprocess
import sys

_state = "wheel"
_VERSION = "import importlib.metadata, sys; print(importlib.metadata.version(sys.argv[1]))"
_NO_TORCH = """tessera is compiled against the torch it will run with, and this environment has none.
Install it first:
    pip install torch==2.13.0
Where pip is not the installer, `--no-build-isolation` lets the build see it."""


def _installed(package: str) -> str | None:
    """The version that the environment has; -E sees it from an isolated build, too (TesseraTorch.cmake)."""
    for flag in ("-B", "-E"):
        words = [sys.executable, flag, "-c", _VERSION, package]
        found = subprocess.run(words, capture_output=True, text=True).stdout.strip()
        if found:
            return found.partition("+")[0]
    return None


def build_state(state: str) -> None:
    """Is told before the rest what is made: a wheel, or a source distribution."""
    global _state
    _state = state


def dynamic_wheel(settings=None) -> dict[str, bool]:
    """Return what a wheel may say otherwise than the sources that it is made of."""
    return {"dependencies": True, "optional-dependencies": True}


def dynamic_metadata(settings=None, project=None) -> dict:
    """Return the dependencies and those of extras."""
    torch, arrow = _installed("torch"), _installed("pyarrow")
    if torch is None and _state != "sdist":
        sys.exit(_NO_TORCH)  # now: pip would fetch gigabytes first, and then fail to compile
    return {
        "dependencies": [f"torch=={torch}" if torch else "torch>=2.11,<2.14"],
        "optional-dependencies": {"parquet": [f"pyarrow=={arrow}" if arrow else "pyarrow"]},
    }
