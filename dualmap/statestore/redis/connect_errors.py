"""Errors of redis-py's attempts to connect, as this package's errors."""

from __future__ import annotations

import socket
import ssl
from collections.abc import Iterator, Sequence

from redis import exceptions

from dualmap.statestore.errors import StoreConfigurationError, StoreError, StoreUnavailableError


def connect_error(error: Exception, server: str, *, tls: bool, timeout_s: float, credentials: str) -> StoreError:
    """The error that an attempt to connect to ``server`` means which failed with ``error``; ``credentials`` is what the
    store's URL calls those of this server."""
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
    why, hint = _why(error, causes), "; start it, or correct store.url"
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


def _why(error: Exception, causes: Sequence[BaseException]) -> str:
    """Why there is no connection, without the address, which redis-py repeats in its texts."""
    for cause in causes:
        if isinstance(cause, ConnectionRefusedError):
            return "nothing listens there"
        if isinstance(cause, FileNotFoundError):
            return "there is no such socket"
        if isinstance(cause, socket.gaierror):
            return "there is no host of this name"
    return str(error).rstrip(".")


def _causes(error: BaseException | None) -> Iterator[BaseException]:
    while error is not None:
        yield error
        error = error.__cause__ or error.__context__
