"""Keeps what tests do to the environment from the tests after them.

A module that needs variables in all of its tests says so: `ENVIRONMENT = {"TESSERA_PROFILE": "assume"}`.
"""

from __future__ import annotations

import contextlib
import os

import pytest

# What programs read of a job and of this library. Imports may change others (torch's compiler does).
READ = ("RANK", "WORLD_SIZE", "LOCAL_", "GROUP_", "MASTER_", "SLURM_", "OMPI_", "PMI", "TESSERA_", "BACKEND")


def read_variables() -> dict[str, str]:
    return {name: value for name, value in os.environ.items() if name.startswith(READ)}


@contextlib.contextmanager
def restored_environment(**variables: str):
    """Set the variables, and put all of the environment back as it was."""
    before = dict(os.environ)
    os.environ.update(variables)
    try:
        yield
    finally:
        if dict(os.environ) != before:
            os.environ.clear()
            os.environ.update(before)


@pytest.fixture(scope="module", autouse=True)
def environment_of_the_module(request):
    with restored_environment(**getattr(request.module, "ENVIRONMENT", {})):
        yield


@pytest.fixture(autouse=True)
def environment_of_the_test(environment_of_the_module):
    with restored_environment():
        yield


_at_the_start = read_variables()


def pytest_collection_finish(session):
    changed = dict(read_variables().items() ^ _at_the_start.items())
    if changed:
        names = ", ".join(sorted(changed))
        raise pytest.UsageError(
            f"a test module sets {names} where it is imported; ENVIRONMENT = {{...}} is for that"
        )
