"""What a server replies and what redis-py raises, as this package's errors: the one place where they are translated."""

from __future__ import annotations

import ssl
from collections.abc import Iterator

from redis import exceptions

from statestore.errors import LeaseLostError, StoreConfigurationError, StoreError, StoreUnavailableError


class ScriptMissingError(StoreError):
    """The server does not know the script (yet, or any more): load it and repeat. Nothing was run."""


class MovedElsewhereError(StoreUnavailableError):
    """Another server has the pool now: connect again, which finds it. Nothing was run."""


_MOVED = (MovedElsewhereError, "the store moved to another server")
_REFUSES = (StoreUnavailableError, "the store refuses calls")
_FORBIDDEN = (StoreConfigurationError, "the store allows this user too little")
_STRANGER = (StoreConfigurationError, "the store refuses this client, check user and password")
_MEANINGS: dict[str, tuple[type[StoreError], str]] = {
    **dict.fromkeys(("READONLY", "MOVED", "ASK"), _MOVED),
    **dict.fromkeys(("LOADING", "MASTERDOWN", "CLUSTERDOWN", "TRYAGAIN", "NOREPLICAS", "BUSY", "MISCONF"), _REFUSES),
    "OOM": (StoreUnavailableError, "the store is out of memory, raise its maxmemory"),
    "WRONGTYPE": (StoreError, "a key of the fleet was overwritten, find it with TYPE and delete it"),
    "NOPERM": _FORBIDDEN,
    **dict.fromkeys(("NOAUTH", "WRONGPASS"), _STRANGER),
    "NOSCRIPT": (ScriptMissingError, "the store does not know a script"),
}
_FORBIDDEN_IN_SCRIPT = ("The user executing the script can't", "ACL failure in script")
"""NOPERM for a command, a key or a channel that a script uses, as older and newer servers write it."""


def reply_error(message: str) -> StoreError:
    """The error that an error reply means."""
    kind, says = StoreError, "the store could not run a command"
    # An error inside a script may arrive behind a prefix of the server's own.
    words = message.replace("-", " ").split()[:12]
    if any(forbidden in message for forbidden in _FORBIDDEN_IN_SCRIPT):
        kind, says = _FORBIDDEN
    elif "FENCED" in words:
        return LeaseLostError(message.partition("FENCED")[2].strip())
    elif known := next((word for word in words if word in _MEANINGS), None):
        kind, says = _MEANINGS[known]
    return kind(f"{says}: {message}")


def connect_error(error: Exception, server: str, *, tls: bool, timeout_s: float, credentials: str) -> StoreError:
    """What an attempt to connect to ``server`` that failed with ``error`` means; ``credentials`` is what the store's
    URL calls those of this server."""
    if isinstance(error, StoreError):
        return error
    causes = tuple(_causes(error))
    if any(isinstance(cause, ssl.SSLCertVerificationError) for cause in causes):
        return StoreConfigurationError(
            f"the certificate of {server} is not accepted: {error};"
            " ssl_ca_certs and ssl_check_hostname in store.url say what is"
        )
    if any(isinstance(cause, exceptions.AuthenticationError) for cause in causes):
        return StoreConfigurationError(f"{server} refuses the {credentials} of store.url: {error}")
    if isinstance(error, exceptions.ResponseError):  # what is left of the greeting is SELECT
        return StoreConfigurationError(f"{server} refuses the database of store.url: {error}")
    if "max number of clients reached" in str(error):
        return StoreUnavailableError(f"the store takes no more connections, raise its maxclients: {error}")
    why, hint = str(error), ""
    if isinstance(error, (TimeoutError, exceptions.TimeoutError)):
        why = f"no answer within {timeout_s:g} s"
    if tls:
        hint = (
            "; if it speaks no TLS, use redis://, and if it wants a certificate of its clients, store.url takes"
            " ssl_certfile and ssl_keyfile"
        )
    elif all(isinstance(cause, ConnectionResetError) for cause in causes if isinstance(cause, OSError)):  # it hung up
        hint = "; if it speaks TLS, use rediss://"
    return StoreUnavailableError(f"cannot connect to the store at {server}: {why}{hint}")


def _causes(error: BaseException | None) -> Iterator[BaseException]:
    while error is not None:
        yield error
        error = error.__cause__ or error.__context__
