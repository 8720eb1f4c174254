"""What ``dualmap instances list`` says of instances beside their figures."""

from __future__ import annotations

from typing import Any

from dualmap.cli.instances import tiers


def listed(name: str, *known: dict[str, Any]) -> dict[str, Any]:
    return {"pool": "default", "id": name, "tiers": [*known] or None}


def test_tiers_have_a_line_for_each_instance_with_some_and_defaults_say_why() -> None:
    host = {"tier": "host", "tokens": 800_000, "price": {"start_s": 0.001, "token_s": 4e-6}, "reason": ""}
    disk = {
        "tier": "disk",
        "tokens": 9_000_000,
        "price": {"start_s": 0.01, "token_s": 2e-5},
        "reason": "it is new",
    }

    assert tiers([listed("b"), listed("a", host, disk), {"pool": "default", "id": "older"}]) == [
        "a: host of 800,000 tokens, 1 ms + 4 µs a token, disk of 9,000,000 tokens, 10 ms + 20 µs a token"
        " (default: it is new)"
    ]
