"""`train lm` on tokens of one's own, `train gnn` on structures of one's own, and both on two hosts."""

from __future__ import annotations

import json
import os
import pathlib
import re
import shutil
import subprocess
import sys

import numpy as np
import pytest

ROOT = pathlib.Path(__file__).resolve().parents[2]
TESSERA = os.environ.get("TESSERA_BIN", str(ROOT / "build/release/bin/tessera"))
LIMIT = 100.0
LM = ["--batch", "4", "--length", "16", "--layers", "1", "--width", "16", "--heads", "2"]
GNN = ["--features", "8", "--layers", "1", "--cutoff", "2.5", "--precision", "float64", "--lr", "0.01"]


def tessera(*words, code=0):
    result = subprocess.run([TESSERA, *map(str, words)], capture_output=True, text=True, timeout=LIMIT)
    assert result.returncode == code, result.stdout + result.stderr
    return result


def train(*words, code=0):
    return tessera("train", *words, code=code)


def judged(run):
    """The last evaluation of a run."""
    lines = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    return [line for line in lines if line["kind"] == "eval"][-1]


# ---- lm


@pytest.fixture(scope="module")
def text(tmp_path_factory):
    folder = tmp_path_factory.mktemp("text")
    (folder / "book.txt").write_text("the cat sat on the mat. the dog sat on the log. " * 200)
    return folder


def tokenizer(folder):
    """A tokenizer.json of bytes and a few words, written by hand."""
    letters = [chr(i) if 33 <= i <= 126 or 161 <= i <= 172 or i >= 174 else None for i in range(256)]
    extra = iter(range(256, 512))
    letters = [letter or chr(next(extra)) for letter in letters]
    vocab = {letter: i for i, letter in enumerate(letters)}
    merges = []
    for pair in (("t", "h"), ("th", "e"), ("a", "t"), (letters[32], "the"), ("o", "n")):
        merges.append(" ".join(pair))
        vocab["".join(pair)] = len(vocab)
    content = {
        "added_tokens": [],
        "normalizer": None,
        "pre_tokenizer": {"type": "ByteLevel", "add_prefix_space": False, "use_regex": True},
        "model": {"type": "BPE", "vocab": vocab, "merges": merges},
    }
    (folder / "tokenizer.json").write_text(json.dumps(content))
    return folder / "tokenizer.json"


def test_lm_is_judged_on_text_that_it_does_not_see(text, tmp_path):
    words = ["lm", *LM, "--file", text / "book.txt", "--tokenizer", tokenizer(text), "--lr", "0.01"]
    words += ["--steps", "40", "--eval-every", "20", "--sample", "12", "--prompt", "the"]
    one = train(*words, "--save", tmp_path / "run").stdout
    judged = re.findall(r"validation loss ([\d.]+) \| perplexity ([\d.]+)", one)
    assert len(judged) == 2 and float(judged[1][0]) < float(judged[0][0]) < np.log(261)
    assert float(judged[1][1]) == pytest.approx(np.exp(float(judged[1][0])), rel=1e-2)
    samples = re.findall(r"^sample   (.*)$", one, re.MULTILINE)
    assert len(samples) == 2 and samples[-1].startswith("the")
    trained, kept = map(
        int, re.match(r"text     (\d+) tokens of 261 kinds, (\d+) to judge on\n", one).groups()
    )
    assert kept == (trained + kept) // 10
    lines = [json.loads(line) for line in (tmp_path / "run/metrics.jsonl").read_text().splitlines()]
    assert [line["step"] for line in lines if line["kind"] == "eval"] == [20, 40]
    written = [(line["step"], line["text"]) for line in lines if line["kind"] == "text"]
    assert [step for step, _ in written] == [20, 40]
    assert all(text.startswith("the") and len(text) > 3 for _, text in written)
    assert [pathlib.Path(one["path"]).name for one in lines[0]["data"]] == ["book.txt", "tokenizer.json"]
    assert (tmp_path / "run/best").is_dir()
    two = json.loads(train(*words, "--ranks", "2", "--json", "--runs", tmp_path).stdout)
    assert two["validation_loss"] == pytest.approx(float(judged[1][0]), abs=2e-3)


