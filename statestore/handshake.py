"""A new connection to one server: made, secured and greeted, or why there is none."""

from __future__ import annotations

import asyncio
import ssl
from collections.abc import Callable, Sequence
from typing import Any

from statestore.endpoint import Endpoint
from statestore.errors import StoreConfigurationError, StoreError, StoreUnavailableError
from statestore.packing import Argument, pack
from statestore.wire import ConnectionLostError, PushHandler, Wire


async def connect(
    endpoint: Endpoint,
    command_timeout_s: float,
    *,
    on_lost: Callable[[Wire], None] = lambda wire: None,
    on_push: PushHandler | None = None,
) -> Wire:
    """A greeted connection; the caller bounds the time and aborts it in the end.

    Raises:
        StoreConfigurationError: a server is there, and it or this side refuses the other.
        StoreUnavailableError: there is none.
    """
    loop = asyncio.get_running_loop()

    def new_wire() -> Wire:
        return Wire(command_timeout_s, on_lost=on_lost, on_push=on_push)

    try:
        if endpoint.unix_path is not None:
            _, wire = await loop.create_unix_connection(new_wire, endpoint.unix_path)
        else:
            _, wire = await loop.create_connection(
                new_wire,
                endpoint.host,
                endpoint.port,
                ssl=endpoint.tls,
                server_hostname=endpoint.host if endpoint.tls is not None else None,
                ssl_handshake_timeout=command_timeout_s if endpoint.tls is not None else None,
            )
    except ssl.SSLCertVerificationError as error:
        raise StoreConfigurationError(
            f"the certificate of {endpoint} is not accepted: {error.verify_message};"
            " ssl_ca_certs and ssl_check_hostname in store.url say what is"
        ) from error
    except (ssl.SSLError, ConnectionAbortedError) as error:  # the latter when it takes too long
        raise StoreUnavailableError(
            f"cannot connect to the store at {endpoint}: {error}; if it speaks no TLS, use redis://"
        ) from error
    except OSError as error:
        raise StoreUnavailableError(f"cannot connect to the store at {endpoint}: {error.strerror or error}") from error
    try:
        for arguments in endpoint.greeting():
            await _greet(wire, endpoint, arguments)
    except BaseException:
        wire.abort()
        raise
    return wire


async def _greet(wire: Wire, endpoint: Endpoint, arguments: tuple[Argument, ...]) -> None:
    command = arguments[0]
    try:
        await wire.send(pack(arguments))
    except ConnectionLostError as error:
        raise StoreUnavailableError(f"{endpoint} does not take this client: {error}; {_hint(endpoint)}") from error
    except StoreUnavailableError:
        raise
    except StoreError as error:
        if command == "SELECT":
            raise StoreConfigurationError(f"{endpoint} refuses the database of store.url: {error}") from error
        if command == "AUTH" or (endpoint.password is None and isinstance(error, StoreConfigurationError)):
            raise StoreConfigurationError(
                f"{endpoint} refuses the {endpoint.credentials} of store.url: {error}"
            ) from error
        # What is left is the connection's name, which only people read.


def _hint(endpoint: Endpoint) -> str:
    """What a server that closes a new connection may miss."""
    if endpoint.tls is None:
        return "if it speaks TLS, use rediss://"
    return "if it wants a certificate of its clients, store.url takes ssl_certfile and ssl_keyfile"


async def ask_all(
    servers: Sequence[Endpoint], command: tuple[Argument, ...], timeout_s: float
) -> list[tuple[Endpoint, Any]]:
    """What each server answers within the time, over a connection of its own; those that do not are left out.

    Raises:
        StoreConfigurationError: none answers, and one that is there refuses this client or the command.
        StoreUnavailableError: none answers.
    """
    replies = await asyncio.gather(*(_ask(server, command, timeout_s) for server in servers), return_exceptions=True)
    answers, complaints = [], []
    for server, reply in zip(servers, replies, strict=True):
        if isinstance(reply, StoreError):
            complaints.append(reply)
        elif isinstance(reply, BaseException):
            raise reply
        else:
            answers.append((server, reply))
    if answers:
        return answers
    for complaint in complaints:
        if isinstance(complaint, StoreConfigurationError):
            raise complaint
    raise StoreUnavailableError("; ".join(map(str, complaints)))


async def _ask(server: Endpoint, command: tuple[Argument, ...], timeout_s: float) -> Any:
    try:
        async with asyncio.timeout(timeout_s):
            wire = await connect(server, timeout_s)
            try:
                return await wire.send(pack(command))
            except StoreUnavailableError as error:
                raise StoreUnavailableError(f"{server}: {error}") from error
            except StoreError as error:
                raise StoreConfigurationError(f"{server} refuses what store.url asks it for: {error}") from error
            finally:
                wire.abort()
    except TimeoutError as error:
        raise StoreUnavailableError(f"{server}: no answer within {timeout_s:g} s") from error
