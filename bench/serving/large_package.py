"""How fast a large package is ready, and what several processes with it take of memory.

Makes a package whose tables are holes: the size of a real one, without its disk. Serves it with `--warm-
bytes 0` several times, from the start of the program to its word that it is ready; then, of a gigabyte that
is all in memory, with one and with several processes, and adds up their memory: the proportional share of
each (Pss), and its page tables. Prints one line of JSON per row.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import os
import pathlib
import statistics
import subprocess
import tempfile
import time

ROOT = pathlib.Path(__file__).resolve().parents[2]
TESSERA = os.environ.get("TESSERA_BIN", str(ROOT / "build/release/bin/tessera"))
CHUNK = 4 << 20  # of which a package has a sum each
WHOLE = 0xFFFFFFFF


def step(sum_: int) -> int:
    """CRC-32C of one more byte of 0."""
    for _ in range(8):
        sum_ = sum_ >> 1 ^ (0x82F63B78 if sum_ & 1 else 0)
    return sum_


def crc(data: bytes) -> int:
    sum_ = WHOLE
    for byte in data:
        sum_ = step(sum_ ^ byte)
    return sum_ ^ WHOLE


def crc_of_zeros(count: int) -> int:
    """Of that many bytes of 0: a step is linear, and powers of it are made by squaring."""

    def apply(matrix: list[int], vector: int) -> int:
        result = 0
        for bit in range(32):
            if vector >> bit & 1:
                result ^= matrix[bit]
        return result

    power, sum_ = [step(1 << bit) for bit in range(32)], WHOLE
    while count:
        if count & 1:
            sum_ = apply(power, sum_)
        power = [apply(power, column) for column in power]
        count >>= 1
    return sum_ ^ WHOLE


def grow(small: pathlib.Path, large: pathlib.Path, num_bytes: int) -> None:
    """A package like another one, whose tables have as many rows of 0 as that many bytes hold."""
    large.mkdir()
    text = (small / "MANIFEST.json").read_bytes()
    manifest = json.loads(text)
    del manifest["sha256"]
    model = json.loads((small / "model.json").read_bytes())
    for table in model["tables"]:
        table["rows"] = num_bytes // len(model["tables"]) // table["row_bytes"]
        size = table["rows"] * table["row_bytes"]
        name = f"tables.{table['name']}.weight"
        tensor = manifest["tensors"][name]
        tensor["shape"] = [table["rows"], table["row_bytes"]]
        entry = {"dtype": "U8", "shape": tensor["shape"], "data_offsets": [0, size]}
        header = json.dumps({name: entry}).encode()
        header += b" " * (-(8 + len(header)) % 64)
        header = len(header).to_bytes(8, "little") + header
        region = tensor["regions"][0]
        whole, rest = divmod(size, CHUNK)
        sums = [f"{crc_of_zeros(CHUNK):08x}"] * whole + [f"{crc_of_zeros(rest):08x}"] * (rest > 0)
        region.update(lengths=tensor["shape"], bytes=[len(header), len(header) + size])
        region["crc32c"] = f"{crc_of_zeros(size):08x}"
        if len(sums) > 1:
            region["chunks"] = "".join(sums)
        file = manifest["files"][region["file"]]
        # The sum of a whole file with a header is compared by nobody who serves it.
        file.update(bytes=len(header) + size, header_bytes=len(header), header_crc32c=f"{crc(header):08x}")
        with open(large / file["name"], "wb") as out:
            out.write(header)
            out.truncate(len(header) + size)
    description = json.dumps(model, indent=1).encode()
    for file in manifest["files"]:
        if file["name"] == "model.json":
            file.update(bytes=len(description), crc32c=f"{crc(description):08x}")
            (large / "model.json").write_bytes(description)
        elif file["name"] == "dense.safetensors":
            (large / "dense.safetensors").write_bytes((small / "dense.safetensors").read_bytes())
    # The last line has the sum of those before it.
    lines = json.dumps(manifest, separators=(",", ":"))[:-1].encode() + b",\n"
    (large / "MANIFEST.json").write_bytes(
        lines + b'"sha256":"' + hashlib.sha256(lines).hexdigest().encode() + b'"}\n'
    )


def make(work: pathlib.Path) -> pathlib.Path:
    """A package of 26 tables of 64 columns in int4, and of few rows."""
    words = ["--steps", "1", "--batch", "64", "--tables", "26", "--rows", "100", "--dim", "64"]
    words += ["--bottom", "512,256,64", "--top", "512,256,1", "--eval-samples", "100"]
    for command in (
        ["train", "dlrm", *words, "--save", work / "run"],
        ["export", work / "run", work / "small", "--dtype", "int4"],
    ):
        subprocess.run([TESSERA, *map(str, command)], check=True, stdout=subprocess.DEVNULL)
    return work / "small"


class Server:
    def __init__(self, package: pathlib.Path, *flags: str):
        begin = time.perf_counter()
        self.process = subprocess.Popen(
            [TESSERA, "serve", str(package), "--port", "0", "--admin-port", "-1", "--json", *flags],
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            text=True,
        )
        assert self.process.stdout.readline(), "the server did not start"
        self.seconds = time.perf_counter() - begin

    def __enter__(self):
        return self

    def __exit__(self, *_):
        self.process.terminate()
        self.process.wait()

    def memory(self) -> int:
        """Of all its processes: bytes, each shared one counted once, and page tables."""
        main = self.process.pid
        children = pathlib.Path(f"/proc/{main}/task/{main}/children").read_text().split()
        total = 0
        for process in (main, *children):
            for file, key in (("smaps_rollup", "Pss:"), ("status", "VmPTE:")):
                lines = pathlib.Path(f"/proc/{process}/{file}").read_text().splitlines()
                total += sum(int(line.split()[1]) << 10 for line in lines if line.startswith(key))
        return total


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--gigabytes", type=float, default=10, help="of the package that is started (10)")
    parser.add_argument("--starts", type=int, default=5, help="of it; 0: none (5)")
    parser.add_argument("--processes", type=int, default=4, help="whose memory is added up (4)")
    words = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        work = pathlib.Path(folder)
        small = make(work)
        if words.starts:
            grow(small, work / "large", int(words.gigabytes * 1e9))
            times = []
            for _ in range(words.starts):
                with Server(work / "large", "--warm-bytes", "0", "--no-verify") as server:
                    times.append(server.seconds)
            row = {
                "name": f"serving/start/{words.gigabytes:g}GB",
                "median_us": statistics.median(times) * 1e6,
            }
            print(json.dumps({**row, "worst_us": max(times) * 1e6}), flush=True)
        grow(small, work / "warm", 10**9)
        used = []
        for count in (1, words.processes):
            flags = ["--warm-bytes", str(2 << 30), "--no-verify", "--processes", str(count)]
            with Server(work / "warm", *flags) as server:
                used.append(server.memory())
        row = {"name": f"serving/memory/p{words.processes}", "bytes": used[1], "bytes_of_one": used[0]}
        print(json.dumps({**row, "ratio": used[1] / used[0]}), flush=True)


if __name__ == "__main__":
    main()
