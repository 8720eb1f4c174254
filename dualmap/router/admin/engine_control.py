"""vLLM's own control endpoints: a call goes to every instance in service, and is answered as vLLM answers it."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from http import HTTPStatus
from typing import Any, Final

import httpx
import orjson
from fastapi import APIRouter, Request, Response

from dualmap.router.admin.auth import caller_of, key_of
from dualmap.router.admin.engine_effects import Effect, effect_of
from dualmap.router.admin.explanations import PEER_TIMEOUT_S, meant_by
from dualmap.router.admin.instances import STATE_RACES
from dualmap.router.admin.scope import PoolsParam, RuntimeParam
from dualmap.router.errors import ForbiddenPathError, InvalidRequestError, NotFoundError, UpstreamError, no_instance
from dualmap.router.http.paths import ABORT_PATH, ENGINE_CONTROL_PATHS
from dualmap.router.pool.served_pool import ServedPool
from dualmap.router.replica.runtime import Runtime
from dualmap.runtime.engine_adapters import LOAD_PATH, UNLOAD_PATH
from dualmap.scheduling.state.instance import InstanceState
from dualmap.scheduling.state.instance_lifecycle import SERVING, InstanceEvent, next_state
from dualmap.scheduling.tenants.tenant import Caller
from dualmap.statestore.errors import StoreError

log = logging.getLogger(__name__)

routes = APIRouter(tags=["engine control"])

MAX_ABORTED: Final = 1000
"""Requests that one call may end."""
CONNECT_TIMEOUT_S: Final = 5.0
ASLEEP_TIMEOUT_S: Final = 2.0
"""Timeout for an instance that is out of service to say whether its engine is paused or asleep."""
TIMEOUT_S: Final = 300.0
"""Timeout for the answer of one instance: to wake up, or to load an adapter, takes minutes at worst."""
_RESET: Final = "/reset_prefix_cache"
_NUMBERED: Final = re.compile(r"[-_]\d{1,4}\Z")
_MAY_REST: Final = frozenset({InstanceState.DOWN, InstanceState.STANDBY})
_SLEEPS: Final = re.compile(rb'"is_sleeping"\s*:\s*true')
_KEEPS: Final = "keep_prefix_cache"
"""Parameter of the calls about adapters: the prefix cache is not emptied."""
_LOCAL: Final = "local"
"""Parameter of ``ABORT_PATH`` by which a peer says that it has called the engines."""
_OWN: Final = frozenset({"pool", _KEEPS, _LOCAL})
"""Parameters that no engine gets."""
_OF_ONE_POOL: Final = frozenset({UNLOAD_PATH, "/collective_rpc"})
"""Paths whose call names something that belongs to one model."""


_KEPT: Final = (
    b" Its prefix cache was not emptied (/reset_prefix_cache: vLLM has it with VLLM_SERVER_DEV_MODE=1): other weights"
    b" under the same name and path would be answered from the KV of the former ones. Load them from another path."
)


@dataclass(frozen=True, slots=True)
class _ServerAnswer:
    """The answer of one server; status 0: none."""

    instance_ids: tuple[str, ...]
    """Several are ranks of one server."""
    status: int
    body: bytes
    content_type: str | None = None

    @property
    def names(self) -> str:
        return ",".join(self.instance_ids)

    @property
    def failed(self) -> bool:
        return not 200 <= self.status < 300 or b'"success":false' in self.body.replace(b" ", b"")

    @property
    def reason(self) -> str:
        text = self.body[:200].decode("utf-8", "replace")
        return f"{self.status} {text}".strip() if self.status else text


async def control(request: Request, pools: PoolsParam, runtime: RuntimeParam) -> Response:
    """Passed to every instance of the named pool, or of all, that is in service, paused or asleep. Where all say the
    same, that is the answer; where some fail, 502 names them. What a call does to an engine is known to the fleet when
    it is answered: an emptied cache, adapters, and that it is paused or asleep and gets no requests.

    An adapter that is unloaded leaves KV by which vLLM would answer for other weights under the same name and path: the
    prefix caches are emptied then, unless `keep_prefix_cache=true`. The
    answer says where that failed. Adapters that were registered come and go by ``admin.adapters``.
    """
    path: str = request.scope["path"]
    if path in _OF_ONE_POOL and len(pools) > 1:
        raise InvalidRequestError(f"name a pool: {', '.join(runtime.pools.pools)}", param="pool")
    body, fields = await request.body(), _fields(request, runtime)
    if path == ABORT_PATH:
        if runtime.tenants.tenants:
            body = await _of_the_caller(body, caller_of(runtime.tenants, request), runtime)
        _mark_aborted(body, runtime)
        if request.query_params.get(_LOCAL) == "true":
            return Response()
        await _tell_peers(request, body, runtime)
    effect = effect_of(path, request.query_params)
    query = httpx.QueryParams([each for each in request.query_params.multi_items() if each[0] not in _OWN])
    renews = path == UNLOAD_PATH and not keeps_cache(request)
    tls = runtime.trust.context
    timeout = httpx.Timeout(TIMEOUT_S, connect=CONNECT_TIMEOUT_S)
    async with httpx.AsyncClient(headers=fields, verify=tls, trust_env=False, timeout=timeout) as client:
        found = await asyncio.gather(*(_servers(pool, client) for pool in pools))
        called = [(pool, urls) for pool, urls in zip(pools, found, strict=True) if urls]
        if not called:
            raise no_instance(pools[0].settings.name)

        async def call(pool: ServedPool, url: str, instance_ids: tuple[str, ...]) -> _ServerAnswer:
            try:
                answer = await client.request(request.method, url + path, params=query, content=body)
                kind = answer.headers.get("content-type")
                own = _ServerAnswer(instance_ids, answer.status_code, answer.content, kind)
            except (httpx.HTTPError, httpx.InvalidURL, OSError) as error:
                own = _ServerAnswer(instance_ids, 0, (str(error) or type(error).__name__).encode())
            renewed = renews and not own.failed and await _empty_cache(client, url)
            if renews and not own.failed and not renewed:
                own = replace(own, body=own.body + _KEPT)
            for instance_id in instance_ids:
                await _follow(pool, instance_id, Effect(empties_cache=True) if renewed else effect, own)
            return own

        answers = await asyncio.gather(*(call(pool, url, ids) for pool, urls in called for url, ids in urls.items()))
    if path == UNLOAD_PATH:
        await asyncio.gather(*(pool.model_lists.read_now(_ids(urls)) for pool, urls in called))
    log.info("%s %s: %s", request.method, path, "; ".join(f"{each.names}: {each.reason}" for each in answers))
    return _answer(path, answers)


def keeps_cache(request: Request) -> bool:
    return request.query_params.get(_KEEPS, "").lower() in ("1", "true", "yes")


async def _empty_cache(client: httpx.AsyncClient, url: str) -> bool:
    """Empty the prefix cache of a server, also of what runs, which is computed again; whether that was done."""
    try:
        answer = await client.post(url + _RESET, params={"reset_running_requests": "true", "reset_external": "true"})
    except (httpx.HTTPError, httpx.InvalidURL, OSError):
        return False
    return not _ServerAnswer((), answer.status_code, answer.content).failed


async def empty_caches(pool: ServedPool, runtime: Runtime) -> None:
    """Empty the prefix caches of a pool's instances in service, as far as they can."""
    timeout = httpx.Timeout(TIMEOUT_S, connect=CONNECT_TIMEOUT_S)
    key = runtime.context.settings.upstream_api_key
    fields = {} if key is None else {"authorization": f"Bearer {key.get_secret_value()}"}
    async with httpx.AsyncClient(
        headers=fields, verify=runtime.trust.context, trust_env=False, timeout=timeout
    ) as client:
        servers = await _servers(pool, client)
        emptied = await asyncio.gather(*(_empty_cache(client, url) for url in servers))
    for is_empty, instance_ids in zip(emptied, servers.values(), strict=True):
        for instance_id in instance_ids if is_empty else ():
            await pool.store.members.forget_cache(instance_id)


