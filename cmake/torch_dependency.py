"""What a wheel asks of pip: the torch that its extension was compiled against, and no other.

`import tessera` refuses another torch (docs/decisions/0007-built-for-one-torch.md); pip must bring none.
"""

from __future__ import annotations

import importlib.metadata


def dynamic_metadata(field: str, settings=None) -> list[str]:
    """Return the dependencies. Without torch, as for a source distribution, any release that builds."""
    if field != "dependencies":
        raise ValueError(f"torch_dependency: there is nothing to say about {field}")
    try:
        release = importlib.metadata.version("torch").partition("+")[0]
    except importlib.metadata.PackageNotFoundError:
        return ["torch>=2.11,<2.14"]
    return [f"torch=={release}"]
