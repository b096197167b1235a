"""An environment with torch and what torch needs, by links instead of unpacking them again."""

from __future__ import annotations

import importlib.metadata
import os
import pathlib
import re
import subprocess
import sysconfig
import venv


def run(*words, limit=100, path=None, expected=0, more=(), **options) -> subprocess.CompletedProcess:
    """Runs a program with nothing of the environment around the tests, but what `more` names."""
    hidden = ("PYTHONPATH", "VIRTUAL_ENV", "TESSERA_WORKER", "TESSERA_BIN", "LD_LIBRARY_PATH")
    env = {name: value for name, value in os.environ.items() if name not in hidden}
    env |= {"PIP_DISABLE_PIP_VERSION_CHECK": "1", **dict(more)}
    if path is not None:
        env["PATH"] = str(path)
    result = subprocess.run(
        [str(word) for word in words],
        capture_output=True, text=True, timeout=limit, cwd=options.pop("cwd", "/"), env=env, **options,
    )  # fmt: skip
    assert result.returncode == expected, result.stdout + result.stderr
    return result


def needed_by_torch() -> set[str]:
    """Distributions that torch needs, and those that they need."""
    found, waiting = set(), ["torch"]
    while waiting:
        name = waiting.pop()
        if name in found:
            continue
        found.add(name)
        for line in importlib.metadata.requires(name) or []:
            other = re.match(r"[\w.-]+", line)[0].lower()
            try:
                importlib.metadata.version(other)
            except importlib.metadata.PackageNotFoundError:
                continue  # of another platform, or an extra
            if "extra ==" not in line:
                waiting.append(other)
    return found


def make_environment(environment: pathlib.Path) -> pathlib.Path:
    """Without pip."""
    venv.create(environment, with_pip=False)
    packages = pathlib.Path(
        sysconfig.get_path("purelib", vars={"base": str(environment), "platbase": str(environment)})
    )
    for name in needed_by_torch():
        distribution = importlib.metadata.distribution(name)
        tops = {pathlib.PurePath(str(file)).parts[0] for file in distribution.files or []}
        for top in tops - {"..", "__pycache__"}:
            if not (packages / top).exists():
                (packages / top).symlink_to(pathlib.Path(str(distribution.locate_file(top))))
    return environment
