"""The addresses of instances as a gateway knows them: an IP address and a port."""

from __future__ import annotations

import asyncio
import ipaddress
import socket
from collections.abc import Iterable, Mapping
from functools import lru_cache
from typing import Final

from dualmap.router.http.upstream_pool import parse_origin
from dualmap.runtime.clock import Clock
from dualmap.scheduling.state.instance import InstanceSpec

KEPT_S: Final = 30.0
"""How long the address of a name is taken for the same."""


class UnknownAddressError(Exception):
    """The name of an instance's host has no address."""


class Addresses:
    """Addresses of instances. Names are resolved once in a while; where that fails, the former address stays."""

    def __init__(self, clock: Clock) -> None:
        self._clock = clock
        self._resolved: dict[str, tuple[str, float]] = {}

    async def of(self, spec: InstanceSpec) -> str:
        """The address of an instance.

        Raises:
            UnknownAddressError: its host has none.
        """
        if (written := literal(spec.url)) is not None:
            return written
        origin = parse_origin(spec.url)
        known, now_s = self._resolved.get(spec.url), self._clock.monotonic_s()
        if known is not None and now_s - known[1] < KEPT_S:
            return known[0]
        try:
            found = await asyncio.get_running_loop().getaddrinfo(origin.host, origin.port, type=socket.SOCK_STREAM)
        except OSError as error:
            if known is None:
                raise UnknownAddressError(f"{origin.host} cannot be resolved: {error.strerror or error}") from error
            return known[0]
        # IPv4 first: gateways are told one address, and are rarely without it.
        _, _, _, _, where = min(found, key=lambda each: each[0] is not socket.AF_INET)
        address = _joined(str(where[0]), origin.port)
        self._resolved[spec.url] = address, now_s
        return address

    async def having(self, members: Mapping[str, InstanceSpec], wanted: Iterable[str]) -> dict[str, list[str]]:
        """The members at each of these addresses; several where an address serves several ranks. An address without a
        port means every member of the host."""
        found: dict[str, list[str]] = {address: [] for address in wanted}
        for instance_id, spec in members.items():
            try:
                address = await self.of(spec)
            except UnknownAddressError:
                continue
            for each in (address, address.rpartition(":")[0].strip("[]")):
                if each in found:
                    found[each].append(instance_id)
        return found


@lru_cache(maxsize=4096)
def literal(url: str) -> str | None:
    """The address of an instance whose URL has one; None where it has a name."""
    origin = parse_origin(url)
    try:
        return _joined(str(ipaddress.ip_address(origin.host)), origin.port)
    except ValueError:
        return None


def _joined(host: str, port: int) -> str:
    return f"[{host}]:{port}" if ":" in host else f"{host}:{port}"
