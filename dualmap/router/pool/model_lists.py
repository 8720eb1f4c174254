"""The model names that instances list, read by a replica at once where an answer shows that what is known is wrong.

The leader's health checks read them every few seconds. An instance that answers 404 may have dropped a name since.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Iterable, Mapping
from typing import Any, Final

import httpx
from pydantic import SecretStr

from dualmap.router.pool.view import ViewKeeper
from dualmap.runtime.clock import Clock
from dualmap.runtime.trust import InstanceTrust
from dualmap.scheduling.state.instance import InstanceSpec
from dualmap.scheduling.state.model_names import ModelList
from dualmap.statestore.errors import StoreError
from dualmap.statestore.port import ReplicaPool

log = logging.getLogger(__name__)

QUERY_TIMEOUT_S: Final = 1.0
AGAIN_S: Final = 1.0
"""Time between two readings of one instance's list: clients may ask for what is nowhere as often as they like."""


class InstanceQueries:
    """Asks instances for ``/v1/models``."""

    def __init__(
        self,
        api_key: SecretStr | None,
        trust: InstanceTrust | None = None,
        *,
        transport: httpx.AsyncBaseTransport | None = None,
    ) -> None:
        """``api_key`` is sent to instances; ``transport`` replaces the network in tests."""
        self._headers = {"authorization": f"Bearer {api_key.get_secret_value()}"} if api_key is not None else {}
        self._trust = trust or InstanceTrust()
        self._transport = transport

    async def models(self, url: str) -> tuple[int, Any]:
        """The status and the parsed answer; 0 and None where there is none within ``QUERY_TIMEOUT_S``."""
        try:
            async with (
                asyncio.timeout(QUERY_TIMEOUT_S),
                httpx.AsyncClient(
                    headers=self._headers, verify=self._trust.context, trust_env=False, transport=self._transport
                ) as client,
            ):
                answer = await client.get(f"{url}/v1/models")
                return answer.status_code, answer.json() if answer.is_success else None
        except (httpx.HTTPError, httpx.InvalidURL, OSError, ValueError):  # TimeoutError is an OSError
            return 0, None


class ModelLists:
    """The model lists of the instances of one pool."""

    def __init__(self, store: ReplicaPool, view: ViewKeeper, queries: InstanceQueries, clock: Clock) -> None:
        self._store = store
        self._view = view
        self._queries = queries
        self._clock = clock
        self._not_before_s: dict[str, float] = {}
        self._reading: dict[str, asyncio.Task[None]] = {}

    def doubt(self, instance_id: str) -> None:
        """The instance did not find the model of a request: read its list again soon. Never waits."""
        spec, now_s = self._view.view.instances.get(instance_id), self._clock.monotonic_s()
        if spec is None or instance_id in self._reading or now_s < self._not_before_s.get(instance_id, now_s):
            return
        self._not_before_s[instance_id] = now_s + AGAIN_S
        reading = self._reading[instance_id] = asyncio.create_task(self._read(spec), name=f"models/{instance_id}")
        reading.add_done_callback(lambda _: self._reading.pop(instance_id, None))

    async def read_now(self, instance_ids: Iterable[str]) -> None:
        """Read the lists of these instances, which have just changed, and tell all replicas.

        Raises:
            StoreError: they could not be told.
        """
        specs = [spec for each in instance_ids if (spec := self._view.view.instances.get(each)) is not None]
        if any(await asyncio.gather(*map(self._store_list, specs))):
            await self._view.refresh()

    async def _read(self, spec: InstanceSpec) -> None:
        try:
            if await self._store_list(spec):
                await self._view.refresh()
        except StoreError as error:
            log.debug("the models of instance %s could not be stored: %s", spec.instance_id, error)

    async def _store_list(self, spec: InstanceSpec) -> bool:
        """Read the list of an instance and store it; returns whether it is another one than before."""
        status, answer = await self._queries.models(spec.url)
        changes = ModelList.of(answer, status).changes(spec)
        if not changes:
            return False
        await self._store.members.update_instance(spec.instance_id, changes)
        return True

    def forget_all_but(self, instances: Mapping[str, InstanceSpec]) -> None:
        for instance_id in self._not_before_s.keys() - instances.keys():
            del self._not_before_s[instance_id]

    async def close(self) -> None:
        """End the readings under way."""
        readings = [*self._reading.values()]
        for reading in readings:
            reading.cancel()
        await asyncio.gather(*readings, return_exceptions=True)
