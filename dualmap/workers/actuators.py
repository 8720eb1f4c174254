"""Actuators: what starts and stops machines outside of the fleet.

Asked from the scaling round, which must not wait: a call runs beside it, and its reply is taken in a later round. A
repeated call for a decision, by this leader or by the next one, has the same key.
"""

from __future__ import annotations

import asyncio
import hashlib
import hmac
import logging
from typing import Protocol

import httpx
import orjson

from dualmap.runtime.clock import Clock
from dualmap.runtime.pool_settings import PoolSettings
from dualmap.runtime.trust import system_trust
from dualmap.scheduling.backoff import backoff_s, worth_logging
from dualmap.scheduling.scaling.scale_job import ActuatorReply
from dualmap.scheduling.scaling.scale_record import ScaleRecord
from dualmap.statestore.url import without_password
from dualmap.workers.pool_reader import PoolReader

log = logging.getLogger(__name__)

TIMEOUT_S = 10.0
"""Timeout of one call of a webhook; it accepts a decision, and need not wait for machines."""
COMMAND_TIMEOUT_S = 60.0
_TEXT_CHARACTERS = 200


class Actuator(Protocol):
    """Carries a decision out."""

    async def call(self, pool: str, record: ScaleRecord) -> ActuatorReply:
        """Ask once. Never raises but for cancellation; bounded in time."""

    async def close(self) -> None:
        """Give back what it holds."""


def decision_key(pool: str, record: ScaleRecord) -> str:
    """The key of a decision, equal for its repetitions and for no other decision: a store that came back empty counts
    from 1, and each role has its own numbers."""
    of_role = f"-{record.role}" if record.role else ""
    return f"{pool}{of_role}-{record.decision_id}-{record.at_ms}"


def order(pool: str, record: ScaleRecord) -> bytes:
    """The decision as JSON."""
    payload = {
        "decision": decision_key(pool, record),
        "pool": pool,
        "role": record.role,
        "size": record.size,
        "wanted": record.wanted,
        "starting": record.starting,
        "leaving": record.leaving,
        "reason": record.reason,
        "attempt": record.asked + 1,
    }
    return orjson.dumps(payload)


class Webhook:
    """POSTs each decision, signed: ``x-dualmap-signature: sha256=HEX`` is the HMAC of the body."""

    def __init__(self, url: str, secret: str, timeout_s: float = TIMEOUT_S) -> None:
        self._url = url
        self._shown_url = without_password(url)
        self._secret = secret.encode()
        self._timeout_s = timeout_s

    async def call(self, pool: str, record: ScaleRecord) -> ActuatorReply:
        body = order(pool, record)
        headers = {
            "content-type": "application/json",
            "idempotency-key": decision_key(pool, record),
            "x-dualmap-signature": "sha256=" + hmac.new(self._secret, body, hashlib.sha256).hexdigest(),
        }
        try:
            async with asyncio.timeout(self._timeout_s), self._client() as client:
                answer = await client.post(self._url, content=body, headers=headers)
        except (httpx.HTTPError, httpx.InvalidURL, OSError, ValueError, ImportError) as error:
            # The last two: what HTTPS_PROXY or ALL_PROXY names is no proxy that can be used.
            return ActuatorReply(False, f"{self._shown_url}: {type(error).__name__} {error}".strip())
        return ActuatorReply(answer.is_success, f"{answer.status_code} {answer.text[:_TEXT_CHARACTERS]}".strip())

    def _client(self) -> httpx.AsyncClient:
        """A client that uses the proxy of the environment: a webhook may be outside of the data centre."""
        return httpx.AsyncClient(timeout=self._timeout_s, verify=system_trust())

    async def close(self) -> None:
        """Nothing is kept between calls."""


