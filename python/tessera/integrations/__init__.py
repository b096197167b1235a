"""Tessera's engine by the names and signatures of other projects.

Each module holds the functions of one project: ``trl``, ``verl``, ``nemo_rl`` and ``megatron``. Import
them from here instead, or call the module's ``install()`` once, which puts them in the place of the
project's own wherever those have been imported by name. No project is imported unless it is there.
"""

from functools import partial

from tessera._lazy import submodule

__getattr__ = partial(submodule, __name__)
