"""Problems of the fleet, in words: the first thing that the live page shows.

Pure functions of what the store and the replicas say. Every problem has a headline, the reason as far as it is known,
and what to do or where to look.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import KW_ONLY, dataclass, field, replace
from enum import StrEnum
from typing import Any, Final

from dualmap.router.telemetry.pressure import ADVICE as ADVICE_ON_OVERLOAD
from dualmap.router.telemetry.pressure import WINDOW_S, Pressure
from dualmap.router.telemetry.traffic import TrafficCounts
from dualmap.router.ui.status import Avoidance, Event, ReplicaStatus
from dualmap.scheduling.scaling.scale_record import ScaleEntry
from dualmap.scheduling.state.instance import InstanceLoad, InstanceState, Role
from dualmap.scheduling.state.view import ClusterView
from dualmap.statestore.call_values import DiscoveryStatus, Note, PoolOverview
from dualmap.statestore.leases import RETIRED

STALLED_S: Final = 10.0
FAULTS: Final = 3
"""Lately, before an instance is said to fail: one or two are tried elsewhere and do no harm."""
LONG_START_MS: Final = 300_000
"""An engine that loads a large model does not answer for minutes."""
MISSED_CHECK_MS: Final = 5000
"""One check that is missed, as by a machine that is short of CPU, is no trouble yet."""
NAMED: Final = 3
"""Instances with the same problem that are named one by one; more share a line."""
_LONGEST_REASON: Final = 300


class Severity(StrEnum):
    """How much it matters, the worst first. The alerts of ``deploy/prometheus`` use the same steps."""

    CRITICAL = "critical"
    WARNING = "warning"
    NOTICE = "notice"


_ORDER: Final = {severity: number for number, severity in enumerate(Severity)}


@dataclass(frozen=True, slots=True)
class Problem:
    """One thing that is wrong."""

    key: str
    """Key that is the same for as long as the problem lasts."""
    severity: Severity
    what: str
    why: str = ""
    advice: str = ""
    since_ms: int | None = None
    """Beginning by the store's clock; None: the store does not know."""
    instances: tuple[str, ...] = ()
    _: KW_ONLY
    weight: float = 0.0
    """How bad it is, beside itself at another time."""
    kind: str = ""
    """Instances with the same kind of problem may share a line; "": none does."""


@dataclass(frozen=True, slots=True)
class PoolState:
    """One pool as the page sees it."""

    name: str
    view: ClusterView
    slo_s: float
    overview: PoolOverview | None
    """None: the store is away."""
    _: KW_ONLY
    recent: TrafficCounts = field(default_factory=TrafficCounts)
    """Counts of the last minute."""
    scaled: ScaleEntry | None = None
    """The newest line of the scaling log."""
    may_be_empty: bool = False
    """The autoscaler may leave it without an instance."""
    discovery: DiscoveryStatus = field(default_factory=DiscoveryStatus)
    recent_s: float = WINDOW_S
    """The time that ``lately`` is of."""

    @property
    def pressure(self) -> Pressure:
        """How it copes with what arrives."""
        if self.overview is None:
            return Pressure(self.recent, self.recent_s, 0, self.slo_s)
        return Pressure.of(self.overview, self.recent, self.recent_s, self.slo_s)


@dataclass(frozen=True, slots=True)
class FleetState:
    """All that problems are found in."""

    own_id: str
    pools: Sequence[PoolState]
    statuses: Mapping[str, ReplicaStatus]
    """Statuses by replica id, as far as they are heard of."""
    recent: Counter[Event]


def problems(fleet: FleetState) -> list[Problem]:
    """All of them, the worst first. Several instances with the same problem share a line."""
    found = [*_of_replicas(fleet), *_of_limits(fleet.recent), *_of_refusals(fleet.recent)]
    pressed: list[Problem] = []
    for pool in fleet.pools:
        of_pool = [
            *_of_pressure(pool),
            *_of_store(fleet, pool),
            *_of_members(pool),
            *_of_traffic(pool),
            *_of_scaling(pool),
            *_of_discovery(pool),
        ]
        of_pool = [replace(each, key=f"{pool.name}/{each.key}") for each in of_pool]
        of_pool += _gathered([*troubles(fleet, pool).values()], pool.name)
        if len(fleet.pools) > 1:
            of_pool = [replace(each, what=f"Pool {pool.name}: {each.what}") for each in of_pool]
        found += of_pool
        pressed += [each for each in of_pool if each.key == f"{pool.name}/late"]
    found = [*pressed, *(each for each in found if each not in pressed)]
    return sorted(found, key=lambda each: _ORDER[each.severity])  # in the order above, where equally bad


