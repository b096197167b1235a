"""Checkpoints from Python: state dicts, real ranks, other readers, and the command line."""

from __future__ import annotations

import doctest
import json
import os
import pathlib
import re
import signal
import subprocess
import time

import pytest
import torch
import torch.distributed as dist
from ranks import run_ranks, run_ranks_collecting
from tessera import _C, checkpoint
from tessera.checkpoint import CheckpointError, Shard

ROOT = pathlib.Path(__file__).resolve().parents[2]
TESSERA = os.environ.get("TESSERA_BIN", str(ROOT / "build/release/bin/tessera"))


def ckpt(*words):
    return subprocess.run([TESSERA, "ckpt", *map(str, words)], capture_output=True, text=True, timeout=60)


def test_docstrings():
    assert doctest.testmod(checkpoint).failed == 0


def trained(steps=3, seed=0):
    torch.manual_seed(seed)
    model = torch.nn.Sequential(torch.nn.Linear(5, 4), torch.nn.Tanh(), torch.nn.Linear(4, 2))
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
    schedule = torch.optim.lr_scheduler.StepLR(optimizer, 2, 0.5)
    train(model, optimizer, schedule, 0, steps)
    return model, optimizer, schedule


def train(model, optimizer, schedule, first, steps):
    for step in range(first, first + steps):
        optimizer.zero_grad()
        model(torch.arange(20.0).reshape(4, 5).add(step).sin()).square().mean().backward()
        optimizer.step()
        schedule.step()


def test_training_continues_bit_for_bit(tmp_path):
    model, optimizer, schedule = trained()
    state = {
        "model": model.state_dict(),
        "optimizer": optimizer.state_dict(),
        "schedule": schedule.state_dict(),
        "rng": torch.get_rng_state(),
    }
    checkpoint.save(tmp_path, 3, state)
    train(model, optimizer, schedule, 3, 4)
    expected_noise = torch.rand(3)

    other, other_optimizer, other_schedule = trained(0, seed=9)
    loaded = checkpoint.read(tmp_path)
    other.load_state_dict(loaded["model"])
    other_optimizer.load_state_dict(loaded["optimizer"])
    other_schedule.load_state_dict(loaded["schedule"])
    torch.set_rng_state(loaded["rng"])
    train(other, other_optimizer, other_schedule, 3, 4)
    for a, b in zip(model.parameters(), other.parameters(), strict=True):
        assert torch.equal(a, b)
    assert torch.equal(torch.rand(3), expected_noise)


def test_nested_values_come_back(tmp_path):
    state = {
        "a": [1, 2.5, "x", None, True, (torch.ones(2), float("inf"))],
        3: {"deep": {"t": torch.arange(3)}, "empty": [], "none": {}},
        "nan": float("nan"),
        "big": 1 << 80,
    }
    saved = checkpoint.save(tmp_path, 0, state)
    assert re.match(
        rf"SaveReport\(step=0, folder='{tmp_path}/\S+', rank_bytes=\d+, total_bytes=\d+, ", str(saved)
    )
    back = checkpoint.read(tmp_path)
    assert back["a"][:5] == [1, 2.5, "x", None, True] and back["a"][5][1] == float("inf")
    assert isinstance(back["a"][5], tuple) and torch.equal(back["a"][5][0], torch.ones(2))
    assert torch.equal(back[3]["deep"]["t"], torch.arange(3)) and back[3]["empty"] == []
    assert back["nan"] != back["nan"] and back["big"] == 1 << 80

    target = {"a": [0, 0.0, "", 1, False, (torch.zeros(2), 0.0)], "big": 0}
    report = checkpoint.load(tmp_path, target)
    assert report.step == 0 and report.saved_world == 1 and report.warnings == []
    assert re.match(rf"LoadReport\(step=0, folder='{tmp_path}/\S+', saved_world=1, values={{", repr(report))
    assert repr(report).endswith("warnings=[])") and "0x" not in repr(report)
    assert target["a"][:5] == [1, 2.5, "x", None, True] and target["big"] == 1 << 80
    assert torch.equal(target["a"][5][0], torch.ones(2))


