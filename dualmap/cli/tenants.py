"""``dualmap tenants``: teams that share a running fleet, through any replica's ``/admin``."""

from __future__ import annotations

import argparse
import json
import re
from collections.abc import Sequence
from datetime import UTC, datetime
from typing import Any
from urllib.parse import quote

import yaml
from rich.table import Table

from dualmap.cli.admin_api import AdminApi, NotKnownError, add_connection_arguments, suggestion
from dualmap.cli.as_json import as_json
from dualmap.cli.errors import UsageError
from dualmap.cli.settings import Settings
from dualmap.runtime.amounts import whole_amount
from dualmap.runtime.spelling import did_you_mean
from dualmap.runtime.tenant_settings import NAME_IN_WORDS, NAME_PATTERN, LimitSettings
from dualmap.simulation.figures.terminal import terminal

_ACTIONS = {
    "list": "all tenants",
    "show": "one tenant: keys by name, limits, models, pools",
    "create": "make a tenant, and its first keys; these are shown this once",
    "set": "change limits, models, pools, weight or class",
    "add-key": "make a further key; it is shown this once",
    "rotate": "replace a key by a new one, which is shown this once",
    "revoke": "end a key",
    "remove": "remove a tenant with all its keys",
    "audit": "the last changes: when, by whom, from what to what",
}
_OF_A_KEY = frozenset({"add-key", "rotate", "revoke"})
_CHANGES = frozenset({"create", "set"})
_USABLE = ("models", "pools")
_LISTS = (*_USABLE, "adapter_paths")
_FIELDS = (*_LISTS, "max_adapters", "weight", "priority_class", "shares_cache")
_LISTED_AT_ONCE = 1000
_EXAMPLE = "for example requests_per_minute=600, weight=2, models=small,large, or large.tokens_per_minute=100k"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    actions = parser.add_subparsers(dest="action", metavar="ACTION", required=True)
    for action, effect in _ACTIONS.items():
        action_parser = actions.add_parser(action, help=effect, description=effect)
        add_connection_arguments(action_parser)
        if action in ("list", "show", "audit"):
            action_parser.add_argument("--json", action="store_true", help="the values, as JSON")
        if action == "audit":
            action_parser.add_argument("name", nargs="?", help="changes of this tenant alone")
            action_parser.add_argument("--limit", type=int, default=50, help="changes at most")
        elif action != "list":
            action_parser.add_argument("name", help="name of the tenant")
        if action in _OF_A_KEY:
            action_parser.add_argument("key", help="name of the key")
        if action in ("add-key", "rotate"):
            action_parser.add_argument("--sha256", help="SHA-256 of a key that you made, in place of a new one")
        if action == "rotate":
            action_parser.add_argument(
                "--keep-old-s", type=float, default=0.0, help="time for which the former key goes on giving access"
            )
        if action == "create":
            action_parser.add_argument(
                "--key", action="append", default=[], help="name of a key to make; may be repeated"
            )
        if action in _CHANGES:
            action_parser.add_argument(
                "changes", nargs="*" if action == "create" else "+", metavar="NAME=VALUE", help=_EXAMPLE
            )
        elif action == "add-key":
            action_parser.add_argument("limits", nargs="*", metavar="NAME=VALUE", help="limits of this key alone")


def looks_at_a_fleet(arguments: argparse.Namespace) -> bool:
    return not arguments.url


def changes_a_fleet(arguments: argparse.Namespace) -> bool:
    return arguments.action not in ("list", "show", "audit")


def run(arguments: argparse.Namespace, settings: Settings) -> int:
    api = AdminApi(arguments, settings)
    try:
        return _run(api, arguments)
    except NotKnownError as error:
        meant = suggestion(arguments.name or "", lambda: [each["name"] for each in _all(api)])
        raise UsageError(f"{error}{meant}") from error


def _run(api: AdminApi, arguments: argparse.Namespace) -> int:
    match arguments.action:
        case "list":
            listed = _all(api)
            if arguments.json:
                print(as_json(listed))
            else:
                terminal().print(tenants_table(listed))
        case "audit":
            query = {"limit": arguments.limit} | ({"tenant": arguments.name} if arguments.name else {})
            changes = api.call("GET", "/audit", query=query)
            if arguments.json:
                print(as_json(changes))
            else:
                terminal().print(audit_table(changes))
        case "show":
            tenant = api.call("GET", _path(arguments.name))
            print(as_json(tenant) if arguments.json else yaml.safe_dump(tenant, sort_keys=False).rstrip("\n"))
        case "create":
            keys = [{"name": _name(key, "key")} for key in arguments.key]
            _name(arguments.name, "tenant")
            made = api.call("POST", "/tenants", {"name": arguments.name, "keys": keys} | _fields(arguments.changes))
            print(f"tenant {arguments.name} made; it is in force everywhere within a second")
            for key in made["keys"]:
                _show_key(key)
        case "set":
            changed = api.call("PATCH", _path(arguments.name), _fields(arguments.changes))
            print(yaml.safe_dump(changed, sort_keys=False), end="")
        case "add-key":
            limits = dict(map(_limit, arguments.limits))
            about = {"name": _name(arguments.key, "key"), "limits": limits} | _given(arguments)
            _show_key(api.call("POST", f"{_path(arguments.name)}/keys", about))
        case "rotate":
            wanted = {"keep_old_s": arguments.keep_old_s} | _given(arguments)
            _show_key(api.call("POST", f"{_path(arguments.name)}/keys/{quote(arguments.key, safe='')}/rotate", wanted))
        case "revoke":
            api.call("DELETE", f"{_path(arguments.name)}/keys/{quote(arguments.key, safe='')}")
            print(f"key {arguments.key} of {arguments.name} is revoked; it ends everywhere within a second")
        case _:
            api.call("DELETE", _path(arguments.name))
            print(f"tenant {arguments.name} is removed; its keys end everywhere within a second")
    return 0


