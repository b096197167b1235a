"""`tessera train dlrm --ids unlimited`: raw logs, streams, files that grow, other numbers of ranks."""

from __future__ import annotations

import hashlib
import json
import os
import pathlib
import random
import signal
import subprocess
import time

import numpy as np
import pytest
import safetensors.numpy
from full_disk import full_disk

try:
    import pyarrow as pa
    import pyarrow.parquet as pq
except ImportError:
    pa = pq = None

ROOT = pathlib.Path(__file__).resolve().parents[2]
TESSERA = os.environ.get("TESSERA_BIN", str(ROOT / "build/release/bin/tessera"))
WORDS = ["red", "green", "blue", "ünï", "x9", "große"]
LIMIT = 180.0  # seconds; for a loaded machine, not a figure
SMALL = ["--dim", "8", "--bottom", "16,8", "--top", "16,1", "--ids", "unlimited"]
SCHEMA = """
[label]
column = "clicked"

[[dense]]
column = "price"

[[feature]]
column = "user"
kind = "integer"
rows = 1

[[feature]]
column = "words"
kind = "hash"
rows = 1
separator = " "
"""


def lines_of(count, seed=5):
    draw = random.Random(seed)
    for _ in range(count):
        user = draw.choice([draw.randrange(40), -draw.randrange(2**63), draw.randrange(2**63)])
        words = " ".join(
            draw.choice(["red", "green", "blue", "ünï", "x9", "große"]) for _ in range(draw.randrange(3))
        )
        yield f"{int(draw.random() < 0.3)},{draw.random():.3f},{user},{words}\n"


@pytest.fixture
def log(tmp_path):
    (tmp_path / "log.toml").write_text(SCHEMA)
    path = tmp_path / "log.csv"
    path.write_text("clicked,price,user,words\n" + "".join(lines_of(1200)))
    return path


def command(tmp_path, *flags, has_schema=True):
    schema = ["--schema", str(tmp_path / "log.toml")] if has_schema else []
    return [TESSERA, "train", "dlrm", "--runs", str(tmp_path / "runs"), *SMALL, *schema, *flags]


def train(tmp_path, *flags, code=0, text=None, has_schema=True):
    words = command(tmp_path, *flags, has_schema=has_schema)
    result = subprocess.run(words, capture_output=True, text=True, timeout=LIMIT, input=text)
    assert result.returncode == code, result.stdout + result.stderr
    return result


def answer(tmp_path, *flags, text=None):
    return json.loads(train(tmp_path, "--json", *flags, text=text).stdout)


def metrics(folder, kind):
    lines = (pathlib.Path(folder) / "metrics.jsonl").read_text().splitlines()
    return [line for line in map(json.loads, lines) if line["kind"] == kind]


def test_trains_on_texts_and_numbers_as_they_are(tmp_path, log):
    found = answer(tmp_path, "--data", str(log), "--batch", "64", "--steps", "12")
    assert found["ids"] == found["ids_admitted"] > 400
    assert 0 < found["id_hit_rate"] < 1
    folder = pathlib.Path(found["report"]).parent
    growth = metrics(folder, "growth")
    assert [table["name"] for table in growth[-1]["tables"]] == ["user", "words"]
    assert growth[-1]["tables"][1]["ids"] == 6  # the different words
    page = (folder / "report.html").read_text()
    assert '"growth":[{"step":' in page and '"hit_rate":' in page


