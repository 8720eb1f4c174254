"""Scaler: decides how many instances the pool has, and acts on it; see ``scheduling.scaling.scale_job``."""

from __future__ import annotations

import logging
from collections.abc import Callable

from dualmap.scheduling.scaling.role_plan import RoleTargets
from dualmap.scheduling.scaling.scale_job import FleetNow, ScaleKeeper
from dualmap.scheduling.scaling.scale_record import DecisionStatus, ScaleRecord
from dualmap.scheduling.settings import SchedulingSettings
from dualmap.scheduling.state.instance import Role
from dualmap.scheduling.steps import drive
from dualmap.statestore.leases import ENDED_FIELD, LIVE_FIELD, WAITING_FIELD
from dualmap.statestore.led import LedScaling
from dualmap.workers.actuators import Actuator, ActuatorCalls
from dualmap.workers.context import LeaderContext

log = logging.getLogger(__name__)


class Scaler:
    """Changes the number of instances, where the pool has ``autoscale``; a second one, the ``decode scaler``, that of
    decode instances, where they scale by themselves.

    It lives for one term. Without the store it decides nothing: the round fails, and says so.
    """

    name = "scaler"
    interval_s = 1.0

    def __init__(
        self,
        context: LeaderContext,
        scheduling: SchedulingSettings,
        actuator: Actuator | None,
        *,
        arrived: Callable[[], int],
        decodes: bool = False,
    ) -> None:
        """``scheduling`` is in seconds of the clock, the pool's ``autoscale`` in those of the engines. The end of the
        scaler is that of the actuator. With ``decodes`` it scales the decode instances."""
        settings, time_scale = context.settings, context.time_scale
        autoscale = settings.autoscale_of(decodes=decodes)
        assert autoscale is not None
        if decodes:
            self.name = "decode scaler"
        self._pool = context.pool
        self._scheduling = scheduling
        self._reader = context.reader
        self._metrics = context.metrics
        self._calls = ActuatorCalls(actuator, context.pool.name, context.clock)
        self._scaling = LedScaling(context.led, now=self._now, actuate=self._calls.actuate)
        self._keeper = ScaleKeeper(
            autoscale,
            context.worker_id,
            scheduling.slo_ttft_s * time_scale,
            scheduling.block_tokens,
            tuple(
                instance.id
                for instance in settings.instances
                if instance.standby and (instance.role is Role.DECODE) is decodes
            ),
            arrived=arrived,
            time_scale=time_scale,
            decodes=decodes,
        )
        self._reported: tuple[int, DecisionStatus] | None = None
        self._hands_off: str | None = None

    async def tick(self) -> None:
        """One round. Raises StoreUnavailableError, LeaseLostError."""
        record = await drive(self._keeper.tick(), self._scaling)
        labels = self._pool.name, record.counts
        self._metrics.wanted_instances.labels(*labels).set(self._keeper.plan.wanted)
        self._metrics.least_instances.labels(*labels).set(self._keeper.settings.min_instances)
        self._report(record)

    async def close(self) -> None:
        """End the call of an actuator; the next leader repeats it with the same key."""
        await self._calls.close()

    async def _now(self) -> FleetNow:
        members = await self._reader.membership()
        pace = RoleTargets.of(self._scheduling, members.learned).answer_pace
        if self._keeper.settings.min_instances > 0:
            now_ms, loads = await self._pool.now_ms(), await self._reader.loads()
            return FleetNow(now_ms, loads, members.instances, answer_pace=pace)
        overview = await self._reader.overview()
        replicas = [replica.info for replica in overview.replicas if replica.is_alive(overview.now_ms)]
        waiting, live, ended = (
            sum(_count(info.get(name)) for info in replicas) for name in (WAITING_FIELD, LIVE_FIELD, ENDED_FIELD)
        )
        return FleetNow(overview.now_ms, overview.loads, members.instances, waiting, live, ended, pace)

    def _report(self, record: ScaleRecord) -> None:
        if self._keeper.hands_off != self._hands_off:
            self._hands_off = self._keeper.hands_off
            if self._hands_off:
                log.warning("%s leaves the size alone pool=%s: %s", self.name, self._pool.name, self._hands_off)
        now = record.decision_id, record.status
        if now == self._reported:
            return
        if self._reported is not None or record.is_open:
            log.info(
                "scaling pool=%s role=%s decision=%d from=%d to=%d status=%s reason=%s outcome=%s",
                self._pool.name,
                record.counts,
                record.decision_id,
                record.size,
                record.wanted,
                record.status,
                record.reason,
                record.outcome or "none yet",
            )
            self._metrics.scale_decisions.labels(self._pool.name, record.counts, record.status.value).inc()
        self._reported = now


def _count(text: str | None) -> int:
    return int(text) if text is not None and text.isdecimal() else 0
