"""Writes a C++ file that holds the text of other files: embed_text.py OUT FILE..."""

import pathlib
import sys


def main() -> None:
    """Join the files and spell their bytes as numbers."""
    out, *files = sys.argv[1:]
    data = b"".join(pathlib.Path(name).read_bytes() for name in sorted(files))
    lines = [",".join(str(byte) for byte in data[i : i + 32]) for i in range(0, len(data), 32)]
    pathlib.Path(out).write_text(
        "// Made by workloads/embed_text.py.\n"
        '#include "lm/text_source.h"\n'
        "namespace tessera::workloads {\n"
        "namespace {\n"
        "constexpr unsigned char kText[] = {\n" + ",\n".join(lines) + "};\n"
        "}  // namespace\n"
        "std::string_view own_source_text() {\n"
        "  return {reinterpret_cast<const char*>(kText), sizeof(kText)};\n"
        "}\n"
        "}  // namespace tessera::workloads\n"
    )


main()
