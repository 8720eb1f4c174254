"""Paths for which a client certificate may be needed; who must show one is tested over TLS, in test_tls."""

from __future__ import annotations

from dualmap.router.admin import engine_control, explanations, inspection, instances, models, settings, tenants
from dualmap.router.http.paths import needs_admin

ADMINISTRATION = (engine_control, explanations, inspection, instances, models, settings, tenants)


def test_every_path_that_the_admin_key_closes_can_need_a_certificate() -> None:
    paths = {route.path for part in ADMINISTRATION for route in part.routes.routes}

    assert paths and [path for path in paths if not needs_admin(path)] == []
    assert not any(map(needs_admin, ("/health", "/ready", "/metrics", "/docs", "/v1/models", "/administration")))
