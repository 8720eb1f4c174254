"""What ``dualmap instances list`` says of instances beside their figures."""

from __future__ import annotations

from typing import Any

from dualmap.cli.instances import tiers

PLACE = {"host": "10.0.0.7", "port": 5710, "price": {"start_s": 0.03, "token_s": 2e-5}}


def listed(name: str, *known: dict[str, Any], **more: Any) -> dict[str, Any]:
    return {"pool": "default", "id": name, "tiers": [*known] or None} | more


def test_tiers_have_a_line_for_each_instance_with_some_and_defaults_say_why() -> None:
    host = {"tier": "host", "tokens": 800_000, "price": {"start_s": 0.001, "token_s": 4e-6}, "reason": ""}
    disk = {
        "tier": "disk",
        "tokens": 9_000_000,
        "price": {"start_s": 0.01, "token_s": 2e-5},
        "reason": "it is new",
    }

    assert tiers([listed("b"), listed("a", host, disk), {"pool": "default", "id": "older"}]) == [
        "a: host of 800,000 tokens, 1 ms + 4 µs a token; disk of 9,000,000 tokens, 10 ms + 20 µs a token"
        " (default: it is new)"
    ]


def test_pulls_say_where_from_at_what_price_and_what_a_lost_one_costs_or_why_there_are_none() -> None:
    fails = PLACE | {"reason": "nothing was loaded yet", "fails_requests": True}

    assert tiers(
        [listed("a", pulls=PLACE), listed("b", pulls=fails), listed("c", pulls=None, no_pulls="its place is unknown")]
    ) == [
        "a: pulls at 10.0.0.7:5710, 30 ms + 20 µs a token",
        "b: pulls at 10.0.0.7:5710, 30 ms + 20 µs a token (default: nothing was loaded yet), fails a request whose"
        " pull is lost",
        "c: no pulls: its place is unknown",
    ]


def test_tiers_that_placements_leave_out_say_why() -> None:
    host = {"tier": "host", "tokens": 1000, "price": {"start_s": 0.001, "token_s": 4e-6}, "reason": ""}

    assert tiers([listed("a", host, unused_tiers="it is hybrid")]) == [
        "a: host of 1,000 tokens, 1 ms + 4 µs a token; placements expect nothing there: it is hybrid"
    ]
