"""The budgets that requests of a tenant draw from, and among which pools they are divided."""

from __future__ import annotations

from collections.abc import Iterable
from collections.abc import Set as AbstractSet
from typing import Final, NamedTuple

from dualmap.router.pool.pool_directory import PoolDirectory, Route
from dualmap.router.pool.served_pool import ServedPool
from dualmap.scheduling.request.metering import account_text
from dualmap.scheduling.tenants.allotments import Division
from dualmap.scheduling.tenants.budgets import Budget, BudgetGroup, Measure, budgets_of, group_of
from dualmap.scheduling.tenants.tenant import Caller, Tenant

_MOST_TERMS: Final = 4096


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


class KeyTerms(NamedTuple):
    """The terms that all requests of a key share that name a model so."""

    route: Route[ServedPool]
    group: BudgetGroup | None
    """The budgets that they draw from; None: from none."""
    account: str
    """The account of those without a class."""
    tenant: Tenant
    routes: object
    """The routes by which these terms were found."""


class TenantBudgets:
    """Knows the budgets of each tenant at each pool, and makes them again when the tenant or the models change."""

    def __init__(self, pools: PoolDirectory[ServedPool], *, begins: bool) -> None:
        """``begins``: a pool has an equal part of a limit until the leader has divided it; else nothing."""
        self._pools = pools
        self._begins = begins
        self._known: dict[str, tuple[Tenant, object, dict[str, PoolBudgets]]] = {}
        self._terms: dict[tuple[str, str, str], KeyTerms] = {}
        """Terms by tenant, key and the name that the request has for its model."""

    def known_terms(self, caller: Caller, model: str) -> KeyTerms | None:
        """The terms of a request for a model, which its sender may use; None where they are not known yet, or may have
        changed."""
        tenant = caller.tenant
        known = self._terms.get((tenant.name, caller.key, model))
        return known if known is not None and known.tenant is tenant and known.routes is self._pools.routes else None

    def terms(self, caller: Caller, model: str, route: Route[ServedPool]) -> KeyTerms:
        """The terms of a request for a model that this route leads to, and that its sender may use."""
        tenant, routes = caller.tenant, self._pools.routes
        budgets = self.of(tenant, route.pool.settings.name).all
        terms = KeyTerms(
            route,
            budgets.of(drawn_by(caller, model, route)),
            account_text(tenant.name, caller.key, "", route.model),
            tenant,
            routes,
        )
        if routes.get(model) is route:  # else it leads elsewhere for this request alone
            if len(self._terms) >= _MOST_TERMS:
                self._terms.clear()
            self._terms[tenant.name, caller.key, model] = terms
        return terms

    def of(self, tenant: Tenant, pool: str) -> PoolBudgets:
        """The budgets of a tenant at a pool."""
        routes = self._pools.routes
        known = self._known.get(tenant.name)
        if known is None or known[0] is not tenant or known[1] is not routes:
            known = self._known[tenant.name] = tenant, routes, self._made(tenant)
        return known[2][pool]

    def keep(self, tenants: AbstractSet[str]) -> None:
        """Forget all tenants but these."""
        self._terms.clear()
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


def drawn_by(caller: Caller, model: str, route: Route[ServedPool]) -> tuple[str, ...]:
    """The names that draws are for, beside the tenant: the key, the model name that was sent, and the model that this
    stands for. Where none was sent, the pool's own counts as sent."""
    return f"key:{caller.key}", f"model:{model or route.pool.settings.model}", f"model:{route.model}"


def pools_of(directory: PoolDirectory[ServedPool], tenant: Tenant) -> tuple[str, ...]:
    """The pools that a tenant may use, in order. Where the pool of a model is not known, it may be any."""
    allowed = {name for name in directory.pools if not tenant.pools or name in tenant.pools}
    routes = [directory.routes.get(model) for model in tenant.models]
    if routes and None not in routes:
        allowed &= {route.pool.settings.name for route in routes if route is not None}
    return tuple(sorted(allowed))
