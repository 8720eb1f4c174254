from __future__ import annotations

from collections.abc import Callable

import pytest

from dualmap.scheduling.scaling.role_plan import HOLDS_MS, PAUSE_MS, RoleChange, RoleState, RoleTargets, plan_roles
from dualmap.scheduling.state.instance import InstanceLoad, InstanceSpec, InstanceState, Role

Load = Callable[..., InstanceLoad]
SLO_S, SLO_TPOT_S = 5.0, 0.05


class Pool:
    """A pool whose loads a test sets; 8,000 tokens of prefill a second."""

    def __init__(self, load: Load, prefill: int, decode: int, mixed: int = 0) -> None:
        roles = [Role.PREFILL] * prefill + [Role.DECODE] * decode + [Role.MIXED] * mixed
        self.instances = {
            f"{role}{index}": InstanceSpec(f"{role}{index}", "http://x", role, InstanceState.READY)
            for index, role in enumerate(roles)
        }
        self.loads = {name: load(name) for name in self.instances}
        self._load = load
        self.state = RoleState()
        self.tpot_s: float | None = None

    def set(self, role: Role, **figures: int) -> None:
        for name, spec in self.instances.items():
            if spec.role is role:
                self.loads[name] = self._load(name, **figures)

    def plan(self, now_ms: int) -> RoleChange | None:
        self.state, change = plan_roles(
            self.state, self.instances, self.loads, RoleTargets(SLO_S, SLO_TPOT_S, self.tpot_s), now_ms
        )
        return change


def late(load: Load) -> int:
    """Pending tokens that take longer than half of the SLO."""
    return round(load("x").prefill_tokens_per_s * SLO_S * 0.7)


def test_a_starved_prefill_side_gets_a_decode_instance_once_that_has_lasted(load: Load) -> None:
    pool = Pool(load, 2, 3)
    pool.set(Role.PREFILL, pending_tokens=late(load))

    assert pool.plan(0) is None
    assert pool.plan(HOLDS_MS - 1) is None
    change = pool.plan(HOLDS_MS)

    assert change is not None
    assert (change.instance_id, change.role) == ("decode2", Role.PREFILL)


def test_a_starved_decode_side_gets_the_prefill_instance_of_the_least_work(load: Load) -> None:
    pool = Pool(load, 2, 2)
    pool.set(Role.DECODE, context_tokens=950_000)
    pool.loads["prefill0"] = load("prefill0", pending_tokens=100)

    pool.plan(0)
    change = pool.plan(HOLDS_MS)

    assert change is not None
    assert (change.instance_id, change.role) == ("prefill1", Role.DECODE)


def test_a_burst_that_is_digested_moves_nobody(load: Load) -> None:
    pool = Pool(load, 2, 2)
    pool.set(Role.PREFILL, pending_tokens=late(load))
    pool.plan(0)
    pool.set(Role.PREFILL)
    pool.plan(HOLDS_MS - 1)
    pool.set(Role.PREFILL, pending_tokens=late(load))

    assert pool.plan(HOLDS_MS) is None


def test_after_a_change_the_new_size_has_to_show(load: Load) -> None:
    pool = Pool(load, 2, 4)
    pool.set(Role.PREFILL, pending_tokens=late(load))
    pool.plan(0)
    assert pool.plan(HOLDS_MS) is not None

    moments = range(HOLDS_MS + 1000, HOLDS_MS + 2 * PAUSE_MS, 1000)
    changes = [now_ms for now_ms in moments if pool.plan(now_ms) is not None]

    assert changes[0] == HOLDS_MS + PAUSE_MS


def test_no_side_loses_its_last_instance_or_what_it_needs_itself(load: Load) -> None:
    last, busy = Pool(load, 2, 1), Pool(load, 2, 2)
    for pool in (last, busy):
        pool.set(Role.PREFILL, pending_tokens=late(load))
    busy.set(Role.DECODE, context_tokens=500_000)

    assert [pool.plan(now_ms) for pool in (last, busy) for now_ms in (0, HOLDS_MS, 2 * HOLDS_MS)] == [None] * 6


def test_mixed_instances_and_pools_without_roles_stay_as_they_are(load: Load) -> None:
    pool = Pool(load, 0, 0, 4)
    pool.set(Role.MIXED, pending_tokens=10 * late(load))

    assert [pool.plan(now_ms) for now_ms in (0, HOLDS_MS)] == [None, None]


def test_a_side_whose_answers_are_too_slow_gets_an_instance(load: Load) -> None:
    pool = Pool(load, 3, 3)
    pool.tpot_s = 0.06

    pool.plan(0)
    change = pool.plan(HOLDS_MS)

    assert change is not None
    assert change.role is Role.DECODE


@pytest.mark.parametrize(("tpot_s", "gives"), [(0.030, True), (0.042, False)])
def test_the_decode_side_gives_nothing_that_would_make_its_answers_too_slow(
    load: Load, tpot_s: float, gives: bool
) -> None:
    pool = Pool(load, 4, 4)  # with one less, answers take a third longer
    pool.set(Role.PREFILL, pending_tokens=late(load))
    pool.tpot_s = tpot_s

    pool.plan(0)

    assert (pool.plan(HOLDS_MS) is not None) == gives


def test_a_short_burst_does_not_begin_the_wait_again(load: Load) -> None:
    pool = Pool(load, 4, 4)
    pool.tpot_s = 0.06
    pool.plan(0)
    pool.set(Role.PREFILL, pending_tokens=late(load))
    pool.plan(HOLDS_MS // 2)
    pool.set(Role.PREFILL, pending_tokens=0)
    for now_ms in range(HOLDS_MS // 2 + 1000, HOLDS_MS * 3, 1000):
        change = pool.plan(now_ms)
        if change is not None:
            break

    assert change is not None
    assert change.role is Role.DECODE
