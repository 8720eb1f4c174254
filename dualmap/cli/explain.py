"""``dualmap explain``: why a request went where it went, from the replica that placed it."""

from __future__ import annotations

import argparse
import json
from collections.abc import Mapping, Sequence
from datetime import UTC, datetime
from typing import Any
from urllib.parse import quote

from rich.console import Group, RenderableType
from rich.table import Table

from dualmap.cli.admin_api import AdminApi, NotKnownError, add_connection_arguments
from dualmap.cli.errors import CommandError
from dualmap.cli.settings import Settings
from dualmap.simulation.figures.terminal import terminal

LISTED = 20


def add_arguments(parser: argparse.ArgumentParser) -> None:
    add_connection_arguments(parser)
    parser.add_argument(
        "request",
        metavar="REQUEST",
        nargs="?",
        help="the answer's x-request-id, or the id in its body (chatcmpl-…, resp_…); without one the last requests are"
        " listed",
    )
    parser.add_argument("--limit", type=int, default=LISTED, metavar="N", help="requests listed at most")
    parser.add_argument("--json", action="store_true", help="all of it, as JSON")


def looks_at_a_fleet(arguments: argparse.Namespace) -> bool:
    return not arguments.url


def run(arguments: argparse.Namespace, settings: Settings) -> int:
    api = AdminApi(arguments, settings)
    if arguments.request is None:
        found = api.call("GET", "/explain", query={"limit": arguments.limit})
        shown: RenderableType = listed(found)
    else:
        try:
            found = api.call("GET", f"/explain/{quote(arguments.request, safe='')}")
        except NotKnownError as error:  # it may be right, and forgotten
            raise CommandError(str(error)) from error
        shown = rendered(found)
    if arguments.json:
        print(json.dumps(found, indent=2))
    else:
        terminal().print(shown, highlight=False, soft_wrap=True)
    return 0


def listed(explanations: Sequence[dict[str, Any]]) -> RenderableType:
    """The last requests as a table; their ids are what ``dualmap explain`` takes."""
    if not explanations:
        return "No replica remembers a request: none was sent yet, or none within reach of the replicas' memory."
    table = Table(box=None, header_style="bold", pad_edge=False)
    for heading in ("received (UTC)", "request", "instance", "why"):
        table.add_column(heading, overflow="fold")
    for heading in ("prompt", "cached", "held", "first token", "done"):
        table.add_column(heading, justify="right", no_wrap=True)
    table.add_column("outcome", no_wrap=True)
    for found in explanations:
        last = found["rounds"][-1] if found["rounds"] else None
        table.add_row(
            datetime.fromtimestamp(found["received_unix_s"], UTC).strftime("%H:%M:%S"),
            found["request_id"],
            found["instance_id"] or "–",
            last["decision"]["reason"] if last else "–",
            f"{found['prompt_tokens']:,}",
            f"{found['expected_cached_tokens']:,}",
            *(_seconds(found, name) for name in ("held_s", "first_token_s", "done_s")),
            found["outcome"] or "under way",
        )
    return table


def rendered(found: dict[str, Any]) -> RenderableType:
    """The explanation of a request, for people; for a live request that no replica explains, its record."""
    if "rounds" not in found:
        facts = "\n".join(f"  {name}: {value}" for name, value in found["record"].items())
        return f"Request {found['request_id']} is live, but {found['note']}.\n{facts}"
    client = f" of client {found['client']}" if found.get("client") else ""
    head = (
        f"Request {found['request_id']}{client} for {found['model']} on pool {found['pool']},"
        f" placed by {found['replica_id']}\n"
        f"  {found['prompt_tokens']:,} prompt tokens in {found['chain_blocks']} blocks; hash key "
        f"{found['hash_key']} ({found['key_blocks']} blocks), policy {found['policy']}, SLO {found['slo_s']:g} s"
    )
    parts: list[RenderableType] = [head]
    if found.get("images") or found.get("media_estimated"):  # a replica of another version may not know them
        why = found["media_estimated"]
        how = f"estimated, as {why}" if why else "counted as an instance rendered them"
        parts.append(f"  Images in it: {found['images']}; media are {how}")
    if found.get("tenant"):  # a replica of another version may not know it
        parts.append(f"  Tenant {found['tenant']}, by its key {found['key']}")
        parts += [f"    {limit}" for limit in found["limits"]]
    if found.get("parked_s") is not None:  # a replica of another version may not know it
        of_run = (
            f"run {found['run'][:12]}, named by {found['run_named_by']}" if found["run"] else "a run without a name"
        )
        parts.append(f"  Turn of {of_run}: waited {found['parked_s']:.3f} s for memory")
    if found.get("adapter_wait_s"):  # a replica of another version may not know it
        parts.append(f"  Waited {found['adapter_wait_s']:.3f} s for its adapter to be loaded")
    if found.get("priority_class"):
        parts.append(f"  Class {found['priority_class']}, band {found['band']}")
    if found.get("share"):
        level = f"  Level {found['standing']['level']} among tenants"
        parts.append(f"{level}: {found['share']}")
    for number, each in enumerate(found["rounds"], 1):
        parts += ["", *_round(number, each)]
    # a replica of another version may know neither of these
    for name, why in found.get("doubts", {}).items():
        parts.append(f"  The cache of {name} is only estimated at present: {why}")
    for wait in found.get("waits", ()):
        parts += ["", f"Held on {wait['instance_id']}:", *(f"  {reason}" for reason in wait["why"])]
    if found.get("waits_unknown"):
        parts.append(found["waits_unknown"])
    decode = found.get("decode")
    if decode is not None:
        for number, each in enumerate(decode["rounds"], 1):
            parts += ["", "Decode leg:", *_round(number, each)[1:]]
    for failure in found["failures"]:
        parts.append(f"failed: {failure}")
    for instance_id, tokens, age_s in found.get("continued", ()):
        parts.append(f"went on elsewhere: {instance_id} had answered {tokens:,} tokens after {age_s:.3f} s")
    return Group(*parts, "", _ending(found))


