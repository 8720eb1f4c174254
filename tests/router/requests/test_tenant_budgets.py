"""Pools among which the limits of a tenant are divided."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

from dualmap.router.pool.pool_directory import PoolDirectory, Route
from dualmap.router.pool.view import GivenNames
from dualmap.router.requests.tenant_budgets import TenantBudgets
from dualmap.runtime.pool_settings import PoolSettings
from dualmap.scheduling.tenants.allotments import Division
from dualmap.scheduling.tenants.budgets import Limit, Measure, Period
from dualmap.scheduling.tenants.tenant import Caller, Tenant

REQUESTS = Limit(Measure.REQUESTS, Period.MINUTE, 60)
TOKENS = Limit(Measure.TOKENS, Period.MINUTE, 6000)
OF_A_MODEL = Limit(Measure.TOKENS, Period.MINUTE, 600, "model:model-a")


def acme(**fields: Any) -> Tenant:
    return Tenant("acme", (TOKENS, REQUESTS, OF_A_MODEL), **{name: frozenset(each) for name, each in fields.items()})


def directory(*names: str) -> PoolDirectory[Any]:
    return PoolDirectory([SimpleNamespace(settings=PoolSettings(name=name, model=f"model-{name}")) for name in names])


def division(budgets: TenantBudgets, tenant: Tenant, pool: str) -> Division | None:
    tokens, requests, of_a_model = budgets.of(tenant, pool).all.budgets
    assert tokens.division == requests.division
    assert of_a_model.division is None, "a model is of one pool"
    return tokens.division


def test_a_tenant_of_one_pool_has_no_division() -> None:
    two = directory("b", "a")

    assert division(TenantBudgets(directory("a"), begins=True), acme(), "a") is None
    assert division(TenantBudgets(two, begins=True), acme(pools={"a"}), "a") is None
    assert division(TenantBudgets(two, begins=True), acme(models={"model-b"}), "b") is None


def test_pools_have_their_places_by_name() -> None:
    budgets = TenantBudgets(directory("c", "b", "a"), begins=False)
    tenant = acme(pools={"c", "a"})

    assert division(budgets, tenant, "a") == Division(("a", "c"), 0, begins=False)
    assert division(budgets, tenant, "c") == Division(("a", "c"), 1, begins=False)
    assert [each.limit for each in budgets.of(tenant, "a").requests.budgets] == [REQUESTS]


def test_a_model_of_an_unknown_pool_may_be_of_any() -> None:
    budgets = TenantBudgets(directory("a", "b"), begins=True)

    assert division(budgets, acme(models={"model-b", "adapter"}), "b") is not None


def test_budgets_follow_changes_of_the_tenant_and_of_model_names() -> None:
    pools = directory("a", "b")
    budgets = TenantBudgets(pools, begins=True)
    assert division(budgets, acme(), "a") is not None
    assert division(budgets, acme(pools={"a"}), "a") is None
    by_model = acme(models={"adapter"})
    assert division(budgets, by_model, "a") is not None

    pools.learn("a", GivenNames({"adapter": "lora"}), {})

    assert division(budgets, by_model, "a") is None


def test_the_terms_of_a_key_are_found_once_and_follow_changes_of_its_tenant_and_of_model_names() -> None:
    pools = directory("a", "b")
    budgets, caller, route = TenantBudgets(pools, begins=True), Caller(acme(), "ci"), pools.routes["model-a"]
    assert budgets.known_terms(caller, "model-a") is None

    terms = budgets.terms(caller, "model-a", route)

    assert terms.route is route and terms.account == "acme ci - model-a"
    assert terms.group is not None and terms.group.is_divided
    assert budgets.known_terms(caller, "model-a") is terms
    for other in (Caller(acme(), "web"), Caller(acme(pools={"a"}), "ci")):
        assert budgets.known_terms(other, "model-a") is None
    pools.learn("a", GivenNames({"adapter": "lora"}), {})
    assert budgets.known_terms(caller, "model-a") is None


def test_the_terms_of_one_request_that_goes_elsewhere_are_not_those_of_its_model() -> None:
    pools = directory("a", "b")
    budgets, caller = TenantBudgets(pools, begins=True), Caller(acme(), "ci")

    elsewhere = budgets.terms(caller, "model-a", Route(pools.pools["b"], "model-b"))

    assert elsewhere.account == "acme ci - model-b"
    assert budgets.known_terms(caller, "model-a") is None


def test_nothing_is_kept_of_tenants_that_were_removed() -> None:
    budgets = TenantBudgets(directory("a"), begins=True)
    acme_budgets = budgets.of(tenant := acme(), "a")
    budgets.terms(caller := Caller(tenant, "ci"), "model-a", budgets._pools.routes["model-a"])
    budgets.of(Tenant("gone", (TOKENS,)), "a")

    budgets.keep({"acme", "new"})

    assert budgets._known.keys() == {"acme"}
    assert budgets.known_terms(caller, "model-a") is None
    assert budgets.of(tenant, "a") is acme_budgets
