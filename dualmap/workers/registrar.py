"""Registrar: ensures that the store knows the fleet's members.

The configuration is applied when a worker starts. What operators change later at run time stays, through
changes of leader too. Only a store that lost its state is filled again: its membership epoch went back, or stayed
while members went. It gets what this worker last saw there, instances added at run time and states included.
"""

from __future__ import annotations

import logging
from collections.abc import Iterable, Mapping
from dataclasses import KW_ONLY, dataclass, field, replace
from typing import Any

from dualmap.runtime.pool_settings import InstanceSettings
from dualmap.scheduling.revisions.rollout import Rollout
from dualmap.scheduling.revisions.weights import NO_WEIGHTS, RevisionWeights
from dualmap.scheduling.state.instance import ADAPTER_ROOM, InstanceSpec
from dualmap.scheduling.state.registered_adapters import RegisteredAdapter
from dualmap.statestore.call_values import Membership
from dualmap.workers.context import PoolContext

log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class Known:
    """The membership as this worker last saw it."""

    epoch: int = 0
    instances: Mapping[str, InstanceSpec] = field(default_factory=dict)
    names: Mapping[str, str] = field(default_factory=dict)
    adapters: Mapping[str, RegisteredAdapter] = field(default_factory=dict)
    overrides: Mapping[str, Any] = field(default_factory=dict)
    _: KW_ONLY
    revisions: RevisionWeights = NO_WEIGHTS
    rollout: Rollout | None = None
    """Model names, adapters, settings, weights of revisions and their rollout that were given to the running fleet."""

    @classmethod
    def of(cls, now: Membership) -> Known:
        return cls(
            now.epoch, now.instances, now.names, now.adapters, now.overrides,
            revisions=now.revisions, rollout=now.rollout,
        )  # fmt: skip

    def has_more_than(self, now: Membership) -> bool:
        """Whether the store has lost something that was given to the running fleet."""
        pairs = (self.names, now.names), (self.adapters, now.adapters), (self.overrides, now.overrides)
        lost_weights = self.revisions.in_force and not now.revisions.in_force
        lost_rollout = self.rollout is not None and now.rollout is None
        return lost_weights or lost_rollout or not all(known.keys() <= kept.keys() for known, kept in pairs)


def plan_start(configured: Iterable[InstanceSettings], stored: Mapping[str, InstanceSpec]) -> tuple[InstanceSpec, ...]:
    """The instances to enter when a worker starts: new ones, and known ones whose configuration changed.

    An instance whose server is in the fleet under another id is left out, see ``served_elsewhere``. A known instance
    keeps its state, and its KV capacity and limits that are not configured: usually it reported them when it became
    ready, and the store does not distinguish such a figure from a configured one.
    """
    configured = tuple(configured)
    elsewhere = served_elsewhere(configured, stored)
    changed = []
    for instance in configured:
        if instance.id in elsewhere:
            continue
        wanted = instance.spec()
        known = stored.get(instance.id)
        if known is not None:
            wanted = replace(wanted, **_kept(instance, known))
        if wanted != known:
            changed.append(wanted)
    return tuple(changed)


def _kept(instance: InstanceSettings, known: InstanceSpec) -> dict[str, Any]:
    """The values that a known instance keeps: its state, what it reported, and limits that its configuration leaves
    open."""
    limits = {"dispatch_window_tokens", "max_running_requests"} - instance.model_fields_set
    reported = ("kv_capacity_tokens", "block_tokens", "dropped_blocks", "models", "adapters", *ADAPTER_ROOM)
    return {name: getattr(known, name) for name in ("state", *reported, *limits)}


def served_elsewhere(
    configured: Iterable[InstanceSettings], stored: Mapping[str, InstanceSpec]
) -> dict[str, InstanceSpec]:
    """Instances that are not configured and serve the URL (and rank) of a configured id, by that id.

    An operator entered the server under this id: to enter it again would list it twice.
    """
    configured = tuple(configured)
    ids = {instance.id for instance in configured}
    added = {(spec.url, spec.data_parallel_rank): spec for name, spec in stored.items() if name not in ids}
    served = {instance.id: added.get((instance.url, instance.data_parallel_rank)) for instance in configured}
    return {instance_id: spec for instance_id, spec in served.items() if spec is not None}


