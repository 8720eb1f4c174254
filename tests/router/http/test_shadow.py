"""Copies of answered requests for a revision that answers nobody."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping, Sequence
from typing import Any

import httpx
import pytest

from dualmap.router.answers.kept_stream import KeptBudget, KeptStream
from dualmap.router.http.body_edits import priority_field, salt_field
from dualmap.router.http.shadow import (
    MOST_AT_ONCE,
    OWN_EVERY,
    OWN_EVERY_LONG,
    SHORT_TOKENS,
    Shadows,
    agreeing,
    goes_to_its_own,
)
from dualmap.router.pool.revision_counts import MOST_OF_SESSION
from dualmap.router.prompts.inference_request import CHAT_PATH
from dualmap.router.replica.runtime import Runtime
from dualmap.runtime.trust import InstanceTrust
from dualmap.scheduling.request.outcome import Outcome, Usage
from dualmap.scheduling.revisions.figures import Figures, Moments, figures_from
from dualmap.scheduling.revisions.weights import NO_WEIGHTS, RevisionWeights, with_shadow
from tests.router.tools import placement, request, spec
from tests.support.manual_clock import ManualClock

FLEET = (spec("a", revision="v1"), spec("b", revision="v1"), spec("c", revision="v2"))
BODY = {"model": "default", "messages": [{"role": "user", "content": "hello"}], "temperature": 0, "user": "ada"}
BUDGET = 1 << 20
CONNECTING_S, ANSWERING_S = 0.5, 0.25


def events(*tokens: str, cached: int = 3) -> bytes:
    """A stream of an answer, with the ids of its tokens."""
    found: list[dict[str, Any]] = [
        {"choices": [{"index": 0, "delta": {"content": token}, "token_ids": [len(token)]}], "usage": None}
        for token in tokens
    ]
    usage = {"prompt_tokens": 9, "completion_tokens": len(tokens), "prompt_tokens_details": {"cached_tokens": cached}}
    found[-1]["choices"][0]["finish_reason"] = "stop"
    found.append({"choices": [], "usage": usage})
    return b"".join(b"data: %b\n\n" % json.dumps(each).encode() for each in found) + b"data: [DONE]\n\n"


class Fleet:
    """A replica whose pool has a shadow, and the copies that instances get."""

    def __init__(self, runtime: Runtime, answers: Mapping[str, bytes], clock: ManualClock) -> None:
        self.runtime = runtime
        self.pool = runtime.pools.pools["default"]
        self.copies: list[tuple[str, dict[str, Any]]] = []
        self._answers = answers
        self._clock = clock
        transport = httpx.MockTransport(self._answer)
        self.shadows = Shadows(b"Bearer engine", InstanceTrust(), now_s=clock.monotonic_s, transport=transport)
        self.budget = KeptBudget(BUDGET)

    async def _answer(self, sent: httpx.Request) -> httpx.Response:
        await self._clock.advance(CONNECTING_S)
        await sent.extensions["trace"]("http11.send_request_body.complete", {})
        await self._clock.advance(ANSWERING_S)
        instance = sent.url.host.partition(".")[0]
        self.copies.append((instance, json.loads(sent.content)))
        assert sent.headers["authorization"] == "Bearer engine"
        found = self._answers.get(instance)
        return httpx.Response(500) if found is None else httpx.Response(200, content=found)

    async def served(
        self,
        answer: bytes,
        body: dict[str, Any] = BODY,
        *,
        fields: Sequence[bytes] = (),
        meanwhile: Callable[[], Awaitable[object]] | None = None,
        **about: Any,
    ) -> None:
        """Serve a request to its end, and wait for its copy. ``meanwhile`` happens while it is served."""
        kept = await self.offered(answer, body, fields=fields, meanwhile=meanwhile, **about)
        await asyncio.gather(*self.shadows._under_way)
        assert kept.lost, "its memory is given back"

    async def offered(
        self,
        answer: bytes,
        body: dict[str, Any] = BODY,
        *,
        fields: Sequence[bytes] = (),
        meanwhile: Callable[[], Awaitable[object]] | None = None,
        **about: Any,
    ) -> KeptStream:
        """Serve a request to its end, and wait for nothing."""
        live = await self.runtime.intake.place(request(path=CHAT_PATH, body=body, **about))
        if meanwhile is not None:
            await meanwhile()
        live.sent()
        live.first_token()
        kept = KeptStream(CHAT_PATH, self.budget, 0, hides_ids=False)
        kept.feed(answer)
        live.finish(Outcome.COMPLETED, Usage(9, 3, 2))
        self.shadows.offer(self.pool, live.machine, CHAT_PATH, json.dumps(body).encode(), kept, fields=fields)
        return kept

    def counted(self) -> dict[str, Figures]:
        return figures_from(self.pool.shadow_counts.text, self.pool.view.revisions.version)

    def results(self) -> dict[str, float]:
        return {name: each.value for name, each in self.pool.metrics.shadows.items() if each.value}


StartFleet = Callable[..., Any]


@pytest.fixture
async def start_fleet(start_runtime: Any, clock: ManualClock) -> AsyncIterator[StartFleet]:
    async def start(**answers: bytes) -> Fleet:
        runtime = await start_runtime(instances=FLEET)
        pool = runtime.pools.pools["default"]
        await pool.store.revisions.change(
            lambda known: with_shadow(RevisionWeights.alone("v1"), "v2", 100.0), "copies", by="ada"
        )
        await pool.view.refresh()
        return Fleet(runtime, answers, clock)

    yield start


async def test_a_copy_goes_to_the_shadow_and_is_compared(start_fleet: StartFleet) -> None:
    fleet = await start_fleet(c=events("good", "day", cached=5))

    await fleet.served(events("good", "day"))

    ((instance, body),) = fleet.copies
    assert instance == "c"
    assert body["messages"] == BODY["messages"]
    assert (body["stream"], body["return_token_ids"], "user" in body) == (True, True, False)
    original, copy = fleet.counted()["v1"], fleet.counted()["v2"]
    assert (original.requests, original.hit_tokens, original.output_tokens) == (1, 3, 2)
    assert (copy.requests, copy.hit_tokens, copy.output_tokens, copy.failed) == (1, 5, 2, 0)
    assert (copy.compared, copy.differing, original.compared) == (1, 0, 0)
    assert fleet.results() == {"sent": 1}


async def test_a_copy_reads_the_load_of_its_instance_and_of_no_other(
    start_fleet: StartFleet, monkeypatch: pytest.MonkeyPatch
) -> None:
    fleet = await start_fleet(c=events("good", "day"))
    read, known = [], fleet.pool.store.loads_of

    async def loads_of(*names: str) -> Any:
        read.append(names)
        return await known(*names)

    async def loads() -> Any:
        raise AssertionError("each copy would cost the more, the larger the fleet is")

    monkeypatch.setattr(fleet.pool.store, "loads_of", loads_of)
    monkeypatch.setattr(fleet.pool.store, "loads", loads)

    await fleet.served(events("good", "day"))

    assert fleet.results() == {"sent": 1}
    assert read == [("c",)]


async def test_the_time_that_a_copy_takes_to_connect_is_not_its_engines(start_fleet: StartFleet) -> None:
    fleet = await start_fleet(c=events("good", "day"))

    await fleet.served(events("good", "day"))

    assert fleet.counted()["v2"].ttft.mean == pytest.approx(Moments.of(ANSWERING_S).mean, abs=1e-3)


async def test_a_copy_has_the_salt_and_priority_that_its_request_was_sent_with(start_fleet: StartFleet) -> None:
    fleet = await start_fleet(c=events("good", "day"))

    await fleet.served(
        events("good", "day"), BODY | {"priority": -9, "cache_salt": "mine"},
        fields=(salt_field("of acme"), priority_field(7)),
    )  # fmt: skip

    ((_, body),) = fleet.copies
    assert (body["priority"], body["cache_salt"]) == (7, "of acme")


@pytest.mark.parametrize("value", ["\ud800", json.loads("[" * 300 + "]" * 300)], ids=["text", "list"])
async def test_what_engines_read_is_copied_as_it_was_sent(start_fleet: StartFleet, value: Any) -> None:
    fleet = await start_fleet(c=events("aa"))

    await fleet.served(events("aa"), {**BODY, "stop": value})

    ((_, copy),) = fleet.copies
    assert copy["stop"] == value


async def test_of_one_session_so_many_copies_are_made(start_fleet: StartFleet) -> None:
    fleet = await start_fleet(a=events("hi"), b=events("hi"), c=events("hi"))
    other = {**BODY, "messages": [{"role": "user", "content": "good morning"}]}

    for _ in range(MOST_OF_SESSION + 5):
        await fleet.served(events("hi"))

    assert fleet.results() == {"sent": MOST_OF_SESSION}
    await fleet.served(events("hi"), other)
    assert fleet.results() == {"sent": MOST_OF_SESSION + 1}, "others have copies of their own"
    await fleet.pool.store.revisions.change(lambda known: with_shadow(known, "v2", 100.0), "again", by="ada")
    await fleet.pool.view.refresh()
    assert not fleet.pool.shadow_counts.has_enough_copies(fleet.pool.view.revisions.version, "0")


async def test_requests_of_a_session_that_end_at_once_are_copied_two_at_a_time_and_no_more_than_count(
    start_fleet: StartFleet, monkeypatch: pytest.MonkeyPatch
) -> None:
    fleet = await start_fleet(c=events("hi"))
    for _ in range(MOST_OF_SESSION - 1):
        await fleet.served(events("hi"))
    at_once = fleet.pool.store.loads_of

    async def loads_of(*names: str) -> Any:
        await asyncio.sleep(0)  # as a store that is reached over a network
        return await at_once(*names)

    monkeypatch.setattr(fleet.pool.store, "loads_of", loads_of)

    kept = [await fleet.offered(events("hi")) for _ in range(6)]
    await asyncio.gather(*fleet.shadows._under_way)

    assert [instance for instance, _ in fleet.copies].count("c") <= MOST_OF_SESSION - 1 + MOST_AT_ONCE
    assert all(each.lost for each in kept)


async def test_a_copy_that_was_under_way_as_the_weights_changed_counts_nothing(
    start_fleet: StartFleet, monkeypatch: pytest.MonkeyPatch
) -> None:
    fleet = await start_fleet(c=events("hi"))
    known = fleet.pool.store.loads_of

    async def loads_of(*names: str) -> Any:
        await fleet.pool.store.revisions.change(lambda before: with_shadow(before, "v2", 50.0), "less", by="ada")
        await fleet.pool.view.refresh()
        return await known(*names)

    monkeypatch.setattr(fleet.pool.store, "loads_of", loads_of)
    await fleet.served(events("hi"))

    assert fleet.results() == {"sent": 1}
    assert fleet.pool.shadow_counts.text == ""


async def test_a_store_that_lost_the_weights_while_a_request_was_served_costs_its_copy_alone(
    start_fleet: StartFleet,
) -> None:
    fleet = await start_fleet(c=events("hi"))

    async def lose() -> None:
        await fleet.pool.store.revisions.change(lambda _: NO_WEIGHTS, "lost", by="ada")
        await fleet.pool.view.refresh()

    await fleet.served(events("hi"), meanwhile=lose)

    assert (fleet.copies, fleet.results()) == ([], {"dropped": 1})


async def test_answers_that_part_are_counted_with_the_tokens_before(start_fleet: StartFleet) -> None:
    fleet = await start_fleet(c=events("good", "evening"))

    await fleet.served(events("good", "day"))

    copy = fleet.counted()["v2"]
    assert (copy.compared, copy.differing, copy.agreed_tokens) == (1, 1, 1)


async def test_answers_that_are_drawn_at_random_are_not_compared(start_fleet: StartFleet) -> None:
    fleet = await start_fleet(c=events("good", "evening"))

    await fleet.served(events("good", "day"), {**BODY, "temperature": 0.7})

    assert fleet.counted()["v2"].compared == 0
    assert fleet.counted()["v2"].requests == 1


@pytest.mark.parametrize(("tokens", "every"), [(SHORT_TOKENS, OWN_EVERY), (SHORT_TOKENS + 1, OWN_EVERY_LONG)])
def test_long_prompts_seldom_go_beside_requests_that_are_answered(tokens: int, every: int) -> None:
    assert [goes_to_its_own(count, tokens) for count in (every - 1, every)] == [False, True]


async def test_some_greedy_requests_show_how_a_revision_differs_from_itself(start_fleet: StartFleet) -> None:
    fleet = await start_fleet(a=events("good", "night"), b=events("good", "night"), c=events("good", "day"))

    for _ in range(OWN_EVERY):
        await fleet.served(events("good", "day"))

    own, copies = fleet.counted()["v1"], [instance for instance, _ in fleet.copies]
    assert copies[:OWN_EVERY] == ["c"] * OWN_EVERY, "the shadow's caches lack no turn"
    assert len(copies) == OWN_EVERY + 1
    assert (own.compared, own.differing) == (1, 1)
    assert own.requests == OWN_EVERY, "its copy is no request of it"
    assert (fleet.counted()["v2"].requests, fleet.counted()["v2"].differing) == (OWN_EVERY, 0)
    assert fleet.results() == {"sent": OWN_EVERY}


async def test_a_revision_shows_how_it_differs_from_itself_while_its_shadow_is_busy(start_fleet: StartFleet) -> None:
    fleet = await start_fleet(a=events("good", "night"), b=events("good", "night"))
    await fleet.pool.store.place(placement("work", "c", tokens=400))

    for _ in range(OWN_EVERY):
        await fleet.served(events("good", "day"))

    own = fleet.counted()["v1"]
    assert (own.requests, own.compared, own.differing) == (0, 1, 1)
    assert fleet.results() == {"dropped": OWN_EVERY}


async def test_a_shadow_that_fails_counts_as_failed(start_fleet: StartFleet) -> None:
    fleet = await start_fleet()

    await fleet.served(events("good", "day"))

    assert (fleet.counted()["v2"].requests, fleet.counted()["v2"].failed) == (1, 1)
    assert fleet.results() == {"failed": 1}


async def test_a_busy_shadow_gets_nothing(start_fleet: StartFleet) -> None:
    fleet = await start_fleet(c=events("good", "day"))
    await fleet.pool.store.place(placement("work", "c", tokens=400))

    await fleet.served(events("good", "day"))

    assert fleet.copies == []
    assert fleet.results() == {"dropped": 1}


async def test_what_a_client_chose_or_no_shadow_wants_is_not_copied(start_fleet: StartFleet) -> None:
    fleet = await start_fleet()
    live = await fleet.runtime.intake.place(request(path=CHAT_PATH, body=BODY, asked_revision="v1"))
    live.finish(Outcome.COMPLETED)

    assert live.machine.spec.shadowed == ""


def test_sequences_agree_up_to_where_they_part() -> None:
    assert agreeing([1, 2, 3], [1, 2, 4]) == 2
    assert agreeing("ab", "abc") == 2
    assert agreeing([], [1]) == 0
