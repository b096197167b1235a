"""What a wheel asks of pip: the torch that its extension was compiled against, and no other.

`import tessera` refuses another torch (docs/decisions/0007-built-for-one-torch.md); pip must bring none.
Parquet is an extra, `tessera-parallel[parquet]`: Arrow's C++ library has another name in every release.
"""

from __future__ import annotations

import importlib.metadata


def _built_with(package: str, otherwise: str) -> str:
    try:
        return f"{package}=={importlib.metadata.version(package).partition('+')[0]}"
    except importlib.metadata.PackageNotFoundError:
        return otherwise  # as for a source distribution


def dynamic_metadata(field: str, settings=None) -> list[str] | dict[str, list[str]]:
    """Return the dependencies, or those of extras."""
    if field == "dependencies":
        return [_built_with("torch", "torch>=2.11,<2.14")]
    if field == "optional-dependencies":
        return {"parquet": [_built_with("pyarrow", "pyarrow")]}
    raise ValueError(f"wheel_dependencies: there is nothing to say about {field}")
