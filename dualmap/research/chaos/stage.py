"""One scenario on a running fleet: traffic, the fault, the way back, and what is left over afterwards."""

from __future__ import annotations

import asyncio
import json
import random
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from typing import Any

from dualmap.research.chaos.checker import Outcome, RightAnswers
from dualmap.research.chaos.local_fleet import ChaosError, Engine, FleetView, LocalFleet, until, until_async
from dualmap.research.chaos.traffic import Tally, Traffic, TrafficPlan
from dualmap.scheduling.state.instance import InstanceState
from dualmap.simulation.http_client import HttpClientError

SHOWN_WITHIN_S = 40.0
"""Within this time a fault shows as the documents say."""
WHOLE_WITHIN_S = 60.0
"""Within this time after a fault the fleet is whole again."""
IDLE_WITHIN_S = 45.0
"""Within this time after the last request nothing is left of any."""
CALM_S = 1.0
"""Traffic before and behind a fault."""
_DRIFT = "sums had drifted"
_PROBES = 4
"""Requests, one after another, that a whole fleet must answer."""


@dataclass(frozen=True, slots=True)
class Scenario:
    """A fault, and what clients may notice of it.

    Args:
        fault: brings the fault about, waits until it shows, ends it, and returns; ends it too where it fails.
        allowed: outcomes of requests other than right answers. Neither wrong nor stuck ones ever are.
        drifts: the leader may find that counts have drifted, and repair them.
        tls: it needs a fleet that speaks TLS.
    """

    name: str
    symptom: str
    """The fault in the words of docs/operate/faults.md."""
    fault: Callable[[Stage], Awaitable[None]]
    allowed: frozenset[Outcome] = frozenset()
    drifts: bool = False
    tls: bool = False


@dataclass(slots=True)
class Result:
    """The result of a scenario."""

    scenario: Scenario
    tally: Tally = field(default_factory=Tally)
    recovery_s: float | None = None
    """Seconds from the end of the fault until the fleet was whole; None: it never was."""
    problems: list[str] = field(default_factory=list)
    """Violations, in words; none: it passed."""
    books: str = "?"
    """``exact``, or what was left over."""