def test_errors(tmp_path):
    with pytest.raises(CheckpointError, match="there is no whole checkpoint in") as caught:
        checkpoint.load(tmp_path, {"w": torch.ones(1)})
    assert caught.value.kind == "missing"
    with pytest.raises(TypeError, match=r"'a\.b' is a object; tensors, numbers, strings"):
        checkpoint.save(tmp_path, 0, {"a": {"b": object()}})
    with pytest.raises(TypeError, match=r"has the key 1\.5; keys are strings or integers"):
        checkpoint.save(tmp_path, 0, {1.5: 0})
    with pytest.raises(ValueError, match=r"two tensors of the state dict are called 'a\.b'"):
        checkpoint.save(tmp_path, 0, {"a": {"b": torch.ones(1)}, "a.b": torch.ones(1)})
    checkpoint.save(tmp_path, 1, {"w": torch.ones(2)})
    with pytest.raises(CheckpointError, match="is F32 \\[2\\], the state wants \\[3\\]") as caught:
        checkpoint.load(tmp_path, {"w": torch.ones(3)})
    assert caught.value.kind == "invalid"
    with pytest.raises(CheckpointError) as caught:
        checkpoint.save("/proc/nowhere", 1, {"w": torch.ones(2)})
    assert caught.value.kind == "write" and "/proc/nowhere" in str(caught.value)


def shard_of(rank, size, rows=10, fill=True):
    begin, end = rows * rank // size, rows * (rank + 1) // size
    whole = torch.arange(rows * 3.0).reshape(rows, 3)
    tensor = whole[begin:end].clone() if fill else torch.zeros(end - begin, 3)
    return Shard(tensor, (rows, 3), (begin, 0)), whole[begin:end]


def save_ranks(rank, root, step):
    size = dist.get_world_size()
    shard, _ = shard_of(rank, size)
    state = {"table": shard, "dense": torch.full((4,), 2.0), "epoch": 5}
    report = checkpoint.save(root, step, state, dist.group.WORLD, rank_values={"position": 10 + rank})
    return report.total_bytes


def load_ranks(rank, root):
    size = dist.get_world_size()
    shard, expected = shard_of(rank, size, fill=False)
    state = {"table": shard, "dense": torch.zeros(4), "epoch": 0}
    report = checkpoint.load(root, state, dist.group.WORLD)
    assert torch.equal(shard.tensor, expected) and state["epoch"] == 5
    assert torch.equal(state["dense"], torch.full((4,), 2.0))
    return report.step, report.rank_values.get("position")


def test_real_ranks_save_and_others_load(tmp_path):
    run_ranks(3, save_ranks, str(tmp_path), 7)
    assert run_ranks(2, load_ranks, str(tmp_path)) == [(7, 10), (7, 11)]
    assert run_ranks(4, load_ranks, str(tmp_path)) == [(7, 10), (7, 11), (7, 12), (7, None)]


def dtensor_rank(rank, root):
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.tensor import Replicate, distribute_tensor
    from torch.distributed.tensor import Shard as Cut

    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    whole = torch.arange(15.0).reshape(5, 3)
    state = {
        "rows": distribute_tensor(whole, mesh, [Cut(0)]),
        "all": distribute_tensor(whole, mesh, [Replicate()]),
    }
    checkpoint.save(root, 1, state, dist.group.WORLD)
    target = {"rows": distribute_tensor(whole * 0, mesh, [Cut(1)])}
    checkpoint.load(root, target, dist.group.WORLD)
    return torch.equal(target["rows"].full_tensor(), whole)


def test_dtensors_are_placed_by_themselves(tmp_path):
    assert run_ranks(2, dtensor_rank, str(tmp_path)) == [True, True]
    reader = checkpoint.open_checkpoint(tmp_path)
    assert torch.equal(reader.read("rows"), torch.arange(15.0).reshape(5, 3))
    assert torch.equal(reader.read("all"), torch.arange(15.0).reshape(5, 3))


def save_and_die(rank, root):
    from tessera import comm

    save_ranks(rank, root, 1)
    comm.barrier()
    if rank == 1:
        os.kill(os.getpid(), signal.SIGKILL)
    try:
        save_ranks(rank, root, 2)
    except Exception as error:
        return type(error).__name__
    return "saved"


