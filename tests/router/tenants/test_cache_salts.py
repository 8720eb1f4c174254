"""Salts by which the KV caches of tenants are kept apart."""

from __future__ import annotations

from dualmap.router.tenants.cache_salts import CacheSalts
from dualmap.scheduling.tenants.tenant import Tenant

ACME, OTHER = Tenant("acme"), Tenant("other")


def test_each_tenant_has_a_salt_of_its_own_the_same_on_every_replica() -> None:
    salts = CacheSalts("a secret")

    assert salts.of(ACME, None) == CacheSalts("a secret").of(ACME, None) == salts.of(ACME, "")
    assert salts.of(ACME, None) != salts.of(OTHER, None)
    assert salts.of(ACME, None) != CacheSalts("another secret").of(ACME, None), "nobody can guess it"


def test_what_a_client_sends_separates_within_its_tenant_and_leads_nowhere_else() -> None:
    salts = CacheSalts("a secret")
    theirs = salts.of(OTHER, None)

    assert salts.of(ACME, "one") not in (None, salts.of(ACME, None), salts.of(ACME, "two"), salts.of(OTHER, "one"))
    assert salts.of(ACME, theirs) != theirs
    assert salts.of(Tenant("a"), "b") != salts.of(Tenant("ab"), "")
    assert salts.of(ACME, "\ud800") is not None, "no text that JSON can say breaks it"


def test_a_tenant_may_share_its_cache() -> None:
    assert CacheSalts("a secret").of(Tenant("open", shares_cache=True), "s") is None