# instances ------------------------------------------------------------------------------------------------------
def troubles(fleet: FleetState, pool: PoolState) -> dict[str, Problem]:
    """The problems of a pool's instances, by id. One problem each, which has all that is known."""
    overview, found = pool.overview, {}
    loads = overview.loads if overview is not None else {}
    notes = overview.notes if overview is not None else {}
    now_ms = overview.now_ms if overview is not None else 0
    avoided = _avoided(fleet, pool.name)
    faults = _faults(fleet.recent, pool.name)
    known = {name: spec.state for name, spec in pool.view.instances.items()}
    for name in {**loads, **known}:
        state = loads[name].state if name in loads else known[name]
        problem = _trouble(_Seen(name, state, loads.get(name), notes.get(name), now_ms), avoided.get(name, []),
                           faults.get(name, Counter()), len(fleet.statuses))  # fmt: skip
        if problem is not None:
            spec = pool.view.instances.get(name)
            where = f" at {spec.url}" if spec is not None else ""
            key, advice = f"{pool.name}/{problem.key}", problem.advice.format(where=where)
            found[name] = replace(problem, key=key, advice=advice, instances=(name,))
    return found


@dataclass(frozen=True, slots=True)
class _Seen:
    """One instance, as the store has it."""

    name: str
    state: InstanceState
    load: InstanceLoad | None
    note: Note | None
    now_ms: int


def _trouble(seen: _Seen, avoided: Sequence[Avoidance], faults: Counter[str], replicas: int) -> Problem | None:
    """The worst of what is wrong, with the rest as its reasons. ``{where}`` in its advice is the server's URL."""
    name, state, note = seen.name, seen.state, seen.note
    if state in (InstanceState.STANDBY, InstanceState.DRAINING):
        return None
    said = [note.text[:_LONGEST_REASON]] if note is not None else []
    since_ms = note.since_ms if note is not None else None
    if avoided:
        said.append(_why_avoided(avoided))
    if faults:
        reasons = ", ".join(f"{reason} × {count}" for reason, count in faults.most_common(3))
        said.append(f"{sum(faults.values())} faults in the last minute: {reasons}")
    made = Problem(f"instance/{name}", Severity.WARNING, "", "; ".join(said), since_ms=since_ms)
    if state is InstanceState.DOWN:
        advice = "Look at its server{where} and its log: it serves again by itself after two good checks."
        return replace(made, severity=Severity.CRITICAL, what=f"{name} is down", advice=advice, kind="down")
    if state is InstanceState.STARTING:
        if note is None:
            return None
        young = seen.now_ms - note.since_ms < LONG_START_MS
        severity = Severity.NOTICE if young else Severity.WARNING
        advice = "It may still load its model. Look at its server{where} and its log if that takes longer than usual."
        return replace(made, severity=severity, what=f"{name} is not ready yet", advice=advice, kind="not ready yet")
    if any(each.state != "busy" for each in avoided):
        who = f" by {len(avoided)} of {replicas} replicas" if replicas > 1 else ""
        advice = "Trial requests go there until it answers again. Look at the log of its server{where}."
        return replace(made, what=f"{name} is ejected{who}", advice=advice, kind="ejected")
    if note is not None:
        severity = Severity.NOTICE if seen.now_ms - note.since_ms < MISSED_CHECK_MS else Severity.WARNING
        advice = "It gets requests until its checks have failed three times. Look at its server{where}."
        return replace(made, severity=severity, what=f"{name} is in trouble", advice=advice, kind="in trouble")
    if seen.load is not None and seen.load.stalled_s >= STALLED_S:
        why = f"work is pending, and no prefill has finished for {seen.load.stalled_s:.0f} s"
        advice = (
            "Look at its server{where}: stopped, sleeping, or out of memory. Health checks take it down if it hangs."
        )
        return replace(made, what=f"{name} stalls", why="; ".join([why, *said]), advice=advice, kind="stalled")
    if sum(faults.values()) >= FAULTS:
        advice = "Requests were tried elsewhere where that was possible. Look at the log of its server{where}."
        return replace(made, what=f"{name} fails requests", advice=advice, kind="failing requests")
    if avoided:
        advice = (
            "It gets nothing for as long as it says. If that lasts, it needs a limit here, or help: look at{where}."
        )
        return replace(made, severity=Severity.NOTICE, what=f"{name} says that it is busy", advice=advice, kind="busy")
    return None