class Command:
    """Runs a program with the decision on its input; exit code 0 accepts."""

    def __init__(self, command: tuple[str, ...], timeout_s: float = COMMAND_TIMEOUT_S) -> None:
        self._command = command
        self._timeout_s = timeout_s

    async def call(self, pool: str, record: ScaleRecord) -> ActuatorReply:
        pipe = asyncio.subprocess.PIPE
        try:
            child = await asyncio.create_subprocess_exec(
                *self._command, stdin=pipe, stdout=pipe, stderr=asyncio.subprocess.STDOUT
            )
        except OSError as error:
            return ActuatorReply(False, f"{self._command[0]}: {error.strerror or error}")
        try:
            async with asyncio.timeout(self._timeout_s):
                output, _ = await child.communicate(order(pool, record))
        except TimeoutError:
            return ActuatorReply(False, f"{self._command[0]} took longer than {self._timeout_s:.0f} s and was killed")
        finally:
            if child.returncode is None:
                child.kill()
                await child.wait()
        text = output.decode("utf-8", "replace").strip()[-_TEXT_CHARACTERS:]
        return ActuatorReply(child.returncode == 0, f"exit {child.returncode} {text}".strip())

    async def close(self) -> None:
        """Nothing is kept between calls."""


def actuator_of(settings: PoolSettings, reader: PoolReader, *, decodes: bool = False) -> Actuator | None:
    """The actuator of the decode instances, or of all others; None where nothing outside is called."""
    autoscale, discovery = settings.autoscale_of(decodes=decodes), settings.discovery
    if autoscale is None:
        return None
    if autoscale.actuator == "kubernetes" and autoscale.workload and discovery is not None:
        from dualmap.workers.discovery.kubernetes_api import KubernetesApi
        from dualmap.workers.workload import Workload  # loaded where it is used, as discovery is

        return Workload(KubernetesApi(discovery.kubernetes), autoscale.workload, reader)
    if autoscale.actuator == "webhook" and autoscale.webhook_url and autoscale.webhook_secret:
        return Webhook(autoscale.webhook_url, autoscale.webhook_secret.get_secret_value())
    if autoscale.actuator == "command":
        return Command(autoscale.command)
    return None


class ActuatorCalls:
    """One call at a time, beside the scaling round."""

    def __init__(self, actuator: Actuator | None, pool: str, clock: Clock) -> None:
        self._actuator = actuator
        self._pool = pool
        self._clock = clock
        self._call: asyncio.Task[ActuatorReply] | None = None
        self._about = ""
        self._not_before_s = float("-inf")

    async def actuate(self, record: ScaleRecord) -> ActuatorReply | None:
        """The reply about this decision, if it is there; else the call is begun, or goes on."""
        if self._actuator is None:
            return ActuatorReply(False, "no actuator is configured")
        key = decision_key(self._pool, record)
        if self._call is not None and self._about != key:
            await self._give_up()
        if self._call is None:
            if self._about == key and self._clock.monotonic_s() < self._not_before_s:
                return None
            self._about = key
            self._call = asyncio.create_task(self._actuator.call(self._pool, record), name=f"actuator/{key}")
            await asyncio.sleep(0)
        if not self._call.done():
            return None
        reply, self._call = self._call.result(), None
        if not reply.accepted:
            pause_s = backoff_s(record.asked + 1, first_s=1.0, longest_s=30.0)
            self._not_before_s = self._clock.monotonic_s() + max(pause_s, reply.retry_after_s)
            if worth_logging(record.asked + 1):
                log.warning(
                    "actuator failed pool=%s decision=%d calls=%d, it is called again: %s",
                    self._pool,
                    record.decision_id,
                    record.asked + 1,
                    reply.text,
                )
        return reply

    async def _give_up(self) -> None:
        """Give up the call under way."""
        if self._call is not None:
            self._call.cancel()
            await asyncio.gather(self._call, return_exceptions=True)
            self._call = None

    async def close(self) -> None:
        """Give up the call under way, and what the actuator holds."""
        await self._give_up()
        if self._actuator is not None:
            await self._actuator.close()
