"""Writes a C++ file with what characters are made of, for NFC: normal_form_tables.py OUT."""

import pathlib
import sys
import unicodedata

SYLLABLES = range(0xAC00, 0xAC00 + 19 * 21 * 28)
POINTS = [point for point in range(0x110000) if not 0xD800 <= point <= 0xDFFF and point not in SYLLABLES]


def form(name: str, point: int) -> list[int]:
    """Return a character in a normal form, as code points."""
    return [ord(c) for c in unicodedata.normalize(name, chr(point))]


def pair(point: int) -> list[int]:
    """Return the two characters that a character is written as, or nothing."""
    words = unicodedata.decomposition(chr(point)).split()
    return [int(word, 16) for word in words] if len(words) == 2 and words[0][0] != "<" else []


def ranges(points: set[int]) -> list[tuple[int, int]]:
    """Runs of code points."""
    found: list[tuple[int, int]] = []
    for point in sorted(points):
        if found and found[-1][1] == point - 1:
            found[-1] = (found[-1][0], point)
        else:
            found.append((point, point))
    return found


def array(kind: str, name: str, rows: list[str]) -> str:
    """Return an array and the function that gives it."""
    body = ",".join("{" + row + "}" for row in rows)
    text = f"namespace {{ constexpr {kind} k_{name}[] = {{{body}}}; }}\n"
    return text + f"std::span<const {kind}> {name}() {{ return k_{name}; }}\n"


def main() -> None:
    """Four arrays, sorted by code point."""
    orders = {point: unicodedata.combining(chr(point)) for point in POINTS}
    marks = {point: order for point, order in orders.items() if order}
    parts = {point: form("NFD", point) for point in POINTS}
    parts = {point: points for point, points in parts.items() if points != [point]}
    # A pair that stays two when it is composed is excluded from that.
    wholes = {tuple(two): point for point in parts if (two := pair(point)) and form("NFC", point) == [point]}
    unsettled = set(marks) | {second for _, second in wholes}
    unsettled |= {point for point in parts if form("NFC", point) != [point]}
    unsettled |= {point for point, points in parts.items() if points[0] in unsettled}
    unsettled |= {*range(0x1161, 0x1161 + 21), *range(0x11A8, 0x11A8 + 27)}  # vowels and tails of syllables
    text = '// Made by workloads/lm/normal_form_tables.py.\n#include "lm/normal_form_tables.h"\n'
    text += "namespace tessera::workloads::lm {\n"
    text += array("Mark", "marks", [f"{point},{order}" for point, order in sorted(marks.items())])
    rows = [f"{p},{len(points)},{{{','.join(map(str, points))}}}" for p, points in sorted(parts.items())]
    text += array("Parts", "decompositions", rows)
    rows = [f"{first},{second},{whole}" for (first, second), whole in sorted(wholes.items())]
    text += array("Composition", "compositions", rows)
    text += array("CodePoints", "unsettled_points", [f"{a},{b}" for a, b in ranges(unsettled)])
    text += "}  // namespace tessera::workloads::lm\n"
    pathlib.Path(sys.argv[1]).write_text(text)


main()
