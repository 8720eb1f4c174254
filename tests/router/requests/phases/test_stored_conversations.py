"""Pinned: a conversation that one instance has stored is continued there."""

from __future__ import annotations

from typing import Any

import pytest

from dualmap.router.errors import (
    NotFoundError,
    UpstreamError,
)
from dualmap.router.prompts.inference_request import response_id
from dualmap.scheduling.request.machine import Failed
from dualmap.scheduling.request.outcome import Outcome, Usage
from dualmap.scheduling.settings import SchedulingSettings
from dualmap.statestore.pool.stored_responses import StoredConversation
from tests.router import tools
from tests.router.requests.phases.fleets import REFUSED, loads


async def test_a_response_is_continued_by_the_instance_that_stored_it(start_runtime: Any, store: Any) -> None:
    runtime = await start_runtime(instances=tuple(tools.spec(name) for name in "abcd"))
    body = {"input": "and then?"}
    for wanted in "abcd":
        pinned = tools.request(path="/v1/responses", body=body, pinned_to=wanted)
        placed = await runtime.intake.place(pinned)
        (record,) = (await store.pool("default").snapshot()).requests
        assert (placed.machine.instance_id, record.instance_id, record.pinned) == (wanted, wanted, True)
        placed.finish(Outcome.COMPLETED)
        await tools.settle()

    gone = await runtime.intake.place(tools.request(path="/v1/responses", body=body, pinned_to="gone"))

    assert gone.machine.instance_id in "abcd"
    gone.finish(Outcome.COMPLETED)


async def test_a_continued_response_counts_the_conversation_that_is_stored(start_runtime: Any, store: Any) -> None:
    runtime = await start_runtime(instances=(tools.spec("a"),))
    asked: dict[str, Any] = {"path": "/v1/responses", "body": {"input": "and then?"}, "leaves_id_open": True}
    first = await runtime.intake.place(tools.request(**asked, stores=True))
    first.finish(Outcome.COMPLETED, Usage(prompt_tokens=2000, output_tokens=300))
    unstored = await runtime.intake.place(tools.request(**asked))
    unstored.finish(Outcome.COMPLETED, Usage(prompt_tokens=2000, output_tokens=300))
    await tools.settle()

    def continuing(request: Any) -> Any:
        return tools.request(**asked, pinned_to="a", continues=response_id(request.request_id, "a"))

    unknown = await runtime.intake.place(continuing(unstored))
    before = (await loads(store))["a"]
    known = await runtime.intake.place(continuing(first))
    after = (await loads(store))["a"]

    assert after.pending_tokens - before.pending_tokens == before.pending_tokens
    assert after.context_tokens - before.context_tokens == before.context_tokens + 2300
    assert (unknown.expected_cached_tokens, known.expected_cached_tokens) == (0, 2300)
    told = known.explain().prompt.prompt_tokens
    assert told == 2300 + known.machine.spec.chain.prompt_tokens
    for request in (known, unknown):
        request.finish(Outcome.COMPLETED)


class TestWhereRunsWaitForMemory:
    @pytest.fixture
    def scheduling(self) -> SchedulingSettings:
        return SchedulingSettings(policy="dualmap-least-cost", block_tokens=16, admit_runs=True)

    async def test_responses_that_continue_each_other_are_turns_of_one_run(
        self, start_runtime: Any, store: Any
    ) -> None:
        runtime = await start_runtime(instances=(tools.spec("a"),))
        asked: dict[str, Any] = {"path": "/v1/responses", "body": {"input": "and then?"}, "leaves_id_open": True}
        previous, names = "", []
        for number in range(4):
            continues = response_id(previous, "a") if previous else None
            sent = tools.request(**asked, pinned_to="a" if previous else None, continues=continues, stores=True)
            placed = await runtime.intake.place(sent)
            names.append(placed.machine.spec.run.run)
            named_by = placed.explain().detours.run_named_by
            assert named_by == ("previous_response_id" if number else "")
            placed.finish(Outcome.COMPLETED, Usage(prompt_tokens=1000 * (number + 1), output_tokens=300))
            previous = placed.request_id
            await tools.settle()

        (run,) = (await store.pool("default").runs.ledger()).runs
        assert names == ["", run.name, run.name, run.name], "it counts from its second turn on"
        assert (run.turns, len(run.agents)) == (3, 1)
        assert run.tokens > 3000, "with what its instance has stored of it"


async def test_a_stored_conversation_has_the_slo_of_its_length(start_runtime: Any, store: Any) -> None:
    by_length = {"slo_ttft_s_per_1k_tokens": 1.0, "slo_ttft_max_s": 60.0}
    await store.pool("default").settings.change(by_length, by="operator")
    runtime = await start_runtime(instances=(tools.spec("a"),))
    await store.pool("default").responses.keep("resp_1@a", StoredConversation(20_000))
    body = {"input": "and then?"}
    slos_s = []
    for continued in (None, "resp_1@a"):
        asked = tools.request(path="/v1/responses", body=body, pinned_to="a", continues=continued)
        placed = await runtime.intake.place(asked)
        slos_s.append(placed.machine.spec.slo_s)
        placed.finish(Outcome.COMPLETED)
    assert slos_s[1] - slos_s[0] == pytest.approx(20.0)


async def test_a_stored_response_is_asked_of_the_instance_that_stored_it_and_of_no_other(start_runtime: Any) -> None:
    runtime = await start_runtime(instances=tuple(tools.spec(name) for name in "abcd"))
    for wanted in "abcd":
        stored = tools.request(path=f"/v1/responses/resp_1@{wanted}", model="", pinned_to=wanted)
        placed = await runtime.intake.place(stored)
        assert placed.machine.instance_id == wanted
        with pytest.raises(UpstreamError):
            await placed.failed(Failed(REFUSED))

    with pytest.raises(NotFoundError, match="not in the fleet"):
        await runtime.intake.place(tools.request(path="/v1/responses/resp_1@e", model="", pinned_to="e"))
    assert len(runtime.context.live) == 0
