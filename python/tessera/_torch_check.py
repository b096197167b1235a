"""Which torch the extension was built for, checked before it is loaded: another one would crash it."""

from __future__ import annotations

import sysconfig

import torch


def _release(version: str) -> str:
    return ".".join(version.split("+")[0].split(".")[:2])


def _major(version: str) -> str:
    return version.split(".")[0]


def check(built_for: str, built_for_cuda: str | None, found: str, found_cuda: str | None) -> None:
    """Raise ImportError unless an extension built for `built_for` can live in this process's torch.

    Releases of one major version of CUDA can stand in for each other, others cannot.

    >>> check("2.13.0", None, "2.13.1+cu130", "13.0")
    >>> check("2.13.0+cu126", "12.6", "2.13.1+cu128", "12.8")
    """
    if _release(built_for) != _release(found):
        raise ImportError(
            f"tessera was built for torch {built_for}, but this Python has torch {found}. "
            f"Install torch {_release(built_for)}, or build tessera again with this torch (make)."
        )
    if built_for_cuda and found_cuda is None:
        raise ImportError(
            f"tessera was built for CUDA with torch {built_for}, but torch {found} here is built for the "
            "CPU alone. Install a torch with CUDA, or build tessera again with this torch (make)."
        )
    if built_for_cuda and found_cuda and _major(built_for_cuda) != _major(found_cuda):
        raise ImportError(
            f"tessera was built for CUDA {built_for_cuda} with torch {built_for}, but torch {found} here is "
            f"built for CUDA {found_cuda}. Install torch {_release(built_for)} for CUDA "
            f"{_major(built_for_cuda)}, or build tessera again with this torch (make)."
        )


try:
    from tessera import _built_for
except ImportError:
    raise ImportError(
        "tessera's extension is not built for this Python "
        f"({sysconfig.get_config_var('SOABI')}). Build it with make, or install the package with pip."
    ) from None

check(_built_for.torch, _built_for.cuda, torch.__version__, torch.version.cuda)
