"""Why a request went where it went; the replica that placed it remembers, and its peers can ask it."""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from heapq import merge
from http import HTTPStatus
from itertools import islice
from typing import Annotated, Any
from urllib.parse import quote

import httpx
from fastapi import APIRouter, Path, Query, Request

from dualmap.router.admin.auth import key_of
from dualmap.router.admin.scope import RuntimeParam
from dualmap.router.errors import NotFoundError
from dualmap.router.pool.served_pool import ServedPool
from dualmap.router.prompts.inference_request import request_of_response
from dualmap.router.replica.runtime import Runtime
from dualmap.router.requests.explain import KEPT_EXPLANATIONS, Explanation
from dualmap.router.requests.explain_costs import costs_of
from dualmap.router.requests.explain_waits import waits_of
from dualmap.scheduling.state.request import StoredRequest
from dualmap.statestore.errors import StoreError

routes = APIRouter(prefix="/admin", tags=["explanations"])

PEER_TIMEOUT_S = 1.0
_WORDS = frozenset({"chatcmpl", "cmpl", "embd", "pooling", "classify", "rerank", "score"})
"""Words that vLLM puts before a request's id, with a hyphen, to name what it answers."""

LocalOnly = Annotated[bool, Query(description="do not ask the other replicas")]


@routes.get("/explain")
@routes.get("/explain/", include_in_schema=False)  # else a request without an id
async def recent(
    request: Request,
    runtime: RuntimeParam,
    limit: Annotated[int, Query(ge=1, le=1000, description="answers at most")] = 20,
    local: LocalOnly = False,
) -> list[dict[str, Any]]:
    """Requests that the replicas remember: live ones, the newest first, then those that ended, the last one first. A
    replica that does not answer within a second is left out. With `local`, no other one is asked."""
    own = _own_recent(runtime, limit)
    if local:
        return own
    answers, _ = await query_peers(request, runtime, f"/admin/explain?limit={limit}&local=true")
    lists = [
        [explained for explained in answer if "rounds" in explained] for answer in answers if isinstance(answer, list)
    ]
    # The lists are merged rather than sorted: times of arrival are computed when requests are explained, and differ by
    # microseconds.
    explanations = merge(own, *lists, key=_place_in_list)
    once = {(explained["replica_id"], explained["request_id"]): explained for explained in explanations}
    return [*islice(once.values(), limit)]


def _place_in_list(explained: dict[str, Any]) -> tuple[bool, float]:
    done_s: float | None = explained["done_s"]
    return done_s is not None, -(explained["received_unix_s"] + (done_s or 0.0))


def _own_recent(runtime: Runtime, limit: int) -> list[dict[str, Any]]:
    context = runtime.context
    found = (live.explain() for live in reversed([*context.live]))  # one after the other, no more than are listed
    live = list(islice((explanation for explanation in found if explanation is not None), limit))
    return [_as_json(runtime, explanation) for explanation in (*live, *context.decisions.recent(limit - len(live)))]


@routes.get("/explain/{request_id:path}")
async def explain(
    request: Request,
    runtime: RuntimeParam,
    request_id: Annotated[str, Path(description="the x-request-id of the answer, or the id in its body")],
    local: LocalOnly = False,
) -> dict[str, Any]:
    """One request: its hash key, the figures and the reason of each decision, why it was held (`waits`: when it was
    deferred, and what went past it, by class and tenant), the instances that it went to, and why the cache of a
    candidate is only estimated at present (`doubts`, where KV events are followed).

    Asked of any replica: what it did not place itself it asks of its peers, by the operation address they
    advertise (`router.ops_port`).
    """
    ids = meant_by(request_id)
    for each in ids:
        if (explanation := _explanation(runtime, each)) is not None:
            pool = runtime.pools.pools[explanation.origin.pool]
            waits, doubts = await waits_of(explanation, pool), await _doubts_of(explanation, pool)
            return _as_json(runtime, explanation) | waits | doubts
    gaps: list[str] = []
    if not local:
        answers, gaps = await query_peers(request, runtime, f"/admin/explain/{quote(request_id, safe='')}?local=true")
        explained = next((answer for answer in answers if isinstance(answer, dict) and "rounds" in answer), None)
        if explained is not None:
            return explained
    record = await _live_record(runtime, ids)
    if record is not None:
        why_not = "was not asked" if local else "could not be asked"
        return {
            "request_id": record.request_id,
            "replica_id": record.replica_id,
            "record": asdict(record),
            "note": f"the replica that placed it keeps the explanation, but {why_not}",
        }
    raise NotFoundError(
        f"{_who_forgot(local, gaps)} request {request_id!r}: each keeps the last {KEPT_EXPLANATIONS} that ended",
        param="request_id",
    )


