"""Who sends a request."""

from __future__ import annotations

import hashlib
from collections.abc import Callable
from typing import Any

import pytest
from pydantic import SecretStr

from dualmap.router.errors import InvalidApiKeyError, UnknownModelError
from dualmap.router.http.admission import make_head_check
from dualmap.router.http.request_reader import ClientRequest, HeadCheck
from dualmap.router.picker.picked import make_head_check as make_picker_head_check
from dualmap.router.pool.pool_directory import PoolDirectory
from dualmap.router.settings import GatewaySettings
from dualmap.router.tenants.directory import TenantDirectory, check_model
from dualmap.router.tenants.tenant_record import KeyRecord, TenantRecord
from dualmap.runtime.tenant_settings import TenantKeySettings, TenantSettings
from dualmap.scheduling.tenants.tenant import Caller

ACME = TenantSettings(
    name="acme",
    models=("chat",),
    keys=(
        TenantKeySettings(name="ci", key=SecretStr("acme-secret")),
        TenantKeySettings(name="web", sha256=hashlib.sha256(b"another-secret").hexdigest()),
    ),
)


def asked(directory: TenantDirectory, key: bytes | None) -> Caller | None:
    sent = {} if key is None else {b"authorization": b"Bearer " + key}
    return directory.caller(sent.get)


def test_a_key_names_its_tenant_whether_it_is_configured_or_only_its_hash() -> None:
    directory = TenantDirectory((), [ACME])

    for key, name in ((b"acme-secret", "ci"), (b"another-secret", "web")):
        caller = asked(directory, key)
        assert caller is not None
        assert (caller.tenant.name, caller.key) == ("acme", name)


@pytest.mark.parametrize("name", [b"authorization", b"x-api-key"])
@pytest.mark.parametrize("scheme", [b"Bearer ", b"bearer ", b"Bearer  ", b"Basic ", b""])
@pytest.mark.parametrize("key", [b"acme-secret", b"another-secret ", b"wrong", b"", b" "])
def test_what_the_usual_form_of_a_key_finds_is_what_every_form_does(name: bytes, scheme: bytes, key: bytes) -> None:
    directory, sent = TenantDirectory((), [ACME]), {name: scheme + key}

    found = directory.by_key(sent.get)

    if found is not None:
        assert directory.caller(sent.get) is found
    usual = (name, scheme, key) == (b"authorization", b"Bearer ", b"acme-secret")
    assert (found is not None) == usual


def test_a_key_alone_names_nobody_where_a_gateway_does() -> None:
    gateway = GatewaySettings(addresses=("10.0.0.0/8",))

    assert TenantDirectory((), [ACME], gateway=gateway).by_key({b"authorization": b"Bearer acme-secret"}.get) is None


@pytest.mark.parametrize("key", [None, b"", b"wrong", b"acme-secre", b"acme-secret2", b"\xff\xfe"])
def test_other_keys_are_refused_where_there_are_tenants(key: bytes | None) -> None:
    with pytest.raises(InvalidApiKeyError):
        asked(TenantDirectory((), [ACME]), key)


def test_a_request_without_a_key_is_of_no_tenant_though_the_hash_of_the_empty_key_was_set() -> None:
    nothing = TenantKeySettings(name="slip", sha256=hashlib.sha256(b"").hexdigest())
    directory = TenantDirectory((), [TenantSettings(name="acme", keys=(nothing,))])

    for key in (None, b"", b"  "):
        with pytest.raises(InvalidApiKeyError):
            asked(directory, key)


def test_api_keys_give_access_for_nobody_in_particular_beside_tenants() -> None:
    directory = TenantDirectory(("general",), [ACME])

    assert asked(directory, b"general") is None
    with pytest.raises(InvalidApiKeyError):
        asked(directory, b"wrong")


def test_without_any_key_access_is_open() -> None:
    directory = TenantDirectory(())

    assert not directory
    assert asked(directory, None) is None


def test_a_model_that_a_tenant_may_not_use_is_unknown_to_it() -> None:
    caller = asked(TenantDirectory((), [ACME]), b"acme-secret")

    assert caller is not None
    check_model(caller, "chat", "chat", "default")
    check_model(caller, "", "chat", "default")
    with pytest.raises(UnknownModelError, match="the model 'other' does not exist"):
        check_model(caller, "other", "other", "default")
    with pytest.raises(UnknownModelError) as unnamed:
        check_model(caller, "", "secret", "default")
    assert "secret" not in unnamed.value.message


def test_a_model_of_a_pool_that_a_tenant_may_not_use_is_unknown_to_it() -> None:
    tenant = TenantSettings(name="acme", pools=("small",)).tenant()

    check_model(Caller(tenant, "ci"), "chat", "chat", "small")
    with pytest.raises(UnknownModelError, match="the model 'chat' does not exist"):
        check_model(Caller(tenant, "ci"), "chat", "chat", "large")


def test_the_error_is_that_of_a_model_that_does_not_exist() -> None:
    tenant = TenantSettings(name="acme", models=("chat",), pools=("small",)).tenant()

    for pool in ("small", "large"):
        with pytest.raises(UnknownModelError) as hidden:
            check_model(Caller(tenant, "ci"), "other", "other", pool)
        with pytest.raises(UnknownModelError) as missing:
            PoolDirectory[Any]([]).resolve("other")
        assert vars(hidden.value) == vars(missing.value)


@pytest.mark.parametrize("made", [make_head_check, make_picker_head_check], ids=["router", "picker"])
def test_a_tenant_that_is_made_while_a_door_is_open_closes_it_to_strangers(made: Callable[..., HeadCheck]) -> None:
    directory = TenantDirectory(())
    check = made(directory, max_body_bytes=1000, forbidden_paths=())

    def sent(key: str) -> ClientRequest:
        request = ClientRequest("POST", "/v1/completions", b"", [(b"x-api-key", key.encode())], False, True)
        check(request)
        return request

    assert sent("anything").caller is None
    record = TenantRecord(keys=(KeyRecord(name="ci", sha256=hashlib.sha256(b"new-secret").hexdigest()),))
    directory.put("new", record, lambda key: True)
    directory.close()

    caller = sent("new-secret").caller
    assert caller is not None and caller.tenant.name == "new"
    with pytest.raises(InvalidApiKeyError):
        sent("anything")


def test_a_key_that_a_tenant_has_is_not_given_to_another_one() -> None:
    directory = TenantDirectory((), [ACME])
    for name in ("thief", "acme"):
        stolen = TenantRecord(keys=(KeyRecord(name="x", sha256=hashlib.sha256(b"acme-secret").hexdigest()),))
        directory.put(name, stolen, lambda key: True)
        directory.remove(name)

    caller = asked(directory, b"acme-secret")
    assert caller is not None and (caller.tenant.name, caller.key) == ("acme", "ci")
