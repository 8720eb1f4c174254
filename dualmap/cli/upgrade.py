"""``dualmap instances upgrade``: instances get another revision, some at a time, and no stream is cut.

Each batch is drained within a bound, by moving its streams; a command of the operator's replaces what runs there; it
gets the new label and is resumed. Then the new revision gets its part of the sessions, in proportion to its instances:
at once, or through the gate, which may stop it.
"""

from __future__ import annotations

import argparse
import os
import shlex
import subprocess
import time
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any, Final
from urllib.parse import quote

from dualmap.cli.admin_api import AdminApi
from dualmap.cli.errors import CommandError, UsageError
from dualmap.runtime.durations import duration_s
from dualmap.scheduling.state.instance import UNLABELLED

_POLL_S: Final = 0.5
_OUT: Final = frozenset({"draining", "standby", "down"})


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("revision", help="label of the new revision")
    parser.add_argument(
        "--run",
        required=True,
        metavar="COMMAND",
        help="what replaces the engine of a drained instance, and ends once it was replaced; it has DUALMAP_INSTANCE"
        " and DUALMAP_URL in its environment",
    )
    parser.add_argument("--only", nargs="+", metavar="ID", help="these instances alone (none: all of other revisions)")
    parser.add_argument("--at-once", type=int, default=1, metavar="N", help="instances that are out at a time")
    parser.add_argument(
        "--within", type=_time_s, default=60.0, metavar="TIME", help="time after which streams move elsewhere (60s)"
    )
    parser.add_argument(
        "--gate", action="store_true", help="go on with the next ones once figures say that the new ones are as good"
    )
    parser.add_argument(
        "--shadow",
        type=float,
        default=0.0,
        metavar="PERCENT",
        help="with --gate: copy the requests of so many sessions to the first new engines before they serve any, which"
        " fills their caches",
    )
    parser.add_argument(
        "--patience", type=_time_s, default=3600.0, metavar="TIME", help="longest wait for each step of one batch (1h)"
    )


def _time_s(text: str) -> float:
    try:
        return duration_s(text)
    except ValueError as error:
        raise argparse.ArgumentTypeError(str(error)) from error


def batches(
    instances: Sequence[Mapping[str, Any]], revision: str, only: Sequence[str] | None, at_once: int
) -> list[list[str]]:
    """The ids of the instances that are to be upgraded, those together that are out at a time.

    Raises:
        UsageError: there are none, or none would be left to serve.
    """
    known = {each["id"]: each for each in instances}
    if unknown := [name for name in only or () if name not in known]:
        raise UsageError(f"there is no instance {unknown[0]!r}")
    wanted = [name for name in sorted(only or known) if known[name]["revision"] != revision]
    serving = [each for each in instances if each["state"] == "ready"]
    if at_once < 1:
        raise UsageError("--at-once must be 1 at least")
    if wanted and at_once >= max(2, len(serving)):
        raise UsageError(f"{len(serving)} instances are ready: --at-once {at_once} would leave none")
    if wanted and len(serving) < 2:
        raise UsageError("only one instance is ready: add another one first, or nothing serves meanwhile")
    return [wanted[first : first + at_once] for first in range(0, len(wanted), at_once)]


def weights_of(instances: Sequence[Mapping[str, Any]], serving: Mapping[str, bool]) -> dict[str, float]:
    """Percent of all sessions by revision, in proportion to instances; of revisions that do not serve yet, 0."""
    counts: dict[str, int] = {}
    for each in instances:
        name = each["revision"] or UNLABELLED
        counts[name] = counts.get(name, 0) + (each["state"] not in _OUT and serving.get(name, True))
    total = sum(counts.values())
    percents = {name: round(100 * count / total, 6) for name, count in sorted(counts.items())}
    largest = max(percents, key=lambda name: percents[name])
    percents[largest] += 100 - sum(percents.values())  # what rounding left over
    return percents


