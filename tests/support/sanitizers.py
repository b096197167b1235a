"""What a build with sanitizers cannot show."""

import os

import pytest

not_sanitized = pytest.mark.skipif(
    bool(os.environ.get("TESSERA_SANITIZE")),
    reason="sanitizers keep memory, and catch signals and failed allocations, in their own way",
)
