"""A gateway that names the tenants of its requests: who is believed, and who is not."""

from __future__ import annotations

from typing import Any

import pytest
from pydantic import SecretStr

from dualmap.router.errors import InvalidApiKeyError, TenantHeaderError, UnknownTenantError
from dualmap.router.http.admission import make_head_check
from dualmap.router.http.client_certificates import head_check_finder
from dualmap.router.http.request_reader import ClientRequest
from dualmap.router.picker.picked import make_head_check as make_picker_head_check
from dualmap.router.serving.picker_door import gateway_streams
from dualmap.router.settings import GatewaySettings, RouterSettings
from dualmap.router.tenants.directory import TenantDirectory
from dualmap.runtime.tenant_settings import TenantKeySettings, TenantSettings
from dualmap.scheduling.tenants.tenant import Caller

TENANTS = [
    TenantSettings(name=name, keys=(TenantKeySettings(name="ci", key=SecretStr(f"{name}-secret")),))
    for name in ("acme", "other")
]
GATEWAY = GatewaySettings(addresses=("10.1.0.0/16", "fd00::7"), certificates=("edge",), class_header="x-class")


class Connection:
    """A connection from an address, perhaps with a certificate."""

    def __init__(self, address: object, certificate: str | None = None) -> None:
        subject = () if certificate is None else ((("commonName", certificate),),)
        self._about = {
            "peername": address,
            "peercert": {"subject": subject} if subject else None,
            "sslcontext": certificate,
        }

    def get_extra_info(self, name: str) -> Any:
        return self._about.get(name)


def asked(connection: Connection, gateway: GatewaySettings | None = GATEWAY, **fields: str) -> Caller | None:
    """Who sends a request with these fields over a connection."""
    settings = RouterSettings(gateway=gateway, tls_client_required_for=())
    check = make_head_check(TenantDirectory((), TENANTS, gateway=gateway), max_body_bytes=1000)
    named = [(name.replace("_", "-").encode(), value.encode()) for name, value in fields.items()]
    request = ClientRequest("POST", "/v1/completions", b"", named, http_10=False, keep_alive=True)
    head_check_finder(settings, check)(connection)(request)
    return request.caller


@pytest.mark.parametrize(
    "connection",
    [
        Connection(("10.1.2.3", 4711)),
        Connection(("::ffff:10.1.2.3", 4711, 0, 0)),
        Connection(("fd00::7", 4711, 0, 0)),
        Connection(("192.0.2.1", 4711), "edge"),
    ],
)
def test_the_gateway_names_tenant_and_class(connection: Connection) -> None:
    caller = asked(connection, x_tenant_id="acme", x_class="batch")

    assert caller is not None
    assert (caller.tenant.name, caller.key, caller.priority_class) == ("acme", "(gateway)", "batch")


@pytest.mark.parametrize(
    "connection",
    [
        Connection(("10.2.0.1", 4711)),
        Connection(("192.0.2.1", 4711), "somebody"),
        Connection(""),
        Connection(None),
        Connection(("no address", 1)),
    ],
)
def test_nobody_else_is_believed_whatever_key_they_send(connection: Connection) -> None:
    for fields in ({}, {"x_api_key": "acme-secret"}, {"x_api_key": "other-secret"}):
        with pytest.raises(TenantHeaderError, match="believed of the gateway alone"):
            asked(connection, x_tenant_id="acme", **fields)
    caller = asked(connection, x_api_key="other-secret")
    assert caller is not None and caller.tenant.name == "other"


def test_the_gateway_may_pass_keys_on_and_no_key_of_another_tenant() -> None:
    gateway = Connection(("10.1.2.3", 4711))
    for fields in ({"x_api_key": "acme-secret"}, {"x_api_key": "acme-secret", "x_tenant_id": "acme"}):
        caller = asked(gateway, **fields)
        assert caller is not None and caller.tenant.name == "acme"
    with pytest.raises(TenantHeaderError, match="another tenant"):
        asked(gateway, x_api_key="other-secret", x_tenant_id="acme")
    with pytest.raises(InvalidApiKeyError):
        asked(gateway)


@pytest.mark.parametrize("make", [make_head_check, make_picker_head_check])
@pytest.mark.parametrize("name", [b"x-tenant-id", b"x-class"])
def test_a_field_that_comes_twice_is_refused_as_one_may_be_the_clients_own(make: Any, name: bytes) -> None:
    check = make(TenantDirectory((), TENANTS, gateway=GATEWAY), max_body_bytes=1000, forbidden_paths=())
    fields = [(b"x-tenant-id", b"acme"), (b"x-class", b"batch"), (name, b"other")]
    request = ClientRequest("POST", "/v1/completions", b"", fields, http_10=False, keep_alive=True)
    request.from_gateway = True

    with pytest.raises(TenantHeaderError, match=f"{name.decode()} was sent more than once"):
        check(request)


@pytest.mark.parametrize("name", ["", "nobody", "ACME", "acme ", "acme,other", "äcme", "a" * 4000])
def test_a_tenant_that_there_is_not_is_refused(name: str) -> None:
    with pytest.raises(UnknownTenantError) as refused:
        asked(Connection(("10.1.2.3", 4711)), x_tenant_id=name)
    assert len(refused.value.message) < 300


def test_without_a_gateway_the_field_means_nothing() -> None:
    with pytest.raises(InvalidApiKeyError):
        asked(Connection(("10.1.2.3", 4711)), None, x_tenant_id="acme")
    caller = asked(Connection(("10.1.2.3", 4711)), None, x_tenant_id="acme", x_api_key="other-secret")
    assert caller is not None and caller.tenant.name == "other"


@pytest.mark.parametrize(
    ("peer", "believed"),
    [
        ("ipv4:10.1.9.9:50001", True),
        ("ipv6:[fd00::7]:50001", True),
        ("ipv6:%5Bfd00::7%5D:50001", True),
        ("ipv4:10.2.9.9:50001", False),
        ("unix:/run/envoy.sock", False),
        ("", False),
    ],
)
def test_a_picker_knows_its_gateway_by_the_address_of_the_stream(peer: str, believed: bool) -> None:
    assert gateway_streams(RouterSettings(gateway=GATEWAY))(peer) is believed
    assert not gateway_streams(RouterSettings())(peer)


@pytest.mark.parametrize("wrong", [{}, {"addresses": ["10.0.0.0/99"]}, {"addresses": ["edge.example"]}])
def test_a_gateway_that_is_not_named_is_refused(wrong: dict[str, Any]) -> None:
    with pytest.raises(ValueError, match=r"gateway|appear|Address"):
        GatewaySettings(**wrong)
