"""Listening sockets of a replica, bound before anything else so that a taken port stops the start."""

from __future__ import annotations

import ipaddress
import socket


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


def advertised_url(host: str, port: int) -> str:
    """The base URL by which other machines reach what listens on ``host`` and ``port``."""
    name = advertised_host(host)
    return f"http://[{name}]:{port}" if ":" in name else f"http://{name}:{port}"


def is_loopback(host: str) -> bool:
    """Whether only this machine reaches what listens on ``host``."""
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return host == "localhost"


def advertised_host(host: str) -> str:
    """The host by which other machines reach what listens on ``host``."""
    return socket.gethostname() if host in ("0.0.0.0", "::", "") else host
