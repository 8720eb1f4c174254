"""``dualmap settings``: the settings in effect, and every setting that there is."""

from __future__ import annotations

import argparse
import json
import re
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Annotated, Any, Literal, Union, cast, get_args, get_origin

from pydantic import BaseModel, SecretStr
from pydantic.fields import FieldInfo
from pydantic_core import PydanticUndefined

from dualmap.cli import fleet_settings
from dualmap.cli.as_json import as_json
from dualmap.cli.errors import UnfitSettingsError
from dualmap.cli.settings import Settings

_NAMES = {
    "str": "text",
    "int": "integer",
    "float": "number",
    "bool": "true, false",
    "SecretStr": "text",
    "Path": "path",
}
"""Names of types in the reference."""


@dataclass(frozen=True, slots=True)
class SettingRow:
    """One setting in the reference."""

    path: str
    kind: str
    default: str
    description: str


def add_arguments(parser: argparse.ArgumentParser) -> None:
    form = parser.add_mutually_exclusive_group()
    form.add_argument("--list", action="store_true", help="every setting with its default, one per line")
    form.add_argument("--json", action="store_true", help="the values in effect as JSON")
    fleet_settings.add_arguments(parser)


def looks_at_a_fleet(arguments: argparse.Namespace) -> bool:
    return bool(arguments.action) and not arguments.url


def changes_a_fleet(arguments: argparse.Namespace) -> bool:
    return arguments.action in ("set", "reset")


def run(arguments: argparse.Namespace, settings: Settings) -> int:
    if arguments.action:
        return fleet_settings.run(arguments, settings)
    if arguments.list:
        for _, _, rows in sections():
            for row in rows:
                print(f"--{row.path:<44} {row.default:<28} {row.description}")
    else:
        _show(arguments, settings)
        return _complain(settings)
    return 0


def _complain(settings: Settings) -> int:
    """Say all that a start with these settings would refuse; the exit code."""
    from dualmap.cli.checks import complaints

    found = list(complaints(settings))
    for complaint in found:
        print(f"dualmap settings: {complaint}", file=sys.stderr)
    return UnfitSettingsError.exit_code if found else 0


def _show(arguments: argparse.Namespace, settings: Settings) -> None:
    if arguments.json:
        print(as_json(shown(settings)))
    else:
        import yaml

        print(yaml.safe_dump(shown(settings), sort_keys=False), end="")


def shown(settings: Settings) -> dict[str, Any]:
    """The settings as plain data for people: keys and passwords of URLs are hidden."""
    from dualmap.statestore.url import without_password

    def hidden(value: Any) -> Any:
        if isinstance(value, dict):
            return {name: hidden(each) for name, each in value.items()}
        if isinstance(value, list):
            return [hidden(each) for each in value]
        return without_password(value) if isinstance(value, str) and "://" in value else value

    return cast("dict[str, Any]", hidden(settings.model_dump(mode="json")))


def sections() -> Iterator[tuple[str, str, list[SettingRow]]]:
    """Path, description and settings of every section, lists' items included, in the order of the tree."""
    for name, field in Settings.model_fields.items():
        yield from _section(name, field)


def _section(name: str, field: FieldInfo) -> Iterator[tuple[str, str, list[SettingRow]]]:
    model = _model_in(field.annotation)
    if model is None:
        return
    path = f"{name}[]" if get_origin(field.annotation) is tuple else name
    plain = {inner: each for inner, each in model.model_fields.items() if _model_in(each.annotation) is None}
    yield path, field.description or "", [_row(f"{path}.{inner}", each) for inner, each in plain.items()]
    for inner, each in model.model_fields.items():
        yield from _section(f"{path}.{inner}", each)


def _model_in(annotation: Any) -> type[BaseModel] | None:
    """The section a field holds, directly or as a list's items; None for a plain value."""
    candidates = [annotation, *get_args(annotation)]
    return next((kind for kind in candidates if isinstance(kind, type) and issubclass(kind, BaseModel)), None)


def _row(path: str, field: FieldInfo) -> SettingRow:
    return SettingRow(path, _kind(field.annotation), _default(field), field.description or "")


def _kind(annotation: Any) -> str:
    origin, inner = get_origin(annotation), get_args(annotation)
    if origin is Annotated:
        return _kind(inner[0])
    if origin is Literal:
        return ", ".join(f"`{choice}`" for choice in inner)
    if origin in (tuple, list, frozenset, set):
        return f"list of {_kind(inner[0])}"
    if origin is Union or type(annotation).__name__ == "UnionType":
        return " or ".join("none" if choice is type(None) else _kind(choice) for choice in inner)
    if origin is dict:
        return "mapping"
    members = getattr(annotation, "__members__", None)
    if members:
        return ", ".join(f"`{member.value}`" for member in members.values())
    return _NAMES.get(getattr(annotation, "__name__", ""), re.sub(r"^\w+\.", "", str(annotation)))


def _default(field: FieldInfo) -> str:
    value = field.get_default(call_default_factory=True, validated_data={})
    if value is PydanticUndefined:
        return "required"
    if isinstance(value, SecretStr):
        return "none" if not value.get_secret_value() else "set"
    if value is None:
        return "none"
    if isinstance(value, (tuple, list, frozenset, set, dict)):
        return json.dumps(value if isinstance(value, dict) else list(value))
    return str(value).lower() if isinstance(value, bool) else str(value)
