"""Times `tessera data convert` of CSV and Parquet beside pandas and pyarrow, which only read. One core each.

Prints one line of JSON per row. The rows named `pandas` and `pyarrow` read the columns into memory, and no
more; `pandas_convert` does with pandas' own functions what a conversion does: logarithms, hashes, bags of
ids, and arrays on the disk. pandas is left out where it is not installed. Then the same table is trained on:
from its log, from Parquet that was seen before, and from Parquet that is converted within the time; as wall
time, and as time of processors, which other work on the machine moves less.
"""

from __future__ import annotations

import argparse
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
    ("csv", "pyarrow"): "import pyarrow, pyarrow.csv as c; pyarrow.set_cpu_count(1); "
    "c.read_csv(FILE, read_options=c.ReadOptions(use_threads=False))",
    ("parquet", "pyarrow"): "import pyarrow.parquet as q; q.read_table(FILE, use_threads=False)",
    ("csv", "pandas"): "import pandas; pandas.read_csv(FILE)",
    ("parquet", "pandas"): "import pandas; pandas.read_parquet(FILE, use_threads=False)",
    ("csv", "pandas_convert"): "convert(pandas.read_csv(FILE))",
    ("parquet", "pandas_convert"): "convert(pandas.read_parquet(FILE, use_threads=False))",
}
DENSE, HASHED, WHOLE = 6, 8, 4
# The fastest that pandas offers: texts are hashed once per distinct value.
PANDAS_CONVERT = """
import numpy as np, pandas
def ids(texts, rows):
    return (pandas.util.hash_array(texts.to_numpy(dtype=object), categorize=True) % rows).astype(np.uint32)
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
    bags = table["tags"].str.split("|")
    out["lengths"] = bags.str.len().to_numpy()
    out["tags"] = ids(bags.explode(), 100)
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
    words = [
        "taskset",
        "-c",
        "0",
        TESSERA,
        "data",
        "convert",
        "--schema",
        folder / "schema.toml",
        folder / name,
    ]
    words += ["--out", folder / "out.click", "--json"]
    return json.loads(subprocess.run(words, check=True, capture_output=True, text=True).stdout)["seconds"]


def trained(folder: pathlib.Path, name: str, cache: str) -> tuple[float, float]:
    """Wall and processor time of a whole `tessera train dlrm`, start and end of the processes included."""
    words = [TESSERA, "train", "dlrm", "--data", folder / name, "--epochs", "2", "--dim", "16"]
    words += [
        "--bottom",
        "64,16",
        "--top",
        "64,1",
        "--eval-every",
        "0",
        "--keep-model",
        "none",
    ]
    if name.endswith(".parquet"):
        words += ["--schema", folder / "schema.toml"]
    environment = {**os.environ, "TESSERA_CACHE": str(folder / cache)}
    begin, used = time.perf_counter(), resource.getrusage(resource.RUSAGE_CHILDREN)
    subprocess.run(words, check=True, capture_output=True, env=environment, cwd=folder)
    end, after = time.perf_counter(), resource.getrusage(resource.RUSAGE_CHILDREN)
    return end - begin, after.ru_utime + after.ru_stime - used.ru_utime - used.ru_stime


def time_trainings(folder: pathlib.Path, repetitions: int) -> dict[str, list[tuple[float, float]]]:
    """Take turns; the first training from Parquet of each turn has an empty cache."""
    converted(folder, "table.parquet")
    times: dict[str, list[tuple[float, float]]] = {}
    for turn in range(repetitions):
        for who, name in (
            ("log", "out.click"),
            ("parquet_new", "table.parquet"),
            ("parquet", "table.parquet"),
        ):
            times.setdefault(who, []).append(trained(folder, name, f"cache-{turn}"))
        shutil.rmtree(folder / f"cache-{turn}")
    return times


def print_row(kind: str, who: str, times: list[float], size: int, rows: int) -> None:
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
        "megabytes_per_second": round(size / 1e6 / statistics.median(times), 1),
    }
    print(json.dumps(row), flush=True)


def main() -> int:
    """Make the tables, then take turns, so that all see the same machine."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--rows", type=int, default=1000000)
    parser.add_argument("--repetitions", type=int, default=5)
    words = parser.parse_args()
    import importlib.util

    peers = {key: code for key, code in PEERS.items() if importlib.util.find_spec(key[1].partition("_")[0])}
    with tempfile.TemporaryDirectory() as name:
        folder = pathlib.Path(name)
        make_tables(folder, words.rows)
        times: dict[tuple[str, str], list[float]] = {}
        for _ in range(words.repetitions):
            for kind in ("csv", "parquet"):
                path = folder / f"table.{kind}"
                times.setdefault((kind, "tessera"), []).append(converted(folder, path.name))
                for (of, who), code in peers.items():
                    if of == kind:
                        times.setdefault((kind, who), []).append(seconds_inside(code, path))
        for (kind, who), some in times.items():
            print_row(f"convert_{kind}", who, some, (folder / f"table.{kind}").stat().st_size, words.rows)
        size = (folder / "out.click").stat().st_size
        for who, some in time_trainings(folder, words.repetitions).items():
            print_row("train_from", who, [wall for wall, _ in some], size, words.rows)
            print_row("train_processor", who, [used for _, used in some], size, words.rows)
    return 0


if __name__ == "__main__":
    sys.exit(main())
