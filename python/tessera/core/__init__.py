"""The path of today's fairchem: ``fairchem.core.common`` is ``tessera.core.common``."""
