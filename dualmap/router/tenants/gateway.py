"""Requests of a gateway that has identified the client, and names its tenant in a header field."""

from __future__ import annotations

from collections.abc import Callable
from ipaddress import ip_address

from dualmap.router.settings import GatewaySettings


def gateway_finder(settings: GatewaySettings) -> Callable[[object, str | None], bool]:
    """Whether a connection is the gateway's, by its address (as ``peername`` gives it) or the name of its verified
    client certificate."""
    networks, certificates = settings.networks, frozenset(settings.certificates)

    def is_gateway(peer: object, certificate: str | None) -> bool:
        if certificate is not None and certificate in certificates:
            return True
        if not networks or not isinstance(peer, tuple) or not peer:
            return False
        try:
            address = ip_address(str(peer[0]).partition("%")[0])
        except ValueError:
            return False
        mapped = getattr(address, "ipv4_mapped", None)
        return any((mapped or address) in network for network in networks)

    return is_gateway
