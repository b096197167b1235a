"""Passes ctest's output on and lists, before its closing lines, the tests that needed a second try.

A test that passes only when it is repeated is a fault of the test or of the product, not luck: it is
named at the end of the run and written into a file, one name a line (empty if there was none).
"""

from __future__ import annotations

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


def main(path):
    seen = []
    for line in sys.stdin:
        if RESULT.match(line):
            seen.append(line)
        elif CLOSING.match(line):
            names = second_tries(seen)
            with open(path, "w") as file:
                file.writelines(f"{name}\n" for name in names)
            if names:
                print(f"needed a second try ({path}): {' '.join(names)}")
        print(line, end="", flush=True)


if __name__ == "__main__":
    main(sys.argv[1])