def kept_capacities(
    configured: Iterable[InstanceSettings], stored: Mapping[str, InstanceSpec]
) -> tuple[tuple[InstanceSettings, int], ...]:
    """The known instances to which another KV capacity is given by configuration, each with the one it keeps."""
    return tuple(
        (instance, stored[instance.id].kv_capacity_tokens)
        for instance in configured
        if "kv_capacity_tokens" in instance.model_fields_set
        and instance.id in stored
        and stored[instance.id].kv_capacity_tokens != instance.kv_capacity_tokens
    )


def shared_urls(configured: Iterable[InstanceSettings]) -> dict[str, list[str]]:
    """URLs that several instances are configured with, and their ids: such a server counts once for each. Ranks of one
    server are instances of their own."""
    ids: dict[tuple[str, int | None], list[str]] = {}
    for instance in configured:
        ids.setdefault((instance.url, instance.data_parallel_rank), []).append(instance.id)
    return {url: names for (url, _), names in ids.items() if len(names) > 1}


def members_to_restore(known: Known, now: Membership) -> tuple[InstanceSpec, ...]:
    """Members to restore: none if the store's epoch grew, as it does when a member leaves; else those that are
    missing."""
    if now.epoch > known.epoch:
        return ()
    return tuple(spec for instance_id, spec in known.instances.items() if instance_id not in now.instances)


class Registrar:
    """Runs in every worker, leading or not: entering a member twice changes nothing."""

    name = "registrar"
    interval_s = 1.0

    def __init__(self, context: PoolContext) -> None:
        self._pool = context.pool
        self._configured = context.settings.instances
        self._metrics = context.metrics
        self._known: Known | None = None
        self._owed: dict[str, InstanceSpec] = {}
        """Instances that are planned and not yet entered: an interrupted restoration continues in the next round."""

    async def tick(self) -> None:
        """Apply the configuration once, afterwards watch for lost state. Raises StoreUnavailableError."""
        now = await self._pool.membership()
        starting = self._known is None
        if starting:
            self._log_kept_capacities(now)
            self._log_served_elsewhere(now)
            for url, ids in shared_urls(self._configured).items():
                log.warning("one server counts for several pool=%s url=%s instances=%s", self._pool.name, url, ids)
        missing = (
            plan_start(self._configured, now.instances) if self._known is None else members_to_restore(self._known, now)
        )
        if missing and not starting:
            log.warning(
                "store lost its members pool=%s epoch=%d restoring=%d", self._pool.name, now.epoch, len(missing)
            )
        self._owed |= {spec.instance_id: spec for spec in missing}
        former = self._known or Known()
        grew = now.epoch > former.epoch  # as it does where a name or a setting is taken back
        given = Known() if grew else former
        self._known = Known(
            now.epoch,
            {**now.instances, **self._owed},
            {**given.names, **now.names},
            {**given.adapters, **now.adapters},
            {**given.overrides, **now.overrides},
            revisions=now.revisions if now.revisions.in_force else given.revisions,
            rollout=now.rollout or given.rollout,
        )
        if self._owed or given.has_more_than(now):
            await self._enter_owed("start" if starting else "restored")
            restored = await self._pool.members.restore_names(given.names)
            restored += await self._pool.adapters.restore(given.adapters)
            restored += await self._pool.settings.restore(given.overrides)
            restored += await self._pool.revisions.restore(given.revisions, given.rollout)
            if restored:
                log.warning(
                    "store lost names, adapters, settings or revisions pool=%s restored=%d", self._pool.name, restored
                )
            self._known = Known.of(await self._pool.membership())

    def _log_kept_capacities(self, now: Membership) -> None:
        for instance, kept_tokens in kept_capacities(self._configured, now.instances):
            log.info(
                "capacity kept pool=%s instance=%s configured_tokens=%d kept_tokens=%d",
                self._pool.name,
                instance.id,
                instance.kv_capacity_tokens,
                kept_tokens,
            )

    def _log_served_elsewhere(self, now: Membership) -> None:
        for instance_id, spec in served_elsewhere(self._configured, now.instances).items():
            log.warning(
                "configured instance left out pool=%s instance=%s url=%s: the fleet lists this server as %s, which was"
                " added at run time; remove one of the two",
                self._pool.name,
                instance_id,
                spec.url,
                spec.instance_id,
            )

    async def _enter_owed(self, cause: str) -> None:
        for instance_id, spec in tuple(self._owed.items()):
            await self._pool.members.put_instance(spec)
            del self._owed[instance_id]
            self._metrics.registrations.labels(self._pool.name, cause).inc()
            log.info(
                "instance registered pool=%s instance=%s url=%s state=%s cause=%s",
                self._pool.name,
                instance_id,
                spec.url,
                spec.state,
                cause,
            )
