"""The numbers that a report draws: they stand in the page as JSON."""

from __future__ import annotations

import json
import re


def data_of(page: str) -> dict:
    """Return what the page's script is given."""
    (found,) = re.findall(r'<script type="application/json" id="data">(.*?)</script>', page)
    return json.loads(found)
