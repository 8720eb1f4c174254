"""Among which pools the limits of a tenant are divided."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

from dualmap.router.pool.pool_directory import PoolDirectory
from dualmap.router.requests.divisions import Divisions
from dualmap.runtime.pool_settings import PoolSettings
from dualmap.scheduling.tenants.allotments import Division
from dualmap.scheduling.tenants.tenant import Tenant


def directory(*names: str) -> PoolDirectory[Any]:
    return PoolDirectory([SimpleNamespace(settings=PoolSettings(name=name, model=f"model-{name}")) for name in names])


def test_a_tenant_of_one_pool_has_no_division() -> None:
    two = directory("b", "a")

    assert Divisions(directory("a"), begins=True).of(Tenant("acme"), "a") is None
    assert Divisions(two, begins=True).of(Tenant("acme", pools=frozenset({"a"})), "a") is None
    assert Divisions(two, begins=True).of(Tenant("acme", models=frozenset({"model-b"})), "b") is None


def test_pools_have_their_places_by_name() -> None:
    divisions = Divisions(directory("c", "b", "a"), begins=False)
    tenant = Tenant("acme", pools=frozenset({"c", "a"}))

    assert divisions.of(tenant, "a") == Division(("a", "c"), 0, begins=False)
    assert divisions.of(tenant, "c") == Division(("a", "c"), 1, begins=False)


def test_a_model_of_an_unknown_pool_may_be_of_any() -> None:
    divisions = Divisions(directory("a", "b"), begins=True)

    assert divisions.of(Tenant("acme", models=frozenset({"model-b", "adapter"})), "b") is not None


def test_a_division_follows_changes_of_the_tenant_and_of_model_names() -> None:
    pools = directory("a", "b")
    divisions = Divisions(pools, begins=True)
    assert divisions.of(Tenant("acme"), "a") is not None
    assert divisions.of(Tenant("acme", pools=frozenset({"a"})), "a") is None
    by_model = Tenant("acme", models=frozenset({"adapter"}))
    assert divisions.of(by_model, "a") is not None

    pools.learn("a", {"adapter": "lora"}, {})

    assert divisions.of(by_model, "a") is None
