"""Signed tokens (JWT) in place of keys: whose they are, and by whose keys they are signed.

A token is verified once: until it expires, or the keys of its issuer change, it is found by its hash as a key is.
Public keys are fetched in the background, at intervals and when a token names one that is not known, which is how
issuers rotate them: its request waits for that, up to ``FETCH_TIMEOUT_S``.
"""

from __future__ import annotations

import asyncio
import contextlib
import hashlib
import logging
import re
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import KW_ONLY, dataclass, field
from typing import TYPE_CHECKING, Any, Final, NoReturn

import httpx
import orjson

from dualmap.router.errors import InvalidTokenError, TokenKeysComingError
from dualmap.router.settings import JwtSettings
from dualmap.runtime.clock import Clock
from dualmap.runtime.extras import how_to_install
from dualmap.runtime.trust import system_trust

if TYPE_CHECKING:
    from jwt import PyJWK

log = logging.getLogger(__name__)

FETCH_TIMEOUT_S: Final = 5.0
RETRY_S: Final = 10.0
"""Pause after which keys that could not be read, or that an issuer did not have, are looked for again."""
MAX_LOOKS: Final = 3
LOOKS_WITHIN_S: Final = 30.0
"""So many looks at the keys of an issuer within this time at most, whatever tokens name."""
MAX_WAITING: Final = 64
"""Requests that wait for one look at most: nobody knows yet who sent them."""
MAX_ABSENT: Final = 1000
MAX_TRIED_KEYS: Final = 16
"""Keys by which the signature of a token is tried at most, where names do not say which one made it."""
MAX_KEYS_BYTES: Final = 1 << 20
REMEMBERED_TOKENS: Final = 10_000
MAX_TOKEN_BYTES: Final = 16 << 10
_KINDS: Final = {"RS": "RSA", "PS": "RSA", "ES": "EC", "Ed": "OKP"}
_TOKEN: Final = re.compile(rb"[A-Za-z0-9_-]+\.[A-Za-z0-9_-]+\.[A-Za-z0-9_-]*")


class TokensUnavailableError(Exception):
    """Tokens are configured, and the packages that verify them are missing."""


def require_tokens(issuers: Sequence[JwtSettings]) -> None:
    """Raises TokensUnavailableError if tokens are configured and the packages for them are missing."""
    if not issuers:
        return
    try:
        import jwt.algorithms
    except ImportError as error:
        raise TokensUnavailableError(f"router.jwt needs PyJWT: {how_to_install('jwt')}") from error
    if not jwt.algorithms.has_crypto:
        raise TokensUnavailableError(f"router.jwt needs cryptography beside PyJWT: {how_to_install('jwt')}")


def is_token(key: bytes) -> bool:
    """Whether what a client sent as its key has the form of a token."""
    return key.startswith(b"eyJ") and _TOKEN.fullmatch(key) is not None


@dataclass(frozen=True, slots=True)
class Claims:
    """The content of a verified token."""

    tenant: str
    priority_class: str
    expires_s: float
    """Unix time from which it is not accepted any more."""
    not_before_s: float


@dataclass(frozen=True, slots=True)
class TokenKey:
    """One public key."""

    key: PyJWK
    name: str | None
    """By which tokens name it (kid); None: it has no name."""
    algorithm: str | None
    """The only one that it is for; None: any of its kind."""

    def fits(self, algorithm: str) -> bool:
        """Whether it can verify signatures by the algorithm."""
        return self.algorithm in (None, algorithm) and self.key.key_type == _KINDS[algorithm[:2]]


@dataclass(slots=True)
class _Issuer:
    """One issuer, and its keys as last read."""

    settings: JwtSettings
    _: KW_ONLY
    keys: Sequence[TokenKey] = ()
    content: bytes = b""
    looks_s: deque[float] = field(default_factory=lambda: deque(maxlen=MAX_LOOKS))
    """The times of the last looks at its keys."""
    absent: dict[str, float] = field(default_factory=dict)
    """Names of keys that tokens had and a look did not find, with the time of that look."""
    sought: set[str] = field(default_factory=set)
    """Names of keys that the next look is for."""
    wanted: asyncio.Event = field(default_factory=asyncio.Event)
    next_look: asyncio.Future[None] | None = None
    """Done at the end of the next look that begins, while somebody waits for it."""
    waiting: int = 0
    """Requests that wait for it."""


