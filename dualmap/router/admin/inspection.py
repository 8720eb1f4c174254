"""Endpoints to look inside: queues, rings, hot prefixes, live requests."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Mapping
from dataclasses import asdict
from typing import Annotated, Any

from fastapi import APIRouter, Body, Query

from dualmap.router.admin.scope import PoolParam, PoolsParam, RuntimeParam
from dualmap.router.errors import InvalidRequestError
from dualmap.router.pool.pool_directory import Route
from dualmap.router.pool.served_pool import ServedPool
from dualmap.router.prompts.inference_request import SCHEDULED_PATHS
from dualmap.router.prompts.prompt import read_prompt, sent_prompt
from dualmap.scheduling.prompts.chain import Chain
from dualmap.scheduling.runs.turn import RunRecord, hashed_name
from dualmap.scheduling.state.instance_lifecycle import SERVING
from dualmap.scheduling.state.registered_adapters import RegisteredAdapter, Step, homes_of, step_for
from dualmap.scheduling.state.request import RequestState, StoredRequest
from dualmap.scheduling.state.ring import VIRTUAL_NODES, Ring
from dualmap.scheduling.state.view import ClusterView
from dualmap.statestore.call_values import Note

routes = APIRouter(prefix="/admin", tags=["inspection"])

_RING_SIZE = 1 << 64

Limit = Annotated[int, Query(ge=1, le=10_000, description="answers at most")]


@routes.get("/queues")
async def queues(
    pools: PoolsParam,
    instance: Annotated[str | None, Query(description="only this instance")] = None,
    limit: Annotated[int, Query(ge=0, le=10_000, description="held requests listed per instance at most")] = 100,
) -> list[dict[str, Any]]:
    """The held requests of every instance, in the order in which they would be granted."""
    answer: list[dict[str, Any]] = []
    for pool in pools:
        loads = await pool.store.loads()
        for instance_id, load in loads.items():
            if instance is not None and instance_id != instance:
                continue
            queue = await pool.store.queues.queue(instance_id, limit) if load.queued_requests and limit else None
            held = queue.held if queue is not None else ()
            now_ms = queue.now_ms if queue is not None else 0
            answer.append(
                {
                    "pool": pool.settings.name,
                    "instance_id": instance_id,
                    "state": load.state,
                    "pending_tokens": load.pending_tokens,
                    "dispatched_tokens": load.dispatched_tokens,
                    "queued_requests": load.queued_requests,
                    "running_requests": load.running_requests,
                    "held": [_request(pool, record, now_ms) for record in held],
                }
            )
    return answer


@routes.get("/runs")
async def runs(
    pool: PoolParam,
    state: Annotated[str | None, Query(description="only runs of this state")] = None,
    tenant: Annotated[str | None, Query(description="only this tenant's")] = None,
    run: Annotated[str | None, Query(description="only of this id, or its beginning, or client's name")] = None,
    limit: Limit = 100,
) -> dict[str, Any]:
    """Agents' runs where they wait for memory: those that wait for longest first, then those that were seen last. Of
    the thousand that were seen last."""
    ledger = await pool.store.runs.ledger()
    found = [each for each in ledger.runs if state in (None, each.state) and tenant in (None, each.tenant)]
    if run:
        found = [each for each in found if each.name.startswith(run) or hashed_name(each.tenant, run).run == each.name]
    found.sort(key=lambda each: (not each.waiting, each.waits_since_ms, -each.seen_ms))
    return {
        "pool": pool.settings.name,
        "admitted": pool.scheduling.admit_runs,
        "memory": {
            "used_tokens": ledger.memory.used_tokens,
            "capacity_tokens": ledger.memory.capacity_tokens,
            "waiting_turns": ledger.memory.waiting_turns,
        },
        "runs": [_run(each, ledger.now_ms) for each in found[:limit]],
    }


def _run(run: RunRecord, now_ms: int) -> dict[str, Any]:
    waits_ms = now_ms - run.waits_since_ms if run.waiting else 0
    return {
        "run": run.name,
        "tenant": run.tenant,
        "parent": run.parent,
        "state": run.state,
        "home": run.home,
        "agents": [
            {
                "agent": each.name,
                "context_tokens": each.tokens,
                "turns_in_flight": each.busy,
                "seen_s_ago": (now_ms - each.seen_ms) / 1000,
            }
            for each in run.agents
        ],
        "turns": run.turns,
        "turns_in_flight": run.busy,
        "turns_waiting": run.waiting,
        "context_tokens": run.tokens,
        "output_tokens": run.output_tokens,
        "service_token_s": round(run.service),
        "waits_s": waits_ms / 1000,
        "waited_s": (run.parked_ms + waits_ms) / 1000,
        "prefill_s": run.prefill_ms / 1000,
        "decode_s": run.decode_ms / 1000,
        "tools_s": run.tool_ms / 1000,
        "begun_s_ago": (now_ms - run.begun_ms) / 1000,
        "seen_s_ago": (now_ms - run.seen_ms) / 1000,
    }


@routes.get("/adapters")
async def adapters(pool: PoolParam) -> dict[str, Any]:
    """Adapters: those that were registered, with where each is loaded and why it is not, and by where their last uses
    say that they are, on the device or in host memory. Those with most running requests come first, then the last used.
    Instances whose room for adapters is not known have none on the device or in host memory. ``room`` has the slots of
    the others, and how many adapters have running requests there: those beyond the slots on the device wait for one."""
    await pool.view.look()  # what instances have loaded: another replica may have changed it a moment ago
    view = pool.view.view
    instances = {name: spec for name, spec in view.instances.items() if spec.adapter_slots}
    # Registrations are read where the uses are: a replica that decides alone for a moment has older ones of its own.
    found, now_ms = await pool.store.members.adapters([*instances])
    records = await pool.store.adapters.records()
    listed: dict[str, dict[str, Any]] = {}
    for name, record in records.items():
        if record.is_registered:
            listed[name] = {"adapter": name, "running": 0, "idle_s": None, "device": [], "host": []}
    for name, uses in found.items():
        slots = instances[name].adapter_slots
        for place, use in enumerate(uses):
            about = listed.setdefault(
                use.adapter, {"adapter": use.adapter, "running": 0, "idle_s": None, "device": [], "host": []}
            )
            about["running"] += use.running
            about["device" if place < slots else "host"].append(name)
            idle_s = 0.0 if use.running else max(0, now_ms - use.used_ms) / 1000
            about["idle_s"] = idle_s if about["idle_s"] is None else min(about["idle_s"], idle_s)
    failures = await pool.store.adapters.failures()
    for name, row in listed.items():
        row["registered"] = _registered(pool, name, records.get(name), failures)
    rows = sorted(listed.values(), key=_by_use)
    room = {
        name: {
            "device": spec.adapter_slots,
            "host": spec.adapter_host_slots,
            "running": sum(use.running > 0 for use in found[name]),
        }
        for name, spec in instances.items()
    }
    return {"pool": pool.settings.name, "room": room, "adapters": rows}


def _by_use(row: dict[str, Any]) -> tuple[int, float, str]:
    idle_s = row["idle_s"]
    return -row["running"], math.inf if idle_s is None else idle_s, row["adapter"]


def _registered(
    pool: ServedPool, name: str, record: RegisteredAdapter | None, failures: Mapping[tuple[str, str], Note]
) -> dict[str, Any] | None:
    """The record of an adapter, and what its instances are about it; None where it was not registered."""
    view = pool.view.view
    if record is None or not record.is_registered:
        return None
    serving = {each: spec for each, spec in view.instances.items() if spec.state in SERVING}
    steps = {each: step_for(spec, name, record) for each, spec in serving.items()}
    return {
        "path": record.path,
        "base": record.base or pool.settings.model,
        "rank": record.rank or None,
        "tenant": record.tenant or None,
        "generation": record.generation,
        "since_ms": record.since_ms,
        "homes": sorted(homes_of(view, pool.settings.model, name)),
        "loaded": [each for each, spec in serving.items() if spec.lists(name) and steps[each] is None],
        "outdated": [each for each, step in steps.items() if step is Step.REPLACE],
        "failed": {each: note.text for (each, failed), note in failures.items() if failed == name},
    }


@routes.get("/ring")
async def ring(
    pool: PoolParam,
    key: Annotated[str | None, Query(description="a hash key, 64 bits in hexadecimal")] = None,
    prompt: Annotated[str | None, Query(description="a completions prompt; it is hashed like a request's")] = None,
) -> dict[str, Any]:
    """The rings: each member's share of them; or the candidate pair of one key or prompt."""
    if key is not None:
        return _pair(pool, _parse_key(key), pool.view.view)
    if prompt is not None:
        return await _lookup(pool, {"prompt": prompt}, "/v1/completions", None)
    view = pool.view.view
    return {
        "pool": pool.settings.name,
        "epoch": view.epoch,
        "members": list(view.rings.members),
        "virtual_nodes": VIRTUAL_NODES,
        "shares": {"first": _shares(view.rings.first), "second": _shares(view.rings.second)},
    }


