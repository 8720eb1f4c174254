"""The budgets that requests of a tenant draw from, and among which pools they are divided."""

from __future__ import annotations

from collections.abc import Iterable
from collections.abc import Set as AbstractSet
from typing import NamedTuple

from dualmap.router.pool.pool_directory import PoolDirectory
from dualmap.router.pool.served_pool import ServedPool
from dualmap.scheduling.tenants.allotments import Division
from dualmap.scheduling.tenants.budgets import Budget, BudgetGroup, Measure, budgets_of, group_of
from dualmap.scheduling.tenants.tenant import Tenant


class Budgets:
    """Some budgets of a tenant, and the groups of them that requests draw from together."""

    def __init__(self, budgets: Iterable[Budget]) -> None:
        self.budgets = tuple(budgets)
        self.is_whole = not any(each.limit.of for each in self.budgets)
        """Whether every request of the tenant draws from all of them."""
        self.whole = group_of(self.budgets, ()) if self.is_whole else None
        self._of = {each.limit.of for each in self.budgets}
        self._groups: dict[tuple[str, ...], BudgetGroup | None] = {}

    def of(self, names: tuple[str, ...]) -> BudgetGroup | None:
        """The budgets that a request for these names draws from; None: from none."""
        if self.is_whole:
            return self.whole
        names = tuple(name for name in names if name in self._of)
        if names not in self._groups:
            self._groups[names] = group_of(self.budgets, names)
        return self._groups[names]


class PoolBudgets(NamedTuple):
    """The budgets of a tenant at one pool."""

    all: Budgets
    requests: Budgets
    """The budgets that count requests."""


class TenantBudgets:
    """Knows the budgets of each tenant at each pool, and makes them again when the tenant or the models change."""

    def __init__(self, pools: PoolDirectory[ServedPool], *, begins: bool) -> None:
        """``begins``: a pool has an equal part of a limit until the leader has divided it; else nothing."""
        self._pools = pools
        self._begins = begins
        self._known: dict[str, tuple[Tenant, object, dict[str, PoolBudgets]]] = {}

    def of(self, tenant: Tenant, pool: str) -> PoolBudgets:
        """The budgets of a tenant at a pool."""
        routes = self._pools.routes
        known = self._known.get(tenant.name)
        if known is None or known[0] is not tenant or known[1] is not routes:
            known = self._known[tenant.name] = tenant, routes, self._made(tenant)
        return known[2][pool]

    def keep(self, tenants: AbstractSet[str]) -> None:
        """Forget all tenants but these."""
        for name in self._known.keys() - tenants:
            del self._known[name]

    def _made(self, tenant: Tenant) -> dict[str, PoolBudgets]:
        names = pools_of(self._pools, tenant)
        made = {}
        for pool in self._pools.pools:
            division = None
            if len(names) > 1 and pool in names:
                division = Division(names, names.index(pool), self._begins)
            budgets = budgets_of(tenant.name, tenant.limits, division)
            requests = [each for each in budgets if each.limit.measure is Measure.REQUESTS]
            made[pool] = PoolBudgets(Budgets(budgets), Budgets(requests))
        return made


def pools_of(directory: PoolDirectory[ServedPool], tenant: Tenant) -> tuple[str, ...]:
    """The pools that a tenant may use, in order. Where the pool of a model is not known, it may be any."""
    allowed = {name for name in directory.pools if not tenant.pools or name in tenant.pools}
    routes = [directory.routes.get(model) for model in tenant.models]
    if routes and None not in routes:
        allowed &= {route.pool.settings.name for route in routes if route is not None}
    return tuple(sorted(allowed))