def test_a_rank_that_dies_leaves_the_checkpoint_before(tmp_path):
    outcomes = run_ranks_collecting(3, save_and_die, str(tmp_path))
    assert outcomes[0].value == "CommError" and outcomes[2].value == "CommError"
    assert checkpoint.steps(tmp_path) == [1]
    assert run_ranks(2, load_ranks, str(tmp_path))[0][0] == 1


def save_async(rank, root):
    saver = checkpoint.AsyncSaver(root, dist.group.WORLD, keep=2)
    tensor = torch.zeros(3)
    for step in range(4):
        tensor.fill_(step + 10 * rank)
        saver.save(step, {"t": Shard(tensor, (6,), (3 * rank,))})
        dist.all_reduce(torch.ones(1000))  # training goes on over its own group
        saver.check()
    report = saver.wait()
    assert not saver.is_saving
    return report.step


def test_asynchronous_saves_of_real_ranks(tmp_path):
    assert run_ranks(2, save_async, str(tmp_path)) == [3, 3]
    assert checkpoint.steps(tmp_path) == [3, 2]
    table = checkpoint.open_checkpoint(tmp_path).read("t")
    assert table.tolist() == [3.0] * 3 + [13.0] * 3


def save_plain(root, step, text):
    """Saves what nobody's state dict says."""
    leaves = _C.CheckpointLeaves([("t", [2], [([0], torch.ones(2), None)], True, -1)], [], [])
    _C.checkpoint_save(str(root), step, leaves, {"python.state_dict": text}, {}, None, _C.SaveOptions())


@pytest.mark.parametrize(
    ("text", "problem"),
    [
        ('[["", ["dict", ["a", "a"]]], ["a", ["value", 1]]]', "'a' is there twice"),
        ('[["", ["dict", [""]]]]', "'' is there twice"),
        ('[["", ["dict", ["a"]]], ["", ["dict", []]]]', "'' is there twice or is no part"),
        ('[["", ["dict", ["a", "b"]]], ["a", ["value", 1]]]', "'b' is missing"),
        ('[["", ["list", 1000000000000]]]', "'0' is missing"),
        ('[["", ["dict", [1.5]]]]', "is no part of a state dict"),
        ('[["", ["value", {}]]]', "is no part of a state dict"),
        ('[["", 7]]', "is no part of a state dict"),
        ("[7]", "cannot unpack"),
        ("not JSON", "Expecting value"),
        ("[" * 100_000, "nested too deep"),
        (
            json.dumps([(".".join("a" * depth), ["dict", ["a"]]) for depth in range(5000)]),
            "nested too deep",
        ),
        # Forty levels of two equal keys: 2^40 values, if each were made.
        (
            json.dumps([(".".join("a" * depth), ["dict", ["a", "a"]]) for depth in range(40)]),
            "is missing",
        ),
    ],
)
def test_state_dicts_that_make_no_sense(tmp_path, text, problem):
    save_plain(tmp_path, 1, text)
    with pytest.raises(CheckpointError, match="its state dict makes no sense") as caught:
        checkpoint.read(tmp_path)
    assert caught.value.kind == "corrupt" and problem in str(caught.value)


def test_parts_of_one_name_are_refused(tmp_path):
    for state in ({"a": {"b": 1}, "a.b": 2}, {1: 2, "1": 3}, {"": 1}):
        with pytest.raises(ValueError, match="two parts of the state dict are called"):
            checkpoint.save(tmp_path, 0, state)
    assert checkpoint.steps(tmp_path) == []


def save_or_say(rank, root, loads, replace):
    shard, _ = shard_of(rank, dist.get_world_size())
    if loads:
        checkpoint.load(root, {"table": shard}, dist.group.WORLD)
    try:
        checkpoint.save(root, 7, {"table": shard}, dist.group.WORLD, replace=replace)
    except CheckpointError as error:
        return error.kind + " " + str(error)
    return "saved"