def _avoided(fleet: FleetState, pool: str) -> dict[str, list[Avoidance]]:
    """The reports of the replicas that avoid an instance, by instance."""
    found: dict[str, list[Avoidance]] = {}
    for status in fleet.statuses.values():
        for name, avoidance in status.avoided.get(pool, {}).items():
            found.setdefault(name, []).append(avoidance)
    return found


def _why_avoided(avoided: Sequence[Avoidance]) -> str:
    reasons = ", ".join(sorted({each.reason for each in avoided if each.reason})) or "faults"
    next_s = min(each.for_s for each in avoided)
    return f"avoided for {reasons}, " + (f"tried again in {next_s:.0f} s" if next_s >= 1 else "tried again now")


def _faults(recent: Counter[Event], pool: str) -> dict[str, Counter[str]]:
    found: dict[str, Counter[str]] = {}
    for event, count in recent.items():
        if event[0] == "fault" and event[1] == pool:
            found.setdefault(event[2], Counter())[event[3]] += count
    return found


def _gathered(each_alone: Sequence[Problem], pool: str) -> Iterator[Problem]:
    """Instances with the same kind of problem on one line, where they are many."""
    by_kind: dict[tuple[str, Severity], list[Problem]] = {}
    for problem in each_alone:
        by_kind.setdefault((problem.kind, problem.severity), []).append(problem)
    for (kind, severity), same in by_kind.items():
        if len(same) <= NAMED:
            yield from same
            continue
        names = [name for problem in same for name in problem.instances]
        times = [problem.since_ms for problem in same if problem.since_ms is not None]
        shown = ", ".join(names[:NAMED])
        why = f"{shown} and {len(names) - NAMED} more. {same[0].instances[0]}: {same[0].why}".removesuffix(": ")
        since_ms = min(times) if len(times) == len(same) else None
        what = f"{len(names)} instances are {kind}"
        yield Problem(
            f"{pool}/instances/{kind}/{severity}", severity, what, why, same[0].advice, since_ms, tuple(names)
        )


# a pool ---------------------------------------------------------------------------------------------------------
def _of_store(fleet: FleetState, pool: PoolState) -> Iterator[Problem]:
    alone = [name for name, status in fleet.statuses.items() if status.stores.get(pool.name, "ok") != "ok"]
    if pool.overview is None:
        own = fleet.statuses.get(fleet.own_id, ReplicaStatus()).stores.get(pool.name)
        what = "The store is away: " + (
            "this replica decides alone"
            if len(alone) < 2
            else f"{len(alone)} of {len(fleet.statuses)} replicas decide alone"
        )
        why = (
            "requests are served, each replica placing them by what it knows itself. Nothing is rebalanced, learned or"
            " checked, and the figures of the fleet are the last that were read"
        )
        if own == "ok":
            what = "The store does not answer"
        advice = "Bring the server at store.url back: replicas return to it by themselves, and no restart is needed."
        yield Problem("store", Severity.CRITICAL, what, why, advice)
        return
    others = [name for name in alone if name != fleet.own_id]
    for name in others:
        advice = "Look at its log, and at its network to the store."
        yield Problem(f"alone/{name}", Severity.WARNING, f"Replica {name} decides alone",
                      "it does not reach the store, which others do", advice)  # fmt: skip


def _of_members(pool: PoolState) -> Iterator[Problem]:
    overview, specs = pool.overview, pool.view.instances
    if overview is None:
        return
    states = {name: load.state for name, load in overview.loads.items()}
    if pool.may_be_empty and InstanceState.READY not in states.values():
        why = "the autoscaler may leave the pool without any: requests wait while the first one starts"
        advice = "Nothing, unless requests end with instance_starting: see dualmap inspect scaling then."
        yield Problem("asleep", Severity.NOTICE, "No instance runs", why, advice)
    elif not states:
        advice = "Add one: dualmap instances add, or the pool's instances in the settings."
        yield Problem("empty", Severity.CRITICAL, "No instance", "every request is refused with 503", advice)
    else:
        roles: dict[bool, list[InstanceState]] = {}
        for name, state in states.items():
            roles.setdefault(name in specs and specs[name].role is Role.DECODE, []).append(state)
        for decodes, of_role in roles.items():
            if InstanceState.READY not in of_role:
                counted = ", ".join(f"{count} {state}" for state, count in Counter(of_role).most_common())
                kind = "No decode instance is ready" if decodes else "No instance is ready"
                why = f"{counted}. " + (
                    "Prompts are not split" if decodes else "Every request is refused with 503 no_instance"
                )
                advice = "Bring one back, or add one: what is wrong with each is said below."
                yield Problem(f"ready/{decodes}", Severity.CRITICAL, kind, why, advice)
    if overview.leader is None:
        why = "nothing is rebalanced, learned, checked or cleaned up, and an instance that comes back is not noticed"
        advice = "Start a worker (dualmap worker), or read its log: why does none lead?"
        yield Problem("leader", Severity.CRITICAL, "No worker leads", why, advice)


