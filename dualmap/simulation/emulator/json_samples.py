"""Values that fit a JSON schema, drawn from a seed: what structured output and tool calls hold.

Keywords that would need a search for a value (``pattern``, ``not``, …) are refused by name; annotations are skipped.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

import orjson
import xxhash

from dualmap.simulation.emulator.errors import bad_request, not_emulated
from dualmap.simulation.workload.prompts import WORDS

_REFUSED = (
    "pattern", "patternProperties", "not", "if", "dependentSchemas", "dependentRequired", "minProperties",
    "uniqueItems", "contains", "multipleOf", "propertyNames", "$dynamicRef",
)  # fmt: skip
_FORMATS = {
    "date-time": "2026-01-01T00:00:00Z",
    "date": "2026-01-01",
    "time": "00:00:00Z",
    "duration": "PT1H",
    "email": "someone@example.com",
    "hostname": "example.com",
    "ipv4": "192.0.2.1",
    "ipv6": "2001:db8::1",
    "uri": "https://example.com/",
    "uuid": "00000000-0000-4000-8000-000000000000",
}
MAX_LENGTH = 1000
"""Items or characters that a schema may demand."""
_OPTIONAL_DEPTH = 3
"""Deeper than this, objects have their required properties alone and arrays their fewest items."""
_MAX_DEPTH = 24


def json_sample(schema: object, seed: int) -> str:
    """JSON text of a value that the schema allows; the same for the same seed.

    Raises:
        ApiError: the schema is none, or holds what is not emulated.
    """
    value = _Sampler(schema, seed).value(schema, 0)
    try:
        return orjson.dumps(value).decode()
    except TypeError as error:
        raise bad_request("Grammar error: numbers beyond 64 bits cannot be had.") from error


class _Sampler:
    def __init__(self, root: object, seed: int) -> None:
        self._root = root
        self._seed = seed
        self._draws = 0

    def value(self, schema: object, depth: int) -> Any:
        if depth > _MAX_DEPTH:
            raise bad_request("A JSON schema that requires itself is not emulated.")
        if schema is True:
            return self._word()
        if not isinstance(schema, Mapping):
            raise bad_request("Grammar error: a JSON schema must be an object or true.")
        for keyword in _REFUSED:
            if schema.get(keyword):
                raise not_emulated(f"JSON schema's {keyword}")
        if "$ref" in schema:
            return self.value(self._referred(schema["$ref"]), depth + 1)
        if "const" in schema:
            return schema["const"]
        if "enum" in schema:
            return self._one_of(schema["enum"], "enum")
        for keyword in ("anyOf", "oneOf"):
            if keyword in schema:
                return self._branch({**schema}, keyword, depth)
        if "allOf" in schema:
            return self.value(_merged(schema), depth + 1)
        return self._typed(schema, depth)

    def _typed(self, schema: Mapping[str, Any], depth: int) -> Any:
        kind = schema.get("type")
        if isinstance(kind, list):
            kind = self._one_of(kind, "type") if depth <= _OPTIONAL_DEPTH or "null" not in kind else "null"
        if kind is None:
            kind = "object" if "properties" in schema else "array" if "items" in schema else "string"
        if kind == "object":
            return self._object(schema, depth)
        if kind == "array":
            return self._array(schema, depth)
        if kind == "string":
            return self._string(schema)
        if kind in ("integer", "number"):
            return self._number(schema, whole=kind == "integer")
        if kind == "boolean":
            return self._draw() % 2 == 1
        if kind == "null":
            return None
        raise bad_request(f"Grammar error: Invalid type: {kind}")

    def _object(self, schema: Mapping[str, Any], depth: int) -> dict[str, Any]:
        properties = schema.get("properties") or {}
        required = schema.get("required") or []
        if not isinstance(properties, Mapping) or not _is_list_of_names(required):
            raise bad_request("Grammar error: properties must be an object, required a list of names.")
        wanted = [name for name in properties if depth < _OPTIONAL_DEPTH or name in required]
        found = {name: self.value(properties[name], depth + 1) for name in wanted}
        other = schema.get("additionalProperties", True)
        for name in required:
            if name not in found:
                found[name] = self.value(other, depth + 1)
        return found

    def _array(self, schema: Mapping[str, Any], depth: int) -> list[Any]:
        least, most = _length(schema, "minItems", 0), _length(schema, "maxItems", MAX_LENGTH)
        first = schema.get("prefixItems") or []
        if not isinstance(first, list):
            raise bad_request("Grammar error: prefixItems must be a list.")
        wanted = max(least, len(first), 1 if depth < _OPTIONAL_DEPTH else 0)
        schemas = [*first, *[schema.get("items", True)] * max(0, wanted - len(first))]
        return [self.value(each, depth + 1) for each in schemas[:most]]

    def _string(self, schema: Mapping[str, Any]) -> str:
        kind = schema.get("format")
        if kind is not None:
            if not isinstance(kind, str) or kind not in _FORMATS:
                raise not_emulated(f"JSON schema's format {kind}")
            return _FORMATS[kind]
        text = self._word()
        least, most = _length(schema, "minLength", 0), _length(schema, "maxLength", MAX_LENGTH)
        while len(text) < least:
            text = f"{text} {self._word()}"
        return text[:most]

    def _number(self, schema: Mapping[str, Any], *, whole: bool) -> float:
        step = 1 if whole else 0.5
        least = max(_bound(schema, "minimum", -math.inf), _bound(schema, "exclusiveMinimum", -math.inf) + step)
        most = min(_bound(schema, "maximum", math.inf), _bound(schema, "exclusiveMaximum", math.inf) - step)
        drawn = float(self._draw() % 100)
        value: float = min(max(drawn, least), most)
        return math.ceil(value) if whole else value

    def _branch(self, schema: dict[str, Any], keyword: str, depth: int) -> Any:
        branches = schema.pop(keyword)
        if depth > _OPTIONAL_DEPTH and {"type": "null"} in branches:
            return None
        branch = self._one_of(branches, keyword)
        return self.value({**schema, **branch} if isinstance(branch, Mapping) else branch, depth + 1)

    def _referred(self, reference: object) -> object:
        at = self._root
        if not isinstance(reference, str) or not reference.startswith("#"):
            raise not_emulated("JSON schema's $ref to another document")
        for key in reference.split("/")[1:]:
            if not isinstance(at, Mapping) or key not in at:
                raise bad_request(f"Grammar error: {reference} does not exist.")
            at = at[key]
        return at

    def _one_of(self, values: object, keyword: str) -> Any:
        if not isinstance(values, list) or not values:
            raise bad_request(f"Grammar error: {keyword} must be a list with at least one value.")
        return values[self._draw() % len(values)]

    def _word(self) -> str:
        return WORDS[self._draw() % len(WORDS)].decode("ascii").strip()

    def _draw(self) -> int:
        self._draws += 1
        return xxhash.xxh3_64_intdigest(self._draws.to_bytes(8, "little"), self._seed)


def _merged(schema: Mapping[str, Any]) -> dict[str, Any]:
    """``allOf`` as one schema: properties and requirements of all, of the rest the last."""
    merged = {name: value for name, value in schema.items() if name != "allOf"}
    parts = schema["allOf"]
    for part in parts if isinstance(parts, list) else ():
        if not isinstance(part, Mapping):
            continue
        properties = _properties(merged) | _properties(part)
        required = _required(merged) + _required(part)
        merged |= part
        if properties:
            merged["properties"] = properties
        if required:
            merged["required"] = required
    return merged


def _properties(schema: Mapping[str, Any]) -> dict[str, Any]:
    found = schema.get("properties")
    return found if isinstance(found, dict) else {}


def _required(schema: Mapping[str, Any]) -> list[Any]:
    found = schema.get("required")
    return found if isinstance(found, list) else []


def _is_list_of_names(value: object) -> bool:
    return isinstance(value, list) and all(isinstance(each, str) for each in value)


def _length(schema: Mapping[str, Any], name: str, default: int) -> int:
    value = schema.get(name)
    if value is None:
        return default
    if type(value) is not int or value < 0:
        raise bad_request(f"Grammar error: {name} must be a whole number.")
    if name.startswith("min") and value > MAX_LENGTH:
        raise not_emulated(f"JSON schema's {name} above {MAX_LENGTH}")
    return value


def _bound(schema: Mapping[str, Any], name: str, default: float) -> Any:
    value = schema.get(name)
    if value is None:
        return default
    if type(value) not in (int, float):
        raise bad_request(f"Grammar error: {name} must be a number.")
    return value
