"""``dualmap rollout``: a new revision gets more and more sessions while it is as good as the one before."""

from __future__ import annotations

import argparse
from datetime import UTC, datetime
from typing import Any

from rich.table import Table
from rich.text import Text

from dualmap.cli.admin_api import AdminApi, add_connection_and_json
from dualmap.cli.as_json import as_json
from dualmap.cli.settings import Settings
from dualmap.simulation.figures.terminal import terminal


def add_arguments(parser: argparse.ArgumentParser) -> None:
    actions = parser.add_subparsers(dest="action", metavar="ACTION")
    actions.add_parser("status", help="the step, and what its figures say (the default)")
    start = actions.add_parser("start", help="start a rollout with its first step")
    start.add_argument("revision", help="the revision that is to get more and more sessions")
    start.add_argument("--steps", type=_steps, help="percent of all sessions, as 5,10,25,50,100 (the default)")
    start.add_argument(
        "--shadow", type=float, default=0.0, metavar="PERCENT", help="copy so many sessions to it before it serves any"
    )
    start.add_argument(
        "--bound",
        action="append",
        default=[],
        type=_bound,
        metavar="NAME=VALUE",
        help="how much worse it may be: ttft=1.25 and tpot=1.25 are ratios, errors=0.01, late=0.05, slow=0.05"
        " and differs=0.05 shares; any other name is a figure of your own, see report",
    )
    actions.add_parser("pause", help="hold it where it is, whatever the figures say")
    actions.add_parser("resume", help="go on with a paused one: its step begins again")
    actions.add_parser("rollback", help="take all sessions of the revision back, at once")
    report = actions.add_parser("report", help="add events of your own, as answers that an evaluation found wrong")
    report.add_argument("name", help="the figure, one of the rollout's bounds")
    report.add_argument("revision")
    report.add_argument("bad", type=int, help="those that went wrong")
    report.add_argument("of", type=int, help="of so many")
    add_connection_and_json(parser, actions.choices.values())


def _steps(text: str) -> list[float]:
    try:
        return [float(each.removesuffix("%")) for each in text.split(",")]
    except ValueError:
        raise argparse.ArgumentTypeError(f"{text!r} are no steps, as 5,10,25,50,100") from None


def _bound(text: str) -> tuple[str, float]:
    name, _, number = text.partition("=")
    try:
        return name, float(number)
    except ValueError:
        raise argparse.ArgumentTypeError(f"{text!r} is no NAME=VALUE, as ttft=1.25") from None


def looks_at_a_fleet(arguments: argparse.Namespace) -> bool:
    return not arguments.url


def changes_a_fleet(arguments: argparse.Namespace) -> bool:
    return arguments.action not in (None, "status")


def run(arguments: argparse.Namespace, settings: Settings) -> int:
    api = AdminApi(arguments, settings)
    action = arguments.action or "status"
    if action == "status":
        found = api.call("GET", "/rollout")
    elif action == "start":
        wanted: dict[str, Any] = {
            "revision": arguments.revision,
            "bounds": dict(arguments.bound),
            "shadow": arguments.shadow,
        }
        found = api.call("POST", "/rollout", wanted | ({"steps": arguments.steps} if arguments.steps else {}))
    elif action == "report":
        names = ("name", "revision", "bad", "of")
        found = api.call("POST", "/rollout/events", {name: getattr(arguments, name) for name in names})
    else:
        found = api.call("POST", f"/rollout/{action}")
    if arguments.json:
        print(as_json(found))
        return 0
    rollout = found["rollout"]
    if rollout is None:
        print(f"pool {found['pool']}: there was no rollout yet")
        return 0
    console = terminal()
    console.print(headline(found["pool"], rollout), markup=False, highlight=False, soft_wrap=True)
    console.print(figures_table(rollout))
    for line in beside(rollout):
        console.print(line, markup=False, highlight=False, soft_wrap=True)
    return 0


def headline(pool: str, rollout: dict[str, Any]) -> str:
    since = datetime.fromtimestamp(rollout["since_ms"] / 1000, UTC).isoformat(" ", "seconds").removesuffix("+00:00")
    seen = ", ".join(f"{name} {count:,}" for name, count in rollout["requests"].items()) or "none"
    place = f"at {rollout['percent']:g} % (step {rollout['step']} of {len(rollout['steps'])}"
    counted = "Requests of sessions that began since"
    if rollout["shadow_percent"]:
        place, counted = f"as a shadow of {rollout['shadow_percent']:g} % (no step yet", "Copies, and their requests"
    return (
        f"pool {pool}: rollout of {rollout['revision']} is {rollout['state']} {place}, since {since} UTC):"
        f" {rollout['why']}. {counted}: {seen}"
    )


def beside(rollout: dict[str, Any]) -> list[str]:
    """What no bound is about, a line for each revision."""
    words = {"hits_percent": "{:.1f} % hits", "output_tokens": "{:.0f} tokens an answer"}
    words |= {"agreed_tokens": "answers that differ part after {:.0f} tokens"}
    lines = []
    for name, each in rollout["per_revision"].items():
        parts = [words[field].format(each[field]) for field in words if each[field] is not None]
        if each.get("compared"):
            parts.append(f"{each['differing']:,} of {each['compared']:,} greedy answers differ")
        if parts:
            lines.append(f"{name}: {', '.join(parts)}")
    return lines


def figures_table(rollout: dict[str, Any]) -> Table:
    table = Table(box=None, header_style="bold", pad_edge=False)
    for heading in ("figure", "says", "estimate"):
        table.add_column(heading)
    for each in rollout["judgements"]:
        table.add_row(Text(each["name"]), each["standing"], Text(each["text"].partition(" ")[2]))
    return table
