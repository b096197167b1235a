"""Options of the extension are structs: their constructors take any field by its name."""

import ast
from pathlib import Path

import pytest
import tessera
from tessera import _C


def option_classes():
    """Every class of the stubs that stands on _Options, with the names of all its fields."""
    found: dict[str, list[str]] = {"_Options": []}

    def look(body, prefix):
        for node in body:
            if not isinstance(node, ast.ClassDef):
                continue
            bases = [prefix + ast.unparse(base) for base in node.bases] + [ast.unparse(b) for b in node.bases]
            known = next((found[base] for base in bases if base in found), None)
            if known is not None:
                own = [line.target.id for line in node.body if isinstance(line, ast.AnnAssign)]
                found[prefix + node.name] = [*known, *own]
            look(node.body, f"{prefix}{node.name}.")

    look(ast.parse((Path(tessera.__file__).parent / "_C.pyi").read_text()).body, "")
    del found["_Options"]
    return found


CLASSES = option_classes()


def class_named(name):
    owner = _C
    for part in name.split("."):
        owner = getattr(owner, part)
    return owner


def test_the_classes_are_found():
    assert set(CLASSES) >= {"DataParallelOptions", "LinearOptions", "sharding.ShardedSequenceOptions"}
    assert len(CLASSES["LinearOptions"]) == 13


@pytest.mark.parametrize("name", CLASSES)
def test_every_field_can_be_given_by_its_name(name):
    options = class_named(name)
    there = {field for field in dir(options) if isinstance(getattr(options, field), property)}
    assert there == set(CLASSES[name])
    usual = options()
    for field in CLASSES[name]:
        options(**{field: getattr(usual, field)})


def test_what_is_given_is_held_and_the_rest_is_as_usual():
    options = _C.LinearOptions(temperature=2, columns=[0, 4], reduction="sum", softcap=3.0)
    assert (options.temperature, options.columns, options.reduction, options.softcap) == (
        2.0,
        (0, 4),
        "sum",
        3,
    )
    usual = _C.LinearOptions()
    assert (options.ignore_index, options.z_loss, options.overwrite) == (-100, 0.0, "never")
    assert (usual.temperature, usual.columns, usual.reduction) == (1.0, None, "mean")


def test_mistakes_name_the_field():
    with pytest.raises(TypeError, match=r"^TokenOptions: there is no 'temprature'\.$"):
        _C.TokenOptions(temprature=2.0)
    with pytest.raises(TypeError, match=r"^TokenOptions: temperature cannot be 'hot'\.$"):
        _C.TokenOptions(temperature="hot")
    with pytest.raises(ValueError, match="overwrite is 'never', 'backward' or 'forward', not 'always'"):
        _C.TokenOptions(overwrite="always")
    with pytest.raises(TypeError):
        _C.TokenOptions(2.0)