def test_unsigned_numbers_of_64_bits_are_the_ids_of_their_bits(tmp_path):
    """Hashes above 2^63, which half of all are; none is left out as no number, however it is stored."""
    draw = random.Random(9)
    users = [2**63 - 1, 2**63, 2**64 - 1] + [draw.randrange(2**64) for _ in range(37)]
    records = [(n % 2, n / 10, users[n % len(users)]) for n in range(160)]
    names = ("clicked", "price", "user")
    schema = SCHEMA[: SCHEMA.index("[[feature]]", SCHEMA.index("integer"))]
    schema += '[[feature]]\ncolumn = "user"\nname = "digits"\nkind = "hash"\nrows = 1\n'
    text = ",".join(names) + "\n" + "".join("{},{},{}\n".format(*one) for one in records)
    (tmp_path / "log.csv").write_text(text)
    (tmp_path / "log.jsonl").write_text(
        "".join(json.dumps(dict(zip(names, one, strict=True))) + "\n" for one in records)
    )
    clicked, price, user = zip(*records, strict=True)
    columns = {"clicked": np.array(clicked), "price": np.array(price), "user": np.array(user, np.uint64)}
    np.savez(tmp_path / "log.npz", **columns)
    kinds = ["csv", "-", "jsonl", "npz"]
    if (pathlib.Path(TESSERA).parent.parent / "lib/libtessera_parquet.so").exists() and pq is not None:
        pq.write_table(pa.table(columns), tmp_path / "log.parquet")
        kinds.append("parquet")

    def ids_of(kind, table):
        words = [TESSERA, "ckpt", "ids", str(tmp_path / f"run{kind}"), "--table", table]
        listed = subprocess.run(words, capture_output=True, text=True, timeout=LIMIT, check=True).stdout
        return {int(line.split(",")[0]) for line in listed.splitlines()[1:]}

    for kind in kinds:
        (tmp_path / "log.toml").write_text(('format = "jsonl"\n' if kind == "jsonl" else "") + schema)
        data = "-" if kind == "-" else str(tmp_path / f"log.{kind}")
        flags = ["--data", data, "--batch", "32", "--epochs", "1", "--save", str(tmp_path / f"run{kind}")]
        answer(tmp_path, *flags, text=text if kind == "-" else None)
        assert ids_of(kind, "user") == {user - 2**64 if user >= 2**63 else user for user in users}, kind
        assert ids_of(kind, "digits") == ids_of("csv", "digits"), kind


def test_numbers_of_more_than_64_bits_are_refused(tmp_path):
    (tmp_path / "log.toml").write_text(SCHEMA)
    log = tmp_path / "log.csv"
    log.write_text("clicked,price,user,words\n" + "1,0.5,18446744073709551616,a\n" * 3)
    told = train(tmp_path, "--data", str(log), "--steps", "1", code=65).stderr
    assert "'18446744073709551616' is not a whole number of 64 bits" in told


def test_a_schema_is_guessed(tmp_path, log):
    """Numbers that are not row numbers are taken for texts then; every one is an id of its own either way."""
    flags = ["--data", str(log), "--batch", "64", "--steps", "8", "--json"]
    growth = []
    for has_schema in (True, False):
        found = json.loads(train(tmp_path, *flags, has_schema=has_schema).stdout)
        tables = metrics(pathlib.Path(found["report"]).parent, "growth")[-1]["tables"]
        growth.append({table["name"]: (table["ids"], table["hit_rate"]) for table in tables})
    assert growth[0] == growth[1]
    assert growth[0]["user"][0] > 100 and growth[0]["words"][0] == 6


def test_ids_are_a_section_of_the_configuration(tmp_path, log):
    config = tmp_path / "job.toml"
    config.write_text(
        "steps = 3\nbatch = 64\n[ids]\nkind = unlimited\ncapacity = 5000\nadmission = freq:2\n"
        'eviction = "lru"\ndefault = "init"\nstrings = "check"\n'
    )
    words = [TESSERA, "train", "dlrm", "--config", str(config), "--print-config"]
    shown = subprocess.run(words, capture_output=True, text=True, timeout=LIMIT, check=True).stdout
    for line in ('ids="unlimited"', "id-capacity=5000", 'id-admission="freq:2"', 'id-eviction="lru"'):
        assert line + "\n" in shown
    assert 'id-default="init"\n' in shown and 'strings="check"\n' in shown
    found = answer(tmp_path, "--data", str(log), "--config", str(config), "--id-admission", "always")
    assert found["steps"] == 3 and found["ids"] > 20
    folder = pathlib.Path(found["report"]).parent
    # All texts of the log were seen at the door; none of the few shares the id of another.
    assert found["texts"] == 6 and found["text_clashes"] == 0
    assert metrics(folder, "growth")[-1]["texts"] == {"seen": 6, "clashes": 0}
    config.write_text("[ids]\nkind = unlimited\ncapacitys = 3\n")
    told = subprocess.run(words, capture_output=True, text=True, timeout=LIMIT)
    assert told.returncode == 78 and "line 3: there is no key 'ids.capacitys'" in told.stderr
    config.write_text("id-capacity = 3\n[ids]\ncapacity = 3\n")
    told = subprocess.run(words, capture_output=True, text=True, timeout=LIMIT)
    assert told.returncode == 78 and "line 3: id-capacity is set again" in told.stderr


