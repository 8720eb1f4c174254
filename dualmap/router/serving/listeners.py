"""Listening sockets of a replica, bound before anything else so that a taken port stops the start."""

from __future__ import annotations

import ipaddress
import socket
from collections.abc import Sequence

_WILDCARDS = frozenset({"0.0.0.0", "::", ""})


def bind(host: str, port: int, *, shared: bool) -> socket.socket:
    """A bound TCP socket that does not listen yet. ``shared``: other replicas on this machine bind it too, and
    the kernel spreads connections over those that listen.

    Raises:
        OSError: the address cannot be bound; the message names it.
    """
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    # The protocol is named because only then does asyncio turn Nagle's algorithm off, which would delay tokens.
    listener = socket.socket(family, socket.SOCK_STREAM, socket.IPPROTO_TCP)
    try:
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        if shared and hasattr(socket, "SO_REUSEPORT"):
            listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEPORT, 1)
        listener.bind((host, port))
    except OSError as error:
        listener.close()
        raise OSError(error.errno, f"cannot listen on {host}:{port}: {error.strerror}") from error
    listener.setblocking(False)
    return listener


def port_of(listener: socket.socket) -> int:
    """The port a socket is bound to."""
    port: int = listener.getsockname()[1]
    return port


def advertised_url(host: str, port: int, towards: Sequence[tuple[str, int]] = (), *, tls: bool = False) -> str:
    """The base URL by which other machines reach what listens on ``host`` and ``port``; ``towards`` are addresses that
    they reach as well, such as the store's."""
    name = advertised_host(host, towards)
    scheme = "https" if tls else "http"
    return f"{scheme}://[{name}]:{port}" if ":" in name else f"{scheme}://{name}:{port}"


def advertised_host(host: str, towards: Sequence[tuple[str, int]] = ()) -> str:
    """The host by which other machines reach what listens on ``host``.

    Of a wildcard it is the address of the interface that leads to the first of ``towards`` which can be resolved: a
    name of this machine may be known to it alone, as in a pod. Where all of them are on this machine, or there is none,
    it is the machine's name if it can be resolved. Waits for a name server, at most.
    """
    if host not in _WILDCARDS:
        return host
    families = (socket.AF_INET,) if host == "0.0.0.0" else (socket.AF_INET, socket.AF_INET6)
    for each in towards:
        address = _address_towards(*each, families)
        if address is not None and not ipaddress.ip_address(address).is_loopback:
            return address
    name = socket.gethostname()
    try:
        socket.getaddrinfo(name, None)
    except OSError:
        return "127.0.0.1"
    return name


def _address_towards(host: str, port: int, families: Sequence[socket.AddressFamily]) -> str | None:
    """The address of this machine's interface that leads to a host; no packet is sent. None where no interface does."""
    try:
        found = socket.getaddrinfo(host, port, type=socket.SOCK_DGRAM)
    except OSError:
        return None
    for family, kind, protocol, _, address in found:
        if family in families:
            try:
                with socket.socket(family, kind, protocol) as probe:
                    probe.connect(address)
                    return str(probe.getsockname()[0])
            except OSError:
                continue
    return None