def _of_traffic(pool: PoolState) -> Iterator[Problem]:
    recent = pool.recent
    if recent.failed:
        share = recent.failed / max(recent.ended, 1)
        severity = Severity.CRITICAL if share >= 0.01 else Severity.WARNING
        what = f"{_several(recent.failed, 'request')} failed in the last minute, of {recent.ended:,}"
        advice = "Filter the requests below by failed: each says what its instances answered."
        yield Problem("failing", severity, what, "errors that reached clients in spite of retries", advice)


def _of_pressure(pool: PoolState) -> Iterator[Problem]:
    """Too many requests miss their SLO, or are about to."""
    pressure = pool.pressure
    if not pressure.headline:
        return
    severity = Severity.CRITICAL if pressure.is_worst else Severity.WARNING
    if pressure.is_overload:
        weight = 1.0 + pressure.late_share
        yield Problem("late", severity, pressure.headline, pressure.figures, ADVICE_ON_OVERLOAD, weight=weight)
        return
    advice = "Filter the requests below by late: a click tells where the time went."
    loads = pool.overview.loads.values() if pool.overview is not None else ()
    over = [
        load.instance_id
        for load in loads
        if load.state is InstanceState.READY and load.pending_tokens > pool.slo_s * load.prefill_tokens_per_s
    ]
    why = pressure.figures
    if over:
        names = ", ".join(over[:NAMED])
        why += f"; {names} {'has' if len(over) == 1 else 'have'} more work ahead than fits the SLO"
        advice = "Look at what these instances have ahead of the others: a stall, or one hot prefix."
    yield Problem("late", severity, pressure.headline, why, advice, weight=pressure.late_share)


def _of_scaling(pool: PoolState) -> Iterator[Problem]:
    line = pool.scaled
    if line is not None and line.event in ("failed", "refused"):
        advice = "The worker's log has the answer of what scales; dualmap inspect scaling shows the decision."
        yield Problem("scaling", Severity.WARNING, "The last scale step failed", line.text, advice, line.at_ms)


def _of_discovery(pool: PoolState) -> Iterator[Problem]:
    status = pool.discovery
    if status.state == "failing":
        why = f"{status.detail}. What was found last stays: pods that come are not used, what goes is found by checks"
        advice = "The detail names the right or setting that is missing; see When the API server does not answer in"
        advice += " docs/operate/kubernetes.md, and dualmap inspect discovery."
        yield Problem("discovery", Severity.WARNING, "Discovery fails", why, advice, status.at_ms)
    elif status.left_out:
        first = "; ".join(status.left_out[:NAMED])
        why = first + (f"; and {len(status.left_out) - NAMED} more" if len(status.left_out) > NAMED else "")
        advice = "Correct the labels or annotations that are named; dualmap inspect discovery lists all."
        yield Problem("left out", Severity.NOTICE, "Discovery leaves something out", why, advice, status.at_ms)


