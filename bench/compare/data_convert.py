"""Times `tessera data convert` of CSV and Parquet beside pandas and pyarrow. One core each.

Prints one line of JSON per row. `pandas` does with its own functions what a conversion does: logarithms,
hashes, bags of ids, and arrays on the disk. `pandas_reads` and `pyarrow_reads` read the columns into memory,
and no more. The floor is to read the file, and to write and sync as many bytes as the log has. Then the same
table is trained on: from its log, from Parquet that was seen before, and from Parquet that is converted
within the time; as wall time, and as time of processors, which other work on the machine moves less.
"""

from __future__ import annotations

import argparse
import importlib.util
import json
import os
import pathlib
import resource
import shutil
import statistics
import subprocess
import sys
import tempfile
import time

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq

ROOT = pathlib.Path(__file__).resolve().parents[2]
TESSERA = os.environ.get("TESSERA_BIN", str(ROOT / "build/release/bin/tessera"))
PEERS = {
    ("csv", "pyarrow_reads"): "import pyarrow, pyarrow.csv as c; pyarrow.set_cpu_count(1); "
    "c.read_csv(FILE, read_options=c.ReadOptions(use_threads=False))",
    ("parquet", "pyarrow_reads"): "import pyarrow.parquet as q; q.read_table(FILE, use_threads=False)",
    ("csv", "pandas_reads"): "import pandas; pandas.read_csv(FILE)",
    ("parquet", "pandas_reads"): "import pandas; pandas.read_parquet(FILE, use_threads=False)",
    ("csv", "pandas"): "convert(pandas.read_csv(FILE))",
    ("parquet", "pandas"): "convert(pandas.read_parquet(FILE, use_threads=False))",
}
DENSE, HASHED, WHOLE = 6, 8, 4
# The fastest of several ways: texts are hashed once per distinct value, and the cells of several values are
# joined to be cut all at once, in half the time of split and explode.
PANDAS_CONVERT = """
import numpy as np, pandas
def ids(texts, rows):
    places, values = pandas.factorize(texts)
    hashes = pandas.util.hash_array(np.asarray(values, dtype=object), categorize=False)
    return (hashes % rows).astype(np.uint32)[places]
def convert(table):
    out = {"label": table["clicked"].to_numpy().astype(np.uint8)}
    dense = [n for n in table.columns if n.startswith("number_")]
    out["dense"] = np.log1p(table[dense].to_numpy(np.float32).clip(0))
    for n in table.columns:
        if n.startswith("text_"):
            out[n] = ids(table[n], 100000)
        elif n.startswith("id_"):
            if table[n].min() < 0 or table[n].max() >= 1000000: raise ValueError(n)
            out[n] = table[n].to_numpy().astype(np.uint32)
    out["lengths"] = table["tags"].str.count("[|]").to_numpy() + 1
    out["tags"] = ids(np.array(table["tags"].str.cat(sep="|").split("|"), dtype=object), 100)
    np.savez(PATH + ".npz", **out)
"""


def make_tables(folder: pathlib.Path, rows: int) -> None:
    """A click table: a label, numbers, texts, whole ids, and several tags in a cell."""
    numbers = np.random.default_rng(1)
    columns = {"clicked": numbers.integers(0, 2, rows)}
    for i in range(DENSE):
        columns[f"number_{i}"] = np.round(numbers.lognormal(2, 1, rows), 3)
    for i in range(HASHED):
        ids = numbers.zipf(1.3, rows) % 100000
        columns[f"text_{i}"] = np.char.add("value-", ids.astype(str))
    for i in range(WHOLE):
        columns[f"id_{i}"] = numbers.integers(0, 1000000, rows)
    tags = np.array(["new", "sale", "red", "blue", "green", "used"])
    parts = tags[numbers.integers(0, len(tags), (rows, 3))]
    columns["tags"] = np.char.add(
        np.char.add(np.char.add(np.char.add(parts[:, 0], "|"), parts[:, 1]), "|"), parts[:, 2]
    )
    table = pa.table(columns)
    pq.write_table(table, folder / "table.parquet")
    import pyarrow.csv as csv

    csv.write_csv(table, folder / "table.csv", csv.WriteOptions(quoting_style="none"))
    schema = '[label]\ncolumn = "clicked"\n'
    schema += "".join(f'[[dense]]\ncolumn = "number_{i}"\nlog1p = true\n' for i in range(DENSE))
    schema += "".join(f'[[feature]]\ncolumn = "text_{i}"\nrows = 100000\n' for i in range(HASHED))
    schema += "".join(
        f'[[feature]]\ncolumn = "id_{i}"\nkind = "integer"\nrows = 1000000\n' for i in range(WHOLE)
    )
    schema += '[[feature]]\ncolumn = "tags"\nrows = 100\nseparator = "|"\n'
    (folder / "schema.toml").write_text(schema)


def seconds_inside(code: str, path: pathlib.Path) -> float:
    """The time of the second reading of a fresh interpreter, on one core: imports are not the reader's."""
    timed = (
        (PANDAS_CONVERT if code.startswith("convert") else "")
        + "import time\n"
        + "for _ in range(2):\n b = time.perf_counter()\n "
        + code.replace("FILE", "PATH")
    )
    timed = f"PATH = {str(path)!r}\n{timed}\nprint(time.perf_counter() - b)"
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "ARROW_NUM_THREADS": "1"}
    words = ["taskset", "-c", "0", sys.executable, "-c", timed]
    result = subprocess.run(words, check=True, capture_output=True, text=True, env=environment)
    return float(result.stdout)


