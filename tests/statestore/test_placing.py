"""Items of one iteration of the event loop that share a script call."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Sequence

import orjson
import pytest

from dualmap.scheduling.estimates.weights import Form, Weights
from dualmap.scheduling.placing.options import Weighing
from dualmap.scheduling.placing.placement import PlaceReply
from dualmap.scheduling.request.release import Release
from dualmap.scheduling.state.legs import Leg
from dualmap.statestore.connect import Store
from dualmap.statestore.errors import StoreUnavailableError
from dualmap.statestore.pool import PoolStore
from dualmap.statestore.pool.placing import MAX_OPTION_TEXTS, Batcher, OptionTexts
from dualmap.statestore.redis import RedisStore
from dualmap.statestore.settings import StoreSettings
from tests.statestore.samples import CHAIN, SCHEDULING, assert_sums_hold, chain, instance, place


class Script:
    """Answers each by its name, and notes what it is called with."""

    def __init__(self, error: Exception | None = None) -> None:
        self.calls: list[list[str]] = []
        self.error = error

    async def run(self, asked: Sequence[str]) -> Sequence[str]:
        self.calls.append([*asked])
        await asyncio.sleep(0)
        if self.error is not None:
            raise self.error
        return [f"to {name}" for name in asked]


async def test_calls_of_one_turn_share_a_script_up_to_a_limit() -> None:
    script = Script()
    batcher = Batcher(script.run, 8)
    names = [f"r{number}" for number in range(9)]

    told = await asyncio.gather(*map(batcher.add, names))
    await batcher.add("later")

    assert script.calls == [names[:8], names[8:], ["later"]]
    assert told == [f"to {name}" for name in names]


async def test_what_finds_no_call_under_way_is_asked_at_once_and_the_others_share_the_next() -> None:
    script = Script()
    batcher = Batcher(script.run, 8)

    told = await asyncio.gather(*map(batcher.submit, "abc"))
    await batcher.submit("d")

    assert script.calls == [["a"], ["b", "c"], ["d"]]
    assert told == ["to a", "to b", "to c"]


async def test_what_was_asked_alone_and_failed_lets_the_next_be_asked() -> None:
    script = Script(StoreUnavailableError("away"))
    batcher = Batcher(script.run, 8)

    with pytest.raises(StoreUnavailableError):
        await batcher.submit("a")
    script.error = None

    assert await batcher.submit("b") == "to b"


async def test_an_error_reaches_all_who_wait() -> None:
    batcher = Batcher(Script(StoreUnavailableError("away")).run, 8)

    told = await asyncio.gather(*map(batcher.add, "ab"), return_exceptions=True)

    assert [str(each) for each in told] == ["away", "away"]


async def test_one_who_gave_up_takes_nothing_from_the_others() -> None:
    script = Script()
    batcher = Batcher(script.run, 8)
    given_up, other = batcher.add("a"), batcher.add("b")

    given_up.cancel()

    assert await other == "to b"
    assert script.calls == [["a", "b"]]


def test_the_text_of_an_option_is_that_of_its_weights_wherever_their_forms_are_in_memory() -> None:
    texts = OptionTexts()
    for number in range(1, 3 * MAX_OPTION_TEXTS):  # forms that are dropped leave their place to the next ones
        text = texts.of(option(float(number)))

        assert orjson.loads(text)["cost"] == [1, number]
        assert texts.of(option(float(number))) == text


def option(cost: float) -> Weighing:
    return Weighing(Leg.WHOLE, ("a", "b"), Weights(Form(cost), Form(ahead_s=1.0)), Form())


async def test_placements_that_share_a_script_are_made_as_if_each_came_alone(
    store: Store, monkeypatch: pytest.MonkeyPatch
) -> None:
    together, alone = store.pool("together"), store.pool("alone")
    if isinstance(together, PoolStore):  # the first one shares it, too: over another connection it may come later
        monkeypatch.setattr(together, "place", together._placements.add)
    for pool in (together, alone):
        for name in ("a", "b"):
            await pool.members.put_instance(instance(name, max_running_requests=1, max_queued_requests=2))

    def asked(pool: PoolStore) -> list[Awaitable[PlaceReply]]:
        return [
            place(pool, "alone", "c"),  # finds no call under way, and is in no script with the others
            *(place(pool, f"r{number}", "a", "b", chain=chain(number, 2, 3), replica_id="one") for number in range(5)),
            *(place(pool, "r1", "a", "b", replica_id=replica_id) for replica_id in ("one", "two")),
            place(pool, "nowhere", "c"),
            *(place(pool, f"s{number}", "b", chain=CHAIN, replica_id="two") for number in range(3)),
        ]

    told = await asyncio.gather(*asked(together))
    expected = [await each for each in asked(alone)]

    assert {reply.status for reply in told} == {"dispatched", "held", "duplicate", "not_ready", "queue_full"}
    for reply, other in zip(told, expected, strict=True):
        assert (reply.status, reply.chosen.instance_id, reply.chosen.alternative_id) == (
            other.status,
            other.chosen.instance_id,
            other.chosen.alternative_id,
        )
        assert {name: (load.pending_tokens, load.hit_blocks) for name, load in reply.seen.loads.items()} == {
            name: (load.pending_tokens, load.hit_blocks) for name, load in other.seen.loads.items()
        }
    await assert_sums_hold(together)
    assert {each.replica_id for each in (await together.overview()).replicas} == {"one", "two"}


async def test_on_a_server_each_is_released_and_the_last_of_an_instance_is_told_its_queue(server_url: str) -> None:
    store = RedisStore(StoreSettings(url=server_url), scheduling=SCHEDULING)
    await store.open()
    pool = store.pool("default")
    for name in ("a", "b"):
        await pool.members.put_instance(instance(name, max_running_requests=2))
    for request_id, name in (("1", "a"), ("2", "a"), ("3", "b"), ("held", "a")):
        await place(pool, request_id, name)

    told = await pool.release([Release("1", "a"), Release("1"), Release("2"), Release("3"), Release("nobody's")])

    assert [each.done for each in told] == [True, True, True, True, False]
    assert [each.queue is not None for each in told] == [False, False, True, False, False]
    queue = told[2].queue
    assert queue is not None
    assert ([entry.request_id for entry in queue.entries], queue.load.running_requests) == (["held"], 0)
    await assert_sums_hold(pool)
    await store.close()