# replicas -------------------------------------------------------------------------------------------------------
def _of_replicas(fleet: FleetState) -> Iterator[Problem]:
    gone: dict[str, int] = {}
    alive: dict[str, Mapping[str, str]] = {}
    for pool in fleet.pools:
        if pool.overview is None:
            continue
        for each in pool.overview.replicas:
            if each.is_alive(pool.overview.now_ms):
                alive[each.replica_id] = each.info
                yield from _of_tokens(pool.name, each.replica_id, each.info)
            elif each.expires_ms != RETIRED:
                gone[each.replica_id] = each.expires_ms
    for name in gone.keys() - alive.keys():
        advice = "It was killed, hangs, or does not reach the store. The leader releases what it held."
        yield Problem(
            f"gone/{name}", Severity.WARNING, f"Replica {name} is gone", "its lease ran out", advice, gone[name]
        )
    for name, (by, why) in sorted(_unreachable(fleet.statuses).items()):
        if name in alive:
            advice = "Set its router.advertise_url to an address that others reach. Requests are served all the same."
            reason = f"{why}. This page and explain lack its requests"
            yield Problem(
                f"reach/{name}", Severity.WARNING, f"Replica {name} cannot be reached by {by}", reason, advice
            )
    if len({info.get("scheduling", "") for info in alive.values() if "scheduling" in info}) > 1:
        why = "queues and learned rates are shared, and read in different ways"
        advice = "Give all routers and workers of this store the same settings; dualmap inspect lists the replicas."
        yield Problem("settings", Severity.WARNING, "Replicas differ in their scheduling settings", why, advice)
    for name in sorted({pool for status in fleet.statuses.values() for pool in status.panics}):
        why = "more instances are ejected than may be, so requests go to all of them"
        yield Problem(f"panic/{name}", Severity.CRITICAL, f"Ejections of pool {name} are ignored", why,
                      "Look at the instances below.")  # fmt: skip
    contested = {name: pools for status in fleet.statuses.values() for name, pools in status.contested.items()}
    for name, pools in contested.items():
        why = f"it is served by {', '.join(pools)}; requests go to one of them"
        advice = "Name models so that each is of one pool: aliases and served names are in dualmap instances list."
        yield Problem(f"contested/{name}", Severity.WARNING, f"Model {name} is of several pools", why, advice)
    for replica_id, status in sorted(fleet.statuses.items()):
        for name, why in status.certificates.items():
            advice = "Renew the files; nothing needs a restart. See security.md."
            what = f"The certificate of {name} at replica {replica_id} needs attention"
            yield Problem(f"certificate/{name}/{replica_id}", Severity.CRITICAL, what, why, advice)


def _of_tokens(pool: str, replica_id: str, info: Mapping[str, str]) -> Iterator[Problem]:
    status = info.get("tokens", "")
    if "mistrusted" in status:
        why = f"{status}: instances count other tokens, so cache hits are estimated by other means"
        advice = (
            "Is transformers installed, and are model files and chat template those of the instances? See tokens.md."
        )
        what = f"Token counts of replica {replica_id} are mistrusted"
        yield Problem(f"tokens/{pool}/{replica_id}", Severity.WARNING, what, why, advice)


def _unreachable(statuses: Mapping[str, ReplicaStatus]) -> dict[str, tuple[str, str]]:
    """The replicas that cannot be reached, with who cannot reach them, and why."""
    found: dict[str, tuple[str, str]] = {}
    for name, status in statuses.items():
        for unreached, why in status.unreachable.items():
            found.setdefault(unreached, (name, why))
    return found


# refusals -------------------------------------------------------------------------------------------------------
ADVICE: Final[Mapping[str, tuple[Severity, str]]] = {
    "instance_starting": (Severity.CRITICAL, "No first instance became ready in time: see dualmap inspect scaling."),
    "queue_full": (Severity.WARNING, "Add instances, or raise the limit that the message of the answer names."),
    "replica_full": (Severity.WARNING, "Add replicas, or raise the limit that the message of the answer names."),
    "no_instance": (Severity.CRITICAL, "Bring an instance up, or one that lists the model: dualmap instances list."),
    "slo_unreachable": (Severity.WARNING, "Add instances; router.late_requests refuses what cannot be on time."),
    "hold_timeout": (Severity.WARNING, "Add instances: requests waited for scheduling.max_hold_s."),
    "store_unavailable": (Severity.CRITICAL, "Bring the server at store.url back."),
    "out_of_files": (Severity.CRITICAL, "Raise the limit of open files of the replica, see sizing.md."),
    "internal_error": (Severity.CRITICAL, "A defect of the router: its log has the details. Please report it."),
    "shutting_down": (Severity.NOTICE, "A replica stopped before these had ended: raise router.drain_timeout_s."),
    "request_quarantined": (Severity.WARNING, "Engines died while they held these prompts: look at the engines' logs."),
    "invalid_api_key": (
        Severity.NOTICE, "Clients send no key or a wrong one: see router.api_keys, admin_key, admins, and tenants.md."
    ),
    "invalid_token": (Severity.NOTICE, "Clients send tokens that are not accepted: the answers say why (router.jwt)."),
    "unknown_tenant": (Severity.NOTICE, "Tokens or the gateway name unknown tenants: dualmap tenants list."),
    "tenant_header": (Severity.NOTICE, "Clients name tenants themselves: only router.gateway is believed."),
    "limits_unknown": (Severity.CRITICAL, "Bring the server at store.url back: router.limits_without_store is closed."),
    "token_keys_coming": (Severity.WARNING, "The keys of an issuer of tokens cannot be had: see the log (router.jwt)."),
    "read_only": (Severity.NOTICE, "Administrators of the role reader try to change something: see router.admins."),
    "model_not_found": (Severity.NOTICE, "Clients name a model that no pool serves: /v1/models lists those that are."),
    "rate_limit_exceeded": (Severity.NOTICE, "A tenant has met a limit: see tenants in the settings."),
    "insufficient_quota": (Severity.NOTICE, "A tenant has spent its quota: see tenants in the settings."),
    "client_certificate_required": (
        Severity.NOTICE, "Clients must show a certificate; router.tls_client_required_for says for what."
    ),
    "foreign_page": (
        Severity.WARNING, "A web page from elsewhere called what is for operators: set router.admin_key (security.md)."
    ),
    "admin_closed": (Severity.NOTICE, "Operators have no key, and need one: set router.admin_key or router.admins."),
    "forbidden_path": (Severity.NOTICE, "Clients call a path that router.forbidden_paths keeps from them."),
}  # fmt: skip
"""Advice on a refusal, by its code; others are the client's alone to change."""
_FAILURES: Final = frozenset({"upstream_failed", "upstream_timeout"})
"""Codes of requests that are counted as failed."""
_BY_LIMITS: Final = frozenset({"rate_limit_exceeded", "insufficient_quota"})
"""Codes of refusals that are reported by tenant and limit."""


