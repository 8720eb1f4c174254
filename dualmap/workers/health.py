"""Active health checks: which instances may serve. Only the leader runs them, over HTTP, off the request path."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Mapping
from dataclasses import replace
from types import TracebackType
from typing import Any

from dualmap.runtime.open_files import ShortageLog
from dualmap.runtime.pool_settings import PoolSettings
from dualmap.scheduling.backoff import worth_logging
from dualmap.scheduling.estimates.adapters import Residency
from dualmap.scheduling.state.instance import InstanceLoad, InstanceSpec, InstanceState
from dualmap.scheduling.state.instance_lifecycle import SERVING, InstanceEvent, next_state
from dualmap.statestore.leases import LOST_FIELD
from dualmap.workers.context import LeaderContext
from dualmap.workers.described import adapter_room, reported_changes, reported_limits
from dualmap.workers.engine_metrics import ServerRun
from dualmap.workers.health_rules import (
    CheckResult,
    HealthRecord,
    Thresholds,
    conclude,
    evaluate,
    is_lost,
    is_suspect,
    most_fail,
    update_suspicion,
    update_waiting,
)
from dualmap.workers.metrics import NOT_SENT
from dualmap.workers.probe import Health, NotSentError, Prober
from dualmap.workers.probe_errors import refused_list
from dualmap.workers.settings import WorkerSettings

log = logging.getLogger(__name__)

DOWN_AFTER = 3
"""Failed checks in a row that take an instance down."""
UP_AFTER = 2
"""Good checks in a row that bring an instance back."""
UNMOVED_SHARE = 0.4
"""Share of ``stall_down_s`` for which the counters of a suspect must stand still: what is left of it when they are
first read, less a few checks."""
JITTER = 0.2
"""Random share by which the time between two checks varies: a fleet that started at once is not checked at once."""
CHECKS_PER_S = 200.0
"""Most checks per second; in a larger fleet each instance is checked less often."""
MODELS_INTERVAL_S = 5.0
"""Time between two readings of the model names that an instance lists: adapters are loaded while it runs. In a large
fleet as many checks lie between them as in a small one."""
SLEEP_INTERVAL_S = 60.0
"""Time after which a server is queried again that does not say whether its engine is paused or asleep."""
CONCURRENCY = 64
"""Checks under way at once."""
LATE_TRIES = 5
"""Checks after which an instance is not asked again for a report that it did not give in time."""

UNNAMED_MODEL = PoolSettings.model_fields["model"].default
"""The model of a pool that was given none: what its instances list is not compared with it."""
_SHOWN_MODELS = 4
_ASLEEP = "its engine is paused or asleep (/is_sleeping): resume it, or wake it up"
_NO_PROGRESS = "no progress although requests run"
_CUT_OFF = "as of most instances at once"
_STAYS = "it stays in service until a router has lost it too"
_UNCHECKED = frozenset({InstanceState.STANDBY})
"""States in which an instance is not in service and not meant to be: its server may not even run."""


def plan_checks(
    instances: Mapping[str, InstanceSpec],
    records: Mapping[str, HealthRecord],
    busy: frozenset[str],
    now_s: float,
) -> tuple[InstanceSpec, ...]:
    """The instances to check now: due and not under way, longest overdue first; those never seen are due."""
    due = [
        (records[instance_id].due_s if instance_id in records else now_s, instance_id)
        for instance_id, spec in instances.items()
        if spec.state not in _UNCHECKED and instance_id not in busy
    ]
    return tuple(instances[instance_id] for due_s, instance_id in sorted(due) if due_s <= now_s)


def check_pause_s(instances: int, settings: WorkerSettings) -> float:
    """Time between two checks of one instance: as configured, or longer where the fleet's checks would add up to
    more than the allowed rate. A checker that is itself overloaded would take healthy instances down."""
    return max(settings.health_interval_s, instances / CHECKS_PER_S)


class HealthChecker:
    """Checks instances and changes their state; reads which model names they list, and notes in words what is wrong
    with one.

    Checks run concurrently, so an instance that hangs does not delay the others'. ``async with`` ends them.
    """

    name = "health"

    def __init__(
        self, context: LeaderContext, prober: Prober, is_prepared: Callable[[InstanceSpec], bool] = lambda spec: True
    ) -> None:
        """``is_prepared`` says whether an instance that could serve has what it should have before."""
        self._is_prepared = is_prepared
        self._settings = settings = context.worker
        self.interval_s = settings.health_interval_s / 4
        self._pool = context.pool
        self._adapters = context.settings.adapters
        self._fence = context.fence
        self._reader = context.reader
        self._model = context.settings.model
        self._thresholds = Thresholds(
            down_after=DOWN_AFTER,
            up_after=UP_AFTER,
            stall_suspect_s=settings.stall_down_s / 2,
            stall_down_s=settings.stall_down_s,
            unmoved_s=UNMOVED_SHARE * settings.stall_down_s,
        )
        self._prober = prober
        self._clock = context.clock
        self._metrics = context.metrics
        self._jitter = context.jitter
        self._records: dict[str, HealthRecord] = {}
        self._limits: dict[str, dict[str, int]] = {}
        """Limits as each server reported them last."""
        self._late: dict[str, int] = {}
        """The instances whose report came in part only, and how often they are still to be asked for the rest."""
        self._notes: dict[str, str] | None = None
        """Complaints about instances as the store has them; None until they were read."""
        self._shortage_log = ShortageLog()
        self._serving: frozenset[str] = frozenset()
        """The instances in service, as of the last tick."""
        self._cut_off = False
        """The checks of most instances in service fail."""
        self._slots = asyncio.Semaphore(CONCURRENCY)
        self._under_way: dict[str, asyncio.Task[None]] = {}

    async def __aenter__(self) -> HealthChecker:
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        checks = list(self._under_way.values())
        for check in checks:
            check.cancel()
        await asyncio.gather(*checks, return_exceptions=True)

    async def tick(self) -> None:
        """Start the checks that are due. Raises the errors of earlier checks: StoreUnavailableError, LeaseLostError."""
        self._collect()
        membership = await self._reader.membership()
        await self._forget_notes(membership.instances)
        self._records = {name: kept for name, kept in self._records.items() if name in membership.instances}
        self._limits = {name: kept for name, kept in self._limits.items() if name in membership.instances}
        self._late = {name: left for name, left in self._late.items() if name in membership.instances}
        self._serving = frozenset(name for name, spec in membership.instances.items() if spec.state in SERVING)
        self._note_contact()
        due = plan_checks(membership.instances, self._records, frozenset(self._under_way), self._clock.monotonic_s())
        if not due:
            return
        loads = await self._reader.loads()
        pause_s = check_pause_s(len(membership.instances), self._settings)
        for spec in due:
            check = self._check(spec, loads.get(spec.instance_id), pause_s)
            self._under_way[spec.instance_id] = asyncio.create_task(check, name=f"check/{spec.instance_id}")

    def _collect(self) -> None:
        finished = [name for name, check in self._under_way.items() if check.done()]
        errors = [self._under_way.pop(name).exception() for name in finished]
        for error in errors:
            if error is not None:
                raise error

    async def _check(self, spec: InstanceSpec, load: InstanceLoad | None, pause_s: float) -> None:
        async with self._slots:
            try:
                await self._check_now(spec, load, pause_s)
            except NotSentError:
                self._not_sent(spec, pause_s)

    def _not_sent(self, spec: InstanceSpec, pause_s: float) -> None:
        """The shortage is this worker's: the instance keeps its state, and what is remembered of it."""
        now_s = self._clock.monotonic_s()
        former = self._records.get(spec.instance_id, HealthRecord(now_s))
        self._records[spec.instance_id] = replace(former, due_s=self._due_s(pause_s))
        self._metrics.health_checks.labels(self._pool.name, NOT_SENT).inc()
        if self._shortage_log.due(now_s):
            log.error(
                "out of files pool=%s: no file descriptor is left for health checks, and instances keep their states;"
                " raise the limit of open files (LimitNOFILE= in systemd, ulimits: nofile in compose)",
                self._pool.name,
            )

    async def _check_now(self, spec: InstanceSpec, load: InstanceLoad | None, pause_s: float) -> None:
        """One instance: check, evaluate, remember, and change its state if that is due."""
        now_s = self._clock.monotonic_s()
        former = self._records.get(spec.instance_id, HealthRecord(now_s))
        health, former = await self._awake(await self._prober.health(spec.url), spec, former, now_s)
        waiting = update_waiting(former.waiting, load, now_s)
        suspect = health.complaint is None and is_suspect(waiting, load, self._thresholds)
        record, restarted, suspicion = former, False, former.suspicion if suspect else None
        counters_due = suspect and (suspicion is None or suspicion.is_read_again(now_s))
        if counters_due or self._is_run_due(spec, health, former):
            run = await self._prober.run(spec.url, spec.data_parallel_rank)
            if spec.state is InstanceState.READY:  # of one that is down, the run before is kept: see _return
                record, restarted = former.after_reading(run, now_s), former.shows_restart(run)
            if suspect:
                suspicion = update_suspicion(suspicion, run.tokens if run is not None else None, now_s)
                if waiting is not None and run is not None and await self._is_idle(spec, run):
                    waiting, suspicion = waiting.ended(), None
        result = evaluate(health.complaint, waiting, suspicion, self._thresholds)
        self._metrics.health_checks.labels(self._pool.name, result.value).inc()
        record = replace(record.after(result, self._due_s(pause_s)), waiting=waiting, suspicion=suspicion)
        self._records[spec.instance_id] = record
        self._report(spec, record, health.complaint, former)
        if result is CheckResult.OK and spec.state is not InstanceState.STARTING and now_s >= record.models_due_s:
            record = await self._read_models(spec, record, pause_s)
        if result is CheckResult.OK and spec.state is InstanceState.READY and self._late.get(spec.instance_id):
            await self._learn(spec)
        if result is not CheckResult.OK or spec.state is not InstanceState.DOWN:  # then it has to prove itself
            trouble = _trouble(result, health, record)
            await self._note(spec, f"{trouble}{self._seen_at_most(spec)}" if health.complaint else trouble)
        if restarted:
            self._records[spec.instance_id] = replace(record, run=former.run, run_due_s=now_s)  # until the store knows
            await self._restart(spec, InstanceEvent.RESTARTED, "restarted between two checks")
            self._records[spec.instance_id] = record
            return
        await self._conclude(spec, record, result, health)

    async def _awake(
        self, health: Health, spec: InstanceSpec, former: HealthRecord, now_s: float
    ) -> tuple[Health, HealthRecord]:
        """The health, with the complaint that the engine is paused or asleep where it is: its ``/health`` is fine then.
        A server that does not say is queried rarely."""
        if health.complaint is not None or now_s < former.sleep_due_s:
            return health, former
        asleep = await self._prober.asleep(spec.url)
        if asleep:
            health = replace(health, complaint=_ASLEEP, asleep=True)
        return health, former if asleep is not None else replace(former, sleep_due_s=now_s + SLEEP_INTERVAL_S)

    async def _read_models(self, spec: InstanceSpec, record: HealthRecord, pause_s: float) -> HealthRecord:
        """The model names that the instance lists by now, for the store; and the record after that."""
        found = await self._prober.models(spec.url)
        models = found.after(spec.models)
        changes = found.changes(spec)
        if "models" in changes:
            self._report_models(spec, models)
        if models and any(models.values()):
            changes |= await self._read_adapters(spec, models)
        if changes:
            await self._pool.members.update_instance(spec.instance_id, changes, fence=self._fence)
        checks = MODELS_INTERVAL_S / self._settings.health_interval_s
        due_s = self._due_s(max(MODELS_INTERVAL_S, checks * pause_s))
        complaint = refused_list(found.status) or self._unlisted(models)
        record = replace(record, models_due_s=due_s, model_complaint=complaint)
        self._records[spec.instance_id] = record
        return record

    async def _read_adapters(self, spec: InstanceSpec, models: Mapping[str, str]) -> dict[str, Any]:
        """What an instance that lists adapters reports about them: the changes of its description, as vLLM reports its
        slots from its first request for one on; and for the store those that are used past the fleet, and those that it
        has, where its version says that. Of several ranks behind one URL it does not say which one uses them."""
        report = await self._prober.adapters(spec.url)
        if not spec.adapter_slots:
            return dict(adapter_room(spec, report.slots, None, self._adapters))
        used, resident = [name for name in report.in_flight if models.get(name)], report.resident
        if spec.data_parallel_rank is None and (used or resident):
            # It keeps what was unloaded until others need the room, under names that requests do not use any more.
            listed = frozenset(name for name, parent in models.items() if parent)
            resident = resident and Residency(resident.device & listed, resident.loaded & listed)
            await self._pool.members.note_adapters(spec, used, resident, fence=self._fence)
        return {}

    def _unlisted(self, models: Mapping[str, str] | None) -> str | None:
        """The complaint about a list of names that has not the pool's model."""
        if models is None or self._model in models or self._model == UNNAMED_MODEL:
            return None
        return (
            f"it lists {_few(models)}, and not the pool's model {self._model!r}, so it gets no requests for that:"
            " set the pool's model, or the server's --served-model-name"
        )

    def _report_models(self, spec: InstanceSpec, models: Mapping[str, str] | None) -> None:
        former, known = spec.models or {}, models or {}
        log.info(
            "instance lists other models pool=%s instance=%s new=%s gone=%s",
            self._pool.name,
            spec.instance_id,
            ",".join(name for name in known if name not in former) or None,
            ",".join(name for name in former if name not in known) or None,
        )

    async def _forget_notes(self, instances: Mapping[str, InstanceSpec]) -> None:
        """Nothing is said of an instance that is not checked."""
        if self._notes is None:
            self._notes = {name: note.text for name, note in (await self._pool.members.notes()).items()}
        for name in [*self._notes]:
            if name not in instances or instances[name].state in _UNCHECKED:
                await self._pool.members.note_instance(name, None, fence=self._fence)
                self._notes.pop(name, None)

    async def _note(self, spec: InstanceSpec, text: str | None) -> None:
        """Say in the store what is wrong with the instance, or that nothing is any more."""
        notes = self._notes
        if notes is None or notes.get(spec.instance_id) == text:
            return
        await self._pool.members.note_instance(spec.instance_id, text, fence=self._fence)
        if text is None:
            notes.pop(spec.instance_id, None)
        else:
            notes[spec.instance_id] = text

    async def _is_idle(self, spec: InstanceSpec, run: ServerRun) -> bool:
        """Whether an engine says that it has no request, and proves that it would serve one."""
        return run.requests == 0 and await self._prober.canary(spec.url, self._model) is None

    def _is_run_due(self, spec: InstanceSpec, health: Health, former: HealthRecord) -> bool:
        """Whether a restart has to be looked for. Only the KV metadata of a ready instance become wrong by one."""
        if spec.state is not InstanceState.READY or health.complaint is not None:
            return False
        return health.connected or self._clock.monotonic_s() >= former.run_due_s

    async def _restart(self, spec: InstanceSpec, event: InstanceEvent, cause: str) -> None:
        """The engine was restarted since it was ready: its KV cache is empty.

        It passes through ``starting``, at whose beginning the store forgets its KV metadata, and is ready again at
        once, so that no request has to wait for the next check.
        """
        await self._learn(spec)
        await self._change(spec, event, cause)
        await self._change(replace(spec, state=InstanceState.STARTING), InstanceEvent.HEALTHY, "checks succeed")

    async def _conclude(self, spec: InstanceSpec, record: HealthRecord, result: CheckResult, health: Health) -> None:
        event = InstanceEvent.UNHEALTHY if health.asleep else conclude(spec.state, record, result, self._thresholds)
        if event is None or next_state(spec.state, event) is spec.state:
            return
        if event is InstanceEvent.UNHEALTHY:
            if health.asleep:
                # Paused behind the fleet's back: most ways to do that empty the cache.
                await self._pool.members.forget_cache(spec.instance_id)
                await self._change(spec, event, _ASLEEP, keeps_cache=True)
                self._records[spec.instance_id] = replace(record, forgotten=True)
                return
            if result is CheckResult.FAILED and await self._stays(spec):
                return
            kept = record.keeps_cache(result, refused=health.refused)
            cause = health.complaint or _NO_PROGRESS
            await self._change(spec, event, cause, keeps_cache=kept)
            self._records[spec.instance_id] = replace(record, forgotten=not kept)
        elif not await self._proves_itself(spec):
            self._records[spec.instance_id] = record.after(CheckResult.FAILED, record.due_s)
        elif not await self._prepare(spec):
            return  # until a later check
        elif spec.state is InstanceState.DOWN:
            await self._return(spec, record)
        else:
            await self._learn(spec)
            await self._change(spec, event, "checks succeed")

    async def _prepare(self, spec: InstanceSpec) -> bool:
        """Whether an instance that could serve has what it should have."""
        if self._is_prepared(spec):
            return True
        await self._learn(spec)  # what it lacks follows from what it lists
        return False

    def _seen_at_most(self, spec: InstanceSpec) -> str:
        """The part of a complaint that says what follows where most checks fail at once."""
        if not self._cut_off:
            return ""
        return f"; {_CUT_OFF}: {_STAYS}" if spec.instance_id in self._serving else f"; {_CUT_OFF}"

    async def _stays(self, spec: InstanceSpec) -> bool:
        """Whether an instance whose checks fail stays in service, as those of most fail and no router has lost it."""
        serving = self._records.keys() & self._serving
        cut_off = most_fail(self._records[name] for name in serving)
        if not cut_off:
            return False
        if not self._cut_off:
            self._cut_off = True
            self._metrics.health_cut_off.labels(self._pool.name).set(1)
            log.error(
                "the checks of most instances fail at once pool=%s: they stay in service unless a router has lost them"
                " too; is this worker cut off from them?",
                self._pool.name,
            )
        overview = await self._reader.overview()
        routers = [replica for replica in overview.replicas if replica.beaten and replica.is_alive(overview.now_ms)]
        lost = [frozenset(replica.info.get(LOST_FIELD, "").split()) for replica in routers]
        record, load = self._records.get(spec.instance_id), overview.loads.get(spec.instance_id)
        waiting = record.waiting if record is not None else None
        return not is_lost(spec.instance_id, waiting, load, lost, self._thresholds)

    def _note_contact(self) -> None:
        """Note that this worker is not cut off any more, once most checks succeed. Where no instance serves, it cannot
        be known."""
        serving = self._records.keys() & self._serving
        if self._cut_off and not most_fail(self._records[name] for name in serving):
            self._cut_off = False
            self._metrics.health_cut_off.labels(self._pool.name).set(0)
            if serving:
                log.warning("the checks of most instances succeed again pool=%s", self._pool.name)
            else:
                log.warning("no instance is in service any more pool=%s", self._pool.name)

    async def _return(self, spec: InstanceSpec, record: HealthRecord) -> None:
        """An instance that was down is ready again, with its KV metadata if it is certain that its engine ran on."""
        run = await self._prober.run(spec.url, spec.data_parallel_rank)
        if record.forgotten or record.is_same_run(run):
            await self._learn(spec)
            await self._change(spec, InstanceEvent.HEALTHY, "checks succeed")
        else:
            await self._restart(spec, InstanceEvent.RESUME, "it was down, and may have been restarted")
        returned = replace(record, forgotten=False).after_reading(run, self._clock.monotonic_s())
        self._records[spec.instance_id] = returned

    def _due_s(self, pause_s: float) -> float:
        return self._clock.monotonic_s() + pause_s * self._jitter.uniform(1 - JITTER, 1 + JITTER)

    def _report(self, spec: InstanceSpec, record: HealthRecord, complaint: str | None, former: HealthRecord) -> None:
        if record.failures and worth_logging(record.failures):
            log.warning(
                "check failed pool=%s instance=%s state=%s failures=%d error=%s",
                self._pool.name,
                spec.instance_id,
                spec.state,
                record.failures,
                complaint or _NO_PROGRESS,
            )
        if record.suspicion is not None and former.suspicion is None:
            log.warning(
                "instance suspect pool=%s instance=%s (requests run, and none is seen to finish its prefill)",
                self._pool.name,
                spec.instance_id,
            )

    async def _proves_itself(self, spec: InstanceSpec) -> bool:
        """Whether an instance that was down completes a token: its ``/health`` may have been fine all along."""
        if spec.state is not InstanceState.DOWN:
            return True
        complaint = await self._prober.canary(spec.url, self._model_of(spec))
        if complaint is None:
            return True
        log.warning("canary failed pool=%s instance=%s error=%s", self._pool.name, spec.instance_id, complaint)
        await self._note(spec, f"its /health is fine, but it completes no token: {complaint}")
        return False

    def _model_of(self, spec: InstanceSpec) -> str:
        """A name that its server answers to: the pool's, or the first that it lists where that one is not listed."""
        if spec.models is None or self._model in spec.models:
            return self._model
        return next((name for name, parent in spec.models.items() if not parent), self._model)

    async def _learn(self, spec: InstanceSpec) -> None:
        """Store what the server reports about itself; what it does not report stays as configured."""
        facts = await self._prober.facts(spec.url, spec.data_parallel_rank)
        left = self._late.pop(spec.instance_id, 0) or LATE_TRIES
        if facts.is_late:
            self._late[spec.instance_id] = left - 1
        log.info(
            "instance described pool=%s instance=%s version=%s models=%s kv_capacity_tokens=%s block_tokens=%s"
            " max_num_batched_tokens=%s max_num_seqs=%s",
            self._pool.name,
            spec.instance_id,
            facts.version,
            ",".join(facts.models),
            facts.kv_capacity_tokens,
            facts.block_tokens,
            facts.max_num_batched_tokens,
            facts.max_num_seqs,
        )
        models = facts.model_list.after(None)
        if (complaint := refused_list(facts.model_list.status) or self._unlisted(models)) is not None:
            log.warning("pool=%s instance=%s: %s", self._pool.name, spec.instance_id, complaint)
        changes: dict[str, Any] = dict(reported_changes(spec, facts, self._limits.get(spec.instance_id, {})))
        changes |= adapter_room(spec, facts.adapter_slots, facts.adapter_host_slots, self._adapters)
        changes |= facts.model_list.changes(spec, may_be_another=True)
        self._limits[spec.instance_id] = reported_limits(facts)
        if changes:
            await self._pool.members.update_instance(spec.instance_id, changes, fence=self._fence)

    async def _change(self, spec: InstanceSpec, event: InstanceEvent, cause: str, *, keeps_cache: bool = False) -> None:
        target = next_state(spec.state, event)
        changed = await self._pool.members.set_instance_state(
            spec.instance_id, target, expected=spec.state, fence=self._fence, keeps_cache=keeps_cache
        )
        if not changed:  # it was changed or removed meanwhile; the next check sees the present state
            return
        self._metrics.health_transitions.labels(self._pool.name, spec.state.value, target.value).inc()
        log.warning(
            "instance state pool=%s instance=%s from=%s to=%s cause=%s",
            self._pool.name,
            spec.instance_id,
            spec.state,
            target,
            cause,
        )


def _few(models: Mapping[str, str]) -> str:
    named = ", ".join(list(models)[:_SHOWN_MODELS])
    return named if len(models) <= _SHOWN_MODELS else f"{named} and {len(models) - _SHOWN_MODELS} more"


def _trouble(result: CheckResult, health: Health, record: HealthRecord) -> str | None:
    """The complaint about an instance by its latest check, in words."""
    if result is CheckResult.OK:
        return record.model_complaint
    return health.complaint or _NO_PROGRESS
