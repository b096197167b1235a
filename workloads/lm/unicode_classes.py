"""Writes a C++ file with the ranges of letters and numbers among all characters: unicode_classes.py OUT."""

import pathlib
import sys
import unicodedata


def ranges(first_letter: str) -> list[tuple[int, int]]:
    """Runs of code points whose category begins with a letter."""
    found: list[tuple[int, int]] = []
    for point in range(0x110000):
        if not unicodedata.category(chr(point)).startswith(first_letter):
            continue
        if found and found[-1][1] == point - 1:
            found[-1] = (found[-1][0], point)
        else:
            found.append((point, point))
    return found


def main() -> None:
    """One array for letters, one for numbers."""
    text = '// Made by workloads/lm/unicode_classes.py.\n#include "lm/unicode_classes.h"\n'
    text += "namespace tessera::workloads::lm {\nnamespace {\n"
    for name, letter in (("kLetters", "L"), ("kNumbers", "N")):
        pairs = ",".join(f"{{{first},{last}}}" for first, last in ranges(letter))
        text += f"constexpr CodePoints {name}[] = {{{pairs}}};\n"
    text += "}  // namespace\n"
    text += "std::span<const CodePoints> letters() { return kLetters; }\n"
    text += "std::span<const CodePoints> numbers() { return kNumbers; }\n"
    text += "}  // namespace tessera::workloads::lm\n"
    pathlib.Path(sys.argv[1]).write_text(text)


main()
