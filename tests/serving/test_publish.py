"""tessera train dlrm --publish: what it writes, and servers that follow it while it trains."""

from __future__ import annotations

import concurrent.futures
import json
import pathlib
import subprocess
import threading
import time

import pytest
from conftest import NUM_ROWS, NUM_TABLES, TESSERA, request_of, some_samples, tessera
from publications import Keeper, answer_of, ask_until, export, folder_of, steps_in, wait_for

TRAINING = [
    "train", "dlrm", "--ranks", 2, "--batch", 64, "--tables", NUM_TABLES, "--rows", NUM_ROWS, "--dim", 16,
    "--bottom", "32,16", "--top", "32,1", "--eval-samples", 500, "--eval-every", 0, "--keep-model", "none",
]  # fmt: skip


@pytest.fixture(scope="session")
def published(tmp_path_factory) -> pathlib.Path:
    """All that a short training has published: a whole version, then deltas."""
    folder = tmp_path_factory.mktemp("published")
    keeper = Keeper(folder / "live", folder / "kept")
    keeper.start()
    # Enough for four versions where a machine writes slowly beside the steps.
    tessera(*TRAINING, "--steps", 120, "--publish", folder / "live", "--publish-every", 0, "--runs", folder)
    keeper.is_over.set()
    keeper.join()
    assert len(steps_in(folder / "kept")) >= 4
    assert steps_in(folder / "kept")[-1] == 120
    return folder / "kept"


def test_a_delta_is_small_and_holds_no_optimizer(published):
    steps = steps_in(published)
    manifests = [json.loads((published / folder_of(s) / "MANIFEST.json").read_text()) for s in steps]
    assert "base" not in manifests[0] or manifests[0]["base"] is None
    assert all(manifest.get("base") for manifest in manifests[1:])
    assert not any("optimizer" in json.dumps(manifest) for manifest in manifests)


@pytest.mark.parametrize("processes", [1, 3])
def test_answers_beside_a_training_belong_to_one_version_each(serve, tmp_path, processes):
    """A training publishes while clients ask: no answer is of two versions, none is lost."""
    live = tmp_path / "live"
    keeper = Keeper(live, tmp_path / "kept")
    keeper.start()
    training = subprocess.Popen(
        [TESSERA, *map(str, TRAINING), "--steps", "300", "--publish", live, "--publish-every", "0.2",
         "--runs", tmp_path / "runs"],
        stdout=subprocess.DEVNULL,
    )  # fmt: skip
    deadline = time.monotonic() + 60
    while not steps_in(live):
        assert time.monotonic() < deadline
        time.sleep(0.02)
    first = steps_in(live)[0]
    package = export(live, first, tmp_path / "pkg")
    server = serve(package, "--watch", str(live), "--processes", str(processes), "--workers", "2")
    request = request_of(some_samples(8))
    event, answers, failures = threading.Event(), [], []
    with concurrent.futures.ThreadPoolExecutor(4) as pool:
        askers = [pool.submit(ask_until, event, server, request, answers, failures) for _ in range(4)]
        assert training.wait(timeout=120) == 0
        wait_for(server, 300)
        answers.append(answer_of(server, request))
        event.set()
        for asker in askers:
            asker.result(timeout=30)
    keeper.is_over.set()
    keeper.join()
    assert not failures
    seen = {step for step, _ in answers}
    assert 300 in seen
    by_step = {}
    for step, numbers in answers:
        assert by_step.setdefault(step, numbers) == numbers, f"step {step} answered twice differently"
    for step in sorted(seen & set(steps_in(tmp_path / "kept")))[-3:]:
        own = serve(export(tmp_path / "kept", step, tmp_path / f"pkg-{step}"))
        assert answer_of(own, request) == (step, by_step[step])
        assert own.stop() == 0
    assert server.stop() == 0
