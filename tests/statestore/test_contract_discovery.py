"""Discovery: its status, and members that are described and removed by the leader alone, on every store."""

from __future__ import annotations

from dataclasses import replace

import pytest

from dualmap.scheduling.state.instance import InstanceSpec, InstanceState
from dualmap.statestore.call_values import DiscoveryStatus
from dualmap.statestore.errors import LeaseLostError
from dualmap.statestore.pool import PoolStore
from tests.statestore.samples import lead

STATUS = DiscoveryStatus(at_ms=7, by="w", source="pods", state="failing", detail="403", pods=2, left_out=("a: no",))
SPEC = InstanceSpec("a", "http://a", origin={"uid": "u", "role": "mixed"})


async def test_a_pool_without_discovery_has_a_status_of_time_0(pool: PoolStore) -> None:
    assert await pool.publications.discovery() == DiscoveryStatus()


async def test_the_leader_reports_what_any_process_reads(pool: PoolStore) -> None:
    fence = await lead(pool)
    await pool.publications.record_discovery(STATUS, fence=fence)
    assert await pool.publications.discovery() == STATUS
    with pytest.raises(LeaseLostError):
        await pool.publications.record_discovery(DiscoveryStatus(), fence=fence - 1)
    assert await pool.publications.discovery() == STATUS


async def test_an_instance_is_described_by_what_it_is_at_that_moment(pool: PoolStore) -> None:
    fence = await lead(pool)
    assert await pool.members.describe_instance("a", lambda known: SPEC if known is None else None, fence=fence)
    assert not await pool.members.describe_instance("a", lambda known: SPEC if known is None else None, fence=fence)
    await pool.members.set_instance_state("a", InstanceState.READY)

    assert await pool.members.describe_instance(
        "a", lambda known: known and replace(known, url="http://b"), fence=fence
    )
    assert (await pool.membership()).instances["a"] == replace(SPEC, url="http://b", state=InstanceState.READY)


async def test_a_former_leader_describes_and_removes_nothing(pool: PoolStore) -> None:
    fence = await lead(pool)
    await pool.members.put_instance(SPEC)
    with pytest.raises(LeaseLostError):
        await pool.members.describe_instance(
            "a", lambda known: known and replace(known, url="http://b"), fence=fence - 1
        )
    with pytest.raises(LeaseLostError):
        await pool.members.remove_instance("a", fence=fence - 1)
    assert (await pool.membership()).instances == {"a": SPEC}
    assert await pool.members.remove_instance("a", fence=fence)
    assert (await pool.membership()).instances == {}
