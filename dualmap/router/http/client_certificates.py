"""The rights of clients that show no certificate, where ``router.tls_client_ca`` names CAs of clients."""

from __future__ import annotations

import asyncio
from collections.abc import Callable

from dualmap.router.errors import CertificateRequiredError
from dualmap.router.http.admission import refusing_inference
from dualmap.router.http.paths import ABORT_PATH, needs_admin, needs_api_key
from dualmap.router.http.request_reader import ClientRequest, HeadCheck
from dualmap.router.settings import RouterSettings
from dualmap.router.tenants.gateway import gateway_finder
from dualmap.runtime.certificates import client_name

HeadCheckFinder = Callable[[asyncio.BaseTransport], HeadCheck]
"""The rule for the heads that come over a connection."""


def head_check_finder(settings: RouterSettings, check_head: HeadCheck) -> HeadCheckFinder:
    """The rule of each connection: ``check_head`` decides, and before it the certificate of the client. A connection of
    the gateway is told by that, or by its address."""
    find = _by_certificate(settings, check_head)
    if settings.gateway is None:
        return find
    is_gateway = gateway_finder(settings.gateway)

    def find_of_gateway(transport: asyncio.BaseTransport) -> HeadCheck:
        check = find(transport)
        named = client_name(transport.get_extra_info("peercert"))
        return _of_gateway(check) if is_gateway(transport.get_extra_info("peername"), named) else check

    return find_of_gateway


def _of_gateway(check_head: HeadCheck) -> HeadCheck:
    def check(request: ClientRequest) -> int:
        request.from_gateway = True
        return check_head(request)

    return check


def _by_certificate(settings: RouterSettings, check_head: HeadCheck) -> HeadCheckFinder:
    needed = settings.tls_client_required_for
    if settings.tls_client_ca is None:
        return lambda _: check_head
    unnamed = _requiring_certificate(check_head, inference="inference" in needed, admin="admin" in needed)
    plain = check_head
    if "inference" in needed or "connections" in needed:
        plain = refusing_inference(
            check_head,
            "the ops port takes no inference where that needs a client certificate; send it to router.port, by https",
        )

    def find(transport: asyncio.BaseTransport) -> HeadCheck:
        if transport.get_extra_info("sslcontext") is None:
            return plain
        name = client_name(transport.get_extra_info("peercert"))
        return unnamed if name is None else _naming_client(check_head, name)

    return find


def _naming_client(check_head: HeadCheck, name: str) -> HeadCheck:
    def check(request: ClientRequest) -> int:
        request.client = name
        return check_head(request)

    return check


def _requiring_certificate(check_head: HeadCheck, *, inference: bool, admin: bool) -> HeadCheck:
    def check(request: ClientRequest) -> int:
        path = request.path
        client_path = needs_api_key(path) or path == ABORT_PATH
        if request.method != "OPTIONS" and ((inference and client_path) or (admin and needs_admin(path))):
            raise CertificateRequiredError(
                f"{path} needs a client certificate here (router.tls_client_required_for); connect with one of the CAs"
                " of router.tls_client_ca"
            )
        return check_head(request)

    return check