def _round(number: int, each: dict[str, Any]) -> tuple[RenderableType, ...]:
    decision, costs = each["decision"], each.get("costs", {})
    weighed = any("total_s" in cost for cost in costs.values())
    table = Table(box=None, header_style="bold", pad_edge=False)
    table.add_column("  candidate")
    for heading in ("cost s" if weighed else "expected s", *_LOAD_HEADINGS):
        table.add_column(heading, justify="right")
    for instance_id in each["candidates"]:
        load = each["loads"].get(instance_id)
        mark = "→ " if instance_id == decision["instance_id"] else "  "
        cost = costs.get(instance_id, {}).get("total_s" if weighed else "expected_ttft_s")
        cells = ("–" if cost is None else f"{cost:.3f}", *_load_cells(load)) if load else ("gone",)
        table.add_row(f"{mark}{instance_id}", *cells)
    verdict = (
        f"  Chosen: {decision['instance_id']}, since {each.get('why', decision['reason'])}. "
        f"{decision['uncached_tokens']:,} tokens to prefill, first token expected in "
        f"{decision['expected_ttft_s']:.3f} s; reservation {each['status'] or 'without an answer'}."
    )
    parts = [f"    {name}: {_parts(cost['parts'])}" for name, cost in costs.items() if cost.get("parts")]
    parts += [f"    {words}" for words in each.get("tiers", ())]  # a replica of another version may not know them
    return f"Decision {number}, attempt {each['attempt']}:", table, verdict, *parts


def _parts(parts: Mapping[str, float]) -> str:
    """A cost, part by part; the largest comes first."""
    return " + ".join(f"{part:.3f} s {words}" for words, part in sorted(parts.items(), key=lambda each: -each[1]))


_LOAD_HEADINGS = ("hit blocks", "pending tokens", "held", "running", "tokens/s", "stalled s")


def _load_cells(load: dict[str, Any]) -> tuple[str, ...]:
    return (
        f"{load['hit_blocks']:,}",
        f"{load['pending_tokens']:,}",
        f"{load['queued_requests']:,}",
        f"{load['running_requests']:,}",
        f"{load['prefill_tokens_per_s']:,.0f}",
        f"{load['stalled_s']:.1f}",
    )


def _seconds(found: Mapping[str, Any], name: str) -> str:
    value = found.get(name)  # a replica of another version may not know it
    return "–" if value is None else f"{value:.3f} s"


def _ending(found: dict[str, Any]) -> str:
    expected, reported = found["expected_cached_tokens"], found["reported_cached_tokens"]
    decode = found.get("decode")
    legs = (
        ""
        if decode is None
        else (
            f"Split: prefilled by {found['instance_id']} until {_seconds(found, 'prefilled_s')}, answered by"
            f" {decode['instance_id']}, {decode['transferred_tokens']:,} tokens to transfer\n"
        )
    )
    return legs + (
        f"Went to {found['instance_id'] or 'no instance'}: held {_seconds(found, 'held_s')}, "
        f"first token {_seconds(found, 'first_token_s')} (expected {_seconds(found, 'expected_ttft_s')}), "
        f"done {_seconds(found, 'done_s')}, outcome {found['outcome'] or 'still open'}\n"
        f"Cached tokens: expected {expected:,}, "
        f"reported {'nothing' if reported is None else f'{reported:,}'}"
        f"{'' if reported is None else f' (off by {abs(reported - expected):,})'}"
    )
