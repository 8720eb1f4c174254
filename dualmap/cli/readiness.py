"""Waiting for a new fleet: its missing parts, the answers of its servers, and which of them it may start without."""

from __future__ import annotations

import asyncio
import contextlib
import json
import math
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from http import HTTPStatus

from dualmap.cli.errors import CommandError
from dualmap.cli.fetch import fetch
from dualmap.cli.fleet_plan import FleetPlan
from dualmap.cli.instance_trust import instance_trust
from dualmap.runtime.pool_settings import InstanceSettings
from dualmap.runtime.trust import InstanceTrust
from dualmap.scheduling.state.instance import InstanceState
from dualmap.statestore.connect import Store

_PROBE_TIMEOUT_S = 2.0


@dataclass(frozen=True, slots=True)
class Pace:
    poll_s: float = 0.1
    report_every_s: float = 5.0
    """Servers are checked this often; an answer is shown if it is new."""
    others_within_s: float = 5.0
    """Time for the other servers once one is ready."""
    own_within_s: float = 60.0
    """Time for the parts that the fleet starts itself."""


@dataclass(frozen=True, slots=True)
class Lack:
    """Parts that a fleet still waits for."""

    parts: str
    """A part of the fleet itself that is missing; empty if none is."""
    servers: tuple[InstanceSettings, ...]
    """Instances that are not ready."""
    some_ready: bool
    """Whether an instance is ready."""


_PACE = Pace()


class Readiness:
    """Waits until the fleet of ``plan`` serves."""

    def __init__(self, plan: FleetPlan, store: Store, say: Callable[[str], None], pace: Pace = _PACE) -> None:
        self._plan = plan
        self._store = store
        self._say = say
        self._pace = pace

    async def wait(self, within_s: float | None, check: Callable[[], None], stopping: asyncio.Event) -> bool:
        """Wait until all of it serves, or until some of the given servers do and the others had their time; False if
        stopped first. Calls ``check`` regularly, which may raise.

        ``within_s``: by default no longer than what the fleet brings itself may take, emulated instances included, and
        as long as it takes for servers that were given.

        Raises:
            CommandError: it takes longer.
        """
        limit_s = within_s or (self._pace.own_within_s if self._plan.emulated else math.inf)
        started_s = said_s = whole_s = time.monotonic()
        some_ready_s, said = math.inf, ""
        while not stopping.is_set():
            check()
            lack, now_s = await self._lack(), time.monotonic()
            if not lack.parts and not lack.servers:
                return True
            if not lack.parts:
                whole_s = now_s
            if not lack.parts and lack.some_ready and not self._plan.emulated:
                some_ready_s = min(some_ready_s, now_s)
                if now_s >= min(some_ready_s + self._pace.others_within_s, started_s + limit_s):
                    self._say(f"starting without {await self._said_of(lack)}\nEach serves as soon as it is ready.")
                    return True
            if now_s >= min(whole_s + self._pace.own_within_s, started_s + limit_s):
                missing = await self._said_of(lack, whole=True)
                raise CommandError(
                    f"not ready after {now_s - started_s:.0f} s, still waiting for {missing}\n"
                    "Give it more time with --ready-within-s S, or look into the logs."
                )
            if now_s >= said_s + self._pace.report_every_s:
                news, said_s = await self._said_of(lack), now_s
                if news != said:
                    self._say(f"waiting for {news}")
                    said = news
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(self._pace.poll_s):
                    await stopping.wait()
        return False

    async def _lack(self) -> Lack:
        servers, seen, led = [], {}, True
        for pool in self._plan.settings.pools:
            snapshot = await self._store.pool(pool.name).snapshot()
            ready = {name for name, known in snapshot.instances.items() if known.state is InstanceState.READY}
            servers += [each for each in pool.instances if not each.standby and each.id not in ready]
            seen[pool.name] = len(ready)
            led = led and snapshot.leader is not None
        some_ready = any(seen.values())
        if not led:
            return Lack("a worker that leads", tuple(servers), some_ready)
        for url in self._plan.ops_urls:
            answer = await asyncio.to_thread(fetch, f"{url}/ready", timeout_s=1.0)
            if answer.status != HTTPStatus.OK or not _sees(answer.body, seen):
                return Lack(f"the router at {url}", tuple(servers), some_ready)
        return Lack("", tuple(servers), some_ready)

    async def _said_of(self, lack: Lack, *, whole: bool = False) -> str:
        """The missing part of the fleet; or the instances that are missing, with the answer of each one's server; or,
        of the ``whole``, both."""
        if lack.parts and not (whole and lack.servers):
            return lack.parts
        trust = instance_trust(self._plan.settings)
        said = await asyncio.gather(*(asyncio.to_thread(_answer_of, server, trust) for server in lack.servers))
        return "\n  ".join(
            (
                f"{lack.parts}, and for instances that are not ready:"
                if lack.parts
                else "instances that are not ready:",
                *(f"{server.id} at {server.url}: {answer}" for server, answer in zip(lack.servers, said, strict=True)),
            )
        )


def _sees(report: bytes, ready: Mapping[str, int]) -> bool:
    """Whether a router, by its report, knows in each pool of the ready instances that ``ready`` counts."""
    pools = json.loads(report)["pools"]
    return all(pools[name]["instances"].get(InstanceState.READY.value, 0) >= count for name, count in ready.items())


def _answer_of(server: InstanceSettings, trust: InstanceTrust) -> str:
    tls = trust.context if server.url.startswith("https:") else None
    answer = fetch(f"{server.url}/health", timeout_s=_PROBE_TIMEOUT_S, tls=tls)
    if answer.status == 0:
        return answer.body.decode(errors="replace")
    accepted = ", and no worker has accepted it yet" if answer.status == HTTPStatus.OK else ""
    return f"/health answers {answer.status}{accepted}"
