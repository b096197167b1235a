"""Graph parallelism by the paths and signatures of ``fairchem.core.common``."""