def _path(name: str) -> str:
    return f"/tenants/{quote(name, safe='')}"


def _all(api: AdminApi) -> list[dict[str, Any]]:
    listed: list[dict[str, Any]] = []
    after: str | None = ""
    while after is not None:
        part = api.call("GET", "/tenants", query={"after": after, "limit": _LISTED_AT_ONCE})
        listed += part["tenants"]
        after = part["next"]
    return listed


def _given(arguments: argparse.Namespace) -> dict[str, Any]:
    return {"sha256": arguments.sha256} if arguments.sha256 else {}


def _show_key(made: dict[str, Any]) -> None:
    if made["key"] is None:
        print(f"key {made['name']} of {made['tenant']} is the one with the hash that you gave")
    else:
        print(f"key {made['name']} of {made['tenant']}, shown this once: {made['key']}")


def _name(name: str, of: str) -> str:
    """The name of something that is to be made."""
    if not re.match(NAME_PATTERN, name):
        raise UsageError(f"the name of a {of} has {NAME_IN_WORDS}: not {name!r}")
    return name


# NAME=VALUE -------------------------------------------------------------------------------------------------------
def _fields(changes: Sequence[str]) -> dict[str, Any]:
    """The fields of a tenant: limits by their names, those for a model behind ``MODEL.``, and what else it has."""
    fields: dict[str, Any] = {}
    for text in changes:
        name, value = _parted(text)
        if name in _LISTS:
            fields[name] = [each for each in value.split(",") if each]
        elif name == "weight":
            fields[name] = _number(name, value)
        elif name == "max_adapters":
            if not value.isdecimal():
                raise UsageError(f"{name} takes a whole number: not {value!r}")
            fields[name] = int(value)
        elif name in ("priority_class", "draws"):
            fields[name] = value
        elif name == "shares_cache":
            if value not in ("true", "false"):
                raise UsageError(f"{name} takes true or false: not {value!r}")
            fields[name] = value == "true"
        elif "." in name:
            model, _, limit = name.rpartition(".")
            fields.setdefault("model_limits", {}).setdefault(model, {})[limit] = _amount(limit, value)
        else:
            fields.setdefault("limits", {})[name] = _amount(name, value)
    return fields


def _limit(text: str) -> tuple[str, int | None]:
    name, value = _parted(text)
    return name, _amount(name, value)


def _parted(text: str) -> tuple[str, str]:
    name, equals, value = text.partition("=")
    if not equals or not name:
        raise UsageError(f"{text!r} is not a change: write NAME=VALUE, {_EXAMPLE}")
    return name, value


def _amount(name: str, value: str) -> int | None:
    """An amount; none for ``none``, which takes the limit away."""
    if name not in LimitSettings.model_fields:
        known = (*LimitSettings.model_fields, *_FIELDS)
        meant = did_you_mean(name, known) or f"; there are: {', '.join(known)}"
        raise UsageError(f"a tenant has no limit or field {name!r}{meant}")
    if value in ("", "none"):
        return None
    try:
        return whole_amount(value)
    except ValueError:
        raise UsageError(f"{name} takes a whole number such as 600, 100k or 2M, or none: not {value!r}") from None


def _number(name: str, value: str) -> float:
    try:
        return float(value)
    except ValueError:
        raise UsageError(f"{name} takes a number: not {value!r}") from None


# tables -----------------------------------------------------------------------------------------------------------
def tenants_table(tenants: Sequence[dict[str, Any]]) -> Table:
    table = Table(box=None, header_style="bold")
    for heading in ("tenant", "of", "class", "weight", "keys", "limits", "models", "pools"):
        table.add_column(heading, justify="right" if heading == "weight" else "left")
    for each in tenants:
        keys = ", ".join(key["name"] for key in each["keys"]) or "–"
        used = [", ".join(each[name]) or "all" for name in _USABLE]
        limits = ", ".join(f"{name}={amount:_}" for name, amount in _all_limits(each).items()) or "–"
        klass = each["priority_class"] or "–"
        table.add_row(each["name"], each["source"], klass, f"{each['weight']:g}", keys, limits, *used)
    return table


def _all_limits(tenant: dict[str, Any]) -> dict[str, int]:
    found: dict[str, int] = dict(tenant["limits"])
    for model, limits in tenant["model_limits"].items():
        found |= {f"{model}.{name}": amount for name, amount in limits.items()}
    return found


def audit_table(changes: Sequence[dict[str, Any]]) -> Table:
    table = Table(box=None, header_style="bold")
    for heading in ("at (UTC)", "by", "what", "tenant", "before", "after"):
        table.add_column(heading)
    for change in changes:
        at = datetime.fromtimestamp(change["at_ms"] / 1000, UTC).isoformat(" ", "seconds").removesuffix("+00:00")
        sides = [json.dumps(change[side]) if change[side] else "–" for side in ("before", "after")]
        names = change["tenants"]
        shown = ", ".join(names[:3]) + (f", … ({len(names)})" if len(names) > len(names[:3]) else "")
        table.add_row(at, change["by"] or "–", change["action"], shown, *sides)
    return table
