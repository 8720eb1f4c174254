"""The page at ``/docs``: the description of the operation API (``/openapi.json``) as HTML.

FastAPI's own page loads scripts from a host on the internet, into the origin of the live page and its admin key. This
one has no script at all, and needs no network.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from html import escape
from typing import Any, Final

HEADERS: Final = {
    "content-security-policy": (
        "default-src 'none'; style-src 'unsafe-inline'; base-uri 'none'; form-action 'none'; frame-ancestors 'none'"
    ),
    "cache-control": "no-cache",
    "x-content-type-options": "nosniff",
    "referrer-policy": "no-referrer",
}
_STYLE: Final = (
    ":root{color-scheme:light dark}"
    "body{font:15px/1.5 system-ui,sans-serif;max-width:60rem;margin:2rem auto;padding:0 1rem}"
    "code,pre{font:0.92em ui-monospace,monospace}"
    "h2{margin-top:2.5rem;border-bottom:1px solid #8886}"
    "h3{margin:1.6rem 0 0.3rem}"
    "p{margin:0.3rem 0;white-space:pre-line}"
    "table{border-collapse:collapse;margin:0.5rem 0}"
    "td,th{text-align:left;vertical-align:top;padding:0.15rem 1rem 0.15rem 0}"
)

Json = Mapping[str, Any]


def reference_page(api: Json) -> str:
    """The page of an OpenAPI description."""
    info = api["info"]
    title = f"{info['title']} {info['version']}"
    return "".join(
        (
            f'<!doctype html>\n<html lang="en"><head><meta charset="utf-8"><title>{escape(title)}</title>',
            f"<style>{_STYLE}</style></head><body><h1>{escape(title)}</h1>",
            _text(info.get("description", "")),
            '<p>The same for programs: <a href="openapi.json">openapi.json</a></p>',
            *_operations(api),
            "</body></html>\n",
        )
    )


def _operations(api: Json) -> Iterator[str]:
    by_tag: dict[str, list[str]] = {}
    for path, methods in api["paths"].items():
        for method, operation in methods.items():
            for tag in operation.get("tags", ("other",)):
                by_tag.setdefault(tag, []).append("".join(_operation(api, method.upper(), path, operation)))
    for tag, operations in by_tag.items():
        yield f"<h2>{escape(tag)}</h2>"
        yield from operations


def _operation(api: Json, method: str, path: str, operation: Json) -> Iterator[str]:
    yield f"<h3><code>{method} {escape(path)}</code></h3>{_text(operation.get('description', ''))}"
    rows = [
        (each["name"], each["in"], each.get("required", False), _type(each["schema"]), each.get("description", ""))
        for each in operation.get("parameters", ())
    ]
    body = operation.get("requestBody", {}).get("content", {}).get("application/json", {}).get("schema", {})
    described = _resolved(api, body)
    needed = described.get("required", ())
    rows += [
        (name, "body", name in needed, _type(schema), schema.get("description", ""))
        for name, schema in described.get("properties", {}).items()
    ]
    if rows:
        yield "<table><tr><th>name<th>in<th>type<th>meaning</tr>"
        for name, place, required, kind, meaning in rows:
            kind = kind if not required else f"{kind}, needed"
            yield f"<tr><td><code>{escape(name)}</code><td>{place}<td>{escape(kind)}<td>{escape(meaning)}</tr>"
        yield "</table>"


def _resolved(api: Json, schema: Json) -> Json:
    """The schema that a reference names; any other one itself."""
    name = schema.get("$ref", "").removeprefix("#/components/schemas/")
    found: Json = api["components"]["schemas"][name] if name else schema
    return found


def _type(schema: Json) -> str:
    if "$ref" in schema:
        return str(schema["$ref"]).rpartition("/")[2]
    if "anyOf" in schema:
        return " or ".join(dict.fromkeys(map(_type, schema["anyOf"])))
    if "enum" in schema:
        return " or ".join(map(str, schema["enum"]))
    kind = str(schema.get("type", "any"))
    return f"list of {_type(schema.get('items', {}))}" if kind == "array" else kind


def _text(text: str) -> str:
    return f"<p>{escape(text.strip())}</p>" if text else ""