def converted(folder: pathlib.Path, name: str) -> float:
    words = ["taskset", "-c", "0", TESSERA, "data", "convert", "--schema", folder / "schema.toml"]
    words += [folder / name, "--out", folder / "out.click", "--json"]
    return json.loads(subprocess.run(words, check=True, capture_output=True, text=True).stdout)["seconds"]


def moved(path: pathlib.Path, log_bytes: int) -> float:
    """The time of what no conversion can do without: reading the file, writing and syncing a log."""
    part = bytearray(1 << 20)
    begin = time.perf_counter()
    with open(path, "rb", buffering=0) as file:
        while file.readinto(part):
            pass
    with open(path.with_suffix(".floor"), "wb", buffering=0) as file:
        for start in range(0, log_bytes, len(part)):
            file.write(memoryview(part)[: log_bytes - start])
        os.fsync(file.fileno())
    return time.perf_counter() - begin


def trained(folder: pathlib.Path, name: str, cache: str) -> tuple[float, float]:
    """Wall and processor time of a whole `tessera train dlrm`, start and end of the processes included."""
    words = [TESSERA, "train", "dlrm", "--data", folder / name, "--epochs", "2", "--dim", "16"]
    words += ["--bottom", "64,16", "--top", "64,1", "--eval-every", "0", "--keep-model", "none"]
    if name.endswith(".parquet"):
        words += ["--schema", folder / "schema.toml"]
    environment = {**os.environ, "TESSERA_CACHE": str(folder / cache)}
    begin, used = time.perf_counter(), resource.getrusage(resource.RUSAGE_CHILDREN)
    subprocess.run(words, check=True, capture_output=True, env=environment, cwd=folder)
    end, after = time.perf_counter(), resource.getrusage(resource.RUSAGE_CHILDREN)
    return end - begin, after.ru_utime + after.ru_stime - used.ru_utime - used.ru_stime


def time_trainings(folder: pathlib.Path, repetitions: int) -> dict[str, list[tuple[float, float]]]:
    """Take turns at being first; the first training from Parquet of each turn has an empty cache."""
    converted(folder, "table.parquet")
    times: dict[str, list[tuple[float, float]]] = {}
    log, parquet = ("log", "out.click"), ("parquet", "table.parquet")
    for turn in range(repetitions):
        new = ("parquet_new", "table.parquet")
        for who, name in (new, parquet, log) if turn % 2 else (log, new, parquet):
            times.setdefault(who, []).append(trained(folder, name, f"cache-{turn}"))
        shutil.rmtree(folder / f"cache-{turn}")
    return times


def print_row(kind: str, who: str, times: list[float], size: int, rows: int, **more: float) -> None:
    deciles = statistics.quantiles(times, n=10, method="inclusive")
    row = {
        "name": f"data/{kind}/{who}/{rows}",
        "ranks": 0,
        "threads": 1,
        "isa": "",
        "device": "cpu",
        "state": "",
        "median_us": round(1e6 * statistics.median(times), 1),
        "p10_us": round(1e6 * deciles[0], 1),
        "p90_us": round(1e6 * deciles[8], 1),
        "bytes": size,
        "repetitions": len(times),
        **more,
    }
    print(json.dumps(row), flush=True)


def main() -> int:
    """Make the tables, then take turns, so that all see the same machine."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--rows", type=int, default=500000)
    parser.add_argument("--repetitions", type=int, default=15, help="of conversions, two at least")
    parser.add_argument("--trainings", type=int, default=15, help="of each kind; 0 or two at least")
    words = parser.parse_args()
    peers = PEERS
    if importlib.util.find_spec("pandas") is None:
        print("data_convert: without pandas, which make peers installs", file=sys.stderr)
        peers = {key: code for key, code in PEERS.items() if not key[1].startswith("pandas")}
    with tempfile.TemporaryDirectory() as name:
        folder = pathlib.Path(name)
        make_tables(folder, words.rows)
        times: dict[tuple[str, str], list[float]] = {}
        floors: dict[str, list[float]] = {}
        for _ in range(words.repetitions):
            for kind in ("csv", "parquet"):
                path = folder / f"table.{kind}"
                times.setdefault((kind, "tessera"), []).append(converted(folder, path.name))
                log_bytes = (folder / "out.click").stat().st_size
                floors.setdefault(kind, []).append(moved(path, log_bytes))
                for (of, who), code in peers.items():
                    if of == kind:
                        times.setdefault((kind, who), []).append(seconds_inside(code, path))
        for (kind, who), some in times.items():
            size = (folder / f"table.{kind}").stat().st_size
            more = {"megabytes_per_second": round(size / 1e6 / statistics.median(some), 1)}
            if not who.endswith("_reads"):
                more["floor_us"] = round(1e6 * statistics.median(floors[kind]), 1)
                size += log_bytes
            print_row(f"convert_{kind}", who, some, size, words.rows, **more)
        for who, some in time_trainings(folder, words.trainings).items():
            print_row("train_from", who, [wall for wall, _ in some], log_bytes, words.rows)
            print_row("train_processor", who, [used for _, used in some], log_bytes, words.rows)
    return 0


if __name__ == "__main__":
    sys.exit(main())
