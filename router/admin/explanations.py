"""Why a request went where it went; the replica that placed it remembers, and its peers know how to ask it."""

from __future__ import annotations

import asyncio
from dataclasses import asdict
from itertools import islice
from typing import Annotated, Any
from urllib.parse import quote

import httpx
from fastapi import APIRouter, Path, Query, Request

from router.admin.auth import presented_key
from router.admin.scope import RuntimeParam
from router.errors import NotFoundError
from router.explain import Explanation
from router.runtime import Runtime
from statestore.base import ReplicaInfo, RequestRecord

routes = APIRouter(prefix="/admin", tags=["explanations"])

PEER_TIMEOUT_S = 1.0

LocalOnly = Annotated[bool, Query(description="do not ask the other replicas")]


@routes.get("/explain")
@routes.get("/explain/", include_in_schema=False)  # else a request without an id
async def recent(
    runtime: RuntimeParam,
    limit: Annotated[int, Query(ge=1, le=1000, description="answers at most")] = 20,
) -> list[dict[str, Any]]:
    """What this replica remembers: its live requests, the newest first, then those that ended, the last one first."""
    context = runtime.context
    told = (live.explain() for live in reversed([*context.live]))  # one after the other, no more than are listed
    live = list(islice((explanation for explanation in told if explanation is not None), limit))
    return [_story(runtime, explanation) for explanation in (*live, *context.decisions.recent(limit - len(live)))]


@routes.get("/explain/{request_id:path}")
async def explain(
    request: Request,
    runtime: RuntimeParam,
    request_id: Annotated[str, Path(description="the x-request-id of the answer")],
    local: LocalOnly = False,
) -> dict[str, Any]:
    """One request's story: its hash key, what each decision saw and why it fell that way, where the request went.

    Asked of any replica: what it did not place itself it asks of its peers, by the operation address they
    advertise (`router.ops_port`).
    """
    if (explanation := _explanation(runtime, request_id)) is not None:
        return _story(runtime, explanation)
    if not local:
        told = await _ask_peers(request, runtime, request_id)
        if told is not None:
            return told
    record = await _live_record(runtime, request_id)
    if record is not None:
        return {
            "request_id": request_id,
            "replica_id": record.replica_id,
            "record": asdict(record),
            "note": "the replica that placed it keeps the explanation, but could not be asked",
        }
    raise NotFoundError(
        f"no replica remembers request {request_id!r}: each keeps its last {runtime.context.settings.explanations} "
        "decisions (router.explanations)",
        param="request_id",
    )


def _explanation(runtime: Runtime, request_id: str) -> Explanation | None:
    live = runtime.context.live.get(request_id)
    return runtime.context.decisions.get(request_id) if live is None else live.explain()


def _story(runtime: Runtime, explanation: Explanation) -> dict[str, Any]:
    return {
        "replica_id": runtime.context.replica_id,
        **asdict(explanation),
        "hash_key": f"{explanation.hash_key:016x}",
    }


async def _live_record(runtime: Runtime, request_id: str) -> RequestRecord | None:
    for pool in runtime.pools.pools.values():
        records = await pool.store.held_states([request_id])
        if request_id in records:
            return records[request_id]
    return None


async def _ask_peers(request: Request, runtime: Runtime, request_id: str) -> dict[str, Any] | None:
    """The first peer's answer that has one. Peers that do not answer in time are passed over."""
    peers = await _peers(runtime)
    if not peers:
        return None
    key = presented_key(request)
    headers = {"authorization": f"Bearer {key}"} if key else {}
    async with httpx.AsyncClient(timeout=PEER_TIMEOUT_S, headers=headers) as client:
        answers = await asyncio.gather(*(_ask_peer(client, url, request_id) for url in peers))
    return next((answer for answer in answers if answer is not None), None)


async def _ask_peer(client: httpx.AsyncClient, url: str, request_id: str) -> dict[str, Any] | None:
    try:
        answer = await client.get(f"{url}/admin/explain/{quote(request_id, safe='')}", params={"local": "true"})
    except httpx.HTTPError:
        return None
    if answer.status_code != 200:
        return None
    story: dict[str, Any] = answer.json()
    return story if "rounds" in story else None


async def _peers(runtime: Runtime) -> list[str]:
    """Addresses of the other replicas, each once although it is in every pool."""
    replicas: dict[str, ReplicaInfo] = {}
    for pool in runtime.pools.pools:
        for replica in (await runtime.fleet.get(pool)).replicas:
            replicas[replica.replica_id] = replica
    replicas.pop(runtime.context.replica_id, None)
    return [url for replica in replicas.values() if (url := replica.info.get("ops_url"))]
