"""A sidecar in front of a decoder, as llm-d's: it sends the prefill leg of a request to the instance that the gateway
names in ``x-prefiller-host-port``, and hands the place of the KV on to its decoder.

    python -m tests.support.sidecar PORT URL_OF_THE_DECODER

It is ours, and speaks that protocol (``kv_transfer_params`` of NIXL); it is not llm-d's process. ``GET /sidecar`` says
how many prefill legs it has sent, and how many requests came without a prefill instance.
"""

from __future__ import annotations

import json
import sys
from collections.abc import AsyncIterator
from typing import Any

import httpx
import uvicorn
from fastapi import FastAPI, Request
from fastapi.responses import JSONResponse, Response, StreamingResponse

PREFILLER = "x-prefiller-host-port"
STAGES = {"do_remote_decode": True, "do_remote_prefill": False}
_HOP = {"host", "content-length", "transfer-encoding", "connection", PREFILLER}


def sidecar(decoder: str) -> FastAPI:
    app, client = FastAPI(), httpx.AsyncClient(timeout=60)
    counts = {"prefills": 0, "alone": 0}

    @app.get("/sidecar")
    def counted() -> dict[str, int]:
        return counts

    @app.api_route("/{path:path}", methods=["GET", "POST"])
    async def passed_on(path: str, request: Request) -> Response:
        body, fields = await request.body(), {k: v for k, v in request.headers.items() if k not in _HOP}
        prefiller = request.headers.get(PREFILLER)
        if prefiller is not None:
            sent: dict[str, Any] = json.loads(body)
            leg = {**sent, "stream": False, "max_tokens": 1, "kv_transfer_params": STAGES}
            leg.pop("stream_options", None)
            answer = await client.post(f"http://{prefiller}/{path}", json=leg, headers=_without_length(fields))
            if answer.status_code != 200:
                return JSONResponse(answer.json(), answer.status_code)
            counts["prefills"] += 1
            body = json.dumps({**sent, "kv_transfer_params": answer.json()["kv_transfer_params"]}).encode()
        elif request.method == "POST":
            counts["alone"] += 1
        url = f"{decoder}/{path}"
        decoding = client.build_request(request.method, url, content=body, headers=fields, params=request.query_params)
        streamed = await client.send(decoding, stream=True)

        async def pieces() -> AsyncIterator[bytes]:
            try:
                async for piece in streamed.aiter_raw():
                    yield piece
            finally:
                await streamed.aclose()

        kept = {name: value for name, value in streamed.headers.items() if name not in _HOP}
        return StreamingResponse(pieces(), streamed.status_code, kept)

    return app


def _without_length(fields: dict[str, str]) -> dict[str, str]:
    return {name: value for name, value in fields.items() if name != "content-type"}


if __name__ == "__main__":
    uvicorn.run(sidecar(sys.argv[2]), host="127.0.0.1", port=int(sys.argv[1]), log_level="warning")