def meant_by(given: str) -> tuple[str, ...]:
    """The request ids that a person may mean by an id in the body of an answer. Engines put words before the id of the
    request, and the id of a stored response names its instance behind it."""
    ids = [given]
    word, _, rest = given.partition("-")
    if rest and word in _WORDS:
        ids.append(rest)
    if given.startswith(("resp_", "msg_")):
        rest = given.partition("_")[2]
        ids += [request_of_response(given) or rest, rest]
    return tuple(dict.fromkeys(ids))


def _who_forgot(local: bool, gaps: Sequence[str]) -> str:
    if local:
        return "this replica does not remember"
    if gaps:
        return f"{', '.join(gaps)}, and no other replica remembers"
    return "no replica remembers"


def _explanation(runtime: Runtime, request_id: str) -> Explanation | None:
    live = runtime.context.live.get(request_id)
    return runtime.context.decisions.get(request_id) if live is None else live.explain()


def _as_json(runtime: Runtime, explanation: Explanation) -> dict[str, Any]:
    pool = runtime.pools.pools[explanation.origin.pool]
    return {
        "replica_id": runtime.context.replica_id,
        **explanation.to_dict(),
        "rounds": [each.to_dict() | {"costs": costs_of(explanation, each, pool)} for each in explanation.rounds],
    }


async def _doubts_of(explanation: Explanation, pool: ServedPool) -> dict[str, Any]:
    """Why the caches of the candidates are not known exactly, by instance, now; nothing where the store is away."""
    candidates = {instance_id for each in explanation.rounds for instance_id in each.loads}
    try:
        doubts = (await pool.store.overview()).doubts
    except StoreError:
        return {}
    return {"doubts": {name: why for name, why in doubts.items() if name in candidates}}


async def _live_record(runtime: Runtime, ids: Sequence[str]) -> StoredRequest | None:
    for pool in runtime.pools.pools.values():
        records = await pool.store.records(ids)
        for each in ids:
            if each in records:
                return records[each]
    return None


async def query_peers(request: Request, runtime: Runtime, path: str) -> tuple[list[Any], list[str]]:
    """The JSON that peers answer, and why others could not be reached in time."""
    addresses = await runtime.addresses()
    peers = {replica_id: url for replica_id, url in addresses.items() if replica_id != runtime.context.replica_id}
    if not peers:
        return [], []
    # Several replicas may share an address; any of them answers there, this one included.
    shared = {url: count for url, count in Counter(addresses.values()).items() if url and count > 1}
    key = key_of(request)
    headers = {b"authorization": b"Bearer " + key} if key else {}
    client = runtime.peer_client.http
    answers = await asyncio.gather(*(_query_peer(client, f"{url}{path}", headers) for url in peers.values()))
    silent = [
        name for (name, url), answer in zip(peers.items(), answers, strict=True) if answer is None and url not in shared
    ]
    gaps = [
        f"{count} replicas share {url} and could not be asked one by one (set router.ops_port)"
        for url, count in shared.items()
    ]
    if silent:
        gaps.insert(0, f"{', '.join(silent)} could not be asked")
    return [answer for answer in answers if answer], gaps


async def _query_peer(client: httpx.AsyncClient, url: str, headers: Mapping[bytes, bytes]) -> Any:
    """The JSON that the peer answers, empty if it remembers nothing; None if it could not be reached."""
    try:
        answer = await client.get(url, headers=headers, timeout=PEER_TIMEOUT_S)
        if answer.status_code == HTTPStatus.NOT_FOUND:
            return {}
        found = answer.json() if answer.status_code == HTTPStatus.OK else None
    except (httpx.HTTPError, httpx.InvalidURL, ValueError):
        return None
    return found if isinstance(found, (dict, list)) else None
