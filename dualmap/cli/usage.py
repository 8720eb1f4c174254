"""``dualmap usage``: what tenants used, through any replica's ``/admin``."""

from __future__ import annotations

import argparse
import csv
import sys
import time
from collections.abc import Sequence
from datetime import date, timedelta
from typing import Any, Final

import orjson
from rich.table import Table

from dualmap.cli.admin_api import AdminApi, add_connection_arguments
from dualmap.cli.as_json import as_json
from dualmap.cli.errors import UsageError
from dualmap.cli.settings import Settings
from dualmap.runtime.spelling import did_you_mean
from dualmap.simulation.figures.terminal import terminal

_GROUPS: Final = ("day", "pool", "tenant", "key", "class", "model")
_COUNTS: Final = (
    "requests", "prompt_tokens", "cached_tokens", "output_tokens", "unanswered", "lost", "refused",
)  # fmt: skip
_DAYS: Final = 7
_FOLLOW_S: Final = 2.0


def add_arguments(parser: argparse.ArgumentParser) -> None:
    add_connection_arguments(parser)
    parser.add_argument("--days", type=int, default=_DAYS, metavar="N", help="days up to the last one (default: 7)")
    parser.add_argument("--last", type=date.fromisoformat, metavar="DATE", help="last day, in UTC (default: today)")
    parser.add_argument(
        "--by", default="day,tenant", metavar="NAMES", help=f"what to add up by: some of {','.join(_GROUPS)}"
    )
    parser.add_argument("--tenant", metavar="NAME", help="only this tenant")
    parser.add_argument("--format", choices=("table", "csv", "json"), default="table", help="form of the output")
    parser.add_argument(
        "--records", action="store_true", help="single requests as JSON lines, as far back as the log goes"
    )
    parser.add_argument("--after", default="0", metavar="ENTRY", help="with --records: only those behind this entry")
    parser.add_argument("--follow", action="store_true", help="with --records: go on as requests end")


def looks_at_a_fleet(arguments: argparse.Namespace) -> bool:
    return not arguments.url


def run(arguments: argparse.Namespace, settings: Settings) -> int:
    api = AdminApi(arguments, settings)
    if arguments.records:
        print_records(api, arguments)
        return 0
    if arguments.days < 1:
        raise UsageError("--days takes a number of days, at least 1")
    for name in arguments.by.split(","):
        if name not in _GROUPS:
            meant = did_you_mean(name, _GROUPS) or f"; there are: {', '.join(_GROUPS)}"
            raise UsageError(f"--by takes names with commas between them, and none is {name!r}{meant}")
    query: dict[str, object] = {"by": arguments.by} | ({"tenant": arguments.tenant} if arguments.tenant else {})
    last = arguments.last or date.fromisoformat(api.call("GET", "/usage", query={"by": "pool"})["last"])
    days = {"first": last - timedelta(arguments.days - 1), "last": last}
    found = api.call("GET", "/usage", query=query | days)
    if arguments.format == "json":
        print(as_json(found))
    elif arguments.format == "csv":
        write_csv(found["by"], found["rows"])
    else:
        terminal().print(usage_table(found["by"], found["rows"]))
    return 0


def print_records(api: AdminApi, arguments: argparse.Namespace) -> None:
    """One JSON line for each request. What is given with ``--after`` is the ``entry`` of a line."""
    after = arguments.after
    while True:
        page = api.call("GET", "/usage/records", query={"after": after})
        for record in page["records"]:
            if arguments.tenant in (None, record["tenant"]):
                print(orjson.dumps(record).decode(), flush=not arguments.follow)
        if page["records"]:
            after = page["next"]
        elif not arguments.follow:
            return
        else:
            sys.stdout.flush()
            time.sleep(_FOLLOW_S)


def write_csv(by: Sequence[str], rows: Sequence[dict[str, Any]]) -> None:
    writer = csv.writer(sys.stdout, lineterminator="\n")
    writer.writerow([*by, *_COUNTS])
    writer.writerows([[row[name] for name in (*by, *_COUNTS)] for row in rows])


def usage_table(by: Sequence[str], rows: Sequence[dict[str, Any]]) -> Table:
    table = Table(box=None, header_style="bold", pad_edge=False)
    for name in by:
        table.add_column(name, overflow="fold")
    for name in _COUNTS:
        table.add_column(name.replace("_", " "), justify="right")
    for row in rows:
        table.add_row(*[str(row[name]) for name in by], *[f"{row[name]:,}" for name in _COUNTS])
    return table
