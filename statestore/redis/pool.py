"""One pool on Redis: members, the life of a request, replicas."""

from __future__ import annotations

import asyncio
from collections.abc import Mapping, Sequence
from typing import Any

import orjson

from scheduling.chain import Chain
from scheduling.idle_holder import idle_holder_cost
from scheduling.instance import InstanceSpec, InstanceState
from scheduling.settings import SchedulingSettings
from statestore.base import FinishFacts, Grant, Membership, Observation, PoolSnapshot, RequestRecord
from statestore.errors import StoreUnavailableError
from statestore.keys import PoolKeys
from statestore.redis import codec
from statestore.redis.calls import Argument, Calls, ClientCalls
from statestore.redis.leader import LeaderCalls
from statestore.redis.packed_chains import PackedChain, PackedChains
from statestore.redis.placed import MAX_MOVES, PlacedRequests
from statestore.redis.subscriber import GrantSubscriber
from statestore.redis.views import Views
from statestore.reservation import IdlePlacement, Newcomer, Reservation, ReserveOutcome, ReserveStatus
from statestore.stream import Stream

_HASH_BYTES = 8
_STATUSES = {status.value.encode(): status for status in ReserveStatus}


class RedisPool(LeaderCalls):
    """``PoolStore`` on Redis. Every transition of a request is one script."""

    degraded = False

    def __init__(
        self,
        name: str,
        keys: PoolKeys,
        calls: Calls,
        scheduling: SchedulingSettings,
        *,
        waiting: ClientCalls,
        subscriber: GrantSubscriber,
        placed: PlacedRequests,
    ) -> None:
        super().__init__(keys, calls, _terms(scheduling, keys), waiting)
        self.name = name
        self._scheduling = scheduling
        self._subscriber = subscriber
        self._placed = placed
        self._remembers_holders = scheduling.looks_beyond
        self._chains = PackedChains()
        # What every call brings, put together once.
        self._load_keys = (keys.meta,)
        self._horizon_keys = (keys.meta, keys.lightest, *keys.holders)
        self._idle_keys = (keys.meta, keys.requests, keys.replicas, keys.arrivals, *keys.holders)
        self._reserve_keys = (
            keys.meta,
            keys.requests,
            keys.replicas,
            keys.arrivals,
            keys.wanted_rebalances,
            *keys.holders,
        )
        self._arrival_bounds = (
            b"%d" % scheduling.hotness_window_requests,
            b"%d" % (scheduling.max_key_blocks * _HASH_BYTES),
        )
        self._holder_marks = b"%d" % scheduling.holder_marks
        cost = idle_holder_cost(scheduling)
        self._idle_weights = None if cost is None else b"%.17g %.17g" % (cost.recompute_weight, cost.eviction_weight)
        self._views = Views(keys, calls, scheduling.bytes_per_token)

    async def close(self) -> None:
        """Listen no longer."""
        await self._subscriber.close()

    # members ---------------------------------------------------------------------------------------------
    async def membership(self) -> Membership:
        return await self._views.membership()

    async def put_instance(self, spec: InstanceSpec) -> None:
        keys = self._keys
        await self._calls.script(
            "put_instance",
            (keys.meta, keys.instances, keys.requests, *keys.account(spec.instance_id), *keys.granting),
            self._terms,
            spec.instance_id,
            spec.state.value,
            *codec.spec_arguments(spec),
        )

    async def update_instance(self, instance_id: str, changes: Mapping[str, Any], *, fence: int | None = None) -> bool:
        keys = self._keys
        reply = await self._calls.script(
            "update_instance",
            (keys.meta, keys.leader, keys.requests, *keys.account(instance_id), *keys.granting),
            self._terms,
            instance_id,
            "" if fence is None else fence,
            *codec.field_arguments(changes),
        )
        return bool(reply)

    async def set_instance_state(
        self,
        instance_id: str,
        state: InstanceState,
        *,
        expected: InstanceState | None = None,
        fence: int | None = None,
    ) -> bool:
        keys = self._keys
        reply = await self._calls.script(
            "set_instance_state",
            (keys.meta, keys.leader, keys.requests, *keys.account(instance_id), *keys.granting),
            self._terms,
            instance_id,
            state.value,
            "" if expected is None else expected.value,
            "" if fence is None else fence,
        )
        return bool(reply)

    async def remove_instance(self, instance_id: str) -> bool:
        keys = self._keys
        reply = await self._calls.script(
            "remove_instance",
            (keys.meta, keys.instances, keys.wanted_rebalances, *keys.account(instance_id), keys.lightest),
            "",
            instance_id,
        )
        keys.forget_account(instance_id)
        return bool(reply)

    # the life of a request -------------------------------------------------------------------------------
    async def observe(self, instance_ids: Sequence[str], chain: Chain, *, horizon: bool = False) -> Observation:
        packed, keys = self._chains.of(chain), [*(self._horizon_keys if horizon else self._load_keys)]
        for instance_id in instance_ids:
            keys += self._keys.account(instance_id).of_load
        if not horizon:
            seen = await self._calls.script("observe_instances", keys, packed.hashes)
            return codec.observation_from(instance_ids, seen)
        seen = await self._calls.script("observe_horizon", keys, packed.hashes, packed.marks)
        return codec.wide_observation_from(instance_ids, seen, packed.mark_depths)

    async def reserve_idle(
        self, instance_ids: Sequence[str], newcomer: Newcomer
    ) -> tuple[Observation, IdlePlacement | None]:
        if self._idle_weights is None:
            raise ValueError("the pool's policy weighs every placement: observe, and reserve")
        chain = newcomer.chain
        packed, keys = self._chains.of(chain), [*self._idle_keys]
        for instance_id in instance_ids:
            keys += self._keys.account(instance_id)
        keys += self._keys.granting
        text = await self._calls.script(
            "reserve_idle",
            keys,
            self._terms,
            packed.hashes,
            packed.marks,
            newcomer.request_id,
            newcomer.replica_id,
            chain.prompt_tokens,
            chain.block_tokens,
            newcomer.expected_output_tokens,
            newcomer.slo_ms,
            self._idle_weights,
            *self._arrival_bounds,
            self._holder_marks,
            *instance_ids,
        )
        seen, decision = codec.idle_reservation_from(instance_ids, text, packed.mark_depths)
        if decision is None:
            return seen, None
        self._placed.put(newcomer.request_id, decision.instance_id)
        return seen, IdlePlacement(decision, newcomer.reservation(decision))

    async def reserve(self, reservation: Reservation) -> ReserveOutcome:
        keys, target = self._keys, reservation.instance_id
        former = self._placed.get(reservation.request_id) or target
        packed = self._chains.of(reservation.chain)
        arguments = self._reserve_arguments(reservation, packed)
        for _ in range(MAX_MOVES):
            status, detail = await self._calls.script(
                "reserve_request",
                (*self._reserve_keys, *keys.account(target), *keys.account(former), *keys.granting),
                *arguments,
                former,
                *self._arrival_bounds,
                self._marks_to_stamp(packed),
                self._holder_marks,
            )
            if status != b"moved":
                outcome = ReserveOutcome(_STATUSES[status], detail)
                if outcome.status in (ReserveStatus.DISPATCHED, ReserveStatus.HELD):
                    self._placed.put(reservation.request_id, target)
                return outcome
            former = detail.decode()
        raise StoreUnavailableError(f"request {reservation.request_id} keeps moving: try again")

    def _reserve_arguments(self, reservation: Reservation, packed: PackedChain) -> tuple[Argument, ...]:
        seen = reservation.seen_pending_tokens
        return (
            self._terms,
            codec.reservation_json(reservation),
            packed.hashes,
            "" if seen is None else seen,
            reservation.tolerance_tokens,
            "1" if reservation.overloaded else "",
        )

    def _marks_to_stamp(self, packed: PackedChain) -> bytes:
        return packed.marks if self._remembers_holders else b""

    async def first_token(self, request_id: str, instance_id: str, chain: Chain, *, seen: bool = True) -> bool:
        keys, packed = self._keys, self._chains.of(chain)
        reply = await self._calls.script(
            "prefill_request",
            (keys.requests, *keys.holders, *keys.account(instance_id), *keys.granting),
            self._terms,
            request_id,
            instance_id,
            packed.hashes,
            chain.block_tokens,
            self._marks_to_stamp(packed),
            self._holder_marks,
            "1" if seen else "",
        )
        return bool(reply)

    async def finish(
        self,
        request_id: str,
        *,
        replica_id: str | None = None,
        attempt: int | None = None,
        facts: FinishFacts | None = None,
    ) -> bool:
        keys = self._keys
        instance_id = self._placed.get(request_id) or await self._look_up(request_id)
        taught = ("", "") if facts is None else (facts.prompt_bytes or "", facts.prompt_tokens or "")
        for _ in range(MAX_MOVES):
            if instance_id is None:
                return False
            reply = await self._calls.script(
                "finish_request",
                (keys.meta, keys.requests, *keys.account(instance_id), *keys.granting),
                self._terms,
                request_id,
                instance_id,
                "" if replica_id is None else replica_id,
                "" if attempt is None else attempt,
                self._scheduling.bytes_per_token,
                *taught,
            )
            if isinstance(reply, int):
                self._placed.discard(request_id)
                return bool(reply)
            instance_id = reply.decode()
        raise StoreUnavailableError(f"request {request_id} keeps moving: try again")

    async def _look_up(self, request_id: str) -> str | None:
        text = await self._calls.command("HGET", self._keys.requests, request_id)
        return None if text is None else codec.record_from(text).instance_id

    def grants(self, replica_id: str) -> Stream[Grant]:
        return self._subscriber.open(replica_id)

    async def records(self, request_ids: Sequence[str]) -> Mapping[str, RequestRecord]:
        if not request_ids:
            return {}
        return codec.records_from(await self._calls.command("HMGET", self._keys.requests, *request_ids))

    # replicas --------------------------------------------------------------------------------------------
    async def heartbeat(self, replica_id: str, lease_ms: int, info: Mapping[str, str]) -> bool:
        keys = (self._keys.replicas,)
        reply = await self._calls.script("beat_replica", keys, replica_id, lease_ms, orjson.dumps(dict(info)))
        return bool(reply)

    async def adopt(self, records: Sequence[RequestRecord]) -> int:
        by_instance: dict[str, list[bytes]] = {}
        for record in records:
            by_instance.setdefault(record.instance_id, []).append(codec.record_json(record))
            self._placed.put(record.request_id, record.instance_id)
        keys = self._keys
        adopted = await asyncio.gather(
            *(
                self._calls.script(
                    "adopt_requests",
                    (keys.meta, keys.requests, keys.replicas, *keys.account(instance_id), *keys.granting),
                    self._terms,
                    instance_id,
                    *texts,
                )
                for instance_id, texts in by_instance.items()
            )
        )
        return sum(adopted)

    async def retire(self, replica_id: str) -> None:
        await self._calls.script("retire_replica", (self._keys.replicas,), replica_id)

    # people ----------------------------------------------------------------------------------------------
    async def snapshot(self) -> PoolSnapshot:
        return await self._views.snapshot()


def _terms(scheduling: SchedulingSettings, keys: PoolKeys) -> bytes:
    """How held requests are granted and instances ranked, as ``shared/terms.lua`` reads it."""
    return b"%s %d %d %.17g %.17g %s" % (
        scheduling.granting_order.encode(),
        round(scheduling.max_hold_s * 1000),
        round(scheduling.max_late_work_s * 1000),
        scheduling.late_work_share,
        scheduling.kv_weight_s,
        keys.grants_channel,
    )
