"""Children of a rank: DataLoader workers, multiprocessing by fork, os.fork."""

from __future__ import annotations

import json
import multiprocessing
import os
import re

import pytest
import torch
import torch.distributed as dist
from ranks import run_ranks
from tessera.nn.parallel import DistributedDataParallel
from test_failure import launch
from torch.utils.data import DataLoader, Dataset


class Rows(Dataset):
    """Rows that a worker makes; it also tries the group of its parent once."""

    def __init__(self, tensor):
        self.tensor = tensor  # lies in the segment

    def __len__(self):
        return 32

    def __getitem__(self, index):
        said = ""
        if index in (0, 1):
            try:
                dist.all_reduce(torch.full((4,), 100.0))
            except ValueError as error:
                said = str(error)
        value = self.tensor[index % 4].item()
        self.tensor.add_(1000.0)  # a copy: nobody else sees it
        return torch.full((8,), float(index)), value, said


def train_with_workers(rank):
    torch.manual_seed(0)
    model = DistributedDataParallel(torch.nn.Linear(8, 4), gradient_as_bucket_view=True)
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-4)
    group = dist.distributed_c10d._get_default_group()
    cpu = torch.device("cpu")
    shared = group._get_backend(cpu).allocate_tensor(4, dtype=torch.float32, device=cpu)
    shared.copy_(torch.arange(4.0))
    said = []
    for _ in range(2):
        loader = DataLoader(Rows(shared), batch_size=4, num_workers=2, multiprocessing_context="fork")
        for rows, values, texts in loader:
            optimizer.zero_grad()
            model(rows + rank).square().mean().backward()
            optimizer.step()
            said += [text for text in texts if text]
            assert torch.all(values % 1000 < 4)
    total = torch.ones(1)
    dist.all_reduce(total)
    weights = [p.detach().clone() for p in model.parameters()]
    return os.getpid(), said, total.item(), shared.tolist(), weights


def test_training_with_loader_workers():
    outcomes = run_ranks(2, train_with_workers)
    for pid, said, total, shared, _ in outcomes:
        assert len(said) == 4
        for text in said:
            assert f"group 'world' belongs to process {pid}, rank " in text
            assert ", forked from it, which is no rank." in text
        assert total == 2.0
        assert shared == [0.0, 1.0, 2.0, 3.0]
    for one, other in zip(outcomes[0][4], outcomes[1][4], strict=True):
        assert torch.equal(one, other)


def _child(rank, results):
    try:
        value = torch.full((1,), 100.0)
        dist.all_reduce(value)
        results.put(f"got {value.item()}")
    except ValueError as error:
        results.put(str(error))


def sum_beside_a_child(rank):
    context = multiprocessing.get_context("fork")
    results = context.Queue()
    child = context.Process(target=_child, args=(rank, results))
    child.start()
    said = results.get(timeout=30)
    child.join(30)
    value = torch.full((1,), float(rank + 1))
    dist.all_reduce(value)
    return value.item(), said, os.getpid(), child.pid, child.exitcode


@pytest.mark.parametrize("backend", ["shm"])
def test_a_child_of_multiprocessing_cannot_take_its_parents_place(backend):
    for value, said, pid, child, code in run_ranks(2, sum_beside_a_child, backend=backend):
        assert value == 3.0
        assert f"belongs to process {pid}" in said and f"this is process {child}" in said
        assert code == 0


CHILD_FAILS = """
    import os, sys, torch, torch.distributed as dist, tessera
    os.environ["TORCHELASTIC_ERROR_FILE"] = f"error-{os.environ['RANK']}.json"
    world = tessera.comm.init(timeout=30)
    dist.barrier()
    if dist.get_rank() == 1:
        child = os.fork()
        if child == 0:
            END
        _, status = os.waitpid(child, 0)
        print("child ended with", status, flush=True)
    value = torch.full((1,), dist.get_rank() + 1.0)
    for _ in range(3):
        dist.all_reduce(value)
    print("sum", value.item(), flush=True)
    dist.destroy_process_group()
"""


@pytest.mark.parametrize(
    "end",
    [
        'raise ArithmeticError("the child is wrong")',
        'tessera.comm.report_failure("the child is wrong"); sys.exit(0)',
        "dist.all_reduce(torch.ones(1))",
        "dist.destroy_process_group(); sys.exit(0)",
        "sys.exit(3)",
    ],
    ids=["raises", "reports", "uses", "destroys", "exits"],
)
def test_what_becomes_of_a_child_is_no_failure_of_its_rank(tmp_path, end):
    result, _ = launch(tmp_path, CHILD_FAILS.replace("END", end))
    assert result.returncode == 0, result.stderr
    assert result.stdout.count("sum 12.0") == 2, result.stdout
    assert "child ended with" in result.stdout
    assert not list(tmp_path.glob("error-*.json"))


@pytest.mark.parametrize(
    "end",
    [
        'raise ArithmeticError("the child is wrong")',
        "dist.destroy_process_group(); sys.exit(0)",
        "sys.exit(3)",
    ],
    ids=["raises", "destroys", "exits"],
)
def test_a_child_of_a_rank_with_torchs_own_engine_ends(tmp_path, end):
    # Torch's Gloo has threads as its NCCL has, and waits for them at its end.
    code = CHILD_FAILS.replace("END", end).replace("init(timeout=30)", 'init("gloo", timeout=30)')
    # The rank goes without Python's end, in which one of those threads may abort it (docs/python.md).
    code += "    os._exit(0)\n"
    result, _ = launch(tmp_path, code)
    assert result.returncode == 0, result.stderr
    assert result.stdout.count("sum 12.0") == 2, result.stdout


def test_the_store_is_the_ranks_alone(tmp_path):
    code = """
        import os, sys, torch, torch.distributed as dist, tessera
        tessera.comm.init(timeout=30)
        store = dist.distributed_c10d._get_default_store()
        store.set("key", "value")
        if dist.get_rank() == 1:
            child = os.fork()
            if child == 0:
                try:
                    store.set("key", "the child's")
                except ValueError as error:
                    print("child:", error, flush=True)
                sys.exit(0)
            os.waitpid(child, 0)
            print("parents", os.getpid(), "and", child, flush=True)
        dist.barrier()
        assert store.get("key") == b"value"
        dist.destroy_process_group()
    """
    result, _ = launch(tmp_path, code)
    assert result.returncode == 0, result.stderr
    parent, child = re.search(r"parents (\d+) and (\d+)", result.stdout).groups()
    assert f"belongs to process {parent}; this is process {child}, forked from it." in result.stdout


def test_a_child_may_make_a_group_of_its_own(tmp_path):
    # Ranks that are themselves children of a process with torch and tessera loaded: these are ranks.
    code = """
        import os, sys, torch, torch.distributed as dist, tessera
        child = os.fork()
        if child:
            sys.exit(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]))
        os.environ["TORCHELASTIC_ERROR_FILE"] = f"error-{os.environ['RANK']}.json"
        tessera.comm.init(timeout=30)
        value = torch.full((1,), dist.get_rank() + 1.0)
        dist.all_reduce(value)
        print("sum", value.item(), flush=True)
        if dist.get_rank() == 1:
            raise ArithmeticError("loss is nan")
        dist.barrier()
    """
    result, _ = launch(tmp_path, code)
    assert result.stdout.count("sum 3.0") == 2, result.stderr
    report = json.loads((tmp_path / "error-1.json").read_text())
    assert report["message"]["message"] == "ArithmeticError: loss is nan"
