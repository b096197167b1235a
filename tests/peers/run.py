"""Runs the comparisons of this folder with the Python given, or says that it is not there."""

import pathlib
import subprocess
import sys

SKIPPED = 77

if __name__ == "__main__":
    python = pathlib.Path(sys.argv[1])
    if not (python.parent.parent / ".ready").exists():
        print(f"skipped: {python} is not there. `make peers` installs the projects to compare with.")
        sys.exit(SKIPPED)
    command = [str(python), "-W", "ignore", "-m", "pytest", "-q", "-p", "no:cacheprovider", *sys.argv[2:]]
    sys.exit(subprocess.run([*command, "."], check=False).returncode)
