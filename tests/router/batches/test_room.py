"""The room that a replica has for lines, by instance."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Mapping
from types import SimpleNamespace
from typing import Any

import pytest

from dualmap.router.batches.room import ANYWHERE_AFTER_S, LineRoom
from dualmap.scheduling.batches.slack import PREFILL_PART, QUIET_S, SEQUENCES_PART
from dualmap.scheduling.state.instance import InstanceLoad, InstanceState

MOST = 100
PART = int(SEQUENCES_PART * MOST)


class Evictable:
    def __init__(self) -> None:
        self.left: list[tuple[str, int]] = []

    def evict_cheapest(self, rule: object, instance_id: str, count: int) -> int:
        self.left.append((instance_id, count))
        return count


class Room(LineRoom):
    """The room of a replica over two instances, at a time and under loads that a test sets."""

    def __init__(self, others: Mapping[str, int], replicas: int) -> None:
        self.loads: dict[str, Any] = {}
        self.evictable = Evictable()
        self.others = others
        self.time_s = 1000.0

        async def loads() -> Mapping[str, InstanceLoad]:
            return {name: InstanceLoad(name, InstanceState.READY, **self.load_of(name)) for name in ("a", "b")}

        async def exchange_lines(replica_id: str, running: Mapping[str, int]) -> Mapping[str, int]:
            return self.others

        async def overview(pool: str) -> Any:
            alive = [SimpleNamespace(replica_id=f"r{n}", is_alive=lambda _: True) for n in range(replicas)]
            return SimpleNamespace(replicas=alive, now_ms=0)

        pool = SimpleNamespace(
            store=SimpleNamespace(loads=loads), evictable=self.evictable, rules=SimpleNamespace(eviction=object())
        )
        runtime: Any = SimpleNamespace(
            pools=SimpleNamespace(pools={"p": pool}),
            fleet=SimpleNamespace(get=overview),
            context=SimpleNamespace(replica_id="r0"),
        )
        book: Any = SimpleNamespace(exchange_lines=exchange_lines)
        super().__init__(runtime, book, lambda: True)
        self._now_s = lambda: self.time_s

    def load_of(self, name: str) -> dict[str, Any]:
        return {"max_running_requests": MOST, "dispatch_window_tokens": 1 << 20} | self.loads.get(name, {})

    async def look(self) -> None:
        await self._look()
        self._let_in("p")
        await asyncio.sleep(0)


class Lines:
    """Lines that wait, and run until they are ended."""

    def __init__(self, room: Room) -> None:
        self.room = room
        self.at: list[str] = []
        self.tasks: list[asyncio.Task[None]] = []
        self.end = asyncio.Event()

    async def begin(self, preferred: str, count: int = 1, batch_id: str = "") -> None:
        for _ in range(count):
            self.tasks.append(asyncio.create_task(self._run(preferred, batch_id)))
        await asyncio.sleep(0)

    async def _run(self, preferred: str, batch_id: str) -> None:
        async with self.room.place("p", preferred, batch_id) as instance_id:
            self.at.append(instance_id)
            await self.end.wait()

    async def over(self) -> None:
        for task in self.tasks:
            task.cancel()
        for task in self.tasks:
            with contextlib.suppress(asyncio.CancelledError):
                await task


@pytest.fixture
async def room() -> Room:
    return Room({}, 1)


async def test_a_line_waits_for_its_own_instance_and_then_takes_any(room: Room) -> None:
    room.loads["a"] = {"pending_tokens": 1 << 20, "running_requests": 1}
    lines = Lines(room)
    await lines.begin("a", 2)
    await room.look()
    assert lines.at == []

    room.time_s += ANYWHERE_AFTER_S
    await room.look()

    assert lines.at == ["b", "b"]
    await lines.over()


async def test_beside_interactive_requests_a_part_of_the_sequences_is_taken_and_alone_all(room: Room) -> None:
    lines = Lines(room)
    await lines.begin("a", 3 * MOST)
    await room.look()
    assert lines.at == ["a"] * PART

    room.time_s += QUIET_S
    room.loads["a"] = {"running_requests": PART}
    await room.look()

    assert lines.at.count("a") == MOST
    await lines.over()


async def test_after_a_long_prompt_the_next_one_waits_until_it_has_worn_off(room: Room) -> None:
    room.loads["a"] = {"dispatch_window_tokens": 4096, "prefill_tokens_per_s": 8000.0, "kv_capacity_tokens": 10**9}
    for _ in range(200):
        room.learn(9000, 8512)  # beyond a quarter of a step, a second of the instance
    lines = Lines(room)
    await lines.begin("a", 2)
    await room.look()
    assert lines.at == ["a"]

    room.loads["b"] = {"pending_tokens": 1 << 20}
    room.time_s += 0.9 / PREFILL_PART
    await room.look()
    assert lines.at == ["a"]

    room.time_s += 0.2 / PREFILL_PART
    room.loads["a"] |= {"running_requests": 2}
    await room.look()
    assert lines.at == ["a", "a"]
    await lines.over()


async def test_a_line_that_ends_is_followed_by_the_next_one(room: Room) -> None:
    lines = Lines(room)
    await lines.begin("a", PART + 3)
    await room.look()
    assert len(lines.at) == PART

    lines.tasks[0].cancel()
    await asyncio.sleep(0)
    await asyncio.sleep(0)

    assert len(lines.at) == PART + 1
    await lines.over()
    assert not room._running


async def test_lines_leave_where_interactive_requests_are_back(room: Room) -> None:
    await room.look()
    room.time_s += QUIET_S
    lines = Lines(room)
    await lines.begin("a", MOST)
    await room.look()
    assert len(lines.at) == MOST
    assert room.evictable.left == []

    room.loads["a"] = {"running_requests": MOST + 1}
    await room.look()

    assert room.evictable.left == [("a", MOST - PART)]
    await lines.over()


async def test_replicas_share_the_room_and_know_the_lines_of_each_other() -> None:
    room = Room({"p/a": PART - 3}, 2)
    room.loads["a"] = {"running_requests": PART - 3}
    lines = Lines(room)
    await lines.begin("a", MOST)

    await room.look()

    assert len(lines.at) in (1, 2), "half of the three that are left"
    await lines.over()


async def test_without_the_loads_nothing_begins(room: Room) -> None:
    lines = Lines(room)
    await lines.begin("a")
    assert lines.at == []
    await lines.over()
    assert room.waiting("p", "a") in (0, 1)
    room._most = {("p", "a"): 1}
    room._let_in("p")
    assert not room._running, "a line that was cancelled gets no room"


async def test_lines_of_a_late_batch_need_no_room_as_many_as_its_window_needs(room: Room) -> None:
    room.loads = {name: {"pending_tokens": 1 << 20, "running_requests": 1} for name in ("a", "b")}
    lines = Lines(room)
    await lines.begin("a", 5, "calm")
    await lines.begin("a", 5, "late")
    room.late = {"late": 3}

    await room.look()
    assert lines.at == ["", "", ""]
    lines.tasks[5].cancel()
    await asyncio.sleep(0)
    await room.look()
    assert len(lines.at) == 4, "one that ends is followed by another"

    room.late = {}
    for task in lines.tasks[5:]:
        task.cancel()
    await room.look()
    assert len(lines.at) == 4
    await lines.over()


async def test_a_late_batch_whose_lines_find_room_gets_no_more_than_its_window_needs(room: Room) -> None:
    lines = Lines(room)
    await lines.begin("a", PART + 10, "late")
    room.late = {"late": PART - 1}

    await room.look()
    assert lines.at == ["a"] * PART

    room.late = {"late": PART + 4}
    await room.look()
    assert lines.at.count("") == 4
    await lines.over()
    assert not room._of_batch
