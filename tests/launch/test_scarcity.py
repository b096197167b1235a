"""The n-th descriptor is refused: the launcher says so, and leaves nothing behind."""

import os
import resource

import pytest
from jobs import run

MOST = 80


def limited(what, count):
    """The words of a job under a hard limit, which the launcher cannot raise."""
    return {"preexec_fn": lambda: resource.setrlimit(what, (count, count))}


def test_every_lack_of_descriptors_is_told(tmp_path):
    env = {"TMPDIR": str(tmp_path)}
    num_refused = 0
    for count in range(4, MOST):
        result = run("run", "-n", 2, "--", "true", env=env, **limited(resource.RLIMIT_NOFILE, count))
        assert os.listdir(tmp_path) == [], count
        if result.code == 0:
            break
        num_refused += 1
        # An error of the launcher's, not the end of a process that could not go on.
        assert result.code in (69, 70, 78, 126, 127), (count, result)
        assert result.err.startswith("error: "), (count, result.err)
        assert "defect" not in result.err, (count, result.err)
    else:
        pytest.fail(f"{MOST} descriptors are not enough")
    assert num_refused > 3
