"""The tables of ``dualmap inspect``: from the store's values to rows, without I/O."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from datetime import UTC, datetime

from rich.console import Group, RenderableType
from rich.table import Table

from dualmap.router.telemetry.traffic import INFO_FIELD, PROCESS_FIELD
from dualmap.scheduling.queues.rebalance import HotQueue
from dualmap.scheduling.scaling.scale_record import ScaleEntry, ScaleRecord
from dualmap.scheduling.state.instance import Role
from dualmap.scheduling.state.legs import request_id_of
from dualmap.scheduling.state.request import StoredRequest
from dualmap.scheduling.state.ring import DualRing, Ring
from dualmap.statestore.call_values import DiscoveryStatus, PoolSnapshot

_HASH_SPACE = 1 << 64


def _table(*headings: str, numbers_from: int = 1, title: str | None = None) -> Table:
    """A table whose columns are numbers from ``numbers_from`` on."""
    table = Table(box=None, header_style="bold", title=title, title_justify="left", title_style="bold")
    for column, heading in enumerate(headings):
        table.add_column(heading, justify="right" if column >= numbers_from else "left", overflow="fold")
    return table


def _has_roles(snapshot: PoolSnapshot) -> bool:
    return any(spec.role is not Role.MIXED for spec in snapshot.instances.values())


def overview(pool: str, snapshot: PoolSnapshot, found: DiscoveryStatus) -> RenderableType:
    """Members, replicas and leader of a pool, and how its discovery goes; the roles of its instances, where one has
    another than to do all."""
    has_roles = _has_roles(snapshot)
    named = ["instance", *(["role"] if has_roles else []), "state", "url"]
    headings = ("pending", "dispatched", "held", "running", "cached blocks", "tokens/s", "stalled s")
    instances = _table(
        *named, *headings, numbers_from=len(named),
        title=f"Pool {pool}: epoch {snapshot.epoch}, tree version {snapshot.tree_version}",
    )  # fmt: skip
    for instance_id, spec in sorted(snapshot.instances.items()):
        load = snapshot.loads.get(instance_id)
        figures = (
            (
                f"{load.pending_tokens:,}",
                f"{load.dispatched_tokens:,}",
                f"{load.queued_requests:,}",
                f"{load.running_requests:,}",
                f"{load.cached_blocks:,}",
                f"{load.prefill_tokens_per_s:,.0f}",
                f"{load.stalled_s:.1f}",
            )
            if load
            else ()
        )
        role = (spec.role.value,) if has_roles else ()
        instances.add_row(instance_id, *role, spec.state.value, spec.url, *figures)
    replicas = _table("replica", "lease ends in s", "about", numbers_from=9)
    for replica in sorted(snapshot.replicas, key=lambda replica: replica.replica_id):
        about = ", ".join(
            f"{name} {value}"
            for name, value in sorted(replica.info.items())
            if value and name not in (INFO_FIELD, PROCESS_FIELD)
        )
        replicas.add_row(replica.replica_id, f"{(replica.expires_ms - snapshot.now_ms) / 1000:.1f}", about)
    leader = snapshot.leader
    leading = f"{leader.owner} (fence {leader.fence})" if leader else "none"
    migrations = ", ".join(f"{count:,} {reason}" for reason, count in sorted(snapshot.migrations.items())) or "none"
    lines = [f"leader: {leading}", f"migrations: {migrations}"]
    if found.at_ms:
        lines.append(f"discovery: {_discovery_line(found)}")
    return Group(instances, "", replicas, "", *lines)


def queues(snapshots: Sequence[HotQueue]) -> RenderableType:
    """A table of the held requests for each queue."""
    parts: list[RenderableType] = []
    for snapshot in snapshots:
        load = snapshot.load
        title = f"{load.instance_id}: {len(snapshot.held)} held, {load.pending_tokens:,} pending tokens"
        headings = ("request", "replica", "other candidate", "uncached", "there", "waited s", "slo s")
        table = _table(*headings, numbers_from=3, title=title)
        for record in snapshot.held:
            table.add_row(
                record.request_id,
                record.replica_id,
                record.alternative_id or "–",
                f"{record.uncached_tokens:,}",
                f"{record.alternative_uncached_tokens:,}",
                f"{(snapshot.now_ms - record.enqueued_ms) / 1000:.2f}",
                f"{record.slo_ms / 1000:g}",
            )
        parts.append(table if snapshot.held else title)
    return Group(*parts)


def ring(rings: DualRing) -> RenderableType:
    """How much of the hash space each ready instance owns; an even ring gives all the same share."""
    table = _table("instance", "anchors", "first ring", "second ring", title=f"{len(rings.members)} ready instances")
    shares = [owned_shares(each) for each in (rings.first, rings.second)]
    for instance_id in rings.members:
        table.add_row(
            instance_id,
            str(rings.first.virtual_nodes),
            *(f"{share.get(instance_id, 0.0):.1%}" for share in shares),
        )
    return table


def owned_shares(ring: Ring) -> dict[str, float]:
    """Share of the hash space for which each instance is the successor; the shares add up to 1."""
    owned: Counter[str] = Counter()
    before = ring.positions[-1] - _HASH_SPACE if ring.positions else 0
    for position, owner in zip(ring.positions, ring.owners, strict=True):
        owned[owner] += position - before
        before = position
    return {owner: length / _HASH_SPACE for owner, length in owned.items()}


def requests(snapshot: PoolSnapshot, limit: int) -> RenderableType:
    """Live requests, oldest first; in a pool with roles one row for each leg."""
    found = oldest_first(snapshot)
    has_roles = _has_roles(snapshot)
    named = ["request", *(["leg"] if has_roles else []), "state", "instance", "other", "replica"]
    title = f"{len({request_id_of(record.request_id) for record in found})} live requests"
    table = _table(*named, "attempt", "uncached", "prompt", "age s", numbers_from=len(named), title=title)
    for record in found[:limit]:
        leg = (record.leg.value,) if has_roles else ()
        table.add_row(request_id_of(record.request_id), *leg, *_request_row(record, snapshot.now_ms))
    return table


def oldest_first(snapshot: PoolSnapshot) -> list[StoredRequest]:
    return sorted(snapshot.requests, key=lambda record: (record.enqueued_ms, record.request_id))


def _request_row(record: StoredRequest, now_ms: int) -> tuple[str, ...]:
    return (
        record.state.value,
        record.instance_id,
        record.alternative_id or "–",
        record.replica_id,
        str(record.attempt),
        f"{record.uncached_tokens:,}",
        f"{record.prompt_tokens:,}",
        f"{(now_ms - record.enqueued_ms) / 1000:.2f}",
    )


def hot(prefixes: Sequence[tuple[str, int, int]]) -> RenderableType:
    """Hot prefixes; requests that start with one are keyed a block longer."""
    table = _table("prefix", "blocks", "requests in window", title=f"{len(prefixes)} hot prefixes")
    for prefix, depth, count in prefixes:
        table.add_row(prefix, str(depth), f"{count:,}")
    return table


def kv(total: int, blocks: Sequence[tuple[str, float]]) -> RenderableType:
    """Blocks in the order in which they would be kept; the last ones would be forgotten first."""
    table = _table("block (prefix hash)", "stamp", "", title=f"{total:,} blocks listed")
    for block, stamp in blocks:
        table.add_row(block, f"{int(stamp):,}", "resident" if is_resident(stamp) else "reserved")
    return table


def is_resident(stamp: float) -> bool:
    """Whether the stamp is that of a block which was computed, or is about to be; docs/reference/redis-keys.md."""
    return stamp % 1 == 0


def scaling(records: Iterable[ScaleRecord], log: Sequence[ScaleEntry]) -> RenderableType:
    """The last scaling decision on each role, and the log, the latest first."""
    headings = [line for record in records if record.decision_id for line in _decision(record)]
    if not headings:
        return "no scaling decision yet; pools.autoscale turns the autoscaler on"
    lines = _table("at (UTC)", "decision", "event", "", numbers_from=9)
    for entry in log:
        lines.add_row(_utc(entry.at_ms), str(entry.decision_id), entry.event, entry.text)
    return Group(*headings, "", lines)


def _decision(record: ScaleRecord) -> Iterator[str]:
    what = f"{record.role} decision" if record.role else "decision"
    last = f"{what} {record.decision_id} by {record.by} within {record.bounds}: {record.size} -> {record.wanted},"
    yield f"{last} {record.status}"
    yield f"reason: {record.reason}"
    yield f"outcome: {record.outcome or 'none yet'}"
    yield f"spares: {', '.join(record.spares) or 'none'}"


def discovery(status: DiscoveryStatus) -> RenderableType:
    """How discovery goes, and what it leaves out."""
    if not status.at_ms:
        return "no discovery yet; pools.discovery turns it on"
    lines = [status.source, _discovery_line(status), f"since {_utc(status.at_ms)} UTC, by {status.by}"]
    return Group(*lines, *(f"left out: {each}" for each in status.left_out))


def _discovery_line(status: DiscoveryStatus) -> str:
    failing = f", what was found last stays: {status.detail}" if status.detail else ""
    left_out = f", {len(status.left_out)} left out" if status.left_out else ""
    return f"{status.state}, {status.pods} pods, {status.serving} instances serve{left_out}{failing}"


def _utc(at_ms: int) -> str:
    return datetime.fromtimestamp(at_ms / 1000, UTC).isoformat(" ", "seconds").removesuffix("+00:00")
