"""Administration without a key where clients need one."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from pydantic import SecretStr

from dualmap.router.admin.exposure import OpenAdminError, require_closed_admin
from dualmap.router.settings import GatewaySettings, JwtSettings, RouterSettings
from dualmap.runtime.tenant_settings import TenantKeySettings, TenantSettings
from tests.router import tools

ACME = TenantSettings(name="acme", keys=(TenantKeySettings(name="ci", key=SecretStr("acme-secret")),))
CLIENTS_NEED_KEYS: list[dict[str, Any]] = [
    {"api_keys": ("a-key-of-clients",)},
    {"needs_key": True},
    {"jwt": (JwtSettings(issuer="i", audience=("a",), keys_url="https://issuer/keys"),)},
    {"gateway": GatewaySettings(addresses=("10.0.0.1",))},
]


@pytest.mark.parametrize("keys", CLIENTS_NEED_KEYS, ids=str)
def test_a_replica_that_its_clients_could_administer_does_not_start(keys: dict[str, Any]) -> None:
    with pytest.raises(OpenAdminError) as refused:
        require_closed_admin(RouterSettings(host="0.0.0.0", **keys), ())
    for setting in ("router.admin_key", "router.admins", "router.host", "router.open_admin"):
        assert setting in str(refused.value)


def test_tenants_are_clients_with_keys() -> None:
    with pytest.raises(OpenAdminError):
        require_closed_admin(RouterSettings(host="::"), (ACME,))


CERTIFICATE = {
    "tls_certificate": Path("c.pem"), "tls_key": Path("k.pem"), "tls_client_ca": Path("ca.pem"),
}  # fmt: skip


@pytest.mark.parametrize(
    "closed",
    [
        {"host": "127.0.0.1"},
        {"host": "::1"},
        {"host": "localhost"},
        {"admin_key": "boss"},
        {"admins": ({"name": "ada", "key": "boss-key"},)},
        {"open_admin": True},
        {**CERTIFICATE, "tls_client_required_for": ("admin",)},
    ],
    ids=str,
)
def test_it_starts_where_administration_is_closed_or_meant_to_be_open(closed: dict[str, Any]) -> None:
    require_closed_admin(RouterSettings(**{"host": "0.0.0.0", "api_keys": ("a-key-of-clients",), **closed}), (ACME,))


@pytest.mark.parametrize(
    "open_to_clients",
    [{"tls_client_required_for": ("connections", "admin")}, {"tls_client_required_for": ("admin",), "ops_port": 9000}],
    ids=str,
)
def test_a_certificate_that_clients_have_too_closes_nothing(open_to_clients: dict[str, Any]) -> None:
    with pytest.raises(OpenAdminError):
        require_closed_admin(RouterSettings(host="0.0.0.0", **CERTIFICATE, **open_to_clients), (ACME,))


def test_without_keys_of_clients_an_open_administration_is_as_open_as_the_rest() -> None:
    require_closed_admin(RouterSettings(host="0.0.0.0"), ())


async def test_tenants_of_the_running_fleet_close_an_administration_without_a_key(
    start_runtime: Any, client_of: Any
) -> None:
    runtime = await start_runtime(instances=(tools.spec("a"),), host="0.0.0.0")
    client = client_of(runtime)
    assert (await client.get("/admin/instances")).status_code == 200

    made = await client.post("/admin/tenants", json={"name": "acme"})
    assert (made.status_code, made.json()["error"]["code"]) == (403, "admin_closed")
    assert "router.admin_key" in made.json()["error"]["message"]

    runtime.tenants.close()  # the store has tenants, which another replica made
    for method, path in (("GET", "/admin/instances"), ("POST", "/sleep"), ("POST", "/admin/instances/a/drain")):
        refused = await client.request(method, path)
        assert (refused.status_code, refused.json()["error"]["code"]) == (403, "admin_closed"), path