def _of_refusals(recent: Counter[Event]) -> Iterator[Problem]:
    reported_elsewhere = _FAILURES | (_BY_LIMITS if any(event[0] == "limited" for event in recent) else frozenset())
    refused = {
        event[1]: count
        for event, count in recent.items()
        if event[0] == "refusal" and event[1] not in reported_elsewhere
    }
    for code, count in sorted(refused.items(), key=lambda each: -each[1]):
        advice = "It is the client's request that must change: see errors.md for this code."
        severity, advice = ADVICE.get(code, (Severity.NOTICE, advice))
        what = f"{_several(count, 'request')} refused in the last minute: {code}"
        yield Problem(f"refused/{code}", severity, what, "", advice)


def _of_limits(recent: Counter[Event]) -> Iterator[Problem]:
    """The tenants that are at a limit, each with all limits that it met."""
    met: dict[str, Counter[str]] = {}
    for event, count in recent.items():
        if event[0] == "limited":
            tenant, _, limit = event[1].partition("/")
            met.setdefault(tenant, Counter())[limit.replace("/", " for ")] += count
    for tenant, limits in sorted(met.items(), key=lambda each: -each[1].total()):
        why = ", ".join(f"{limit} refused {_several(count, 'request')}" for limit, count in limits.most_common(NAMED))
        advice = f"Raise it if that is not meant: dualmap tenants set {tenant} LIMIT=AMOUNT. Others are not affected."
        yield Problem(
            f"limited/{tenant}", Severity.NOTICE, f"Tenant {tenant} is at its limit",
            f"{why} in the last minute", advice,
        )  # fmt: skip


def _several(count: int, noun: str) -> str:
    return f"{count:,} {noun}{'s'[: count != 1]}"


# since when -----------------------------------------------------------------------------------------------------
class Since:
    """Times since when problems exist, where the store does not have them. A problem that existed at the first reading
    may be older."""

    def __init__(self) -> None:
        self._first: dict[str, tuple[float, bool]] = {}
        self._looked = False

    def of(self, found: Iterable[Problem], now_unix_s: float) -> dict[str, tuple[float, bool]]:
        """The time by key: seconds since 1970, and whether the problem may have existed before."""
        first = {each.key: self._first.get(each.key, (now_unix_s, not self._looked)) for each in found}
        self._first, self._looked = first, True
        return first


def as_values(found: Sequence[Problem], first: Mapping[str, tuple[float, bool]]) -> list[dict[str, Any]]:
    """The problems as plain values, for the page."""
    return [
        {
            "key": each.key,
            "severity": each.severity.value,
            "what": each.what,
            "why": each.why,
            "advice": each.advice,
            "since_s": round(first[each.key][0] if each.since_ms is None else each.since_ms / 1000, 1),
            "or_longer": each.since_ms is None and first[each.key][1],
            "instances": each.instances[:NAMED],
        }
        for each in found
    ]
