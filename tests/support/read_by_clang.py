"""Reads the files of a configured build with its compiler and prints what it says; builds nothing.

read_by_clang.py [-j N] BUILD [PATTERN]: PATTERN picks files by their path.
"""

import argparse
import json
import re
import shlex
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path


def reading(command):
    """The words that read a file as `command` compiles it, without what it would write."""
    words = shlex.split(command)
    if Path(words[0]).name == "ccache":
        words = words[1:]
    out = words.index("-o")
    return [*words[:out], *words[out + 2 :], "-fsyntax-only"]


def say(entry):
    result = subprocess.run(
        reading(entry["command"]), cwd=entry["directory"], capture_output=True, text=True, check=False
    )
    return entry["file"], result.returncode, result.stderr.strip()


def main():
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("build", type=Path)
    parser.add_argument("-j", type=int, default=1)
    parser.add_argument("pattern", nargs="?", default=".")
    given = parser.parse_args()
    entries = json.loads((given.build / "compile_commands.json").read_text())
    chosen = [e for e in entries if re.search(given.pattern, e["file"]) and not e["file"].endswith(".cu")]
    failed = 0
    with ThreadPoolExecutor(given.j) as pool:
        for file, code, text in pool.map(say, chosen):
            if code != 0 or text:
                print(f"{file}\n{text}", flush=True)
                failed += 1
    print(f"{len(chosen)} files read, {failed} with something to say")
    return 1 if failed or not chosen else 0


if __name__ == "__main__":
    sys.exit(main())
