"""Packs a built tree into a wheel, without compiling anything: make_wheel.py BUILD FOLDER.

What goes in is the component "wheel" of the build (cmake/TesseraWheel.cmake); name, version, tags and
dependencies are those that `pip install .` would use, asked of pyproject.toml's own backend.
"""

from __future__ import annotations

import base64
import hashlib
import os
import pathlib
import re
import subprocess
import sys
import tempfile
import zipfile

import scikit_build_core.build as backend

SOURCE = pathlib.Path(__file__).resolve().parents[1]


def pack(stage: pathlib.Path, wheel: pathlib.Path, record: str) -> None:
    """Write every file below `stage` and a list of them, the wheel's RECORD. Same files, same bytes."""
    lines = []
    with zipfile.ZipFile(wheel, "w", zipfile.ZIP_DEFLATED, compresslevel=1) as archive:

        def add(name: str, mode: int, data: bytes) -> None:
            entry = zipfile.ZipInfo(name)  # of 1980, the first date that it can hold
            entry.external_attr = (0o100000 | mode) << 16
            entry.compress_type = zipfile.ZIP_DEFLATED
            archive.writestr(entry, data)

        for path in sorted(path for path in stage.rglob("*") if path.is_file()):
            name, data = path.relative_to(stage).as_posix(), path.read_bytes()
            digest = base64.urlsafe_b64encode(hashlib.sha256(data).digest()).rstrip(b"=").decode()
            lines.append(f"{name},sha256={digest},{len(data)}\n")
            add(name, 0o755 if os.access(path, os.X_OK) else 0o644, data)
        add(record, 0o644, "".join([*lines, f"{record},,\n"]).encode())


def main(build: pathlib.Path, folder: pathlib.Path) -> pathlib.Path:
    """Return the wheel of `build`, new in `folder`."""
    folder.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=folder) as temporary:
        stage = pathlib.Path(temporary)
        install = ["cmake", "--install", build, "--component", "wheel", "--prefix", stage]
        subprocess.run(install, check=True, stdout=subprocess.DEVNULL)
        about = stage / backend.prepare_metadata_for_build_wheel(str(stage))
        name = about.name.removesuffix(".dist-info")
        (stage / f"{name}.data").mkdir()
        (stage / "bin").rename(stage / f"{name}.data/scripts")
        (tag,) = re.findall(r"^Tag: (.+)$", (about / "WHEEL").read_text(), re.MULTILINE)
        wheel = folder / f"{name}-{tag}.whl"
        unfinished = stage.with_suffix(".part")
        pack(stage, unfinished, f"{about.name}/RECORD")
        unfinished.replace(wheel)
    return wheel


if __name__ == "__main__":
    if len(sys.argv) != 3:
        sys.exit(__doc__.splitlines()[0])
    build, folder = (pathlib.Path(word).resolve() for word in sys.argv[1:])
    os.chdir(SOURCE)
    print(main(build, folder))
