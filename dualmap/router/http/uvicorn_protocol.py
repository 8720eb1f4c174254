"""The protocol of the data plane, which uvicorn makes for every connection."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import Any

from uvicorn.config import Config
from uvicorn.server import ServerState

from dualmap.router.http.admission import make_head_check, refusing_inference
from dualmap.router.http.client import ClientConnection
from dualmap.router.http.client_certificates import head_check_finder
from dualmap.router.http.connection_limit import connection_limit_finder
from dualmap.router.http.plane import DataPlane


def http_protocol(
    plane: DataPlane, *, ops_port: int | None = None, inference: bool = True
) -> Callable[..., asyncio.Protocol]:
    """The value of uvicorn's ``http=``: makes a protocol per connection, over one data plane.

    Everything but inference goes to uvicorn's application. Connections to ``ops_port`` do not count for
    ``router.max_connections``. Without ``inference`` there is none here.
    """
    settings = plane.settings
    limit_of = connection_limit_finder(settings.max_connections, ops_port)
    batches = settings.batches
    check_head = make_head_check(
        plane.tenants,
        max_body_bytes=settings.max_body_bytes,
        max_file_bytes=0 if batches.storage is None else batches.max_file_bytes,
        forbidden_paths=settings.forbidden_paths,
    )
    if not inference:
        why = "this port takes no inference; send it to the gateway that asks this picker"
        check_head = refusing_inference(check_head, why)
    check_of = head_check_finder(settings, check_head)

    def make(
        config: Config,
        server_state: ServerState,
        app_state: dict[str, Any],
        _loop: asyncio.AbstractEventLoop | None = None,
    ) -> asyncio.Protocol:
        return ClientConnection(plane, check_of, config.loaded_app, server_state, app_state, limit_of)

    return make
