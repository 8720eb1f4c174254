"""Values that fit their schemas."""

from __future__ import annotations

import json
from typing import Any

import pytest

from dualmap.simulation.emulator.errors import ApiError
from dualmap.simulation.emulator.json_samples import json_sample


def sample(schema: Any, seed: int = 1) -> Any:
    return json.loads(json_sample(schema, seed))


def test_every_type_gives_a_value_of_its_type() -> None:
    kinds = {"string": str, "integer": int, "number": float, "boolean": bool, "object": dict, "array": list}
    schema = {"type": "object", "properties": {name: {"type": name} for name in kinds}}
    assert {name: type(value) for name, value in sample(schema).items()} == kinds
    assert sample({"type": "null"}) is None
    assert sample({"type": ["null"]}) is None


def test_the_same_seed_gives_the_same_value_and_another_one_another() -> None:
    schema = {"type": "array", "items": {"type": "integer"}, "minItems": 8}
    assert sample(schema, 3) == sample(schema, 3) != sample(schema, 4)


@pytest.mark.parametrize("seed", range(20))
def test_bounds_are_kept(seed: int) -> None:
    assert 10 <= sample({"type": "integer", "minimum": 9.5, "maximum": 12}, seed) <= 12
    assert 1 < sample({"type": "number", "exclusiveMinimum": 1, "exclusiveMaximum": 4}, seed) < 4
    assert 6 <= len(sample({"type": "string", "minLength": 6, "maxLength": 7}, seed)) <= 7
    assert len(sample({"type": "string", "maxLength": 1}, seed)) <= 1
    assert len(sample({"type": "array", "minItems": 2, "maxItems": 3}, seed)) in (2, 3)
    assert sample({"type": "array", "maxItems": 0}, seed) == []
    assert sample({"enum": ["ü", 2]}, seed) in ("ü", 2)


def test_references_branches_and_combinations_are_followed() -> None:
    schema = {
        "$defs": {"city": {"type": "object", "properties": {"name": {"const": "Ulm"}}, "required": ["name"]}},
        "allOf": [
            {"type": "object", "properties": {"home": {"$ref": "#/$defs/city"}}},
            {"properties": {"age": {"anyOf": [{"type": "integer"}]}}, "required": ["age", "other"]},
        ],
    }
    value = sample(schema)
    assert value["home"] == {"name": "Ulm"}
    assert isinstance(value["age"], int)
    assert "other" in value


def test_a_schema_that_may_go_on_for_ever_ends() -> None:
    tree: Any = {"type": "object", "properties": {"children": {"type": "array", "items": {"$ref": "#"}}}}
    assert "children" in sample(tree)
    chain = {"type": "object", "properties": {"next": {"anyOf": [{"$ref": "#"}, {"type": "null"}]}}}
    assert all(isinstance(sample({**chain, "required": ["next"]}, seed), dict) for seed in range(10))


@pytest.mark.parametrize(
    ("schema", "message"),
    [
        ({"type": "string", "pattern": "a+"}, "pattern is not emulated"),
        ({"type": "string", "format": "odd"}, "format odd is not emulated"),
        ({"type": "object", "properties": {"a": {"$ref": "#"}}, "required": ["a"]}, "requires itself"),
        ({"$ref": "#/nowhere"}, "does not exist"),
        ({"type": "wat"}, "Invalid type: wat"),
        ({"enum": []}, "at least one value"),
        ({"type": "integer", "minimum": "low"}, "minimum must be a number"),
        (False, "must be an object or true"),
        (5, "must be an object or true"),
    ],
)
def test_what_cannot_be_sampled_is_refused_by_name(schema: Any, message: str) -> None:
    with pytest.raises(ApiError, match=message):
        json_sample(schema, 0)
