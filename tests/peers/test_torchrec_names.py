"""What of torchrec 1.8.0's names is missing is what the page of compatibility says, name by name."""

from __future__ import annotations

import collections

import torchrec_names


def test_what_is_missing_is_explained():
    missing = torchrec_names.missing()
    told = [name for names in torchrec_names.explained().values() for name in names]
    assert [name for name, count in collections.Counter(told).items() if count > 1] == []
    assert sorted(missing - set(told)) == []  # missing, and not on the page
    assert sorted(set(told) - missing) == []  # on the page, and there


def test_the_walk_finds_what_is_there():
    """Not vacuous: it goes through every module that tests compare, and sees arguments and methods."""
    import torchrec

    seen = set(torchrec_names.paths(torchrec))
    for path in ("optim.keyed", "modules.crossnet", "models.dlrm", "metrics.auc", "distributed.shard", ""):
        assert path in seen and torchrec_names.BY_HAND.fullmatch(path)
    assert len(seen) > 200

    class Theirs:
        def __init__(self, one, two):
            pass

        def work(self):
            pass

    class Own:
        def __init__(self, one):
            pass

    assert sorted(torchrec_names.parts("m:Theirs", Theirs, Own)) == ["m:Theirs(two)", "m:Theirs.work"]
    assert list(torchrec_names.parts("m:Theirs", Theirs, Theirs)) == []


def test_the_page_names_all_of_it():
    page = "\n".join(torchrec_names.lines())
    for names in torchrec_names.explained().values():
        for name in names:
            assert f"`{name.rpartition(':')[2]}`" in page