@routes.post("/ring")
async def ring_lookup(
    pool: PoolParam,
    runtime: RuntimeParam,
    body: Annotated[dict[str, Any], Body(description="the body of a scheduled request")],
    path: Annotated[str, Query(description="the path it would be sent to")] = "/v1/chat/completions",
) -> dict[str, Any]:
    """Hash a request as if it had been sent, without placing it: its key and its candidate pair."""
    if path not in SCHEDULED_PATHS:
        raise InvalidRequestError(f"only {', '.join(sorted(SCHEDULED_PATHS))} are scheduled", param="path")
    return await _lookup(pool, body, path, runtime.pools.routes.get(str(body.get("model", ""))))


@routes.get("/hot-prefixes")
async def hot_prefixes(pools: PoolsParam, limit: Limit = 100) -> list[dict[str, Any]]:
    """The prefixes that are hot now: requests that share one are spread by a longer hash key."""
    answer = []
    for pool in pools:
        view = pool.view.view
        hot = sorted(view.tree.hot.items(), key=lambda entry: (entry[1], entry[0]))[:limit]
        answer.append(
            {
                "pool": pool.settings.name,
                "tree_version": view.tree_version,
                "block_tokens": pool.scheduling.block_tokens,
                "count": len(view.tree.hot),
                "prefixes": [{"prefix": f"{prefix:016x}", "blocks": depth} for prefix, depth in hot],
            }
        )
    return answer


