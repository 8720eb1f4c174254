"""How a request's story reads."""

from __future__ import annotations

from typing import Any

from rich.console import Console

from dualmap.cli.explain import listed, rendered


def told(**changes: Any) -> str:
    story = {
        "request_id": "r", "model": "m", "pool": "default", "policy": "dualmap", "replica_id": "replica-1",
        "slo_s": 5.0, "prompt_tokens": 1000, "chain_blocks": 7, "key_blocks": 2, "hash_key": "00ff", "rounds": [],
        "failures": [], "instance_id": "a", "held_s": 0.5, "expected_ttft_s": 1.5, "first_token_s": 1.25, "done_s": 2.0,
        "outcome": "completed", "expected_cached_tokens": 128, "reported_cached_tokens": None, **changes,
    }  # fmt: skip
    console = Console(width=200)
    with console.capture() as captured:
        console.print(rendered(story), highlight=False)
    return captured.get()


def test_the_ending_tells_the_first_token_beside_its_estimate() -> None:
    assert "Went to a: held 0.500 s, first token 1.250 s (expected 1.500 s), done 2.000 s, outcome completed" in told()


def test_a_request_that_nobody_took_has_neither() -> None:
    text = told(instance_id=None, held_s=None, expected_ttft_s=None, first_token_s=None, outcome="refused")

    assert "Went to no instance: held –, first token – (expected –)" in text


def test_a_turn_says_how_long_it_waited_for_memory_and_what_named_its_run() -> None:
    named = told(run="0a1b2c3d4e5f6a7b", run_named_by="x-session-id", parked_s=3.25)

    assert "Turn of run 0a1b2c3d4e5f, named by x-session-id: waited 3.250 s for memory" in named
    assert "Turn of a run without a name: waited 0.000 s" in told(run="", run_named_by="", parked_s=0.0)
    assert "Turn of" not in told() and "Turn of" not in told(run="", run_named_by="", parked_s=None)


def test_images_are_said_to_be_rendered_or_why_they_are_not() -> None:
    assert "Images in it: 2; media are counted as an instance rendered them" in told(images=2, media_estimated="")
    assert "Images in it: 1; media are estimated, as it was late" in told(images=1, media_estimated="it was late")
    assert "Images" not in told() and "Images" not in told(images=0, media_estimated="")


def test_reported_cached_tokens_are_compared_with_expected_ones() -> None:
    assert "Cached tokens: expected 128, reported 96 (off by 32)" in told(reported_cached_tokens=96)
    assert "Cached tokens: expected 128, reported nothing" in told()


def test_a_decision_tells_why_and_what_each_candidate_costs() -> None:
    load = {"hit_blocks": 3, "pending_tokens": 10, "queued_requests": 0, "running_requests": 1, "stalled_s": 0.0}
    decision = {"instance_id": "a", "reason": "cost", "uncached_tokens": 616, "expected_ttft_s": 0.1}
    round_ = {
        "candidates": ["a", "b"], "loads": {name: load | {"prefill_tokens_per_s": 8000.0} for name in ("a", "b")},
        "decision": decision, "why": "it costs least", "attempt": 1, "status": "dispatched",
        "costs": {
            "a": {"total_s": 0.3, "parts": {"work ahead": 0.1, "own prefill, weighed": 0.2}},
            "b": {"total_s": 0.5, "parts": {"own prefill, weighed": 0.5}},
        },
    }  # fmt: skip

    text = told(rounds=[round_])

    assert "Chosen: a, since it costs least. 616 tokens to prefill, first token expected in 0.100 s" in text
    assert "a: 0.200 s own prefill, weighed + 0.100 s work ahead" in text
    assert text.index("0.300") < text.index("0.500")


def test_the_last_requests_are_listed_with_what_explain_takes() -> None:
    story = {
        "request_id": "r1", "received_unix_s": 0.0, "instance_id": "a", "rounds": [{"decision": {"reason": "cache"}}],
        "prompt_tokens": 1000, "expected_cached_tokens": 128, "held_s": 0.0, "first_token_s": 0.25, "done_s": None,
        "outcome": None,
    }  # fmt: skip
    console = Console(width=200)
    with console.capture() as captured:
        console.print(listed([story]), listed([]), highlight=False)

    for part in ("00:00:00", "r1", "cache", "1,000", "0.250 s", "under way", "none was sent yet"):
        assert part in captured.get()


def test_a_request_of_a_tenant_tells_its_class_and_share() -> None:
    share = "held: tenant acme had sent 3 times its share of the work (15.0 s of 5.0 s), so others go first"
    text = told(
        tenant="acme", key="ci", limits=[], priority_class="batch", band=60, share=share, standing={"level": 12}
    )

    assert "  Class batch, band 60\n" in text
    assert f"  Level 12 among tenants: {share}\n" in text
    assert "Level" not in told() and "Class" not in told()


def test_a_cache_that_is_only_estimated_is_named_with_its_reason() -> None:
    assert "  The cache of b is only estimated at present: no replay\n" in told(doubts={"b": "no replay"})


def test_a_wait_is_told_in_sentences() -> None:
    wait = {"instance_id": "a", "why": ["Deferred.", "2 requests went before it."]}

    text = told(waits=[wait], waits_unknown="the logs of queues cannot be read")

    assert "Held on a:\n  Deferred.\n  2 requests went before it.\nthe logs of queues cannot be read" in text
