"""``dualmap what-if``: a recorded hour on a twin of the fleet, as it is and as it would be."""

from __future__ import annotations

import argparse
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, Final

from dualmap.cli.admin_api import AdminApi, checked_url
from dualmap.cli.configuration import Assignment, ConfigurationError, from_file, validated
from dualmap.cli.errors import UsageError
from dualmap.cli.settings import Settings
from dualmap.runtime.pool_settings import InstanceSettings, PoolSettings
from dualmap.scheduling.settings import SchedulingSettings
from dualmap.scheduling.state.instance import InstanceState
from dualmap.simulation.commands import what_if
from dualmap.simulation.commands.options import ConfiguredFleet
from dualmap.simulation.commands.what_if import Change

FLEET: Final = "fleet"
FLEET_OPTIONS: Final = frozenset(
    ["instances", "preset", "roles", "move_roles", "dispatch", "dispatch_window_tokens", "autoscale",
     "autoscale_decode", "start_s", "kv_events", "slo_s"]
)  # fmt: skip
"""Options of the command that a change may name below ``fleet``."""
SIMULATED: Final = frozenset(["scheduling", "pools", "emulator", "tenants"])
"""Sections of the configuration that the twin follows as a whole."""
LATE_REQUESTS: Final = ("router", "late_requests")
_POLICY: Final = ("scheduling", "policy")
_POLICY_OPTIONS: Final = ("scheduling", "policy_options")
_OF_INSTANCE: Final = (
    "id", "url", "role", "prefill_tokens_per_s", "kv_capacity_tokens", "dispatch_window_tokens",
    "max_running_requests", "max_queued_requests",
)  # fmt: skip


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--url",
        help="a router of the running fleet, or its endpoint: the twin has its instances, with the rates that it has"
        " learned of them, and its scheduling settings in effect (none: those of the configuration)",
    )  # fmt: skip
    what_if.add_arguments(parser)


def run(arguments: argparse.Namespace, settings: Settings) -> int:
    now = settings if arguments.url is None else _running(arguments, settings)
    try:
        change = _change(arguments.change, now)
    except ConfigurationError as error:
        raise UsageError(str(error)) from error
    return what_if.run(arguments, _configured(now), change)


def _configured(settings: Settings) -> ConfiguredFleet:
    return ConfiguredFleet(
        settings.scheduling,
        settings.emulator,
        settings.pools,
        settings.router.late_requests,
        tuple(tenant.tenant() for tenant in settings.tenants),
    )


# the fleet as it is --------------------------------------------------------------------------------------------------
def _running(arguments: argparse.Namespace, settings: Settings) -> Settings:
    """The settings with what is in effect in the running fleet. Raises CommandError."""
    checked_url(arguments.url)
    api = AdminApi(arguments, settings)
    query = {} if arguments.pool is None else {"pool": arguments.pool}
    found = api.call("GET", "/settings", query=query)
    scheduling = SchedulingSettings.model_validate(found["scheduling"])
    rows = api.call("GET", "/instances", query={"pool": found["pool"]})["instances"]
    instances = tuple(_instance(row) for row in rows if row["state"] == InstanceState.READY)
    if not instances:
        raise UsageError(f"pool {found['pool']} at {arguments.url} has no instance in service: nothing to be a twin of")
    pool = next((each for each in settings.pools if each.name == found["pool"]), PoolSettings(name=found["pool"]))
    pool = pool.model_copy(update={"instances": instances})
    return settings.model_copy(update={"scheduling": scheduling, "pools": (pool,)})


def _instance(row: Mapping[str, Any]) -> InstanceSettings:
    """An instance in service, with the prefill rate that was learned of it."""
    fields = {name: row[name] for name in _OF_INSTANCE}
    learned = (row.get("load") or {}).get("prefill_tokens_per_s")
    return InstanceSettings.model_validate(fields | ({"prefill_tokens_per_s": learned} if learned else {}))


# the fleet as it would be --------------------------------------------------------------------------------------------
def _change(path: Path, now: Settings) -> Change:
    """The fleet with what the file changes. Raises ConfigurationError, UsageError."""
    given = list(from_file(path))
    if not given:
        raise UsageError(f"{path} changes nothing: name what would be different, as scheduling: {{policy: dualmap}}")
    fleet = {each.path[1]: each.value for each in given if each.path[0] == FLEET and len(each.path) == 2}
    for each in given:
        _check(each, path)
    settings = [each for each in given if each.path[0] != FLEET]
    return Change(_configured(_with(now, settings)), fleet, list(_words(given)))


def _check(each: Assignment, path: Path) -> None:
    """Raises UsageError for what the twin does not follow."""
    name = ".".join(each.path)
    if each.path[0] == FLEET:
        if len(each.path) != 2 or each.path[1] not in FLEET_OPTIONS:
            raise UsageError(
                f"{path}: {name} is not known; below 'fleet:' there are {', '.join(sorted(FLEET_OPTIONS))}"
            )
    elif each.path[0] not in SIMULATED and each.path != LATE_REQUESTS:
        known = ", ".join([*sorted(SIMULATED), ".".join(LATE_REQUESTS), FLEET])
        raise UsageError(f"{path}: {name} makes no difference to a twin; it follows {known}")


def _with(now: Settings, changes: Sequence[Assignment]) -> Settings:
    """The settings with these in place: sections are changed leaf by leaf, lists as a whole. Another policy begins
    without parameters. Raises ConfigurationError."""
    sections = {each.path[0] for each in changes}
    kept = {name: getattr(now, name).model_dump() for name in ("scheduling", "emulator") if name in sections}
    base = [
        Assignment((section, *leaf), value, f"{section} as it is")
        for section, fields in kept.items()
        for leaf, value in _leaves(fields, ())
    ]
    if any(each.path == _POLICY and each.value != now.scheduling.policy for each in changes):
        base = [each for each in base if each.path[:2] != _POLICY_OPTIONS]
    changed = validated([*base, *changes])
    update = {name: getattr(changed, name) for name in sections if name != "router"}
    if "router" in sections:
        update["router"] = now.router.model_copy(update={"late_requests": changed.router.late_requests})
    return now.model_copy(update=update)


def _leaves(fields: Mapping[str, Any], above: tuple[str, ...]) -> Iterator[tuple[tuple[str, ...], object]]:
    for name, value in fields.items():
        if isinstance(value, dict) and value:
            yield from _leaves(value, (*above, name))
        elif value is not None:
            yield (*above, name), value


def _words(given: Sequence[Assignment]) -> Iterator[str]:
    for each in given:
        shown = each.value if isinstance(each.value, str | int | float | bool) else "as the file says"
        yield f"{'.'.join(each.path)} is {shown}"
