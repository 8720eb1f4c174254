"""What a new fleet waits for: its own parts always, and servers that are given to it for as long as they may take."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator, Callable
from dataclasses import dataclass, field
from http import HTTPStatus

import pytest

from dualmap.cli import readiness
from dualmap.cli.configuration import load_settings, split_flags
from dualmap.cli.errors import CommandError
from dualmap.cli.fetch import HttpReply
from dualmap.cli.fleet_plan import FleetSize, plan_fleet
from dualmap.cli.readiness import Pace, Readiness
from dualmap.scheduling.settings import SchedulingSettings
from dualmap.scheduling.state.instance import InstanceSpec, InstanceState
from dualmap.statestore.memory import MemoryStore

A, B = "http://a:8000", "http://b:8000"
REFUSED = HttpReply(0, b"[Errno 111] Connection refused")


@dataclass
class Fleet:
    """A fleet whose parts and servers are as a test says."""

    store: MemoryStore
    servers: dict[str, HttpReply] = field(default_factory=dict)
    routers: HTTPStatus = HTTPStatus.OK
    routers_see: int = 9
    """Ready instances in the routers' view."""
    said: list[str] = field(default_factory=list)
    stopping: asyncio.Event = field(default_factory=asyncio.Event)

    def fetch(self, url: str, *, timeout_s: float, tls: object = None) -> HttpReply:
        report = {"pools": {"default": {"instances": {"ready": self.routers_see}}}}
        return self.servers.get(url.removesuffix("/health")) or HttpReply(self.routers, json.dumps(report).encode())

    async def lead(self) -> None:
        await self.store.pool("default").leader_lease.acquire("worker", 60_000)

    async def enter(self, name: str, url: str) -> None:
        await self.store.pool("default").members.put_instance(InstanceSpec(name, url))

    async def make_ready(self, name: str) -> None:
        await self.store.pool("default").members.set_instance_state(name, InstanceState.READY)

    def waiting(
        self,
        *urls: str,
        within_s: float | None = None,
        others_within_s: float = 0.0,
        own_within_s: float = 1000.0,
        check: Callable[[], object] = bool,
    ) -> asyncio.Task[bool]:
        flags, _ = split_flags(("--router.port", "0"), {})
        plan = plan_fleet(load_settings(flags, {}), FleetSize(1, 1, 1), urls, "fleet.yaml")
        pace = Pace(0.001, report_every_s=0.01, others_within_s=others_within_s, own_within_s=own_within_s)
        return asyncio.create_task(
            Readiness(plan, self.store, self.said.append, pace).wait(within_s, check, self.stopping)
        )

    async def until_said(self, text: str) -> None:
        async with asyncio.timeout(60):
            while text not in "\n".join(self.said):  # noqa: ASYNC110 - said by the code under test
                await asyncio.sleep(0.001)


@pytest.fixture
async def fleet(monkeypatch: pytest.MonkeyPatch) -> AsyncIterator[Fleet]:
    fleet = Fleet(MemoryStore(SchedulingSettings()))
    await fleet.store.open()
    monkeypatch.setattr(readiness, "fetch", fleet.fetch)
    yield fleet


async def test_a_fleet_with_all_its_servers_is_ready_without_a_word(fleet: Fleet) -> None:
    await fleet.lead()
    await fleet.enter("instance-1", A)
    await fleet.make_ready("instance-1")

    assert await fleet.waiting(A) is True
    assert fleet.said == []


async def test_servers_that_load_are_waited_for_and_what_they_answer_is_told_once(fleet: Fleet) -> None:
    await fleet.lead()
    await fleet.enter("instance-1", A)
    fleet.servers = {A: REFUSED}
    waiting = fleet.waiting(A)
    await fleet.until_said("Connection refused")
    fleet.servers = {A: HttpReply(503, b"")}
    await fleet.until_said("503")
    fleet.servers = {A: HttpReply(200, b"")}
    await fleet.until_said("200")
    await asyncio.sleep(0.05)  # several times what it takes to be told again

    await fleet.make_ready("instance-1")

    assert await waiting is True
    heading = f"waiting for instances that are not ready:\n  instance-1 at {A}: "
    assert fleet.said == [
        f"{heading}[Errno 111] Connection refused",
        f"{heading}/health answers 503",
        f"{heading}/health answers 200, and no worker has accepted it yet",
    ]


async def test_a_fleet_starts_with_the_servers_that_are_ready_once_the_others_had_their_time(fleet: Fleet) -> None:
    await fleet.lead()
    await fleet.enter("instance-1", A)
    await fleet.enter("instance-2", B)
    fleet.servers = {A: HttpReply(200, b""), B: REFUSED}
    await fleet.make_ready("instance-1")
    patient = fleet.waiting(A, B, others_within_s=1000.0)
    await fleet.until_said("instance-2")
    assert not patient.done()
    patient.cancel()

    assert await fleet.waiting(A, B) is True

    assert fleet.said[-1] == (
        f"starting without instances that are not ready:\n  instance-2 at {B}: [Errno 111] Connection refused\n"
        "Each serves as soon as it is ready."
    )


async def test_when_none_is_ready_in_the_time_it_may_take_the_servers_answers_are_the_error(fleet: Fleet) -> None:
    await fleet.lead()
    fleet.servers = {A: REFUSED, B: HttpReply(500, b"")}

    with pytest.raises(CommandError, match=r"not ready after 0 s, still waiting for ") as caught:
        await fleet.waiting(A, B, within_s=0.05)

    assert f"instance-1 at {A}: [Errno 111] Connection refused" in str(caught.value)
    assert f"instance-2 at {B}: /health answers 500" in str(caught.value)


async def test_without_its_own_parts_a_fleet_never_starts(fleet: Fleet) -> None:
    await fleet.enter("instance-1", A)
    await fleet.make_ready("instance-1")
    with pytest.raises(CommandError, match="a worker that leads"):
        await fleet.waiting(A, within_s=0.05)

    await fleet.lead()
    fleet.routers = HTTPStatus.SERVICE_UNAVAILABLE
    with pytest.raises(CommandError, match="the router at http://127"):
        await fleet.waiting(A, own_within_s=0.05)  # however long servers may take


async def test_emulated_instances_are_waited_for_all_of_them(fleet: Fleet) -> None:
    await fleet.lead()
    with pytest.raises(CommandError, match="instance-1 at http://127"):
        await fleet.waiting(own_within_s=0.05)


async def test_a_stop_and_a_child_that_ended_end_the_wait(fleet: Fleet) -> None:
    def ended() -> None:
        raise CommandError("worker-1 ended")

    with pytest.raises(CommandError, match="worker-1 ended"):
        await fleet.waiting(A, check=ended)

    waiting = fleet.waiting(A)
    await fleet.until_said("waiting for")
    fleet.stopping.set()
    assert await waiting is False


async def test_a_router_that_does_not_know_of_the_ready_instances_is_waited_for(fleet: Fleet) -> None:
    await fleet.lead()
    await fleet.enter("instance-1", A)
    await fleet.make_ready("instance-1")
    fleet.routers_see = 0
    waiting = fleet.waiting(A)
    await fleet.until_said("waiting for the router at")

    fleet.routers_see = 1

    assert await waiting is True