def _mark_aborted(body: bytes, runtime: Runtime) -> None:
    """Note that their client ends the requests of this replica that a call names: what engines abort then is no fault
    of theirs, and goes on at no other instance."""
    try:
        named = orjson.loads(body)["request_ids"]
    except (orjson.JSONDecodeError, TypeError, KeyError):
        return  # the engines judge it
    named = [named] if isinstance(named, str) else named
    for each in named[:MAX_ABORTED] if isinstance(named, list) else ():
        for request_id in _meant_by(each) if isinstance(each, str) else ():
            live = runtime.context.live.get(request_id)
            if live is not None:
                live.abort_requested = True


async def _tell_peers(request: Request, body: bytes, runtime: Runtime) -> None:
    """Have the other replicas note it too, before any engine hears of it: only the one that serves a request can know
    that its end is no fault. With the key of the caller, whose requests a peer finds out for itself."""
    try:
        addresses = await runtime.addresses()
    except StoreError:
        return  # a replica alone knows no peers
    own_id, key = runtime.context.replica_id, key_of(request)
    headers = {b"authorization": b"Bearer " + key} if key else {}
    client = runtime.peer_client.http

    async def tell(url: str) -> None:
        # One that cannot be reached takes the end for a fault, and its stream goes on.
        with contextlib.suppress(httpx.HTTPError, httpx.InvalidURL):
            path = f"{url}{ABORT_PATH}?{_LOCAL}=true"
            await client.post(path, content=body, headers=headers, timeout=PEER_TIMEOUT_S)

    await asyncio.gather(*(tell(url) for url in {url for name, url in addresses.items() if url and name != own_id}))


