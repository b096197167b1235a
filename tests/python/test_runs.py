"""tessera.runs: a run is followed while it is written, and to its end."""

from __future__ import annotations

import json
import threading

import pytest
from tessera import runs


def line(**record):
    return json.dumps(record) + "\n"


def test_what_was_logged_is_read(tmp_path):
    text = line(kind="run", workload="lm") + line(kind="step", step=1, loss=2.0, name="x", flag=True)
    text += line(kind="eval", step=1, auc=0.5) + line(kind="end", steps=1, status="stopped") + '{"kind":'
    (tmp_path / "metrics.jsonl").write_text(text)
    step, judged, end = runs.read(tmp_path)
    assert (step.kind, step.step, step.figures) == ("step", 1, {"loss": 2.0})
    assert (judged.kind, judged.figures) == ("evaluation", {"auc": 0.5})
    assert (end.kind, end.step, end.status) == ("end", 1, "stopped")


def test_a_run_is_followed_while_it_is_written(tmp_path):
    path = tmp_path / "metrics.jsonl"
    found, may_write = [], threading.Event()

    def seen(metrics):
        found.append((metrics.kind, metrics.step))
        may_write.set()

    follower = threading.Thread(target=runs.follow, args=(tmp_path, seen), kwargs={"timeout": 30})
    follower.start()
    whole = ""
    for step in range(1, 4):
        whole += line(kind="step", step=step, loss=1.0)
        with open(path, "a") as file:  # a line comes in two parts
            file.write(whole.splitlines(keepends=True)[-1][:10])
            file.flush()
            file.write(whole.splitlines(keepends=True)[-1][10:])
        assert may_write.wait(30)
        may_write.clear()
    # The run goes on after a checkpoint of step 1.
    path.write_text(whole.splitlines(keepends=True)[0])
    for step in (2, 3, 4):
        with open(path, "a") as file:
            file.write(line(kind="step", step=step, loss=1.0))
    with open(path, "a") as file:
        file.write(line(kind="end", steps=4, status="finished"))
    follower.join(30)
    assert not follower.is_alive()
    assert found == [("step", 1), ("step", 2), ("step", 3), ("step", 4), ("end", 4)]


def test_a_run_that_says_nothing_more_is_given_up(tmp_path):
    (tmp_path / "metrics.jsonl").write_text(line(kind="step", step=1, loss=1.0))
    with pytest.raises(TimeoutError, match=r"nothing new for 0\.5 s"):
        runs.follow(tmp_path, lambda metrics: None, timeout=0.5)