def test_another_jobs_step_is_not_replaced_unasked(tmp_path):
    root = str(tmp_path)
    assert run_ranks(2, save_or_say, root, False, False) == ["saved"] * 2
    sums = {path.name: path.read_bytes() for path in (tmp_path / "step-000000000007").iterdir()}
    for text in run_ranks(2, save_or_say, root, False, False):
        assert text.startswith("invalid checkpoint.save: rank 0: ") and "was saved by job" in text
    assert sums == {path.name: path.read_bytes() for path in (tmp_path / "step-000000000007").iterdir()}
    assert run_ranks(2, save_or_say, root, True, False) == ["saved"] * 2  # it goes on with it
    assert run_ranks(2, save_or_say, root, False, True) == ["saved"] * 2

    plain = tmp_path / "x.safetensors"
    checkpoint.open_checkpoint(root).export(str(plain))
    refused = ckpt("import", root, "--from", plain, "--step", "7")
    assert refused.returncode == 65 and "was saved by job" in refused.stderr
    assert ckpt("import", root, "--from", plain, "--step", "7", "--replace").returncode == 0


def test_workers_forked_during_a_save_hold_nothing_up(tmp_path):
    saver = checkpoint.AsyncSaver(tmp_path)
    children, large = [], torch.zeros(1 << 24)
    try:
        for step in range(4):
            saver.save(step, {"t": large})
            while saver.is_saving and not list(tmp_path.glob("*.tmp-*/shard-*")):
                time.sleep(0.0001)
            child = os.fork()  # as the workers of a data loader
            if child == 0:
                signal.pause()
                os._exit(0)
            children.append(child)
            assert saver.wait().step == step
    finally:
        for child in children:
            os.kill(child, signal.SIGKILL)
            os.waitpid(child, 0)
    assert len(children) == 4 and checkpoint.steps(tmp_path) == [3, 2, 1, 0]


def test_a_forked_child_has_no_saver(tmp_path):
    saver = checkpoint.AsyncSaver(tmp_path)
    saver.save(1, {"t": torch.zeros(1 << 22)})
    ours, theirs = os.pipe()
    child = os.fork()
    if child == 0:
        try:
            saver.wait()
        except CheckpointError as error:
            os.write(theirs, str(error).encode())
        del saver  # waits for nothing
        os._exit(0)
    os.close(theirs)
    with os.fdopen(ours) as pipe:
        text = pipe.read()
    assert f"is of process {os.getpid()}, which forked process {child}" in text
    assert os.waitpid(child, 0)[1] == 0 and saver.wait().step == 1


def test_a_damaged_newest_is_passed_over(tmp_path, capfd):
    for step in (1, 2):
        checkpoint.save(tmp_path, step, {"w": torch.full((5,), float(step))})
    shard = next((tmp_path / "step-000000000002").glob("shard-*"))
    data = bytearray(shard.read_bytes())
    data[-1] ^= 4
    shard.write_bytes(data)
    state = {"w": torch.zeros(5)}
    report = checkpoint.load(tmp_path, state)
    assert report.step == 1 and torch.equal(state["w"], torch.ones(5))
    assert len(report.warnings) == 1 and str(shard) in report.warnings[0]
    assert "step 1 is loaded instead of a newer one" in capfd.readouterr().err


def test_deltas(tmp_path):
    table = torch.arange(20.0).reshape(10, 2)
    checkpoint.save(tmp_path, 1, {"t": Shard(table, table.shape, (0, 0))})
    table[[3, 8]] = -1
    rows = torch.tensor([3, 8])
    checkpoint.save(tmp_path, 2, {"t": Shard(table, table.shape, (0, 0), touched_rows=rows)}, base=1)
    assert torch.equal(checkpoint.read(tmp_path)["t"], table)
    assert ckpt("compact", tmp_path).returncode == 0
    assert torch.equal(checkpoint.read(tmp_path)["t"], table)
    listed = json.loads(ckpt("ls", tmp_path, "--json").stdout)
    assert [row["state"] for row in listed["checkpoints"]] == ["whole", "whole"]


# The files belong to everybody: the safetensors package and torch's own reader open them.


