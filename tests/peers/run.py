"""Runs the comparisons of this folder, or what of it is named, with the Python given, if it is there."""

import pathlib
import subprocess
import sys

SKIPPED = 77

if __name__ == "__main__":
    python, arguments = pathlib.Path(sys.argv[1]), sys.argv[2:]
    if not (python.parent.parent / ".ready").exists():
        print(f"skipped: {python} is not there. `make peers` installs the projects to compare with.")
        sys.exit(SKIPPED)
    if not (arguments and arguments[0].endswith("_suite.py")):
        folder = [] if any(".py" in word for word in arguments) else ["."]
        arguments = ["-m", "pytest", "-q", "-p", "no:cacheprovider", *arguments, *folder]
    sys.exit(subprocess.run([str(python), "-W", "ignore", *arguments], check=False).returncode)