@routes.get("/requests")
async def requests(
    pools: PoolsParam,
    state: Annotated[RequestState | None, Query(description="only requests in this state")] = None,
    instance: Annotated[str | None, Query(description="only requests on this instance")] = None,
    replica: Annotated[str | None, Query(description="only requests of this replica")] = None,
    tenant: Annotated[str | None, Query(description="only requests of this tenant")] = None,
    limit: Limit = 1000,
) -> list[dict[str, Any]]:
    """The live requests of the whole fleet, oldest first."""
    answer: list[dict[str, Any]] = []
    for pool in pools:
        snapshot = await pool.store.snapshot()
        answer += [
            _request(pool, record, snapshot.now_ms)
            for record in snapshot.requests
            if state in (None, record.state)
            and instance in (None, record.instance_id)
            and replica in (None, record.replica_id)
            and tenant in (None, record.tenant)
        ]
    return answer[:limit]


def _request(pool: ServedPool, record: StoredRequest, now_ms: int) -> dict[str, Any]:
    return {"pool": pool.settings.name, **asdict(record), "age_ms": max(0, now_ms - record.enqueued_ms)}


def _parse_key(key: str) -> int:
    try:
        number = int(key, 16)
    except ValueError:
        number = -1
    if not 0 <= number < _RING_SIZE:
        raise InvalidRequestError("key must be 64 bits in hexadecimal", param="key")
    return number


def _pair(pool: ServedPool, key: int, view: ClusterView) -> dict[str, Any]:
    return {"pool": pool.settings.name, "hash_key": f"{key:016x}", "pair": list(view.rings.pair(key))}


async def _lookup(pool: ServedPool, body: dict[str, Any], path: str, route: Route[ServedPool] | None) -> dict[str, Any]:
    sent = sent_prompt(path, body)
    if sent is None:
        raise InvalidRequestError("the body has no prompt where one is looked for: it would be passed on")
    prompt = await read_prompt(
        sent,
        model=pool.settings.model,
        lora=None if route is None else route.cached_as,
        rule=pool.blocks,
        learned=pool.view.learned,
        tokenizer=pool.tokenizer,
    )
    view = pool.view.view.serving("" if route is None else route.model)
    return _pair(pool, _key(pool, prompt.chain), view) | {
        "key_blocks": pool.view.view.tree.key_blocks(prompt.chain),
        "prompt_tokens": prompt.chain.prompt_tokens,
        "chain_blocks": len(prompt.chain.hashes),
    }


def _key(pool: ServedPool, chain: Chain) -> int:
    return pool.view.view.tree.key(chain)


def _shares(ring: Ring) -> dict[str, float]:
    """Each member's part of the key space: the arcs that end at its anchors."""
    arcs: Counter[str] = Counter()
    before = ring.positions[-1] - _RING_SIZE if ring.positions else 0
    for position, owner in zip(ring.positions, ring.owners, strict=True):
        arcs[owner] += position - before
        before = position
    return {owner: round(arc / _RING_SIZE, 6) for owner, arc in sorted(arcs.items())}
