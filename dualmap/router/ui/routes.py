"""The live page over HTTP: its files, which hold no data and need no key, and its streams, which need the admin key."""

from __future__ import annotations

from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

from fastapi import APIRouter, FastAPI
from fastapi.responses import RedirectResponse, Response, StreamingResponse

from dualmap.router.errors import NotFoundError, ReplicaFullError
from dualmap.router.replica.runtime import Runtime
from dualmap.router.ui.feed import INTERVAL_S, MAX_VIEWERS, Feed, frame
from dualmap.router.ui.own_requests import OwnRequests
from dualmap.router.ui.peers import PATH as REPLICA_STREAM
from dualmap.router.ui.peers import Peers
from dualmap.router.ui.status import status_of

_FILES = Path(__file__).parent / "static"
_TYPES = {".html": "text/html", ".css": "text/css", ".js": "text/javascript", ".svg": "image/svg+xml"}
_POLICY = (
    "default-src 'none'; script-src 'self'; style-src 'self' 'unsafe-inline'; img-src 'self' data:; connect-src 'self';"
    " base-uri 'none'; form-action 'none'; frame-ancestors 'none'"
)
_STREAM_HEADERS = {"cache-control": "no-store", "x-accel-buffering": "no"}


def add_ui(app: FastAPI, runtime: Runtime, needs_admin: Any) -> None:
    """Serve the page of this replica at ``/ui``."""
    own_key = runtime.context.settings.own_admin_key
    peers = Peers(runtime.context.replica_id, own_key, runtime.peer_client)
    feed = Feed(runtime, peers)
    files = {path.name: path.read_bytes() for path in _FILES.iterdir() if path.suffix in _TYPES}
    routes = APIRouter(include_in_schema=False)

    @routes.get("/ui/")
    async def slash() -> Response:
        return RedirectResponse("../ui")

    @routes.get("/ui")
    async def page() -> Response:
        return _file("index.html", files["index.html"])

    @routes.get("/ui/stream", dependencies=[needs_admin])
    async def stream() -> Response:
        if feed.viewers >= MAX_VIEWERS:
            raise ReplicaFullError(f"this replica has {MAX_VIEWERS} viewers already; close a page", retry_after_s=10.0)
        return StreamingResponse(feed.frames(), media_type="text/event-stream", headers=_STREAM_HEADERS)

    @routes.get(REPLICA_STREAM, dependencies=[needs_admin])
    async def replica_stream() -> Response:
        return StreamingResponse(_own_requests(runtime), media_type="text/event-stream", headers=_STREAM_HEADERS)

    @routes.get("/ui/{name}")
    async def static(name: str) -> Response:
        if name not in files:
            raise NotFoundError(f"there is nothing at /ui/{name}; the live page is at /ui")
        return _file(name, files[name])

    app.include_router(routes)


async def _own_requests(runtime: Runtime) -> AsyncIterator[bytes]:
    """The stream for a peer's page: the requests and the status of this replica alone, every second."""
    own, replica_id = OwnRequests(runtime), runtime.context.replica_id
    while not runtime.context.draining:
        rows, keys = own.read()
        message = {"replica_id": replica_id, "requests": rows, "keys": keys, "status": status_of(runtime)}
        yield frame("requests", message)
        await runtime.context.clock.sleep(INTERVAL_S)


def _file(name: str, content: bytes) -> Response:
    headers = {
        "content-security-policy": _POLICY,
        "cache-control": "no-cache",
        "x-content-type-options": "nosniff",
        "referrer-policy": "no-referrer",
    }
    return Response(content, media_type=_TYPES[Path(name).suffix], headers=headers)
