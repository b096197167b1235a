"""The error of a group."""

from __future__ import annotations

from collections.abc import Sequence

from torch.distributed import DistBackendError

from tessera import _C


class CommError(DistBackendError):
    """Tell that the ranks of a group cannot go on together: the same text on every rank.

    ``kind`` is one of ``"mismatch"``, ``"peer lost"``, ``"peer failed"``, ``"timeout"``,
    ``"aborted"``, ``"unavailable"`` and ``"rendezvous"``; ``ranks`` are the group ranks at fault,
    if they are known.

    >>> error = CommError("comm.barrier #4: rank 1 ended.", kind="peer lost", ranks=[1])
    >>> error.kind, error.ranks
    ('peer lost', [1])
    """

    def __init__(self, message: str = "", kind: str = "aborted", ranks: Sequence[int] = ()):
        super().__init__(message)
        self.kind = kind
        self.ranks = list(ranks)

    def __reduce__(self):
        return type(self), (str(self), self.kind, self.ranks)


def comm_error_of(error: BaseException) -> CommError | None:
    """Return `error` as a CommError if it is one, or is one that torch.distributed passed on.

    The latter arrives as a plain DistBackendError; kind and ranks are looked up by its text.
    """
    if isinstance(error, CommError):
        return error
    if isinstance(error, DistBackendError) and (last := _C.last_error()) is not None:
        kind, ranks, text = last
        if text in str(error):
            return CommError(text, kind, ranks)
    return None