def test_the_safetensors_package_opens_them(tmp_path):
    safetensors = pytest.importorskip("safetensors.torch")
    state = {
        "w": torch.randn(3, 4),
        "h": torch.randn(5).bfloat16(),
        "n": torch.tensor(7),
        "b": torch.ones(2) > 0,
    }
    checkpoint.save(tmp_path / "a", 1, state)
    (file,) = (tmp_path / "a/step-000000000001").glob("*.safetensors")
    for name, tensor in safetensors.load_file(file).items():
        assert torch.equal(tensor, state[name])
    checkpoint.open_checkpoint(tmp_path / "a").export(str(tmp_path / "plain.safetensors"))
    plain = safetensors.load_file(tmp_path / "plain.safetensors")
    assert sorted(plain) == sorted(state) and all(torch.equal(plain[name], state[name]) for name in state)

    # And what the package writes can be imported.
    safetensors.save_file({"w": state["w"]}, tmp_path / "theirs.safetensors")
    checkpoint.import_plain(tmp_path / "theirs.safetensors", tmp_path / "b", 4)
    assert torch.equal(checkpoint.open_checkpoint(tmp_path / "b", 4).read("w"), state["w"])


def test_both_refuse_the_same_headers(tmp_path):
    safetensors = pytest.importorskip("safetensors")
    path = tmp_path / "x.safetensors"

    def verdicts(header: str, data: bytes):
        path.write_bytes(len(header).to_bytes(8, "little") + header.encode() + data)
        found = []
        for reader in (
            lambda: safetensors.safe_open(path, "pt").keys(),
            lambda: checkpoint.import_plain(path, tmp_path / "r", 0),
        ):
            try:
                reader()
                found.append(True)
            except Exception:
                found.append(False)
        return found

    def entry(shape, begin, end, dtype="F32"):
        return {"dtype": dtype, "shape": shape, "data_offsets": [begin, end]}

    cases = [
        ({"a": entry([2], 0, 8)}, 8, True),
        ({"a": entry([2], 0, 8), "b": entry([], 8, 12)}, 12, True),
        ({"a": entry([0], 0, 0)}, 0, True),
        ({"a": entry([3], 0, 8)}, 8, False),
        ({"a": entry([2], 0, 8)}, 9, False),
        ({"a": entry([2], 0, 8)}, 7, False),
        ({"a": entry([2], 0, 8), "b": entry([2], 4, 12)}, 12, False),
        ({"a": entry([2], 0, 8), "b": entry([2], 12, 20)}, 20, False),
        ({"a": entry([2], 8, 0)}, 8, False),
        ({"a": entry([2], 0, 8, "F33")}, 8, False),
        ({"a": entry([1 << 62, 1 << 62], 0, 8)}, 8, False),
    ]
    for header, num_bytes, is_good in cases:
        assert verdicts(json.dumps(header), bytes(num_bytes)) == [is_good, is_good], header
    assert verdicts("[" * 100000, b"") == [False, False]


def test_torch_reads_them(tmp_path):
    pytest.importorskip("safetensors")
    import torch.distributed.checkpoint as dcp

    run_ranks(3, save_ranks, str(tmp_path), 7)
    state = {"table": torch.zeros(10, 3), "dense": torch.zeros(4)}
    dcp.load(
        state,
        storage_reader=dcp.HuggingFaceStorageReader(str(tmp_path / "step-000000000007")),
        no_dist=True,
    )
    assert torch.equal(state["table"], torch.arange(30.0).reshape(10, 3))
    assert torch.equal(state["dense"], torch.full((4,), 2.0))


def test_what_torch_writes_is_imported(tmp_path):
    pytest.importorskip("safetensors")
    import torch.distributed.checkpoint as dcp

    state = {"w": torch.randn(6, 2), "v": torch.arange(4)}
    dcp.save(
        state,
        storage_writer=dcp.HuggingFaceStorageWriter(str(tmp_path / "theirs"), save_distributed=True),
        no_dist=True,
    )
    checkpoint.import_plain(tmp_path / "theirs", tmp_path / "ours", 2)
    reader = checkpoint.open_checkpoint(tmp_path / "ours")
    assert all(torch.equal(reader.read(name), state[name]) for name in state)