async def _follow(pool: ServedPool, instance_id: str, effect: Effect, answer: _ServerAnswer) -> None:
    """Enter in the shared state what a call has done to an instance. One without an answer, or that failed within the
    server, may have emptied its cache too."""
    if effect.empties_cache and (not answer.failed or answer.status == 0 or answer.status >= 500):
        await pool.store.members.forget_cache(instance_id)
    if effect.stops and not answer.failed:
        await _take_out(pool, instance_id)


async def _take_out(pool: ServedPool, instance_id: str) -> None:
    """Give an engine that computes nothing no requests: it is down until it completes a token for the health checks,
    which the leader tries. What it has cached stays, unless it was forgotten."""
    for _ in range(STATE_RACES):
        spec = (await pool.store.membership()).instances.get(instance_id)
        if spec is None or spec.state not in SERVING:
            return
        state = next_state(spec.state, InstanceEvent.UNHEALTHY)
        if await pool.store.members.set_instance_state(instance_id, state, expected=spec.state, keeps_cache=True):
            log.warning("instance %s: %s → %s: its engine was paused or put to sleep", instance_id, spec.state, state)
            await pool.view.refresh()
            return


async def _of_the_caller(body: bytes, caller: Caller | None, runtime: Runtime) -> bytes:
    """The body with the requests alone that are the caller's, as far as this replica or the store knows them: no
    tenant may end another one's request, even if it knows the id. An id that can also mean another's is left out.

    Raises:
        InvalidRequestError, NotFoundError: it names no requests, or none of the caller's.
    """
    try:
        named = orjson.loads(body)["request_ids"]
    except (orjson.JSONDecodeError, TypeError, KeyError):
        named = None
    if isinstance(named, str):
        named = [named]
    if not isinstance(named, list) or not all(isinstance(each, str) for each in named) or len(named) > MAX_ABORTED:
        raise InvalidRequestError(f"request_ids must be a list of up to {MAX_ABORTED} ids", param="request_ids")
    meant = {each: _meant_by(each) for each in named}
    ids = [request_id for each in meant.values() for request_id in each]
    owners: dict[str, set[str]] = {request_id: set() for request_id in ids}
    for live in map(runtime.context.live.get, ids):
        if live is not None:
            owners[live.request_id].add(live.inference_request.tenant)
    for pool in runtime.pools.pools.values():
        for request_id, record in (await pool.store.records(ids)).items():
            owners[request_id].add(record.tenant)
    tenant = "" if caller is None else caller.tenant.name
    own = [each for each, of_it in meant.items() if set().union(*(owners[name] for name in of_it)) == {tenant}]
    if not own:
        raise NotFoundError("none of these is a live request of yours that this replica knows", param="request_ids")
    return orjson.dumps({"request_ids": own})


