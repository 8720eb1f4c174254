"""The health of a replica, for people and probes."""

from __future__ import annotations

from typing import Any

from dualmap.router.replica.runtime import Runtime
from dualmap.runtime.certificates import reported
from dualmap.runtime.extras import package_version
from dualmap.scheduling.state.instance import InstanceState


def health_report(runtime: Runtime) -> dict[str, Any]:
    """The replica's own state and its view of the pools; touches no network."""
    context = runtime.context
    pools = {name: _pool(runtime, name) for name in runtime.pools.pools}
    degraded = any(pool["store"] != "ok" for pool in pools.values())
    status = "draining" if context.draining else "starting" if not runtime.joined else "ok"
    if status == "ok":
        late = any(pool["problem"] for pool in pools.values())
        status = "degraded" if degraded else "late" if late else "ok"
    report: dict[str, Any] = {
        "status": status,
        "version": package_version(),
        "replica_id": context.replica_id,
        "requests": len(context.live),
        "outbox": runtime.outbox_releases,
        "pools": pools,
    }
    if runtime.warnings:
        report["warnings"] = list(runtime.warnings)
    if runtime.certificates:
        report["certificates"] = reported(runtime.certificates)
    if runtime.pools.contested:
        report["models_in_several_pools"] = {name: list(each) for name, each in runtime.pools.contested.items()}
    if runtime.peer_watch.unreachable:
        report["unreachable_replicas"] = dict(runtime.peer_watch.unreachable)
    return report


def _pool(runtime: Runtime, name: str) -> dict[str, Any]:
    pool, view = runtime.pools.pools[name], runtime.pools.pools[name].view.view
    states = [spec.state for spec in view.instances.values()]
    pressure = runtime.replicas[name].pressure()
    return {
        "store": runtime.replicas[name].store_state,
        "epoch": view.epoch,
        "instances": {state.value: states.count(state) for state in InstanceState if state in states},
        "held": pool.grant_waiters.held_requests,
        "overdue": pressure.overdue,
        "last_minute": {
            "arrived": pressure.recent.arrived,
            "answered": pressure.recent.answered,
            "on_time": pressure.recent.on_time,
            "not_on_time": pressure.recent.late,
        },
        "problem": f"{pressure.headline}: {pressure.figures}" if pressure.headline else None,
        "avoided": {
            name: {"state": avoided.state, "reason": avoided.reason, "for_s": round(avoided.for_s, 1)}
            for name, avoided in pool.evidence.breakers.avoided(runtime.context.clock.monotonic_s()).items()
        },
        "panic": pool.evidence.breakers.panics,
    }
