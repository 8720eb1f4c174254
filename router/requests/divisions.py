"""Among which pools the limits of a tenant are divided."""

from __future__ import annotations

from dualmap.router.pool.pool_directory import PoolDirectory
from dualmap.router.pool.served_pool import ServedPool
from dualmap.scheduling.tenants.allotments import Division
from dualmap.scheduling.tenants.tenant import Tenant


class Divisions:
    """Knows the division of each tenant at each pool; made anew when the tenant or the names of models change."""

    def __init__(self, pools: PoolDirectory[ServedPool], *, begins: bool) -> None:
        """``begins``: a pool has an equal part of a limit until the leader has divided it; else nothing."""
        self._pools = pools
        self._begins = begins
        self._known: dict[str, tuple[Tenant, object, dict[str, Division]]] = {}

    def of(self, tenant: Tenant, pool: str) -> Division | None:
        """The division of a tenant's limits at a pool; None where it uses one pool alone."""
        directory = self._pools
        if len(directory.pools) == 1:
            return None
        known = self._known.get(tenant.name)
        if known is None or known[0] is not tenant or known[1] is not directory.routes:
            known = self._known[tenant.name] = tenant, directory.routes, self._made(tenant)
        return known[2].get(pool)

    def _made(self, tenant: Tenant) -> dict[str, Division]:
        names = _pools_of(self._pools, tenant)
        if len(names) == 1:
            return {}
        return {name: Division(names, place, self._begins) for place, name in enumerate(names)}


def _pools_of(directory: PoolDirectory[ServedPool], tenant: Tenant) -> tuple[str, ...]:
    """The pools that a tenant may use, in order. Where the pool of a model is not known, it may be any."""
    allowed = {name for name in directory.pools if not tenant.pools or name in tenant.pools}
    routes = [directory.routes.get(model) for model in tenant.models]
    if routes and None not in routes:
        allowed &= {route.pool.settings.name for route in routes if route is not None}
    return tuple(sorted(allowed))