def test_lm_ends_when_it_gets_no_better(text, tmp_path):
    words = ["lm", *LM, "--file", text / "book.txt", "--lr", "0", "--steps", "50", "--eval-every", "2"]
    told = train(*words, "--patience", "3", "--save", tmp_path / "run").stdout
    assert "stopped  early, after 3 evaluations that were not better than that of step 2" in told
    lines = [json.loads(line) for line in (tmp_path / "run/metrics.jsonl").read_text().splitlines()]
    assert [line["step"] for line in lines if line["kind"] == "eval"] == [2, 4, 6, 8]
    assert lines[-1]["status"] == "stopped early"
    assert [path.name for path in (tmp_path / "run/best").glob("step-*")] == ["step-000000000002"]


def test_lm_says_what_it_cannot_use(text, tmp_path):
    (tmp_path / "bad.json").write_text('{"model": {"type": "Unigram"}}')
    words = ["lm", *LM, "--file", text / "book.txt", "--steps", "1", "--runs", tmp_path]
    said = train(*words, "--tokenizer", tmp_path / "bad.json", code=65).stderr
    assert "bad.json: its words are cut by 'nothing', not over bytes" in said
    assert "there is no file" in train(*words, "--tokenizer", tmp_path / "none.json", code=65).stderr
    assert "--eval-file names it" in train(*words, "--eval-file", tmp_path / "none.txt", code=65).stderr
    (tmp_path / "short.txt").write_text("x" * 100)
    words = ["lm", *LM, "--file", tmp_path / "short.txt", "--steps", "1", "--runs", tmp_path]
    for wish in ("--sample", "--patience", "--eval-every"):
        assert (
            f"{tmp_path}/short.txt: its last tenth has 10 tokens, too few to judge on by sequences of 17, "
            f"and {wish} is for evaluations. Name another text with --eval-file, or use a smaller --length."
        ) in train(*words, wish, "1", code=65).stderr
    said = "text     100 tokens of 256 kinds, none to judge on: a tenth of it is shorter than a sequence\n"
    assert train(*words).stdout.startswith(said)


def test_a_finished_lm_is_measured(text, tmp_path):
    shutil.copy(text / "book.txt", tmp_path / "book.txt")
    words = ["lm", *LM, "--file", tmp_path / "book.txt", "--steps", "4", "--save", tmp_path / "run"]
    train(*words, "--ranks", "2", "--vocab-ranks", "2")
    wanted = judged(tmp_path / "run")
    told = json.loads(tessera("eval", tmp_path / "run", "--json").stdout)
    assert told["validation_loss"] == pytest.approx(wanted["validation_loss"], rel=1e-5)
    assert (told["step"], told["run"]) == (4, str(tmp_path / "run"))
    # Another text; what it was trained on is not asked for.
    (tmp_path / "book.txt").unlink()
    (tmp_path / "other.txt").write_text("zebras quiz jolly foxes " * 50)
    other = tessera("eval", tmp_path / "run", "--best", "-n", "2", "--data", tmp_path / "other.txt").stdout
    loss = re.search(r"^judged   validation loss ([\d.]+) \| perplexity [\d.]+$", other, re.MULTILINE)
    assert float(loss[1]) > wanted["validation_loss"]
    (tmp_path / "short.txt").write_text("x" * 12)
    said = tessera("eval", tmp_path / "run", "--data", tmp_path / "short.txt", code=78).stderr
    assert "lm: a text of 12 tokens holds no sequence of 17." in said
    said = tessera(
        "predict", tmp_path / "run", "--data", tmp_path / "other.txt", "--out", "x", code=65
    ).stderr
    assert f"predict: {tmp_path}/run is a run of lm\n  why: what a language model writes is text\n" in said


