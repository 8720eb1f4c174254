"""The port of a replica to its pool: what its requests call, what people read through it, and what operators change.

``PoolStore`` is one implementation, and ``router.pool.failover`` the other, which goes on without the store. What a
leader calls with its fence is ``statestore.led``.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Mapping, Sequence
from typing import Any, Protocol

from dualmap.runtime.certificates import FollowedFiles
from dualmap.scheduling.placing.placement import Observation, Placement, PlaceReply, PlaceStatus
from dualmap.scheduling.prompts.chain import Chain
from dualmap.scheduling.queues.granting import CommitReply, Grant
from dualmap.scheduling.queues.queue_order import QueuePlan
from dualmap.scheduling.request.release import Release
from dualmap.scheduling.runs.turn import Turn
from dualmap.scheduling.state.instance import InstanceLoad
from dualmap.scheduling.state.request import StoredRequest
from dualmap.scheduling.tenants.budgets import Drawn, Draws
from dualmap.statestore.batches.batch_book import BatchBook
from dualmap.statestore.call_values import Membership, PoolOverview, PoolSnapshot, Transition
from dualmap.statestore.pool.adapter_registry import AdapterRegistry
from dualmap.statestore.pool.chronicle import Chronicle
from dualmap.statestore.pool.entered_schema import EnteredSchema
from dualmap.statestore.pool.members import Members
from dualmap.statestore.pool.publications import Publications
from dualmap.statestore.pool.queues import Queues
from dualmap.statestore.pool.revisions import Revisions
from dualmap.statestore.pool.running_settings import RunningSettings
from dualmap.statestore.pool.runs import Runs, TurnStatus
from dualmap.statestore.pool.stored_responses import StoredResponses
from dualmap.statestore.pool.usage import UsageBooks
from dualmap.statestore.tenants.tenant_book import TenantBook


class RequestPort(Protocol):
    """Calls that requests need. ``PoolStore`` describes each call."""

    def membership(self) -> Awaitable[Membership]: ...

    def place(self, placement: Placement, /) -> Awaitable[PlaceReply]: ...

    def register(self, request: StoredRequest, draws: Draws | None, /) -> Awaitable[tuple[PlaceStatus, Drawn]]: ...

    def admit(self, turns: Sequence[Turn], capacity_tokens: int, /) -> Awaitable[Sequence[TurnStatus]]: ...

    def observe(self, instance_ids: Sequence[str], chain: Chain, /) -> Awaitable[Observation]: ...

    def commit(self, plan: QueuePlan, /, *, replica_id: str = "") -> Awaitable[CommitReply]: ...

    def release(self, releases: Sequence[Release], /) -> Awaitable[Sequence[Transition]]: ...

    def records(self, request_ids: Sequence[str], /) -> Awaitable[Mapping[str, StoredRequest]]: ...

    def requests_of(self, replica_id: str, /) -> Awaitable[Sequence[StoredRequest]]: ...

    def adopt(self, requests: Sequence[StoredRequest], /) -> Awaitable[int]: ...


class ReadingPort(Protocol):
    """Calls that people and jobs read with."""

    def loads(self) -> Awaitable[Mapping[str, InstanceLoad]]: ...

    def loads_of(self, *instance_ids: str) -> Awaitable[Mapping[str, InstanceLoad]]: ...

    def overview(self) -> Awaitable[PoolOverview]: ...

    def snapshot(self) -> Awaitable[PoolSnapshot]: ...


class ReplicaPool(RequestPort, ReadingPort, Protocol):
    """Calls that a replica needs of one pool."""

    @property
    def name(self) -> str: ...

    @property
    def schema(self) -> EnteredSchema: ...

    # its presence, and the grants of its requests
    def heartbeat(self, replica_id: str, lease_ms: int, info: Mapping[str, str], /) -> Awaitable[bool]: ...

    def retire(self, replica_id: str, /) -> Awaitable[None]: ...

    def on_grant(self, replica_id: str, deliver: Callable[[Grant], None], /) -> None: ...

    def on_turn(self, replica_id: str, deliver: Callable[[str], None], /) -> None: ...

    # what operators look at and change through it
    @property
    def members(self) -> Members: ...

    @property
    def adapters(self) -> AdapterRegistry: ...

    @property
    def settings(self) -> RunningSettings: ...

    @property
    def queues(self) -> Queues: ...

    @property
    def publications(self) -> Publications: ...

    @property
    def chronicle(self) -> Chronicle: ...

    @property
    def usage(self) -> UsageBooks: ...

    @property
    def runs(self) -> Runs: ...

    @property
    def revisions(self) -> Revisions: ...

    @property
    def responses(self) -> StoredResponses: ...


class ReplicaStore(Protocol):
    """The pools of a replica."""

    @property
    def certificates(self) -> tuple[FollowedFiles[Any], ...]:
        """The certificates of the connections, for reports."""

    @property
    def tenants(self) -> TenantBook:
        """The tenants of all pools."""

    @property
    def batches(self) -> BatchBook:
        """The files and batches of all tenants."""

    async def open(self) -> None: ...

    async def close(self) -> None: ...

    def pool(self, name: str, /) -> ReplicaPool: ...