class Stage:
    """The means that a fault has: the fleet, a source of chance, and waiting for what must show."""

    def __init__(self, fleet: LocalFleet, right: RightAnswers, traffic: TrafficPlan, rng: random.Random) -> None:
        self.fleet = fleet
        self.right = right
        self.rng = rng
        self._plan = traffic
        self._drifts = 0

    def any_engine(self) -> Engine:
        return self.rng.choice(self.fleet.engines)

    async def hold(self, seconds: float) -> None:
        """The fault lasts so much longer."""
        await asyncio.sleep(seconds)

    async def shows(self, probe: Callable[[], object], what: str) -> None:
        """Wait until the fault shows. Raises ChaosError."""
        await until(probe, what, SHOWN_WITHIN_S)

    async def fleet_shows(self, probe: Callable[[FleetView], bool], what: str) -> None:
        """Wait until it shows in the fleet as its store and its routers describe it. Raises ChaosError."""

        async def shown() -> bool:
            return probe(await self.fleet.view())

        await until_async(shown, what, SHOWN_WITHIN_S)

    async def becomes(self, engine: Engine, *states: InstanceState) -> None:
        """Wait until the fleet says one of these states of an instance. Raises ChaosError."""
        name = engine.name
        await self.fleet_shows(lambda view: view.states.get(name) in states, f"{name} is {' or '.join(states)}")

    async def stays(self, engine: Engine, state: InstanceState, seconds: float) -> None:
        """Raises ChaosError: the fleet says another state of an instance within this time."""
        end_s = time.monotonic() + seconds
        while time.monotonic() < end_s:
            found = (await self.fleet.view()).states.get(engine.name)
            if found is not state:
                raise ChaosError(f"{engine.name} is {found}, and must stay {state}")
            await asyncio.sleep(0.2)

    async def alone(self, *, all_of_them: bool = True) -> None:
        """Wait until routers say that they decide without the store. Raises ChaosError."""
        enough = all if all_of_them else any
        await self.fleet_shows(
            lambda view: enough(state != "ok" for state in view.store_states.values()), "routers decide alone"
        )

    @asynccontextmanager
    async def logged(self, text: str) -> AsyncIterator[None]:
        """The logs of routers and workers get this text within the context, or soon after. Raises ChaosError."""
        before = self.fleet.logs().count(text)
        yield
        await self.shows(lambda: self.fleet.logs().count(text) > before, f"the logs say: {text}")

    async def admin(self, method: str, path: str) -> int:
        """The status of an answer of the routers' ``/admin``. Raises HttpClientError."""
        client = self.fleet.client()
        try:
            return (await client.request(method, f"/admin/{path}")).status
        finally:
            client.close()

    async def ask(self, body: dict[str, Any]) -> tuple[int | None, dict[str, Any]]:
        """Status and body of a completion that is not streamed, over a connection of its own; None: it was lost."""
        pieces, client = bytearray(), self.fleet.client()
        try:
            question = json.dumps({"model": self.fleet.plan.model, **body}).encode()
            async with asyncio.timeout(self._plan.client_waits_s):
                answer = await client.request("POST", "/v1/completions", question, on_body=pieces.extend)
            return answer.status, json.loads(bytes(pieces))
        except (HttpClientError, TimeoutError):
            return None, {}
        finally:
            client.close()

    async def play(self, scenario: Scenario) -> Result:
        """Run a scenario; the fleet is whole before, and should be so afterwards."""
        result = Result(scenario)
        traffic, stopping = self.traffic(self.rng.getrandbits(32)), asyncio.Event()
        with traffic.counted() as result.tally:
            sending = asyncio.create_task(traffic.run(stopping))
            try:
                await self.hold(CALM_S)
                await self.suffer(result)
                await self.hold(CALM_S)
                stopping.set()
                await sending
                await self._probe(traffic, result)
            finally:
                sending.cancel()
                await asyncio.gather(sending, return_exceptions=True)
                traffic.close()
        self.judge(result)
        left = await self.left_over()
        result.books = books(left)
        if left:
            result.problems.append(f"left over: {result.books}")
        if self.drifted() and not scenario.drifts:
            result.books = "drifted"
            result.problems.append("counts had drifted, and were repaired")
        return result

    async def suffer(self, result: Result) -> None:
        """Bring the scenario's fault about and end it, and wait until the fleet is whole again."""
        try:
            await result.scenario.fault(self)
        except (ChaosError, HttpClientError) as error:
            result.problems.append(f"it did not show as it should: {error}")
        try:
            result.recovery_s = await self.fleet.whole(WHOLE_WITHIN_S)
        except ChaosError as error:
            result.problems.append(str(error))

    @staticmethod
    def judge(result: Result) -> None:
        """Complain about outcomes that the scenario does not allow."""
        for outcome, count in result.tally.outcomes.items():
            if outcome not in (Outcome.RIGHT, Outcome.LEFT) and outcome not in result.scenario.allowed:
                result.problems.append(f"{count} {outcome}")

    def drifted(self) -> bool:
        """Whether the leader has repaired counts since this was last asked."""
        before, self._drifts = self._drifts, self.fleet.logs().count(_DRIFT)
        return self._drifts > before

    def traffic(self, seed: int) -> Traffic:
        """Requests to this fleet; not yet running."""
        return Traffic(self.fleet.client(), self.fleet.plan.model, self.right, self._plan, seed)

    async def _probe(self, traffic: Traffic, result: Result) -> None:
        for _ in range(_PROBES):
            verdict = await traffic.ask_once()
            if verdict.outcome is not Outcome.RIGHT:
                result.problems.append(f"after the fault: {verdict.outcome} ({verdict.why})")

    async def left_over(self) -> dict[str, int]:
        """The records, counts of the store and requests of engines that outlive the requests once all have ended; empty
        where nothing does."""
        left: dict[str, int] = {"not looked": 1}

        async def nothing() -> bool:
            nonlocal left
            left = await self._left_now()
            return not left

        try:
            await until_async(nothing, "", IDLE_WITHIN_S, every_s=0.3)
        except ChaosError:
            return left
        return {}

    async def _left_now(self) -> dict[str, int]:
        view = await self.fleet.view()
        left = {**view.counts}
        if view.live_requests:
            left["requests in the store"] = view.live_requests
        if len(view.states) != len(self.fleet.engines):
            left["instances away"] = len(self.fleet.engines) - len(view.states)
        for engine in self.fleet.engines:
            try:
                said = await engine.order("statistics")
            except HttpClientError:
                left["engines away"] = left.get("engines away", 0) + 1
                continue
            for name in ("running", "waiting"):
                if said[name]:
                    left[f"engines {name}"] = left.get(f"engines {name}", 0) + said[name]
        return left


def books(left: Mapping[str, int]) -> str:
    """The leftovers in words."""
    return ", ".join(f"{name} {count}" for name, count in left.items()) or "exact"
