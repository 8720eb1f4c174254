"""Done: what is released, counted and learned at the end."""

from __future__ import annotations

from typing import Any

import pytest

from dualmap.router.prompts.prompt import sent_prompt
from dualmap.scheduling.estimates.learning import EndSample
from dualmap.scheduling.request.machine import Failed
from dualmap.scheduling.request.outcome import Outcome, Usage
from tests.router import tools
from tests.router.requests.phases.fleets import LONG, REFUSED, loads, nothing_is_left


async def test_ending_twice_counts_and_releases_once(start_runtime: Any, store: Any) -> None:
    runtime = await start_runtime(instances=(tools.spec("a"),))
    request = await runtime.intake.place(tools.request())

    request.finish(Outcome.CLIENT_GONE)
    request.finish(Outcome.COMPLETED)
    request.first_token()

    assert await nothing_is_left(store, runtime)
    registry = runtime.context.metrics.registry
    counted = {
        outcome: registry.get_sample_value("dualmap_requests_total", {"pool": "default", "outcome": outcome})
        for outcome in ("client_gone", "completed")
    }
    assert counted == {"client_gone": 1.0, "completed": 0.0}


async def contents(store: Any) -> list[Any]:
    return [sample.content for sample in await store.pool("default").publications.samples("0", 100)]


async def test_the_leader_is_told_how_many_tokens_an_instance_counted(start_runtime: Any, store: Any) -> None:
    runtime = await start_runtime(instances=(tools.spec("a"),))

    request = await runtime.intake.place(tools.request(LONG))
    request.finish(Outcome.COMPLETED, Usage(prompt_tokens=2500, cached_tokens=100, output_tokens=70))
    await tools.settle()

    assert await contents(store) == [EndSample(5000, 2500, 70)]
    assert {
        kind: runtime.context.metrics.registry.get_sample_value(
            "dualmap_prompt_tokens_total", {"pool": "default", "by": kind}
        )
        for kind in ("expected", "reported", "unreported")
    } == {"expected": 1250.0, "reported": 2500.0, "unreported": 0.0}


async def test_what_no_instance_reported_counts_as_it_was_expected(start_runtime: Any) -> None:
    runtime = await start_runtime(instances=(tools.spec("a"),))

    request = await runtime.intake.place(tools.request(LONG))
    request.finish(Outcome.COMPLETED, Usage(prompt_tokens=2500, output_tokens=70))
    await tools.settle()

    metrics = runtime.context.metrics.pools["default"]
    assert metrics.prompt_tokens_reported.value == 0
    assert metrics.prompt_tokens_unreported.value == metrics.prompt_tokens_expected.value > 0
    assert metrics.hit_tokens_unreported.value == metrics.hit_tokens_expected.value


async def test_the_leader_is_told_how_many_images_a_prompt_had(start_runtime: Any, store: Any) -> None:
    runtime = await start_runtime(instances=(tools.spec("a"),))
    image = {"type": "image_url", "image_url": {"url": "data:a"}}
    received = tools.request()
    received.prompt = sent_prompt("/v1/chat/completions", {"messages": [{"role": "user", "content": [image, image]}]})

    request = await runtime.intake.place(received)
    assert (await loads(store))["a"].pending_tokens == 2048 + 21  # of the prior, and of role and marks
    shown = request.explain().prompt
    assert (shown.images, shown.media_estimated) == (2, "the pool has no tokenizer")
    request.finish(Outcome.COMPLETED, Usage(prompt_tokens=1300, output_tokens=7))
    await tools.settle()

    assert await contents(store) == [EndSample(85, 1300, 7, images=2)]


async def test_a_first_token_teaches_what_was_expected_of_it(start_runtime: Any, store: Any, clock: Any) -> None:
    runtime = await start_runtime(instances=(tools.spec("a"),))
    before = await runtime.intake.place(tools.request("other " * 100))
    request = await runtime.intake.place(tools.request(LONG))
    await clock.advance(1.5)

    request.first_token()
    await tools.settle()

    [content] = await contents(store)
    assert (content.instance_id, content.tokens, content.prefilled_ms - content.enqueued_ms) == ("a", 1250, 1500)
    constant, ahead_s, compute_s, *_ = content.features
    assert (constant, ahead_s, compute_s) == (1.0, pytest.approx(0.15), pytest.approx(1.25))
    for each in (before, request):
        each.finish(Outcome.COMPLETED)


async def test_the_ttft_of_a_retry_teaches_nothing_but_its_prefill(start_runtime: Any, store: Any) -> None:
    runtime = await start_runtime(instances=(tools.spec("a"), tools.spec("b")))
    request = await runtime.intake.place(tools.request(LONG))
    await request.failed(Failed(REFUSED))

    request.first_token()
    await tools.settle()

    [content] = await contents(store)
    assert (content.instance_id, content.tokens, content.features) == (request.machine.instance_id, 1250, None)
    request.finish(Outcome.COMPLETED)


async def test_an_answer_that_does_not_stream_teaches_no_prefill(start_runtime: Any, store: Any, clock: Any) -> None:
    runtime = await start_runtime(instances=(tools.spec("a"),))
    request = await runtime.intake.place(tools.request(LONG, stream=False))

    await clock.advance(1.3)
    request.finish(Outcome.COMPLETED)
    await tools.settle()

    assert await contents(store) == []


@pytest.mark.parametrize(("outcome", "silent_s"), [(Outcome.COMPLETED, 0.0), (Outcome.CLIENT_GONE, 21.3)])
async def test_only_the_answer_of_a_request_that_does_not_stream_is_a_sign_of_life_of_its_instance(
    outcome: Outcome, silent_s: float, start_runtime: Any, store: Any, clock: Any
) -> None:
    runtime = await start_runtime(instances=(tools.spec("a"),))
    texts = ("x" * 400, "y" * 400)
    request, other = [await runtime.intake.place(tools.request(text, stream=False)) for text in texts]
    for each in (request, other):
        each.sent()

    await clock.advance(21.3)  # its first token is presumed
    presumed = (await loads(store))["a"]
    if outcome is Outcome.COMPLETED:
        request.first_token()
    request.finish(outcome)
    await tools.settle()

    assert (presumed.pending_tokens, presumed.silent_s) == (0, pytest.approx(21.3))
    assert (await loads(store))["a"].silent_s == pytest.approx(silent_s)
    other.finish(Outcome.COMPLETED)
