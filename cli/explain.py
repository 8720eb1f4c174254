"""``dualmap explain``: why a request went where it went, from the replica that placed it."""

from __future__ import annotations

import argparse
import json
from typing import Any
from urllib.parse import quote

from rich.console import Group, RenderableType
from rich.table import Table

from cli.admin_api import AdminApi, add_connection_arguments
from cli.settings import Settings
from simulation.terminal import terminal


def add_arguments(parser: argparse.ArgumentParser) -> None:
    add_connection_arguments(parser)
    parser.add_argument("request", metavar="REQUEST", help="the answer's x-request-id")
    parser.add_argument("--json", action="store_true", help="all of it, as JSON")


def run(arguments: argparse.Namespace, settings: Settings) -> int:
    story = AdminApi(arguments, settings).call("GET", f"/explain/{quote(arguments.request, safe='')}")
    if arguments.json:
        print(json.dumps(story, indent=2))
    else:
        terminal().print(tell(story), highlight=False, soft_wrap=True)
    return 0


def tell(story: dict[str, Any]) -> RenderableType:
    """The explanation of a request, for people; for a live request that no replica explains, its record."""
    if "rounds" not in story:
        facts = "\n".join(f"  {name}: {value}" for name, value in story["record"].items())
        return f"Request {story['request_id']} is live, but {story['note']}.\n{facts}"
    head = (
        f"Request {story['request_id']} for {story['model']} on pool {story['pool']}, placed by {story['replica_id']}\n"
        f"  {story['prompt_tokens']:,} prompt tokens in {story['chain_blocks']} blocks; hash key "
        f"{story['hash_key']} ({story['key_blocks']} blocks), policy {story['policy']}, SLO {story['slo_s']:g} s"
    )
    parts: list[RenderableType] = [head]
    for number, each in enumerate(story["rounds"], 1):
        parts += ["", *_round(number, each)]
    decode = story.get("decode")
    if decode is not None:
        for number, each in enumerate(decode["rounds"], 1):
            parts += ["", "Decode leg:", *_round(number, each)[1:]]
    for failure in story["failures"]:
        parts.append(f"failed: {failure}")
    return Group(*parts, "", _ending(story))


def _round(number: int, each: dict[str, Any]) -> tuple[RenderableType, ...]:
    decision = each["decision"]
    table = Table(box=None, header_style="bold", pad_edge=False)
    table.add_column("  candidate")
    for heading in ("hit blocks", "pending tokens", "held", "running", "tokens/s", "stalled s"):
        table.add_column(heading, justify="right")
    for instance_id in each["candidates"]:
        load = each["loads"].get(instance_id)
        mark = "→ " if instance_id == decision["instance_id"] else "  "
        table.add_row(f"{mark}{instance_id}", *(_load_cells(load) if load else ("gone",)))
    verdict = (
        f"  {decision['reason']}: {decision['uncached_tokens']:,} tokens to prefill, first token expected in "
        f"{decision['expected_ttft_s']:.3f} s; reservation {each['status'] or 'without an answer'}"
    )
    return f"Decision {number}, attempt {each['attempt']}:", table, verdict


def _load_cells(load: dict[str, Any]) -> tuple[str, ...]:
    return (
        f"{load['hit_blocks']:,}",
        f"{load['pending_tokens']:,}",
        f"{load['queued_requests']:,}",
        f"{load['running_requests']:,}",
        f"{load['prefill_tokens_per_s']:,.0f}",
        f"{load['stalled_s']:.1f}",
    )


def _ending(story: dict[str, Any]) -> str:
    def seconds(name: str) -> str:
        value = story.get(name)  # a replica of another version may not know it
        return "–" if value is None else f"{value:.3f} s"

    expected, reported = story["expected_cached_tokens"], story["reported_cached_tokens"]
    decode = story.get("decode")
    legs = (
        ""
        if decode is None
        else (
            f"Split: prefilled by {story['instance_id']} until {seconds('prefilled_s')}, answered by"
            f" {decode['instance_id']}, {decode['transferred_tokens']:,} tokens to transfer\n"
        )
    )
    return legs + (
        f"Went to {story['instance_id'] or 'no instance'}: held {seconds('held_s')}, "
        f"first token {seconds('first_token_s')} (expected {seconds('expected_ttft_s')}), "
        f"done {seconds('done_s')}, outcome {story['outcome'] or 'still open'}\n"
        f"Cached tokens: expected {expected:,}, "
        f"reported {'nothing' if reported is None else f'{reported:,}'}"
        f"{'' if reported is None else f' (off by {abs(reported - expected):,})'}"
    )
