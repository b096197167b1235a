"""Passes ctest's output on and lists, before its closing lines, the tests that needed a second try.

A test that passes only when it is repeated is a fault of the test or of the product, not luck: it is
named at the end of the run and written into a file, one name a line (empty if there was none). The files
of the two runs before are kept beside it, as FILE.1 and FILE.2; a test that is in all three has had its
time, and the run ends with 1.
"""

from __future__ import annotations

import pathlib
import re
import sys

RESULT = re.compile(r"^\s*(?:\d+/\d+ )?Test\s+#\d+: (\S+) \.*\s*(\*\*\*\S+|Passed)")
CLOSING = re.compile(r"^\d+% tests passed")


def second_tries(lines):
    """Return the tests that failed and then passed, in the order of their first failure."""
    failed, passed = [], set()
    for line in lines:
        result = RESULT.match(line)
        if result is None:
            continue
        name, outcome = result.groups()
        if outcome == "Passed":
            passed.add(name)
        elif outcome != "***Skipped" and name not in failed:
            failed.append(name)
    return [name for name in failed if name in passed]


def keep(path, names):
    """Write this run's names and return those of them that both runs before had, too."""
    before, earlier = (pathlib.Path(f"{path}.{age}") for age in (1, 2))
    if before.exists():
        before.replace(earlier)
    if path.exists():
        path.replace(before)
    path.write_text("".join(f"{name}\n" for name in names))
    if not (before.exists() and earlier.exists()):
        return []
    return [name for name in names if all(name in run.read_text().split() for run in (before, earlier))]


def main(path):
    seen, again = [], []
    for line in sys.stdin:
        if RESULT.match(line):
            seen.append(line)
        elif CLOSING.match(line):
            names = second_tries(seen)
            again = keep(path, names)
            if names:
                print(f"needed a second try ({path}): {' '.join(names)}")
            if again:
                print(f"needed it in three runs in a row, which is an error: {' '.join(again)}")
        print(line, end="", flush=True)
    return 1 if again else 0


if __name__ == "__main__":
    sys.exit(main(pathlib.Path(sys.argv[1])))
