"""Tokens in place of keys: which are accepted, and why the others are not."""

from __future__ import annotations

import asyncio
import contextlib
import logging
from collections.abc import AsyncIterator, Iterator
from http.server import BaseHTTPRequestHandler, HTTPServer
from pathlib import Path
from threading import Thread
from typing import Any

import pytest

from dualmap.router.errors import InvalidTokenError, RouterError, TokenKeysComingError, UnknownTenantError
from dualmap.router.settings import JwtSettings, RouterSettings
from dualmap.router.tenants import signed_tokens
from dualmap.router.tenants.directory import TenantDirectory
from dualmap.router.tenants.signed_tokens import MAX_LOOKS, MAX_WAITING, Tokens
from dualmap.runtime.tenant_settings import TenantSettings
from dualmap.scheduling.tenants.tenant import Caller
from tests.support.manual_clock import ManualClock, settle
from tests.support.signed_tokens import EC_KEY, NOW_S, OTHER_RSA_KEY, RSA_KEY, jwk, jwks, token

ACME = TenantSettings(name="acme")


class Issuer:
    """A directory that trusts an issuer, whose keys are in a file; and the time."""

    def __init__(self, folder: Path, **settings: Any) -> None:
        self.file = folder / "keys.json"
        self.now_s = NOW_S
        self.clock = ManualClock()
        given = {"issuer": "https://id.example", "audience": ("fleet",), "keys_file": self.file, "class_claim": "class"}
        self.tokens = Tokens([JwtSettings(**(given | settings))], self.clock, lambda: self.now_s)
        self.directory = TenantDirectory(("eyJ.static.key",), [ACME], tokens=self.tokens)

    def caller(self, sent: bytes) -> Caller | None:
        return self.directory.caller({b"authorization": b"Bearer " + sent}.get)


@contextlib.asynccontextmanager
async def following(issuer: Issuer) -> AsyncIterator[None]:
    """The keys are followed, as while a replica runs."""
    running = asyncio.create_task(issuer.tokens.run())
    await settle()
    yield
    running.cancel()


@pytest.fixture
async def issuer(tmp_path: Path) -> Issuer:
    made = Issuer(tmp_path)
    made.file.write_bytes(jwks(jwk(RSA_KEY, "one", alg="RS256"), jwk(EC_KEY, "two"), {"kty": "new", "kid": "three"}))
    await made.tokens.start()
    return made


async def test_a_token_names_tenant_and_class(issuer: Issuer) -> None:
    for sent in (
        token(**{"class": "batch"}),
        token(EC_KEY, "two", "ES256", **{"class": "batch"}),
        token(aud=["x", "fleet"], **{"class": "batch"}),
    ):
        caller = issuer.caller(sent)
        assert caller is not None
        assert (caller.tenant.name, caller.priority_class, caller.key) == ("acme", "batch", "(token)")
    assert issuer.caller(b"eyJ.static.key") is None, "an API key may look like a token"


@pytest.mark.parametrize(
    ("made", "why"),
    [
        ({"exp": NOW_S - 31}, "has expired"),
        ({"nbf": NOW_S + 31}, "not valid yet"),
        ({"aud": "other"}, "another audience"),
        ({"aud": None}, "lacks a claim: aud"),
        ({"exp": None}, "lacks a claim: exp"),
        ({"exp": "soon"}, "one of its claims"),
        ({"iss": "https://evil.example"}, "issuer that is not accepted"),
        ({"iss": None}, "issuer that is not accepted"),
        ({"tenant": None}, "names no tenant"),
        ({"tenant": 7}, "names no tenant"),
        ({"key": OTHER_RSA_KEY}, "signature"),
        ({"key": None, "algorithm": "none"}, "must be signed by one of RS256"),
        ({"key": "one-shared-secret-of-32-characters", "algorithm": "HS256"}, "must be signed by one of RS256"),
        ({"algorithm": "RS512"}, "must be signed by one of RS256"),
        ({"key": EC_KEY, "algorithm": "ES256"}, "another algorithm"),
        ({"kid": None, "exp": NOW_S - 31}, "has expired"),
    ],
)
async def test_a_token_that_is_not_to_be_trusted_is_refused_by_name(
    issuer: Issuer, made: dict[str, Any], why: str, caplog: pytest.LogCaptureFixture
) -> None:
    sent = token(**made)
    with caplog.at_level(logging.DEBUG), pytest.raises(InvalidTokenError, match=why) as refused:
        issuer.caller(sent)
    assert sent.decode() not in caplog.text + refused.value.message


