"""How a request's story reads."""

from __future__ import annotations

from typing import Any

from rich.console import Console

from cli.explain import tell


def told(**changes: Any) -> str:
    story = {
        "request_id": "r", "model": "m", "pool": "default", "policy": "dualmap", "replica_id": "replica-1",
        "slo_s": 5.0, "prompt_tokens": 1000, "chain_blocks": 7, "key_blocks": 2, "hash_key": "00ff", "rounds": [],
        "failures": [], "instance_id": "a", "held_s": 0.5, "expected_ttft_s": 1.5, "first_token_s": 1.25, "done_s": 2.0,
        "outcome": "completed", "expected_cached_tokens": 128, "reported_cached_tokens": None, **changes,
    }  # fmt: skip
    console = Console(width=200)
    with console.capture() as captured:
        console.print(tell(story), highlight=False)
    return captured.get()


def test_the_ending_tells_the_first_token_beside_its_estimate() -> None:
    assert "Went to a: held 0.500 s, first token 1.250 s (expected 1.500 s), done 2.000 s, outcome completed" in told()


def test_a_request_that_nobody_took_has_neither() -> None:
    text = told(instance_id=None, held_s=None, expected_ttft_s=None, first_token_s=None, outcome="refused")

    assert "Went to no instance: held –, first token – (expected –)" in text


def test_reported_cached_tokens_are_compared_with_expected_ones() -> None:
    assert "Cached tokens: expected 128, reported 96 (off by 32)" in told(reported_cached_tokens=96)
    assert "Cached tokens: expected 128, reported nothing" in told()
