"""Lets `tessera inspect --stacks` ask this process where its Python threads are."""

from __future__ import annotations

import faulthandler
import os
import signal

# As in src/core/live_record.h.
_SIGNAL = signal.SIGRTMAX - 6
_VARIABLE = "TESSERA_LIVE_FILE"
_SUFFIX = ".python"

_is_installed = False


def install() -> None:
    """Answer the signal of `tessera inspect --stacks`, in jobs of `tessera run`.

    Does nothing if the launcher has named no file, or if the program uses the signal itself.
    """
    global _is_installed
    record = os.environ.get(_VARIABLE)
    if _is_installed or not record or signal.getsignal(_SIGNAL) is not signal.SIG_DFL:
        return
    _is_installed = True
    flags = os.O_WRONLY | os.O_CREAT | os.O_APPEND | os.O_NOFOLLOW | os.O_CLOEXEC
    try:
        file = os.open(record + _SUFFIX, flags, 0o600)
    except OSError:
        return
    # The file stays open as long as the process lives.
    faulthandler.register(_SIGNAL, file=file, all_threads=True)