@pytest.mark.parametrize("sent", [b"eyJ.e.x", b"eyJhbGciOiJub25lIn0.e30.", b"eyJ" + b"a" * 20_000 + b".b.c"])
async def test_what_is_no_token_is_refused(issuer: Issuer, sent: bytes) -> None:
    with pytest.raises(RouterError) as refused:
        issuer.caller(sent)
    assert refused.value.status == 401


async def test_a_token_of_an_unknown_tenant_is_refused(issuer: Issuer) -> None:
    for name in ("nobody", "acme\n", "ACME", "a" * 500):
        with pytest.raises(UnknownTenantError, match="not known here"):
            issuer.caller(token(tenant=name))


async def test_a_token_that_was_accepted_expires(issuer: Issuer) -> None:
    sent = token()
    assert issuer.caller(sent) is not None
    issuer.now_s += 89
    assert issuer.caller(sent) is not None, "clocks may differ by the leeway"
    issuer.now_s += 2
    with pytest.raises(InvalidTokenError, match="has expired"):
        issuer.caller(sent)


async def fetched(issuer: Issuer, sent: bytes) -> None:
    """Present a token whose key is not known, and wait for the keys, as its request does."""
    with pytest.raises(TokenKeysComingError) as coming:
        issuer.caller(sent)
    assert (coming.value.status, coming.value.retry_after_s) == (503, 1.0)
    assert coming.value.fetched is not None
    async with asyncio.timeout(20):
        await coming.value.fetched


async def test_a_token_is_good_at_once_after_a_rotation_of_keys(issuer: Issuer) -> None:
    sent, former = token(OTHER_RSA_KEY, "four"), token()
    assert issuer.caller(former) is not None
    issuer.file.write_bytes(jwks(jwk(OTHER_RSA_KEY, "four")))  # the keys were read a moment ago
    async with following(issuer):
        await fetched(issuer, sent)
    assert issuer.caller(sent) is not None
    with pytest.raises(TokenKeysComingError):
        issuer.caller(former)  # it was accepted before, and its key is gone


async def test_a_key_that_was_looked_for_and_not_found_is_refused_until_it_is_worth_another_look(
    issuer: Issuer,
) -> None:
    sent = token(OTHER_RSA_KEY, "four")
    async with following(issuer):
        await fetched(issuer, sent)
        for _ in range(3):
            with pytest.raises(InvalidTokenError, match="does not have, or has no more"):
                issuer.caller(sent)
        issuer.file.write_bytes(jwks(jwk(OTHER_RSA_KEY, "four")))
        issuer.clock.jump(11)
        await fetched(issuer, sent)
    assert issuer.caller(sent) is not None


async def test_invented_keys_cause_few_looks_and_few_requests_wait_for_them(
    issuer: Issuer, monkeypatch: pytest.MonkeyPatch
) -> None:
    looks: list[JwtSettings] = []

    async def read(settings: JwtSettings) -> bytes:
        looks.append(settings)
        return issuer.file.read_bytes()

    monkeypatch.setattr(signed_tokens, "_read", read)
    async with following(issuer):
        for number in range(40):
            with pytest.raises(TokenKeysComingError):
                issuer.caller(token(OTHER_RSA_KEY, f"invented-{number}"))
            await settle()
        assert 1 <= len(looks) < MAX_LOOKS, "the first one was that of the start"
        waiting = []
        for number in range(2 * MAX_WAITING):
            with pytest.raises(TokenKeysComingError) as coming:
                issuer.caller(token(OTHER_RSA_KEY, f"more-{number}"))
            waiting.append(coming.value.fetched)
    assert sum(each is not None for each in waiting) <= MAX_WAITING


async def test_keys_that_could_not_be_fetched_are_not_known_to_be_absent(issuer: Issuer) -> None:
    issuer.file.unlink()
    sent = token(OTHER_RSA_KEY, "four")
    async with following(issuer):
        await fetched(issuer, sent)
        with pytest.raises(TokenKeysComingError):
            issuer.caller(sent)