def test_written_text_that_is_no_utf8_is_marked(tmp_path):
    (tmp_path / "bytes.txt").write_bytes(b"\xe2\x82" * 400)
    words = [
        "lm",
        *LM,
        "--file",
        tmp_path / "bytes.txt",
        "--steps",
        "2",
        "--sample",
        "8",
        "--prompt",
        "\u20ac",
    ]
    said = train(*words, "--save", tmp_path / "run").stdout
    (shown,) = re.findall(r"^sample   (.*)$", said, re.MULTILINE)
    assert shown.startswith("\u20ac") and "\ufffd" in shown
    lines = [json.loads(line) for line in (tmp_path / "run/metrics.jsonl").read_text().splitlines()]
    (text,) = [line["text"] for line in lines if line["kind"] == "text"]
    assert text.startswith("\u20ac") and "\ufffd" in text


def test_a_diverged_lm_ends_with_an_error(text, tmp_path):
    words = ["lm", *LM, "--file", text / "book.txt", "--steps", "30", "--lr", "1e30", "--runs", tmp_path]
    result = train(*words, code=1)
    assert "the loss is not a number at step" in result.stderr


# ---- gnn


def write_structures(path, count, seed, with_stress=True):
    """Atoms in boxes with springs between all pairs within 2.5, in the nearest image."""
    numbers = np.random.default_rng(seed)
    species = {"Si": -3.0, "O": -1.5}
    with open(path, "w") as file:
        for _ in range(count):
            n, side = int(numbers.integers(4, 8)), 6.0
            places = numbers.uniform(0, side, (n, 3))
            names = [["Si", "O"][i] for i in numbers.integers(0, 2, n)]
            energy, forces, virial = sum(species[name] for name in names), np.zeros((n, 3)), np.zeros((3, 3))
            for i in range(n):
                for j in range(i):
                    d = places[i] - places[j]
                    d -= side * np.round(d / side)
                    r = np.linalg.norm(d)
                    if r < 2.5:
                        energy += 0.5 * (2.5 - r) ** 2
                        pull = (2.5 - r) * d / r
                        forces[i] += pull
                        forces[j] -= pull
                        virial -= np.outer(d, pull)
            stress = " ".join(f"{x:.10f}" for x in (virial / side**3).flatten())
            file.write(f'{n}\nLattice="{side} 0 0 0 {side} 0 0 0 {side}" ')
            file.write(f'Properties=species:S:1:pos:R:3:forces:R:3 energy={energy:.10f} pbc="T T T"')
            file.write(f' stress="{stress}"\n' if with_stress else "\n")
            for name, place, force in zip(names, places, forces, strict=True):
                file.write(f"{name} " + " ".join(f"{x:.10f}" for x in (*place, *force)) + "\n")


@pytest.fixture(scope="module")
def structures(tmp_path_factory):
    folder = tmp_path_factory.mktemp("structures")
    write_structures(folder / "md-1.xyz", 12, 1)
    write_structures(folder / "md-2.xyz", 8, 2, with_stress=False)
    return folder


def test_gnn_learns_energies_forces_and_stress_of_files(structures, tmp_path):
    words = ["gnn", *GNN, "--data", structures / "md-*.xyz", "--eval-data", structures / "md-1.xyz"]
    words += ["--stress-weight", "10", "--batch", "2"]
    result = train(*words, "--steps", "60", "--save", tmp_path / "run")
    lines = result.stdout.splitlines()
    assert lines[0].startswith("structures 20 of ")
    assert lines[1:3] == [
        "labels   energies of 20, forces of 20, stress of 12",
        "         judged by energies of 12, forces of 12, stress of 12",
    ]
    assert re.match(r"species  O -?[\d.]+, Si -", lines[3])
    (end,) = [line for line in lines if line.startswith("energy error")]
    found = re.fullmatch(
        r"energy error ([\d.]+) per atom, was ([\d.]+) \| force error ([\d.]+), was ([\d.]+)"
        r" \| stress error ([\d.]+), was ([\d.]+)",
        end,
    )
    assert float(found[1]) < float(found[2]) and float(found[3]) < float(found[4])
    assert float(found[5]) < float(found[6])
    assert (tmp_path / "run/checkpoints/LATEST").exists() and (tmp_path / "run/report.html").exists()
    head = json.loads((tmp_path / "run/metrics.jsonl").read_text().splitlines()[0])
    read = [pathlib.Path(one["path"]).name for one in head["data"]]
    assert read == ["md-1.xyz", "md-2.xyz", "md-1.xyz"]
    halves = ["--steps", "10", "--json", "--runs", tmp_path]
    one = json.loads(train(*words, *halves).stdout)
    two = json.loads(train(*words, *halves, "--ranks", "2").stdout)
    assert two["energy_error"] == pytest.approx(one["energy_error"], rel=1e-6)
    assert two["stress_error"] == pytest.approx(one["stress_error"], rel=1e-6)
    train(*words, "--steps", "5", "--save", tmp_path / "half")
    again = json.loads(train("gnn", "--resume", tmp_path / "half", "--steps", "10", "--json").stdout)
    assert again["fingerprint"] == one["fingerprint"]


