"""Weights that depend on the place of an id in its bag, for a group of features.

>>> GroupedPositionWeightedModule({"f": 0})
Traceback (most recent call last):
ValueError: embed.position_weighted: feature 'f' has a longest bag of 0. It must be at least 1.
"""

from __future__ import annotations

from tessera.modules.feature_processor import PositionWeightedProcessor

__all__ = ["GroupedPositionWeightedModule"]


class GroupedPositionWeightedModule(PositionWeightedProcessor):
    """Give features weights by position: `position_weights.<feature>`, ones at first.

    If the features have weights already, those are the positions, as they arrive from row-wise input.
    """
