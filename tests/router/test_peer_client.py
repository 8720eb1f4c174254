"""All that queries peers shares one HTTP client."""

from __future__ import annotations

from typing import Any

import httpx

from dualmap.router.peer_client import PeerClient
from tests.router import tools


async def test_a_closed_client_is_made_again_where_something_is_still_asked() -> None:
    client = PeerClient(httpx.MockTransport(lambda request: httpx.Response(200, text=request.url.path)))
    first = client.http
    assert client.http is first

    await client.close()

    assert first.is_closed
    assert (await client.http.get("http://peer/health")).text == "/health"
    await client.close()


async def test_a_replica_that_queried_peers_leaves_no_client_open(start_runtime: Any) -> None:
    runtime = await start_runtime(instances=(tools.spec("a"),))
    client = runtime.peer_client.http

    await runtime.stop()

    assert client.is_closed
