"""Errors of this process, told to its peers and to its launcher."""

from __future__ import annotations

import contextlib
import os
import sys
import traceback

from tessera import _C
from tessera._error import comm_error_of
from tessera.comm import _stacks

# The exit code of a process that ends because its group failed: a peer was lost, ranks disagreed or a
# limit passed, unless the kind of error has its own.
_EXIT_CODE = 75
_EXIT_CODES = {"rendezvous": 69, "unavailable": 78}

# Kinds of error whose cause lies with another rank.
_SECONDARY_KINDS = ("peer lost", "peer failed", "aborted")

_is_installed = False
# The process that is a rank: the last words of children forked from it are not this rank's.
_rank_process = 0


def _title(error: BaseException) -> str:
    return "".join(traceback.format_exception_only(type(error), error)).strip()


def report_failure(reason: str | BaseException) -> None:
    """Tell every group of this process that it failed.

    Peers that wait, or will wait, raise CommError of kind "peer failed" with this rank's number and
    `reason`; the process's own groups are unusable afterwards. An exception that came from a peer is
    passed on unchanged, so that the root cause survives. Not collective; returns at once.

    >>> report_failure("the disk is full")
    """
    if isinstance(reason, str):
        _C.report_failure(reason)
        return
    error = comm_error_of(reason)
    if error is None:
        _C.report_failure(_title(reason))
    else:
        _C.report_comm_error(error.kind, error.ranks, str(error))


def set_step(step: int) -> None:
    """Name the training step this process is at, for error messages.

    >>> set_step(17)
    """
    _C.set_step(step)


class guard(contextlib.ContextDecorator):
    """Report an exception that leaves the block to the other ranks, and let it go on.

    Without it, peers of a rank that survives an exception wait for that rank until their limit.
    Works as a context manager and as a decorator.

    >>> with guard():
    ...     pass
    """

    def __enter__(self):
        return self

    def __exit__(self, kind, error, trace) -> bool:
        if error is not None and not isinstance(error, (SystemExit, GeneratorExit)):
            report_failure(error)
        return False


def _report_uncaught(error: BaseException) -> None:
    comm_error = comm_error_of(error)
    callstack = "".join(traceback.format_exception(type(error), error, error.__traceback__))
    _C.write_error_file(
        _title(error), callstack, comm_error is not None and comm_error.kind in _SECONDARY_KINDS
    )
    report_failure(error)
    if comm_error is not None:
        _C.set_exit_code(_EXIT_CODES.get(comm_error.kind, _EXIT_CODE))


def install() -> None:
    """Have uncaught exceptions reported to the peers and the launcher. Later calls change nothing.

    The error file (TORCHELASTIC_ERROR_FILE) is written. A process that only failed because its group
    did ends with code 75; with 69 if the ranks did not meet, 78 if the engine cannot be had. Children
    forked from this process report nothing, unless they make a group themselves.
    """
    global _is_installed, _rank_process
    _rank_process = os.getpid()
    _C.install_failure_handler()
    if _is_installed:
        return
    _is_installed = True
    _stacks.install()
    print_as_before = sys.excepthook

    def excepthook(kind, error, trace):
        try:
            if not issubclass(kind, SystemExit) and os.getpid() == _rank_process:
                _report_uncaught(error)
        finally:
            print_as_before(kind, error, trace)

    sys.excepthook = excepthook