class Tokens:
    """The issuers of a replica."""

    def __init__(self, issuers: Sequence[JwtSettings], clock: Clock, unix_s: Callable[[], float]) -> None:
        """``unix_s`` is the time by which tokens expire: the store's, as all replicas share it.

        Raises:
            TokensUnavailableError: the packages for it are missing.
        """
        require_tokens(issuers)
        self._issuers = {each.issuer: _Issuer(each) for each in issuers}
        self._clock = clock
        self._unix_s = unix_s
        self._verified: dict[bytes, Claims] = {}

    def claims(self, token: bytes) -> Claims:
        """The content of a token, once it is verified.

        Raises:
            InvalidTokenError: it is not to be trusted, and why.
            TokenKeysComingError: the key that signed it is not known yet, and is being looked for.
        """
        digest, now_s = hashlib.sha256(token).digest(), self._unix_s()
        claims = self._verified.get(digest)
        if claims is None:
            claims = self._verify(token, digest.hex())
            if len(self._verified) >= REMEMBERED_TOKENS:
                del self._verified[next(iter(self._verified))]
            self._verified[digest] = claims
        if now_s >= claims.expires_s:
            del self._verified[digest]
            raise InvalidTokenError("the token has expired; fetch a new one")
        if now_s < claims.not_before_s:
            raise InvalidTokenError("the token is not valid yet; compare the clocks of its issuer and of the fleet")
        return claims

    def _verify(self, token: bytes, digest: str) -> Claims:
        import jwt

        if len(token) > MAX_TOKEN_BYTES:
            raise InvalidTokenError(f"the token has over {MAX_TOKEN_BYTES} bytes")
        try:
            head = jwt.get_unverified_header(token)
            unverified = jwt.decode(token, options={"verify_signature": False})
        except (jwt.PyJWTError, ValueError) as error:
            raise InvalidTokenError("the token cannot be read: it must be a signed JWT") from error
        issuer = self._issuers.get(str(unverified.get("iss")))
        if issuer is None:
            raise InvalidTokenError("the token is of an issuer that is not accepted here (iss, router.jwt)")
        settings, algorithm = issuer.settings, str(head.get("alg"))
        if algorithm not in settings.algorithms:
            raise InvalidTokenError(f"the token must be signed by one of {', '.join(settings.algorithms)} (alg)")
        name = head.get("kid")
        keys = self._keys(issuer, name, algorithm) or self._look_for(issuer, name or digest)
        try:
            said = _signed(token, algorithm, settings, keys)
            expires_s, not_before_s = float(said["exp"]), float(said.get("nbf", 0.0))
        except jwt.InvalidAudienceError as error:
            raise InvalidTokenError("the token is for another audience (aud)") from error
        except jwt.MissingRequiredClaimError as error:
            raise InvalidTokenError(f"the token lacks a claim: {error.claim}") from error
        except jwt.InvalidSignatureError as error:
            if name is None or name not in {each.name for each in keys}:  # it may be by a key that took one's place
                self._look_for(issuer, digest)
            raise InvalidTokenError("the token's signature is wrong") from error
        except (jwt.PyJWTError, TypeError, ValueError) as error:
            raise InvalidTokenError("the token's signature, or one of its claims, is wrong") from error
        tenant, named = said.get(settings.tenant_claim), said.get(settings.class_claim or "", "")
        if not isinstance(tenant, str) or not tenant:
            raise InvalidTokenError(f"the token names no tenant: it lacks the claim {settings.tenant_claim}")
        leeway_s = settings.leeway_s
        return Claims(tenant, named if isinstance(named, str) else "", expires_s + leeway_s, not_before_s - leeway_s)

    def _keys(self, issuer: _Issuer, name: object, algorithm: str) -> Sequence[TokenKey]:
        """The keys that may have signed a token: those of the name that it says, and those without a name; where it
        says none, any. Sets without names are valid (RFC 7517 section 4.5). Empty where a look is worth it."""
        named = [each for each in issuer.keys if name is not None and each.name == name]
        others = [each for each in issuer.keys if name is None or each.name is None]
        fitting = [each for each in (*named, *others) if each.fits(algorithm)][:MAX_TRIED_KEYS]
        if named and not fitting:
            raise InvalidTokenError("the token is signed by another algorithm than its key is for (alg)")
        return fitting

    def _look_for(self, issuer: _Issuer, what: str) -> NoReturn:
        """Have the keys read, unless they were just read for this key, or token.

        Raises:
            TokenKeysComingError: they will be.
            InvalidTokenError: they were.
        """
        absent_s = issuer.absent.get(what)
        if absent_s is not None and self._clock.monotonic_s() - absent_s < RETRY_S:
            raise InvalidTokenError("the token is signed by a key that its issuer does not have, or has no more (kid)")
        issuer.sought.add(what)
        issuer.wanted.set()
        may_wait = issuer.waiting < MAX_WAITING
        if issuer.next_look is None:
            issuer.next_look = asyncio.get_running_loop().create_future()
        issuer.waiting += may_wait
        raise TokenKeysComingError(
            "the key that signed this token is not known yet, and is being fetched; try again",
            fetched=issuer.next_look if may_wait else None,
            retry_after_s=1.0,
        )

    # keys --------------------------------------------------------------------------------------------------------
    async def start(self) -> None:
        """Look for the keys of all issuers once; what cannot be had is looked for again by ``run``."""
        await asyncio.gather(*map(self._refresh, self._issuers.values()))

    async def run(self) -> None:
        """Follow the keys. Runs until cancelled."""
        async with asyncio.TaskGroup() as group:
            for issuer in self._issuers.values():
                group.create_task(self._follow(issuer))

    async def _follow(self, issuer: _Issuer) -> None:
        while True:
            await self._pause(issuer, issuer.settings.refresh_s if issuer.keys else RETRY_S)
            if len(issuer.looks_s) == MAX_LOOKS:
                wait_s = issuer.looks_s[0] + LOOKS_WITHIN_S - self._clock.monotonic_s()
                if wait_s > 0:
                    await self._clock.sleep(wait_s)
            await self._refresh(issuer)

    async def _pause(self, issuer: _Issuer, for_s: float) -> None:
        waits = (asyncio.ensure_future(self._clock.sleep(for_s)), asyncio.ensure_future(issuer.wanted.wait()))
        try:
            await asyncio.wait(waits, return_when=asyncio.FIRST_COMPLETED)
        finally:
            for each in waits:
                each.cancel()

    async def _refresh(self, issuer: _Issuer) -> None:
        """Read the keys; the former ones stay where they cannot be read."""
        issuer.looks_s.append(self._clock.monotonic_s())
        issuer.wanted.clear()
        sought, issuer.sought = issuer.sought, set()
        look, issuer.next_look, issuer.waiting = issuer.next_look, None, 0
        try:
            content = await _read(issuer.settings)
            if content != issuer.content:
                keys = keys_from(content)
                if not keys:
                    raise ValueError("there is no key for signatures in it")
                issuer.keys, issuer.content = keys, content
                self._verified.clear()  # a key may be gone, and what it signed with it
                log.info("tokens of %s: keys=%d", issuer.settings.issuer, len(keys))
            issuer.absent = _newest({**issuer.absent, **dict.fromkeys(sought, self._clock.monotonic_s())})
        except (OSError, httpx.HTTPError, httpx.InvalidURL, ValueError) as error:
            why = str(error) or type(error).__name__
            log.warning(
                "tokens of %s: the last known keys stay, as new ones cannot be read: %s", issuer.settings.issuer, why
            )
        finally:
            if look is not None and not look.done():
                look.set_result(None)