class Upgrade:
    """One run of the command."""

    def __init__(self, api: AdminApi, arguments: argparse.Namespace, tell: Callable[[str], None] = print) -> None:
        self._api = api
        self._wanted = arguments
        self._tell = tell

    def run(self) -> None:
        """Raises CommandError where it stops."""
        revision = self._wanted.revision
        if self._wanted.shadow and not self._wanted.gate:
            raise UsageError("--shadow needs --gate, which compares copies with what they are copies of")
        plan = batches(self._instances(), revision, self._wanted.only, self._wanted.at_once)
        if not plan:
            self._tell(f"all instances are of revision {revision} already")
            return
        # Until their share is given to them, upgraded instances are sent nothing.
        is_new = all((each["revision"] or UNLABELLED) != revision for each in self._instances())
        if is_new:
            self._api.call("PATCH", "/revisions", {"weights": weights_of(self._instances(), {revision: False})})
        for number, names in enumerate(plan, 1):
            self._tell(f"{number} of {len(plan)}: {', '.join(names)}")
            for name in names:
                self._api.call("POST", f"{_path(name)}/drain?within_s={self._wanted.within:g}")
            for name in names:
                self._until(partial(self._is, name, "standby"), f"{name} is not empty")
            for name in names:
                self._replace(name)
            for name in names:
                self._until(partial(self._is, name, "ready"), f"{name} is not ready with its new engine")
            self._give_share(is_first=is_new and number == 1)
        self._tell(f"done: {sum(map(len, plan))} instances are of revision {revision}")

    def _replace(self, name: str) -> None:
        url = next(each["url"] for each in self._instances() if each["id"] == name)
        environment = {**os.environ, "DUALMAP_INSTANCE": name, "DUALMAP_URL": url}
        code = subprocess.run(shlex.split(self._wanted.run), env=environment, check=False).returncode
        if code:
            raise CommandError(
                f"{self._wanted.run!r} ended with {code} for {name}, which stays drained; nothing else changed"
            )
        self._api.call("PATCH", _path(name), {"revision": self._wanted.revision})
        self._api.call("POST", f"{_path(name)}/resume")

    def _give_share(self, *, is_first: bool) -> None:
        """Give the new revision sessions in proportion to its instances."""
        weights = weights_of(self._instances(), {})
        percent = weights[self._wanted.revision]
        if not self._wanted.gate or percent >= 100:
            self._api.call("PATCH", "/revisions", {"weights": weights})
            self._tell(f"   {self._wanted.revision} has {percent:.3g} % of the sessions")
            return
        body = {"revision": self._wanted.revision, "steps": [percent]}
        if shadow := self._wanted.shadow if is_first else 0.0:
            body["shadow"] = shadow
        self._api.call("POST", "/rollout", body)
        copies = f"copies of {shadow:.3g} % of the sessions first, then " if shadow else ""
        self._tell(f"   {self._wanted.revision} has {copies}{percent:.3g} % of the sessions: waiting for the gate")
        self._until(self._gate_passed, "the gate has too little evidence; the rollout goes on, start the upgrade again")

    def _gate_passed(self) -> bool:
        rollout = self._api.call("GET", "/rollout")["rollout"]
        if rollout["state"] == "running":
            return False
        if rollout["state"] != "done":
            raise CommandError(f"stopped by the gate, {rollout['state']}: {rollout['why']}")
        return True

    def _until(self, holds: Callable[[], bool], complaint: str) -> None:
        end_s = time.monotonic() + self._wanted.patience
        while not holds():
            if time.monotonic() > end_s:
                raise CommandError(complaint)
            time.sleep(_POLL_S)

    def _instances(self) -> list[dict[str, Any]]:
        found: list[dict[str, Any]] = self._api.call("GET", "/instances")["instances"]
        return found

    def _is(self, name: str, state: str) -> bool:
        return any(each["id"] == name and each["state"] == state for each in self._instances())


def _path(name: str) -> str:
    return f"/instances/{quote(name, safe='')}"