def _meant_by(given: str) -> Sequence[str]:
    """The request ids that an engine's may mean. Those of completions and of responses have a number behind them."""
    plain = _NUMBERED.sub("", given)
    return tuple(dict.fromkeys((*meant_by(given), *meant_by(plain), given.removeprefix("generate-tokens-"))))


for _path, _method in ENGINE_CONTROL_PATHS.items():
    if _path in (LOAD_PATH, UNLOAD_PATH):
        continue  # ``admin.adapters``
    _name = _path.rpartition("/")[2]
    routes.add_api_route(
        _path, control, methods=[_method], name=_name, operation_id=_name,
        description="vLLM's own, at every instance in service.",
    )  # fmt: skip


async def _servers(pool: ServedPool, client: httpx.AsyncClient) -> dict[str, tuple[str, ...]]:
    """The instances in service, and those that are not because their engines are paused or asleep, by URL."""
    members = pool.view.view.instances.values()
    resting = {spec.url for spec in members if spec.state in _MAY_REST}
    answers = await asyncio.gather(*(_is_asleep(url, client) for url in resting))
    asleep = {url for url, is_asleep in zip(resting, answers, strict=True) if is_asleep}
    servers: dict[str, tuple[str, ...]] = {}
    for spec in members:
        if spec.state in SERVING or spec.url in asleep:
            servers[spec.url] = (*servers.get(spec.url, ()), spec.instance_id)
    return servers


async def _is_asleep(url: str, client: httpx.AsyncClient) -> bool:
    try:
        answer = await client.get(f"{url}/is_sleeping", timeout=ASLEEP_TIMEOUT_S)
    except (httpx.HTTPError, httpx.InvalidURL, OSError):
        return False
    return answer.is_success and _SLEEPS.search(answer.content) is not None


def _ids(servers: Mapping[str, Sequence[str]]) -> list[str]:
    return [instance_id for ids in servers.values() for instance_id in ids]


def _fields(request: Request, runtime: Runtime) -> dict[str, str]:
    """The fields that instances get: the client's own key, unless it is one of the fleet's."""
    settings, fields = runtime.context.settings, {}
    if settings.upstream_api_key is not None:
        fields["authorization"] = f"Bearer {settings.upstream_api_key.get_secret_value()}"
    elif settings.admin_is_open and not runtime.tenants and (sent := request.headers.get("authorization")) is not None:
        fields["authorization"] = sent
    if (kind := request.headers.get("content-type")) is not None:
        fields["content-type"] = kind
    return fields


def _answer(path: str, answers: Sequence[_ServerAnswer]) -> Response:
    first = answers[0]
    if path == ABORT_PATH and all(each.status == HTTPStatus.FORBIDDEN for each in answers):
        raise ForbiddenPathError("no instance ends requests by their ids: start vLLM with --enable-scale-out")
    unknown = all(each.status == HTTPStatus.NOT_FOUND for each in answers)
    if unknown and path in ENGINE_CONTROL_PATHS and not path.startswith("/v1/"):
        raise NotFoundError(
            f"no instance has {path}: start vLLM with VLLM_SERVER_DEV_MODE=1, or for profiles with --profiler-config"
        )
    if first.status and all((each.status, each.body) == (first.status, first.body) for each in answers):
        return Response(first.body, status_code=first.status, media_type=first.content_type)
    failed = [each for each in answers if each.failed]
    if failed:
        names = [each.names for each in answers if not each.failed]
        raise UpstreamError(
            f"{path} failed at {len(failed)} of {len(answers)} instances: "
            + "; ".join(f"{each.names}: {each.reason}" for each in failed)
            + (f"; it took effect at {', '.join(names)}" if names else "")
        )
    return Response(
        orjson.dumps({"instances": {each.names: _shown(each.body) for each in answers}}),
        media_type="application/json",
    )


def _shown(body: bytes) -> Any:
    try:
        return orjson.loads(body)
    except orjson.JSONDecodeError:
        return body.decode("utf-8", "replace")