@pytest.mark.parametrize(
    ("content", "says"),
    [
        ("", "holds no structure"),
        ("two\n\n", "line 1: 'two' is not a number of atoms"),
        ("1\nenergy=1\nH 0 0\n", "line 3: an atom has 3 values; Properties has 4"),
        ("2\nenergy=1\nH 0 0 0\n", "line 3: the file ends after 1 of 2 atoms"),
        ("1\nenergy=nan\nH 0 0 0\n", "line 2: 'nan' is not a finite number"),
        ("1\nenergy=1\nH 0 inf 0\n", "line 3: 'inf' is not a finite number"),
        ('1\nLattice="1 0 0 0 1 0 0 0" energy=1\nH 0 0 0\n', "line 2: Lattice has 8 numbers, not 9"),
        ('1\nLattice="1 0 0 1 0 0 0 0 1" energy=1\nH 0 0 0\n', "line 2: Lattice has no volume"),
        ('1\npbc="T T T" energy=1\nH 0 0 0\n', "line 2: pbc repeats a box that has no Lattice"),
        ("1\nE=1\nH 0 0 0\n1\nE=2\nH 0 0 0\n", "structure 1 has neither energy nor forces"),
        (
            '1\nenergy=1 stress="1 0 0 0 1 0 0 0 1"\nH 0 0 0\n',
            "line 2: stress is of a box; there is no Lattice",
        ),
        ("1\nenergy=1\nH 0 0 0\n", "holds one structure; one more is needed"),
    ],
)
def test_gnn_names_what_is_wrong_with_a_file(tmp_path, content, says):
    path = tmp_path / "a.xyz"
    path.write_text(content)
    said = train("gnn", *GNN, "--data", path, "--steps", "1", "--runs", tmp_path, code=65).stderr
    assert "a.xyz: " in said and says in said


def test_other_names_and_no_box(tmp_path):
    text = "".join(f"2\nE={i}.5\nH 0 0 0\nH 0 0 {1 + i / 10}\n" for i in range(3))
    (tmp_path / "a.xyz").write_text(text)
    words = ["gnn", *GNN, "--data", tmp_path / "a.xyz", "--energy-key", "E", "--steps", "2", "--json"]
    told = json.loads(train(*words, "--runs", tmp_path).stdout)
    assert "energy_error" in told and "force_error" not in told
    said = train("gnn", *GNN, "--stress-weight", "1", "--steps", "1", "--runs", tmp_path, code=78).stderr
    assert "--stress-weight is for structures of --data" in said


def test_gnn_epochs_in_another_order_each_time(structures, tmp_path):
    words = ["gnn", *GNN, "--data", f"{structures}/md-1.xyz,{structures}/md-2.xyz", "--epochs", "4"]
    words += ["--json", "--runs", tmp_path]
    plain = json.loads(train(*words).stdout)
    assert plain["steps"] == 4 * 18  # the last two of 20 are kept to judge on
    two = ["--ranks", "2", "--graph-parallel", "1", "--batch", "2"]
    assert json.loads(train(*words, *two).stdout)["steps"] == 4 * 5
    shuffled = json.loads(train(*words, "--shuffle", "--checkpoint-every", "45").stdout)
    assert shuffled["steps"] == plain["steps"] and shuffled["fingerprint"] != plain["fingerprint"]
    # The order is that of the step, also after an interruption in the middle of an epoch.
    run = pathlib.Path(shuffled["report"]).parent
    for path in (run / "checkpoints").glob("step-*72"):
        shutil.rmtree(path)
    resumed = json.loads(train("gnn", "--resume", run, "--json").stdout)
    assert resumed["first_step"] == 45 and resumed["fingerprint"] == shuffled["fingerprint"]


