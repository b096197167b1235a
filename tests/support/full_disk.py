"""A disk on which nothing fits: how a program ends that cannot write its file."""

from __future__ import annotations

import resource
import signal


def full_disk(num_bytes: int = 512) -> None:
    """For ``preexec_fn``: files of the process end after so many bytes, with an error and no signal."""
    signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
    resource.setrlimit(resource.RLIMIT_FSIZE, (num_bytes, num_bytes))
