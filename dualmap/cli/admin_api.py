"""Calls of a replica's ``/admin``."""

from __future__ import annotations

import argparse
import getpass
import socket
from collections.abc import Callable, Iterable, Mapping
from http import HTTPStatus
from typing import Any
from urllib.parse import urlencode

from dualmap.cli.errors import CommandError, UsageError
from dualmap.cli.fetch import HttpReply, fetch
from dualmap.cli.settings import Settings
from dualmap.runtime.spelling import did_you_mean

_TIMEOUT_S = 10.0
_EVERYWHERE = frozenset({"", "0.0.0.0", "::"})


def add_connection_arguments(parser: argparse.ArgumentParser, default: str | None = None) -> None:
    """The options of every command that talks to a router."""
    url = "a replica or the fleet's endpoint; by default the address of router.port"
    parser.add_argument("--url", default=default, help=url)
    parser.add_argument("--pool", default=default, help="pool name; may be left out when there is one")


def add_connection_and_json(parser: argparse.ArgumentParser, actions: Iterable[argparse.ArgumentParser] = ()) -> None:
    """The options of a command that talks to a router and prints a table, before its action as well as behind it."""
    said = "the values behind the table, as JSON"
    add_connection_arguments(parser)
    parser.add_argument("--json", action="store_true", help=said)
    for each in actions:  # an option that is left out there must not undo the one before it
        add_connection_arguments(each, argparse.SUPPRESS)
        each.add_argument("--json", action="store_true", default=argparse.SUPPRESS, help=said)


def endpoint(settings: Settings) -> str:
    """The URL by which this machine reaches the routers of this configuration."""
    return base_url(settings, settings.router.port, "http" if settings.router.tls is None else "https")


def operation(settings: Settings) -> str:
    """The URL for administration: where the endpoint speaks TLS, its certificate hardly names this machine's address,
    and the replica's own port speaks none."""
    router = settings.router
    if router.tls is None or router.ops_port is None:
        return endpoint(settings)
    return base_url(settings, router.ops_port)


def base_url(settings: Settings, port: int, scheme: str = "http") -> str:
    """The URL by which this machine reaches a router that listens on ``port``, the endpoint's or its own."""
    host = "127.0.0.1" if settings.router.host in _EVERYWHERE else settings.router.host
    return f"{scheme}://[{host}]:{port}" if ":" in host else f"{scheme}://{host}:{port}"


class NotKnownError(UsageError):
    """The fleet knows nothing of the name that was given."""


def suggestion(name: str, known: Callable[[], Iterable[str]]) -> str:
    """The end of the error about a name that the fleet does not know; ``known`` lists those that it does."""
    try:
        return did_you_mean(name, known())
    except CommandError:
        return ""


def checked_url(url: str) -> str:
    """The URL that an option names.

    Raises:
        UsageError: it does not say by which protocol.
    """
    if not url.startswith(("http://", "https://")):
        raise UsageError(f"--url needs http:// or https:// in front: http://{url.partition('://')[2] or url}")
    return url


class AdminApi:
    """One replica's ``/admin``; what it changes, it changes for the whole fleet."""

    def __init__(self, arguments: argparse.Namespace, settings: Settings) -> None:
        url = checked_url(arguments.url) if arguments.url else operation(settings)
        self._base_url = url.rstrip("/").removesuffix("/v1")
        self._pool = arguments.pool
        self._key = settings.router.own_admin_key

    def call(
        self, method: str, path: str, body: dict[str, Any] | None = None, query: Mapping[str, object] | None = None
    ) -> Any:
        """The JSON of the answer.

        Raises:
            CommandError: no answer, or an error; with the replica's own message.
        """
        answer = self.send(method, path, body, query)
        refuse_errors(answer)
        return answer.json

    def send(
        self,
        method: str,
        path: str,
        body: dict[str, Any] | None = None,
        query: Mapping[str, object] | None = None,
        *,
        folder: str = "/admin",
        timeout_s: float = _TIMEOUT_S,
    ) -> HttpReply:
        """The answer, with any status; ``folder`` is that of the path.

        Raises:
            CommandError: no server answers.
        """
        fields = {**(query or {}), **({"pool": self._pool} if self._pool else {})}
        answer = fetch(
            f"{self._base_url}{folder}{path}{'?' if fields else ''}{urlencode(fields)}",
            method=method,
            body=body,
            key=self._key,
            timeout_s=timeout_s,
            fields={"x-dualmap-by": user_and_machine()},
        )
        if answer.status == 0:
            reason = answer.body.decode(errors="replace")
            raise CommandError(f"no router answers at {self._base_url} ({reason}); name one with --url")
        return answer


def user_and_machine() -> str:
    """The user who runs this and the machine, for the logs of changes."""
    return f"{getpass.getuser()}@{socket.gethostname()}".encode("ascii", "replace").decode()


def refuse_errors(answer: HttpReply) -> None:
    """Raises CommandError with the replica's own message; its errors have OpenAI's shape."""
    if answer.status < HTTPStatus.BAD_REQUEST:
        return
    body = answer.json
    error = body.get("error") if isinstance(body, dict) else None
    said = error.get("message") if isinstance(error, dict) else answer.body.decode(errors="replace")[:300]
    if answer.status == HTTPStatus.NOT_FOUND and error is None:  # a router's own answers have OpenAI's shape
        raise CommandError("the server that answers is no router (a worker, or an instance?); name a router with --url")
    if answer.status == HTTPStatus.NOT_FOUND:
        raise NotKnownError(said)
    if answer.status in (HTTPStatus.BAD_REQUEST, HTTPStatus.UNPROCESSABLE_ENTITY):
        raise UsageError(said)
    if answer.status == HTTPStatus.UNAUTHORIZED:
        said = f"{said}; give it in the variable DUALMAP_ROUTER__ADMIN_KEY, or as router.admin_key in --config FILE"
    raise CommandError(said)