def test_gnn_ends_when_it_gets_no_better(structures, tmp_path):
    words = ["gnn", *GNN, "--data", structures / "md-1.xyz", "--lr", "0", "--steps", "50"]
    words += ["--eval-every", "2", "--patience", "3", "--runs", tmp_path]
    assert (
        "stopped  early, after 3 evaluations that were not better than that of step 2" in train(*words).stdout
    )


def test_gnn_says_what_it_cannot_learn(structures, tmp_path):
    def said(*words):
        return train("gnn", *GNN, "--data", *words, "--steps", "1", "--runs", tmp_path, code=65).stderr

    file = structures / "md-2.xyz"
    for label in ("energy", "forces", "stress"):
        wanted = f"{file}: no structure to train on has 'none', which --{label}-key names."
        assert wanted in said(file, f"--{label}-key", "none")
    assert (
        f"{file}: no structure to train on has 'stress' or a virial, so --stress-weight has nothing to "
        "weigh. Name what they have with --stress-key, or leave --stress-weight out."
    ) in said(file, "--stress-weight", "1")
    (tmp_path / "iron.xyz").write_text("2\nenergy=1\nFe 0 0 0\nSi 0 0 1\n")
    words = ["--data", file, "--eval-data", tmp_path / "iron.xyz", "--steps", "1", "--runs", tmp_path]
    told = train("gnn", *GNN, *words).stdout
    assert "unknown  Fe: in what is judged, but in nothing that is trained on\n" in told


def frames(path):
    """Energy, forces and stress of every structure of a file that the program wrote."""
    lines, found = path.read_text().splitlines(), []
    while lines:
        count, head = int(lines[0]), lines[1]
        rows = np.array([line.split()[1:] for line in lines[2 : 2 + count]], dtype=float)
        energy = float(re.search(r"energy=(\S+)", head)[1])
        stress = re.search(r'stress="([^"]+)"', head)
        found.append((energy, rows[:, 3:], stress and np.array(stress[1].split(), dtype=float)))
        lines = lines[2 + count :]
    return found


