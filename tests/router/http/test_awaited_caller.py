"""Requests whose tokens are signed by keys that are not known yet: they wait while the keys are fetched."""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections.abc import AsyncIterator
from pathlib import Path

import pytest

from dualmap.router.http import admission
from dualmap.router.settings import JwtSettings
from dualmap.router.tenants.directory import TenantDirectory
from dualmap.router.tenants.signed_tokens import Tokens
from dualmap.runtime.clock import RealClock
from dualmap.runtime.tenant_settings import TenantSettings
from tests.router.http.kit import Intake, StartInstance, StartRouter, Talk, eventually
from tests.support.signed_tokens import OTHER_RSA_KEY, RSA_KEY, jwk, jwks, token


class Rotation:
    """A directory whose issuer has just exchanged its keys."""

    def __init__(self, folder: Path) -> None:
        self.file = folder / "keys.json"
        self.file.write_bytes(jwks(jwk(RSA_KEY, "one")))
        trusted = JwtSettings(issuer="https://id.example", audience=("fleet",), keys_file=self.file)
        self.tokens = Tokens([trusted], RealClock(), time.time)
        self.tenants = TenantDirectory((), [TenantSettings(name="acme")], tokens=self.tokens)
        signed = token(OTHER_RSA_KEY, "two", exp=time.time() + 600).decode()
        self.field = f"authorization: Bearer {signed}\r\n"

    def rotate(self) -> None:
        self.file.write_bytes(jwks(jwk(OTHER_RSA_KEY, "two")))


@pytest.fixture
async def rotation(tmp_path: Path) -> AsyncIterator[Rotation]:
    made = Rotation(tmp_path)
    await made.tokens.start()
    running = asyncio.create_task(made.tokens.run())
    yield made
    running.cancel()
    with contextlib.suppress(asyncio.CancelledError):
        await running


async def answer(talk: Talk) -> None:
    await talk.answer({"choices": []})


async def test_a_request_waits_for_the_key_of_its_token_and_is_served(
    start_router: StartRouter, start_instance: StartInstance, rotation: Rotation
) -> None:
    instance = await start_instance(answer)
    intake = Intake([instance.url])
    client = await (await start_router(intake, tenants=rotation.tenants)).connect()
    rotation.rotate()

    client.chat(headers=rotation.field)

    assert (await client.answer()).status == 200
    caller = intake.requests[0].caller
    assert caller is not None
    assert caller.tenant.name == "acme"
    assert b"Bearer" not in instance.talks[0].head


async def test_the_list_of_models_waits_for_it_too(start_router: StartRouter, rotation: Rotation) -> None:
    client = await (await start_router(Intake([]), tenants=rotation.tenants)).connect()
    rotation.rotate()

    client.request("/v1/models", method="GET", headers=rotation.field)

    assert (await client.answer()).status == 200


async def test_a_key_that_does_not_come_is_waited_for_no_longer_than_a_time(
    start_router: StartRouter, rotation: Rotation, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(admission, "FETCH_TIMEOUT_S", 0.05)
    monkeypatch.setattr("dualmap.router.tenants.signed_tokens._read", lambda _: asyncio.Event().wait())
    intake = Intake([])
    client = await (await start_router(intake, tenants=rotation.tenants)).connect()

    client.chat(headers=rotation.field)

    refused = await client.answer()
    assert (refused.status, refused.error["code"]) == (503, "token_keys_coming")
    assert intake.requests == []


async def test_a_key_that_the_issuer_does_not_have_is_refused_after_a_look(
    start_router: StartRouter, rotation: Rotation
) -> None:
    client = await (await start_router(Intake([]), tenants=rotation.tenants)).connect()

    client.chat(headers=rotation.field)

    refused = await client.answer()
    assert (refused.status, refused.error["code"]) == (401, "invalid_token")


async def test_no_long_body_is_kept_for_a_sender_that_is_not_known(
    start_router: StartRouter, rotation: Rotation
) -> None:
    client = await (await start_router(Intake([]), tenants=rotation.tenants)).connect()
    length = admission.UNKNOWN_CALLER_BYTES + 1

    client.send(
        f"POST /v1/completions HTTP/1.1\r\nhost: x\r\n{rotation.field}content-length: {length}\r\n\r\n".encode()
    )

    assert (await client.answer()).error["code"] == "token_keys_coming"


async def test_a_client_that_leaves_while_it_waits_leaves_nothing(
    start_router: StartRouter, rotation: Rotation, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("dualmap.router.tenants.signed_tokens._read", lambda _: asyncio.Event().wait())
    intake = Intake([])
    router = await start_router(intake, tenants=rotation.tenants)
    client = await router.connect()
    client.chat(headers=rotation.field)
    await eventually(lambda: router.plane.bodies.held_bytes)

    client.reset()

    await eventually(lambda: not router.plane.bodies.held_bytes)
    assert intake.requests == []
