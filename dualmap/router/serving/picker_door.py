"""The endpoint picker as the door of a replica."""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Callable
from typing import Any
from urllib.parse import unquote, urlsplit

from dualmap.router.http.plane import DataPlane
from dualmap.router.picker.addresses import Addresses
from dualmap.router.picker.picked import Picker, make_head_check
from dualmap.router.picker.service import PickerServer
from dualmap.router.picker.settings import PickerSettings
from dualmap.router.replica.runtime import Runtime
from dualmap.router.serving.serve import MakeDoor
from dualmap.router.settings import RouterSettings
from dualmap.router.tenants.gateway import gateway_finder

log = logging.getLogger(__name__)


def door_of(settings: PickerSettings, *, test_headers: bool = False) -> MakeDoor:
    def make(runtime: Runtime, plane: DataPlane) -> PickerServer:
        started_s, router = int(time.time()), plane.settings

        async def model_cards() -> dict[str, Any]:
            pools = runtime.pools.pools
            await asyncio.gather(*(pool.view.look() for pool in pools.values()))
            lengths = await asyncio.gather(*map(runtime.model_lengths.of, pools.values()))
            known = {name: length for name, length in zip(pools, lengths, strict=True) if length is not None}
            return runtime.pools.model_cards(started_s, known)

        check_head = make_head_check(
            plane.tenants,
            max_body_bytes=router.max_body_bytes,
            forbidden_paths=router.forbidden_paths,
        )

        def warn(what: str) -> None:
            log.warning(what)
            runtime.warnings.append(what)

        picker = Picker(
            plane,
            check_head,
            Addresses(runtime.context.clock),
            model_cards,
            choices=settings.choices,
            observed_share=settings.observed_share,
            test_headers=test_headers,
            is_gateway=gateway_streams(router),
            warn=warn,
        )
        server = PickerServer(
            settings,
            picker,
            lambda: runtime.accepts_traffic,
            max_body_bytes=router.max_body_bytes,
            reached_at=urlsplit(runtime.advertised_url).hostname or settings.host,
        )
        runtime.certificates += server.certificates
        return server

    return make


def gateway_streams(router: RouterSettings) -> Callable[[str], bool]:
    """Whether a stream comes from an address of the gateway that names tenants."""
    if router.gateway is None:
        return lambda peer: False
    is_gateway = gateway_finder(router.gateway)

    def find(peer: str) -> bool:
        kind, _, place = peer.partition(":")
        address = unquote(place.rpartition(":")[0]).strip("[]")
        return kind in ("ipv4", "ipv6") and is_gateway((address,), None)

    return find