def test_a_finished_gnn_is_measured_and_predicts(structures, tmp_path):
    shutil.copy(structures / "md-2.xyz", tmp_path / "train.xyz")
    known = structures / "md-1.xyz"
    words = ["gnn", *GNN, "--data", tmp_path / "train.xyz", "--eval-data", known, "--eval-every", "10"]
    train(*words, "--steps", "30", "--batch", "2", "--save", tmp_path / "run")
    wanted = judged(tmp_path / "run")
    figures = ("energy_error", "force_error", "stress_error")
    own = json.loads(tessera("eval", tmp_path / "run", "--json").stdout)
    (tmp_path / "train.xyz").unlink()  # the model does not need it
    told = json.loads(tessera("eval", tmp_path / "run", "--data", known, "-n", "2", "--json").stdout)
    assert own["structures"] == told["structures"] == 12 and told["step"] == 30
    for name in figures:
        assert own[name] == pytest.approx(wanted[name], rel=1e-9)
        assert told[name] == pytest.approx(wanted[name], rel=1e-6)
    said = tessera("eval", tmp_path / "run", "--best", "--data", known).stdout
    assert re.search(
        r"^judged   energy error [\d.]+ per atom \| force error [\d.]+ \| stress", said, re.MULTILINE
    )

    bare = re.sub(r' energy=\S+| stress="[^"]+"', "", known.read_text())
    (tmp_path / "bare.xyz").write_text(bare.replace(":forces:R:3", ":other:R:3"))
    words = ["--data", tmp_path / "bare.xyz", "--out", tmp_path / "out.xyz"]
    said = tessera("predict", tmp_path / "run", *words).stdout
    assert said.endswith(f"structures 12, written to {tmp_path}/out.xyz\n") and "judged" not in said
    wrong = np.zeros(3)
    for (energy, forces, stress), (found, pulls, stretch) in zip(
        frames(known), frames(tmp_path / "out.xyz"), strict=True
    ):
        errors = [abs(found - energy) / len(forces), np.abs(pulls - forces).mean()]
        wrong += [*errors, np.abs(stretch - stress).mean()]
    assert wrong / 12 == pytest.approx([wanted[name] for name in figures], rel=1e-6)

    (tmp_path / "iron.xyz").write_text("1\nenergy=1\nSi 0 0 0\n2\nenergy=1\nFe 0 0 0\nSi 0 0 1\n")
    said = tessera("eval", tmp_path / "run", "--data", tmp_path / "iron.xyz", code=65).stderr
    assert f"{tmp_path}/iron.xyz: structure 2 has an atom of Fe, which the model has not seen." in said
    bare = (tmp_path / "bare.xyz").read_bytes()
    words = ["--data", tmp_path / "bare.xyz", "--out", tmp_path / "bare.xyz"]
    said = tessera("predict", tmp_path / "run", *words, code=65).stderr
    assert "bare.xyz: is read and cannot be written too." in said
    assert (tmp_path / "bare.xyz").read_bytes() == bare
    said = tessera("predict", tmp_path / "run", "--data", known, "--out", "x.csv", code=2).stderr
    assert "predict: structures are written as extended XYZ, not as x.csv: name it .xyz" in said
    train("gnn", *GNN, "--atoms", "27", "--structures", "2", "--steps", "1", "--save", tmp_path / "made")
    said = tessera("eval", tmp_path / "made", "--data", known, code=65).stderr
    assert "the run learned from structures that the program made, whose atoms are of no element." in said
    assert "force_error" in json.loads(tessera("eval", tmp_path / "made", "--json").stdout)


# ---- several hosts

sys.path.insert(0, str(ROOT / "tests/faults"))


def test_two_hosts_train_as_one(tmp_path):
    from hosts import TwoHosts, reason_not_possible

    if reason := reason_not_possible():
        pytest.skip(reason)
    words = ["lm", *LM, "--steps", "6", "--data-ranks", "2"]
    wanted = json.loads(train(*words, "--ranks", "2", "--json", "--runs", tmp_path).stdout)
    secret = tmp_path / "secret"
    secret.write_text("0123456789abcdef0123456789abcdef0123456789")
    secret.chmod(0o600)
    hosts_words = ["--nnodes", "2", "--rdzv-endpoint", "10.97.0.1:29571", "--secret-file", str(secret)]

    def node(host):
        return ["--node-rank", str(host), "--json"]

    with TwoHosts() as hosts:
        for flags in (["--save", str(tmp_path / "run")], ["--resume", str(tmp_path / "run"), "--steps", "8"]):
            start = [*words, "--ranks", "1"] if flags[0] == "--save" else ["lm"]
            started = [
                subprocess.Popen(
                    [
                        *hosts.inside(host),
                        TESSERA,
                        "train",
                        *map(str, start),
                        *flags,
                        *hosts_words,
                        *node(host),
                    ],
                    stdout=subprocess.PIPE,
                    stderr=subprocess.PIPE,
                    text=True,
                )
                for host in (0, 1)
            ]
            answers = [process.communicate(timeout=LIMIT) for process in started]
            assert [process.returncode for process in started] == [0, 0], answers
            told = json.loads(answers[0][0])
            assert told["ranks"] == 2
            if flags[0] == "--save":
                assert told["loss"] == pytest.approx(wanted["loss"], rel=1e-6)
    assert told["first_step"] == 6 and told["steps"] == 8
    said = train(
        "lm", "--resume", tmp_path / "run", "--nnodes", "3", *hosts_words[2:], "--steps", "9", code=78
    )
    assert "2 ranks cannot be divided over 3 hosts" in said.stderr
    assert "needs --rdzv-endpoint" in train("lm", *LM, "--nnodes", "2", code=2).stderr
