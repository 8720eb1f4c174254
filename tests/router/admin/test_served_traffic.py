"""Rates and shares by instance."""

from __future__ import annotations

from dataclasses import asdict
from typing import Any

import pytest

from dualmap.router.admin.served_traffic import Remembered, Served, remembered, shares_of
from dualmap.router.requests.explain import Answer, Course, Explanation, KeyedPrompt, Origin, Terms
from dualmap.scheduling.request.outcome import Outcome, Usage
from tests.router import tools
from tests.router.admin.peer_server import answering

NOT_REPORTED = Usage()


def ended(
    instance_id: str | None,
    ended_unix_s: float,
    *,
    first_token_s: float | None = None,
    outcome: str = "completed",
    expected_cached_tokens: int = 0,
    usage: Usage = NOT_REPORTED,
) -> Explanation:
    return Explanation(
        Origin("r", "m", "default"),
        Terms("dualmap"),
        KeyedPrompt(100),
        Course(ended_unix_s - 2.0, 5.0, first_token_s=first_token_s, done_s=2.0),
        Answer(instance_id, outcome, expected_cached_tokens, 1, usage),
    )


def test_what_ended_in_time_is_summed_by_instance() -> None:
    log = [
        ended("a", 99.0, first_token_s=1.0, usage=Usage(120, 60, 7)),
        ended("b", 95.0, first_token_s=6.0, expected_cached_tokens=50),
        ended("a", 91.0, outcome="upstream_failed"),
        ended("a", 89.0),
    ]

    found = remembered(log, now_unix_s=100.0, seconds=10.0, kept=4)

    assert found == Remembered(
        10.0,
        {
            "a": Served(2, 1, on_time=1, streamed=1, prompt_tokens=120, cached_tokens=60, output_tokens=7),
            "b": Served(1, 1, on_time=0, streamed=1, prompt_tokens=100, cached_tokens=50),
        },
    )
    # a memory that is full says how far back it reaches
    assert remembered(log, now_unix_s=100.0, seconds=60.0, kept=4).seconds == pytest.approx(11.0)
    assert remembered(log, now_unix_s=100.0, seconds=60.0, kept=5).seconds == 60.0


def test_rates_of_replicas_add_up_each_over_its_own_time() -> None:
    one = asdict(Remembered(10.0, {"a": Served(30, 30, prompt_tokens=300, cached_tokens=30, output_tokens=100)}))
    other = asdict(Remembered(5.0, {"a": Served(5, 5, prompt_tokens=100, cached_tokens=90), "": Served(20)}))

    found = shares_of([one, other])

    assert (found["seconds"], found["requests_per_s"], found["output_tokens_per_s"]) == (5.0, 8.0, 10.0)
    assert found["instances"]["a"]["share"] == pytest.approx(0.5)
    assert found["instances"]["a"]["hit_rate"] == pytest.approx(0.3)
    assert found["instances"]["none"]["requests"] == 20
    assert shares_of([asdict(Remembered(60.0))]) == {
        "seconds": 60.0, "requests_per_s": 0, "output_tokens_per_s": 0, "instances": {}
    }  # fmt: skip


def test_replicas_of_other_versions_count_by_the_fields_that_this_one_knows() -> None:
    newer = asdict(Remembered(10.0, {"a": Served(10, 10, output_tokens=50)}))
    newer["instances"]["a"]["rejected"] = 3
    older = asdict(Remembered(10.0, {"a": Served(10, 10, output_tokens=50)}))
    del older["instances"]["a"]["output_tokens"]

    found = shares_of([newer, older])

    assert (found["requests_per_s"], found["output_tokens_per_s"]) == (2.0, 5.0)
    assert "rejected" not in found["instances"]["a"]


async def test_any_replica_answers_for_all(start_runtime: Any, client_of: Any, store: Any) -> None:
    runtime = await start_runtime(instances=(tools.spec("a"),))
    for number in range(3):
        request = await runtime.intake.place(tools.request("x" * 400, request_id=str(number)))
        request.finish(Outcome.COMPLETED, Usage(output_tokens=4))
    far = asdict(Remembered(60.0, {"b": Served(1, 1, prompt_tokens=10)}))
    with answering(far) as url:
        await store.pool("default").heartbeat("peer", 60_000, {"ops_url": url})
        found = (await client_of(runtime).get("/admin/shares")).json()
        own = (await client_of(runtime).get("/admin/shares?seconds=5&local=true")).json()

    assert (found["replicas"], found["not_asked"]) == (2, [])
    assert {name: each["requests"] for name, each in found["instances"].items()} == {"a": 3, "b": 1}
    assert found["instances"]["a"]["output_tokens"] == 12
    assert (own["seconds"], list(own["instances"])) == (5.0, ["a"])