async def test_sets_whose_keys_have_no_names_are_tried_key_by_key(issuer: Issuer) -> None:
    issuer.file.write_bytes(jwks(jwk(EC_KEY, None), jwk(RSA_KEY, None), jwk(OTHER_RSA_KEY, None)))
    await issuer.tokens.start()
    for key, algorithm in ((RSA_KEY, "RS256"), (OTHER_RSA_KEY, "RS256"), (EC_KEY, "ES256")):
        for kid in (None, "said-by-the-token-alone"):
            assert issuer.caller(token(key, kid, algorithm)) is not None


async def test_a_token_that_names_no_key_is_tried_by_all_that_fit(issuer: Issuer) -> None:
    assert issuer.caller(token(kid=None)) is not None
    assert issuer.caller(token(EC_KEY, None, "ES256")) is not None


async def test_a_rotation_of_keys_without_names_is_followed_too(issuer: Issuer) -> None:
    issuer.file.write_bytes(jwks(jwk(RSA_KEY, None)))
    await issuer.tokens.start()
    issuer.file.write_bytes(jwks(jwk(OTHER_RSA_KEY, None)))
    sent = token(OTHER_RSA_KEY, None)
    async with following(issuer):
        await fetched(issuer, sent)
    assert issuer.caller(sent) is not None


async def test_one_name_may_stand_for_keys_of_several_kinds(issuer: Issuer) -> None:
    issuer.file.write_bytes(jwks(jwk(RSA_KEY, "one"), jwk(EC_KEY, "one")))
    await issuer.tokens.start()
    assert issuer.caller(token()) is not None
    assert issuer.caller(token(EC_KEY, "one", "ES256")) is not None


async def test_keys_that_cannot_be_read_leave_the_former_ones(issuer: Issuer, caplog: pytest.LogCaptureFixture) -> None:
    for content in (b"", b"[]", b'{"keys": 7}', b'{"keys": []}', jwks({"kty": "oct", "k": "c2VjcmV0", "kid": "one"})):
        issuer.file.write_bytes(content)
        await issuer.tokens.start()
        assert issuer.caller(token()) is not None
    issuer.file.unlink()
    await issuer.tokens.start()
    assert issuer.caller(token()) is not None
    assert "the last known keys stay" in caplog.text


async def test_without_any_keys_yet_a_client_is_told_to_come_back(tmp_path: Path) -> None:
    issuer = Issuer(tmp_path)
    await issuer.tokens.start()
    with pytest.raises(TokenKeysComingError):
        issuer.caller(token())


async def test_an_only_key_needs_no_name(tmp_path: Path) -> None:
    issuer = Issuer(tmp_path)
    issuer.file.write_bytes(jwks(jwk(RSA_KEY, None)))
    await issuer.tokens.start()
    assert issuer.caller(token(kid=None)) is not None


@pytest.fixture
def served() -> Iterator[str]:
    """The URL of a key set."""

    class Handler(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            self.send_response(200)
            self.end_headers()
            self.wfile.write(jwks(jwk(RSA_KEY, "one")) if self.path == "/keys" else b"x" * (2 << 20))

        def log_message(self, *_: object) -> None:
            pass

    with HTTPServer(("127.0.0.1", 0), Handler) as server:
        thread = Thread(target=server.serve_forever, kwargs={"poll_interval": 0.01})
        thread.start()
        yield f"http://127.0.0.1:{server.server_port}"
        server.shutdown()
        thread.join()


async def test_keys_come_by_url_too_and_no_endless_answer_is_read(
    tmp_path: Path, served: str, caplog: pytest.LogCaptureFixture
) -> None:
    issuer = Issuer(tmp_path, keys_file=None, keys_url=f"{served}/keys")
    await issuer.tokens.start()
    assert issuer.caller(token()) is not None
    await Issuer(tmp_path, keys_file=None, keys_url=f"{served}/endless").tokens.start()
    assert "over 1048576 bytes" in caplog.text


def test_settings_that_name_no_keys_or_an_issuer_twice_are_refused(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="needs either keys_url or keys_file"):
        JwtSettings(issuer="x", audience=("a",))
    one = JwtSettings(issuer="x", audience=("a",), keys_file=tmp_path)
    with pytest.raises(ValueError, match="two of jwt have one issuer"):
        RouterSettings(jwt=(one, one))
    with pytest.raises(ValueError, match="algorithms"):
        JwtSettings.model_validate({"issuer": "x", "audience": ["a"], "keys_file": "k", "algorithms": ["HS256"]})
