"""Compare two files of benchmark rows; a difference below the spread is called "same".

    .venv/bin/python bench/diff.py before.json after.json [--all]

Exit code 0, or 1 if a row became slower.
"""

from __future__ import annotations

import argparse
import pathlib
import sys

import rows as row_files


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("before", type=pathlib.Path)
    parser.add_argument("after", type=pathlib.Path)
    parser.add_argument("--all", action="store_true", help="show rows that are the same, too")
    words = parser.parse_args()
    before = {row_files.key_of(row): row for row in row_files.load(words.before)}
    after = {row_files.key_of(row): row for row in row_files.load(words.after)}
    counts = {"same": 0, "faster": 0, "slower": 0}
    width = max((len(name) for name, _ in before | after), default=0)
    for key in before.keys() & after.keys():
        counts[row_files.verdict(before[key], after[key])] += 1
    for key, old in before.items():
        if key not in after:
            continue
        new = after[key]
        answer = row_files.verdict(old, new)
        if answer == "same" and not words.all:
            continue
        print(
            f"{answer:6}  {key[0]:{width}}  {key[1]:4}  "
            f"{row_files.value_text(old, 'median'):>10} -> "
            f"{row_files.value_text(new, 'median'):>10}  "
            f"({row_files.value_of(new, 'median') / row_files.value_of(old, 'median'):.2f} x)"
        )
    print(", ".join(f"{number} {word}" for word, number in counts.items()), end="")
    print(f"; {len(before.keys() ^ after.keys())} rows in one file only")
    return 1 if counts["slower"] else 0


if __name__ == "__main__":
    sys.exit(main())
