"""Modules for training on several ranks."""

from tessera.nn import parallel

__all__ = ["parallel"]