@pytest.mark.skipif(not os.path.exists(TESSERA), reason="the programs were not built")
def test_command_line(tmp_path):
    root = tmp_path / "a"
    run_ranks(2, save_ranks, str(root), 3)
    run_ranks(2, save_ranks, str(root), 4)
    listed = ckpt("ls", root)
    assert listed.returncode == 0, listed.stderr
    lines = listed.stdout.splitlines()
    assert lines[0].split() == ["step", "saved", "ranks", "tensors", "bytes", "state"]
    assert [line.split()[0] for line in lines[1:]] == ["4", "3"] and lines[1].split()[-1] == "whole"
    verified = json.loads(ckpt("verify", root, "--json").stdout)
    assert [row["good"] for row in verified["checkpoints"]] == [True, True]
    shown = json.loads(ckpt("show", root, "--step", 3, "--json").stdout)
    assert shown["ranks"] == 2 and [t["name"] for t in shown["tensors"]] == ["dense", "table"]
    assert shown["rank_values"] == [{"position": 10}, {"position": 11}]
    assert "tensor   table" in ckpt("show", root).stdout

    result = ckpt("reshard", root, "--ranks", "3", "--cut", "columns", "--to", tmp_path / "b")
    assert result.returncode == 0 and result.stdout.startswith("wrote step 4 for 3 ranks, ")
    assert run_ranks(4, load_ranks, str(tmp_path / "b"))[0][0] == 4
    assert ckpt("export", root, "--to", tmp_path / "x.safetensors").returncode == 0
    assert ckpt("import", tmp_path / "c", "--from", tmp_path / "x.safetensors", "--step", "9").returncode == 0
    assert torch.equal(
        checkpoint.open_checkpoint(tmp_path / "c").read("table"), torch.arange(30.0).reshape(10, 3)
    )

    # What is read is not written: a file of any of the checkpoints, the folder that is cut anew, one
    # whose own file is imported.
    whole = {path: path.read_bytes() for path in root.rglob("*") if path.is_file()}
    kept = next((root / "step-000000000003").glob("shard-00001*"))
    (tmp_path / "link").symlink_to(kept)
    (tmp_path / "same").symlink_to("a")
    for words, name in (
        (("export", root, "--to", tmp_path / "link"), "link"),
        (("export", root, "--to", kept), kept),
        (("reshard", root, "--ranks", "3", "--to", tmp_path / "same"), "same"),
        (("import", root, "--from", kept, "--step", "3", "--replace"), kept.parent),
        (("import", root, "--from", kept.parent, "--step", "3", "--replace"), kept.parent),
    ):
        refused = ckpt(*words)
        assert refused.returncode == 65, words
        assert f"{tmp_path / name}: is read and cannot be written too." in refused.stderr
    assert {path: path.read_bytes() for path in root.rglob("*") if path.is_file()} == whole

    shard = next((root / "step-000000000004").glob("shard-00002*"))
    shard.write_bytes(shard.read_bytes()[:-1] + b"\x55")
    bad = ckpt("verify", root)
    assert bad.returncode == 65 and "damaged" in bad.stdout and str(shard) in bad.stdout
    shard.unlink()
    assert ckpt("ls", root).returncode == 65
    shown = ckpt("show", root)
    assert shown.returncode == 0 and "is missing" in shown.stderr  # falls back to step 3
    missing = ckpt("show", tmp_path / "nothing")
    assert missing.returncode == 65
    assert missing.stderr.splitlines()[0] == f"error: ckpt: show {tmp_path}/nothing"
    assert len(missing.stderr.splitlines()) == 3
    for words, text in {
        (): "error: ckpt: say what to do, as in tessera ckpt ls DIR",
        ("verfy", root): "error: ckpt: there is no 'verfy': did you mean verify?",
        ("ls",): "error: ckpt: name one folder, as in tessera ckpt ls DIR",
        ("ls", root, "--jsn"): "error: ckpt: unknown flag --jsn: did you mean --json?",
        ("reshard", root, "--to", "x"): "error: ckpt: reshard needs --ranks N, 1 or more, or --plan FILE",
        ("reshard", root, "--ranks", "2"): "error: ckpt: reshard needs --to PATH",
        ("reshard", root, "--ranks", "2", "--to", "x", "--cut", "y"): (
            "error: ckpt: --cut is rows, columns or whole, not 'y'"
        ),
        ("import", root): "error: ckpt: import needs --from PATH",
    }.items():
        wrong = ckpt(*words)
        assert (wrong.returncode, wrong.stderr.strip()) == (2, text)
