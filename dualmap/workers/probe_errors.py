"""Reasons why a server could not be reached, in words that say what to look at."""

from __future__ import annotations

import socket
import ssl
from collections.abc import Iterator
from http import HTTPStatus
from typing import Final

import httpx

_WANTS_CERTIFICATE: Final = ("TLSV13_ALERT_CERTIFICATE_REQUIRED", "SSLV3_ALERT_HANDSHAKE_FAILURE")


def unreached(error: BaseException, url: httpx.URL) -> str:
    """The reason why an exchange got no answer, in words."""
    where = f"{url.host}:{url.port or {'https': 443}.get(url.scheme, 80)}"
    for each in _causes(error):
        if isinstance(each, socket.gaierror):
            return f"the host name {url.host!r} cannot be resolved: {each.strerror}"
        if isinstance(each, ssl.SSLCertVerificationError):
            return (
                f"TLS: the certificate of {where} is not accepted: {each.verify_message}; name its CA by"
                " upstream.ca_file or SSL_CERT_FILE, where that is what is missing"
            )
        if isinstance(each, ssl.SSLError):
            if each.reason in _WANTS_CERTIFICATE:
                return f"TLS: {where} wants a certificate of its clients; set upstream.certificate_file and key_file"
            return f"TLS: no handshake with {where}: {each.reason or each}; does it speak https?"
        if isinstance(each, ConnectionRefusedError):
            return f"connection refused by {where}: no server listens there"
    if isinstance(error, httpx.RemoteProtocolError):
        return f"no HTTP from {where}: {error}"
    said = next((each.strerror for each in _causes(error) if isinstance(each, OSError) and each.strerror), None)
    if isinstance(error, httpx.ConnectError) and said is not None:
        return f"no connection to {where}: {said}"
    return f"{type(error).__name__}: {said or error}"


def refused_status(status: int) -> str:
    """The meaning of a status that is no success, in words."""
    if status in (HTTPStatus.UNAUTHORIZED, HTTPStatus.FORBIDDEN):
        return f"status {status}: it wants a key; set worker.upstream_api_key and router.upstream_api_key"
    if 300 <= status < 400:
        return f"status {status}: it leads elsewhere; give the instance the URL of the server itself"
    return f"status {status}"


def refused_list(status: int) -> str | None:
    """The complaint about requests that a refused ``/v1/models`` implies; None where it says nothing of them."""
    wants_key = status in (HTTPStatus.UNAUTHORIZED, HTTPStatus.FORBIDDEN)
    return f"GET /v1/models: {refused_status(status)}" if wants_key else None


def _causes(error: BaseException | None) -> Iterator[BaseException]:
    """The error, and what it was raised from, groups of errors included."""
    while error is not None:
        yield error
        if isinstance(error, BaseExceptionGroup):
            for each in error.exceptions:
                yield from _causes(each)
        error = error.__cause__ or error.__context__