def test_trains_on_criteos_format(tmp_path):
    """26 columns of texts, each a table that grows; an empty field is no id."""
    draw = random.Random(8)
    lines, texts = [], [set() for _ in range(26)]
    for number in range(320):
        dense = [str(draw.randrange(-1, 50)) if draw.random() < 0.8 else "" for _ in range(13)]
        words = [f"{draw.randrange(30 + column):08x}" if draw.random() < 0.9 else "" for column in range(26)]
        lines.append("\t".join([str(draw.randrange(2)), *dense, *words]))
        if number < 288:  # the last tenth is for evaluation, from which nothing is learned
            for seen, text in zip(texts, words, strict=True):
                seen.update([text] if text else [])
    path = tmp_path / "day_0"
    path.write_text("\n".join(lines) + "\n")
    for ranks in (1, 2):
        flags = ["--data", str(path), "--steps", "9", "--ranks", str(ranks), "--batch", str(32 // ranks)]
        found = json.loads(train(tmp_path, "--json", *flags, has_schema=False).stdout)
        tables = metrics(pathlib.Path(found["report"]).parent, "growth")[-1]["tables"]
        assert [table["ids"] for table in tables] == [len(seen) for seen in texts]
        assert found["ids"] == found["ids_admitted"] == sum(len(seen) for seen in texts)


def test_a_checkpoint_of_another_hash_is_refused(tmp_path, log):
    flags = ["--data", str(log), "--batch", "64", "--save", str(tmp_path / "run")]
    train(tmp_path, *flags, "--steps", "3")
    found = (tmp_path / "run").rglob("MANIFEST.json")
    manifests = {path.stat().st_ino: path for path in found}  # the best one has a second name
    assert manifests
    for path in manifests.values():  # as another program would have written it
        body, _, _ = path.read_text().rpartition('"sha256":"')
        assert '"xmx64-1"' in body
        body = body.replace('"xmx64-1"', '"murmur-3"')
        path.write_text(f'{body}"sha256":"{hashlib.sha256(body.encode()).hexdigest()}"}}\n')
    for ranks in (1, 2):
        words = ["--resume", str(tmp_path / "run"), "--steps", "5", "--ranks", str(ranks)]
        words += ["--batch", str(64 // ranks)]
        told = train(tmp_path, *words, code=65).stderr
        assert "ids were hashed by 'murmur-3'; this program hashes them by 'xmx64-1'" in told


def test_texts_of_a_stream_are_checked(tmp_path, log):
    flags = ["--epochs", "1", "--batch", "50", "--ranks", "2", "--strings", "check"]
    piped = answer(tmp_path, "--data", "-", *flags, text=log.read_text())
    assert piped["texts"] == 6 and piped["text_clashes"] == 0


def test_every_number_of_ranks_has_the_same_ids(tmp_path, log):
    flags = ["--data", str(log), "--steps", "6", "--id-admission", "freq:2"]
    one = answer(tmp_path, *flags, "--batch", "96", "--save", str(tmp_path / "one"))
    three = answer(tmp_path, *flags, "--batch", "32", "--ranks", "3", "--save", str(tmp_path / "three"))
    assert one["ids"] == three["ids"] and one["id_hit_rate"] == three["id_hit_rate"]
    assert three["loss"] == pytest.approx(one["loss"], rel=1e-5)

    # Ids can be had from checkpoints.
    def ids_of(name, *flags):
        words = [TESSERA, "ckpt", "ids", str(tmp_path / name), *flags]
        listed = subprocess.run(words, capture_output=True, text=True, timeout=LIMIT, check=True).stdout
        return [tuple(map(int, line.split(","))) for line in listed.splitlines()[1:]]

    users = ids_of("one", "--table", "user")
    assert len(users) == metrics(tmp_path / "one", "growth")[-1]["tables"][0]["ids"]
    assert [row for _, row, _, _ in users] == list(range(len(users)))
    as_set = {(one, count, last) for one, _, count, last in users}
    assert as_set == {(one, count, last) for one, _, count, last in ids_of("three", "--table", "user")}
    ids_of("one", "--table", "user", "--to", str(tmp_path / "user.npy"))
    assert np.load(tmp_path / "user.npy").tolist() == [list(row) for row in users]
    ids_of("one", "--table", "user", "--to", str(tmp_path / "user.safetensors"))
    columns = safetensors.numpy.load_file(tmp_path / "user.safetensors")
    lists = [columns[name].tolist() for name in ("id", "row", "count", "last_step")]
    assert list(zip(*lists, strict=True)) == [tuple(row) for row in users]
    # Whole or not at all, and never over what they are read from.
    words = [TESSERA, "ckpt", "ids", str(tmp_path / "one"), "--table", "user", "--to"]
    for path in tmp_path.glob("user.*"):
        path.write_text("good")
        told = subprocess.run(
            [*words, str(path)], capture_output=True, text=True, timeout=LIMIT, preexec_fn=full_disk
        )
        assert told.returncode == 65 and "File too large" in told.stderr
        assert path.read_text() == "good" and list(tmp_path.glob("user.*partial*")) == []
    shard = next(tmp_path.glob("one/checkpoints/step-*/shard-*.safetensors"))
    before = shard.read_bytes()
    told = subprocess.run([*words, str(shard)], capture_output=True, text=True, timeout=LIMIT)
    assert told.returncode == 65 and "is read and cannot be written too." in told.stderr
    assert shard.read_bytes() == before
    words = [TESSERA, "ckpt", "ids", str(tmp_path / "one"), "--table", "user", "--to", "user.txt"]
    told = subprocess.run(words, capture_output=True, text=True, timeout=LIMIT)
    assert told.returncode == 2 and "written to .csv, .npy or .safetensors, not user.txt" in told.stderr
    words = words[:4]
    told = subprocess.run(words, capture_output=True, text=True, timeout=LIMIT)
    assert told.returncode == 2 and "user, words" in told.stderr
    # On other ranks it goes on.
    on = [*flags[:2], "--steps", "9"]
    again = answer(tmp_path, *on, "--resume", str(tmp_path / "three"), "--ranks", "2", "--batch", "48")
    straight = answer(tmp_path, *on, "--resume", str(tmp_path / "one"))
    assert again["steps"] == straight["steps"] == 9
    assert again["ids"] == straight["ids"]
    assert again["loss"] == pytest.approx(straight["loss"], rel=1e-5)


def test_a_stream_trains_to_its_end(tmp_path, log):
    text = log.read_text()
    flags = ["--epochs", "1", "--batch", "50", "--ranks", "2"]
    piped = answer(tmp_path, "--data", "-", *flags, text=text)
    assert piped["steps"] == 12  # 1,200 samples, 100 a step
    line = train(tmp_path, "--data", "-", *flags, text=text).stdout
    assert "ids " in line and "/12" not in line
    # Checkpoints on the way, and one at the end; each holds the ids seen until then.
    folder = tmp_path / "run"
    flags += ["--checkpoint-every", "5", "--keep", "9", "--save", str(folder)]
    saved = answer(tmp_path, "--data", "-", *flags, text=text)
    assert saved["steps"] == 12 and saved["ids"] == piped["ids"]
    assert checkpoints_of(folder) == [12, 10, 5]
    counts = []
    for step in (5, 10, 12):
        words = [TESSERA, "ckpt", "ids", str(folder), "--table", "user", "--step", str(step)]
        listed = subprocess.run(words, capture_output=True, text=True, timeout=LIMIT, check=True).stdout
        counts.append(len(listed.splitlines()) - 1)
    users = [int(one.split(",")[2]) for one in text.splitlines()[1:]]
    assert counts == [len(set(users[: 100 * step])) for step in (5, 10, 12)]
    # A pipe goes on as it comes: what it brings now is new.
    resumed = answer(
        tmp_path, "--resume", str(folder), text=text.splitlines()[0] + "\n" + "".join(lines_of(300, seed=6))
    )
    assert resumed["first_step"] == 12 and resumed["steps"] == 15


def checkpoints_of(folder):
    """Return the steps of the whole checkpoints of a run that goes on, once there are some."""
    deadline = time.monotonic() + LIMIT
    while True:
        words = [TESSERA, "ckpt", "ls", str(folder), "--json"]
        listed = subprocess.run(words, capture_output=True, text=True, timeout=LIMIT)
        if listed.returncode == 0:
            rows = json.loads(listed.stdout)["checkpoints"]
            if steps := [row["step"] for row in rows if row["state"] == "whole"]:
                return steps
        assert time.monotonic() < deadline, listed.stderr
        time.sleep(0.05)


def test_a_file_that_grows_is_followed_until_told_to_stop(tmp_path, log):
    folder = tmp_path / "run"
    flags = ["--data", str(log), "--follow", "--epochs", "1", "--batch", "50", "--save", str(folder)]
    with subprocess.Popen(
        command(tmp_path, *flags, "--checkpoint-every", "10"), stdout=subprocess.PIPE, text=True
    ) as process:

        def wait_for(step):
            deadline = time.monotonic() + LIMIT
            while not (folder / "metrics.jsonl").exists() or len(metrics(folder, "step")) < step:
                assert process.poll() is None and time.monotonic() < deadline
                time.sleep(0.05)

        # A step is done when the samples of the next one have come.
        wait_for(23)
        # Checkpoints are there on the way; the last one may be written still.
        assert set(checkpoints_of(folder)) & {10, 20} and process.poll() is None
        with log.open("a") as file:
            file.writelines(lines_of(200, seed=6))
        wait_for(27)
        process.send_signal(signal.SIGTERM)
        assert process.wait(LIMIT) == 0
    assert len(metrics(folder, "step")) == 28
    # What was read is not read again.
    with log.open("a") as file:
        file.writelines(lines_of(100, seed=7))
    resumed = answer(tmp_path, "--resume", str(folder), "--steps", "30", "--epochs", "0")
    assert resumed["first_step"] == 28 and resumed["steps"] == 30


def test_a_killed_run_goes_on_with_other_ranks_to_the_same_ids(tmp_path, log):
    flags = ["--data", str(log), "--steps", "10", "--id-admission", "freq:2", "--checkpoint-every", "2"]
    train(tmp_path, *flags, "--batch", "96", "--save", str(tmp_path / "straight"))
    folder = tmp_path / "killed"
    words = command(tmp_path, *flags, "--batch", "48", "--ranks", "2", "--save", str(folder))
    # It begins again on other ranks after every SIGKILL; 96 samples a step all the while.
    for step, ranks in ((3, 3), (6, 1)):
        with subprocess.Popen(words, stdout=subprocess.DEVNULL, start_new_session=True) as process:
            deadline = time.monotonic() + LIMIT
            while process.poll() is None:
                done = metrics(folder, "step") if (folder / "metrics.jsonl").exists() else []
                if done and done[-1]["step"] >= step:
                    break
                assert time.monotonic() < deadline
                time.sleep(0.01)
            os.killpg(process.pid, signal.SIGKILL)
        words = command(tmp_path, "--resume", str(folder), "--ranks", str(ranks), "--batch", str(96 // ranks))
    last = subprocess.run(words, capture_output=True, text=True, timeout=LIMIT)
    assert last.returncode == 0, last.stdout + last.stderr

    def ids_of(root):
        words = [TESSERA, "ckpt", "ids", str(root), "--table", "user"]
        listed = subprocess.run(words, capture_output=True, text=True, timeout=LIMIT, check=True).stdout
        rows = [line.split(",") for line in listed.splitlines()[1:]]
        return {row[0]: (row[2], row[3]) for row in rows}, len(rows)

    straight, count = ids_of(tmp_path / "straight")
    assert len(straight) == count > 5
    assert ids_of(folder) == (straight, count)


def test_evicts_to_its_capacity(tmp_path, log):
    flags = ["--data", str(log), "--batch", "64", "--steps", "15", "--id-capacity", "1"]
    found = answer(tmp_path, *flags, "--id-eviction", "lru", "--id-default", "zero")
    assert found["ids_evicted"] > 0 and found["ids"] <= 2 * 1024
    full = train(tmp_path, *flags, code=78)
    assert "bucket" in full.stderr and "capacity of 1" in full.stderr


def test_ids_and_rows_are_published_and_exported(tmp_path, log):
    published = tmp_path / "published"
    flags = ["--data", str(log), "--batch", "64", "--steps", "15", "--ranks", "2", "--id-capacity", "1"]
    flags += ["--id-eviction", "lru", "--save", str(tmp_path / "run")]
    found = answer(tmp_path, *flags, "--publish", str(published), "--publish-every", "0")
    assert found["ids_evicted"] > 0

    def ckpt(*words, code=0):
        result = subprocess.run([TESSERA, "ckpt", *words], capture_output=True, text=True, timeout=LIMIT)
        assert result.returncode == code, result.stdout + result.stderr
        return result.stdout + result.stderr

    # Deltas on the first one, with the ids that went.
    manifests = [json.loads(path.read_text()) for path in sorted(published.glob("*/MANIFEST.json"))]
    user = "tables.embedding_bags.user"
    deltas = [one for one in manifests if "base" in one]
    assert deltas and all(f"{user}.ids" in one["lists"] for one in deltas)
    assert any(one["tensors"][f"{user}.removed"]["shape"] != [0] for one in deltas)
    ckpt("verify", str(published))

    def tensors(root, name):
        ckpt("export", str(root), "--to", str(tmp_path / name))
        return safetensors.numpy.load_file(tmp_path / name)

    whole = tensors(tmp_path / "run", "run.safetensors")
    chained = tensors(published, "published.safetensors")
    for table in (user, "tables.embedding_bags.words"):
        rows = [
            dict(zip(one[f"{table}.ids"].tolist(), one[f"{table}.weight"].tolist(), strict=True))
            for one in (whole, chained)
        ]
        assert rows[0] == rows[1] and rows[0]
    listed = ckpt("ids", str(tmp_path / "run"), "--table", "user").splitlines()[1:]
    assert [int(line.split(",")[0]) for line in listed] == whole[f"{user}.ids"].tolist()
    assert "publication" in ckpt("ids", str(published), "--table", "user", code=2)
    ckpt("compact", str(published))
    after = tensors(published, "compacted.safetensors")
    assert {key: value.tolist() for key, value in after.items()} == {
        key: value.tolist() for key, value in chained.items()
    }


@pytest.mark.parametrize(
    ("flags", "parts"),
    [
        (["--sharding", "column_wise"], ["--sharding column_wise", "row_wise or table_wise"]),
        (["--id-admission", "often"], ["'often'", "freq:N"]),
        (["--id-eviction", "ttl:0"], ["'ttl:0'", "distance-lfu"]),
        (["--id-eviction", "lfu"], ["--id-eviction lfu needs --id-capacity", "ttl:N"]),
        (["--id-eviction", "lru", "--id-capacity", "0"], ["--id-eviction lru needs --id-capacity"]),
        (["--id-eviction", "distance-lfu"], ["--id-eviction distance-lfu needs --id-capacity"]),
        (["--ids", "rows", "--id-eviction", "lfu"], ["--id-eviction lfu needs --id-capacity"]),
        (["--data", "-", "--follow"], ["--follow"]),
        (["--data", "-", "--epochs", "2"], ["epoch"]),
        (["--plan", "plan.json"], ["--plan plan.json", "fixed number of rows"]),
        (["--ids", "rows", "--strings", "check"], ["--strings check", "--ids unlimited"]),
    ],
)
def test_what_cannot_be_is_refused_before_anything_starts(tmp_path, log, flags, parts):
    data = [] if "--data" in flags else ["--data", str(log)]
    result = subprocess.run(
        command(tmp_path, *data, *flags), capture_output=True, text=True, timeout=LIMIT, input=""
    )
    assert result.returncode in (2, 78), result.stdout + result.stderr
    for part in parts:
        assert part in result.stderr, result.stderr


def test_a_file_that_grows_is_refused_without_unlimited_ids(tmp_path, log):
    words = [TESSERA, "train", "dlrm", "--runs", str(tmp_path), "--data", str(log), "--follow"]
    result = subprocess.run(words, capture_output=True, text=True, timeout=LIMIT)
    assert result.returncode == 78 and "--follow is for --ids unlimited" in result.stderr
