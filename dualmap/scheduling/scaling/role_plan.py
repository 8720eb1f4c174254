"""The rule by which an instance changes its role: one role of a split pool is starved while the other has room.

A role is starved by what its requests wait for: prefill by queued work, in TTFT SLOs; decode by KV memory and sequences
in use, or by answers that come too slowly. An instance is moved only if the other role could do with one less, and only
after the same imbalance has lasted, so that a burst that is digested in time moves none. One instance at a time, then a
pause: the new size has to show.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from math import expm1
from statistics import fmean

from dualmap.scheduling.estimates.learned import Learned
from dualmap.scheduling.settings import SchedulingSettings
from dualmap.scheduling.state.instance import InstanceLoad, InstanceSpec, Role
from dualmap.scheduling.state.legs import Leg
from dualmap.scheduling.state.view import takers
from dualmap.scheduling.values import value

STARVED_PREFILL = 0.5
"""Queued work on a prefill-capable instance, in TTFT SLOs, from which the prefill instances are starved, in the mean.
"""
STARVED_DECODE = 0.85
"""KV memory or sequences in use on a decode-capable instance, whichever is more, in the mean."""
SLOW_ANSWERS = 0.9
"""Mean time per output token, in its SLO: above it decoding is starved, and it gives no instance that would lead there.
With fewer instances each answers more requests, so the time grows no faster than their number shrinks."""
ROOM = 0.8
"""The other role has room where its pressure, carried by one instance less, is under this share of being starved."""
HOLDS_MS = 10_000
SMOOTHED_OVER_MS = 10_000
PAUSE_MS = 60_000


@value
class RoleChange:
    """Give this instance that role, and why."""

    instance_id: str
    role: Role
    reason: str


@value
class RoleState:
    """State that one plan leaves to the next."""

    starved: Role | None = None
    """The role that was starved, PREFILL or DECODE."""
    since_ms: int = 0
    changed_ms: int = -PAUSE_MS
    """The last change."""
    seen_ms: int | None = None
    prefill: float = 0.0
    """Pressures until then, smoothed: bursts come and go within seconds."""
    decode: float = 0.0

    def seen(self, prefill: float, decode: float, now_ms: int) -> RoleState:
        """The state after the pressures of now."""
        new = 1.0 if self.seen_ms is None else -expm1((self.seen_ms - now_ms) / SMOOTHED_OVER_MS)
        smoothed = self.prefill + new * (prefill - self.prefill), self.decode + new * (decode - self.decode)
        return replace(self, seen_ms=now_ms, prefill=smoothed[0], decode=smoothed[1])


@value
class RoleTargets:
    """SLOs that roles are moved for."""

    slo_ttft_s: float
    slo_tpot_s: float
    tpot_s: float | None = None
    """The mean of recent answers, where it is known."""

    @classmethod
    def of(cls, scheduling: SchedulingSettings, learned: Learned) -> RoleTargets:
        return cls(scheduling.slo_ttft_s, scheduling.split.slo_tpot_s, learned.tpot_s)

    @property
    def answer_pace(self) -> float:
        """The mean time per output token in its SLO; 0 where none was seen."""
        return 0.0 if self.tpot_s is None else self.tpot_s / self.slo_tpot_s

    @property
    def answer_pressure(self) -> float:
        """The pace of answers over the slowest good one: from 1 on they are too slow."""
        return self.answer_pace / SLOW_ANSWERS


def prefill_pressure(loads: Sequence[InstanceLoad], slo_s: float) -> float:
    """Pressure on the prefill-capable instances; 1 where each is starved by itself."""
    waits_s = [(load.pending_tokens - load.overtaken_tokens) / load.prefill_tokens_per_s for load in loads]
    return fmean(waits_s) / slo_s / STARVED_PREFILL if waits_s else 0.0


def decode_pressure(loads: Sequence[InstanceLoad]) -> float:
    """Pressure on the decode-capable instances; 1 where each is starved by itself."""
    used = [max(load.kv_demand, load.running_share) for load in loads]
    return fmean(used) / STARVED_DECODE if used else 0.0


def plan_roles(
    state: RoleState,
    instances: Mapping[str, InstanceSpec],
    loads: Mapping[str, InstanceLoad],
    targets: RoleTargets,
    now_ms: int,
) -> tuple[RoleState, RoleChange | None]:
    """The change of now, if one is due. Nothing changes in a pool without both roles, and no role loses its last."""
    by_role = {
        role: [loads[name] for name in sorted(takers(instances, leg)) if name in loads]
        for role, leg in ((Role.PREFILL, Leg.PREFILL), (Role.DECODE, Leg.DECODE))
    }
    state = state.seen(
        prefill_pressure(by_role[Role.PREFILL], targets.slo_ttft_s), decode_pressure(by_role[Role.DECODE]), now_ms
    )
    pressures = {Role.PREFILL: state.prefill, Role.DECODE: max(state.decode, targets.answer_pressure)}
    starved = next((role for role in by_role if pressures[role] > 1.0), None)
    giving = None if starved is None else (Role.DECODE if starved is Role.PREFILL else Role.PREFILL)
    donors = [] if giving is None else [load for load in by_role[giving] if instances[load.instance_id].role is giving]
    if giving is None or not donors or not _has_room(giving, len(by_role[giving]), state, targets):
        return replace(state, starved=None), None
    if state.starved is not starved:
        return replace(state, starved=starved, since_ms=now_ms), None
    if now_ms - state.since_ms < HOLDS_MS or now_ms - state.changed_ms < PAUSE_MS:
        return state, None
    assert starved is not None
    donor = min(donors, key=lambda load: (load.context_tokens + load.pending_tokens, load.instance_id))
    reason = f"{starved} side starved: {pressures[starved]:.2f}, {giving} side {pressures[giving]:.2f}"
    return replace(state, starved=None, changed_ms=now_ms), RoleChange(donor.instance_id, starved, reason)


def _has_room(role: Role, instances: int, state: RoleState, targets: RoleTargets) -> bool:
    """Whether a role with ``instances`` can do with one less."""
    if instances < 2:
        return False
    more = instances / (instances - 1)
    if role is Role.PREFILL:
        return state.prefill * more <= ROOM
    return state.decode * more <= ROOM and targets.answer_pressure * more <= 1.0