def _signed(token: bytes, algorithm: str, settings: JwtSettings, keys: Sequence[TokenKey]) -> dict[str, Any]:
    """The content of a token that one of the keys has signed. Raises PyJWTError, TypeError or ValueError."""
    import jwt

    for each in keys[:-1]:
        with contextlib.suppress(jwt.InvalidSignatureError):
            return _decoded(token, algorithm, settings, each)
    return _decoded(token, algorithm, settings, keys[-1])


def _decoded(token: bytes, algorithm: str, settings: JwtSettings, key: TokenKey) -> dict[str, Any]:
    import jwt

    said: dict[str, Any] = jwt.decode(
        token,
        key.key.key,
        algorithms=[algorithm],
        audience=list(settings.audience),
        issuer=settings.issuer,
        options={"require": ["exp"], "verify_exp": False, "verify_nbf": False, "verify_iat": False},
    )
    return said


async def _read(settings: JwtSettings) -> bytes:
    """Raises OSError, HTTPError or ValueError."""
    if settings.keys_file is not None:
        return await asyncio.to_thread(settings.keys_file.read_bytes)
    trust = await asyncio.to_thread(system_trust)
    async with (
        httpx.AsyncClient(timeout=FETCH_TIMEOUT_S, verify=trust, trust_env=False) as client,
        asyncio.timeout(FETCH_TIMEOUT_S),
        client.stream("GET", settings.keys_url or "") as answer,
    ):
        answer.raise_for_status()
        content = bytearray()
        async for piece in answer.aiter_bytes():
            content += piece
            if len(content) > MAX_KEYS_BYTES:
                raise ValueError(f"the answer has over {MAX_KEYS_BYTES} bytes")
        return bytes(content)


def _newest(absent: dict[str, float]) -> dict[str, float]:
    """The keys that were looked for last, up to ``MAX_ABSENT``."""
    return dict(list(absent.items())[-MAX_ABSENT:])


def keys_from(content: bytes) -> list[TokenKey]:
    """The keys for signatures in a JWK set. Raises ValueError if the set is malformed."""
    from jwt import PyJWK, PyJWTError

    try:
        listed = orjson.loads(content)["keys"]
        given = [each for each in listed if each.get("use", "sig") == "sig" and each.get("kty") != "oct"]
    except (TypeError, KeyError, AttributeError) as error:
        raise ValueError("it is no JWK set, which has a list of keys") from error
    keys: list[TokenKey] = []
    for each in given:
        try:
            keys.append(TokenKey(PyJWK.from_dict(each), each.get("kid"), each.get("alg")))
        except (PyJWTError, ValueError, TypeError):
            continue  # of a kind that is not known here; a token that names it is refused
    return keys
