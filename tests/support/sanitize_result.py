"""Says in a few lines what a run of the tests under a sanitizer found: `sanitize_result.py LANE LOG`."""

import pathlib
import re
import sys

REPORT = re.compile(
    r"(ERROR: AddressSanitizer: .*|WARNING: ThreadSanitizer: .*|SUMMARY: .*|.*: runtime error: .*)"
)


def result(lane: str, log: str) -> list[str]:
    counts = re.search(r"(\d+)% tests passed, (\d+) tests? failed out of (\d+)", log)
    passed = "no result: see the log" if counts is None else f"{counts[2]} of {counts[3]} tests failed"
    reports = sorted(set(REPORT.findall(log)))
    failed = re.findall(r"^\s*\d+ - (\S+) \((.*)\)$", log, re.MULTILINE)
    return [
        f"{lane}: {passed}, {len(reports)} reports",
        *(f"  {name}: {how}" for name, how in failed),
        *(f"  {report}" for report in reports),
    ]


if __name__ == "__main__":
    lane, path = sys.argv[1:]
    print("\n".join(result(lane, pathlib.Path(path).read_text(errors="replace"))))
