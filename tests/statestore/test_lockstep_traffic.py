"""The twins of ``test_lockstep`` under traffic as it comes: many held requests, few disasters.

Random rules mostly meet a pool that the rules before have broken. Here the calls have the weights of a busy fleet, so
that queues fill, deadlines pass and prefixes wander.
"""

from __future__ import annotations

import random
from collections import Counter
from collections.abc import Callable

import pytest

from scheduling.instance import InstanceState
from scheduling.settings import SchedulingSettings
from scheduling.ttft_model import TtftFeatures
from statestore.base import RequestState
from statestore.embedded import EmbeddedValkey
from tests.statestore.samples import SCHEDULING
from tests.statestore.test_lockstep import CHAINS, DEADLINE, INSTANCES, REPLICAS, SEED, Twins

STEPS = 400


class Traffic:
    """Draws one call after another and makes it on both stores."""

    def __init__(self, twins: Twins, seed: int) -> None:
        self.twins = twins
        self.rng = random.Random(seed)
        self.made: Counter[str] = Counter()
        self._calls: dict[Callable[[], None], int] = {
            self.arrive: 30,
            self.pass_time: 20,
            self.first_token: 14,
            self.finish: 8,
            self.migrate: 10,
            self.observe: 8,
            self.retry: 3,
            self.adopt: 2,
            self.change_instance: 2,
            self.make_ready: 3,
            self.drift: 2,
            twins.grant_overdue: 4,
        }

    def step(self) -> None:
        (call,) = self.rng.choices([*self._calls], [*self._calls.values()])
        call()
        twins = self.twins
        twins.views_agree()
        twins.queues_and_horizon_agree()
        twins.sums_are_the_sums_of_the_requests()
        twins.kv_metadata_and_arrivals_agree()
        twins.chains_of_held_requests_are_kept_and_no_others()
        self._look()

    def _look(self) -> None:
        """Count what the traffic has led to, so that a test can tell whether it was worth anything."""
        ledger = self.twins.memory.ledger
        self.made["late"] += any(len(account.late) > 1 for account in ledger.accounts.values())
        self.made["queued"] += any(len(account.queue) > 2 for account in ledger.accounts.values())
        self.made["holders"] += bool(ledger.holders.generations()[1])
        self.made["migrated"] = sum(ledger.migrations.values())

    # calls -------------------------------------------------------------------------------------------------
    def arrive(self) -> None:
        rng = self.rng
        instance_id, other_id = rng.sample(INSTANCES, 2)
        self.made["arrived"] += 1
        self.twins.reserve(
            f"t{self.made['arrived']}",
            rng.choice(REPLICAS),
            instance_id,
            other_id,
            rng.choice(CHAINS),
            rng.choice((1, 100, 100, 400, 600, 900)),
            attempt=1,
            seen=None,
            tolerance=0,
            overloaded=rng.random() < 0.1,
            slo_ms=rng.choice((20, 150, 150, 500, 2000, 60_000)),
            features=TtftFeatures(
                rng.randrange(5000), rng.randrange(1, 900), rng.randrange(90), rng.randrange(500_000)
            ),
        )

    def pass_time(self) -> None:
        self.twins.time_passes(self.rng.choice((1, 10, 50, 100, 400, 400, 9000)))

    def first_token(self) -> None:
        self.twins.first_token(self.rng.randrange(100), self.rng.choice(CHAINS), self.rng.random() < 0.9)

    def finish(self) -> None:
        self.twins.finish(self.rng.randrange(100), None)

    def migrate(self) -> None:
        held = self.twins.pick(self.rng.randrange(100), RequestState.HELD)
        if held is not None:
            self.twins.migrate_anything(held.request_id, held.instance_id, self.rng.choice(INSTANCES), False)

    def observe(self) -> None:
        self.twins.observe(self.rng.choice(CHAINS))

    def retry(self) -> None:
        self.twins.retry(self.rng.randrange(100), self.rng.choice(INSTANCES), self.rng.randrange(1, 600), None)

    def adopt(self) -> None:
        self.made["adopted"] += 1
        state = self.rng.choice([*RequestState])
        self.twins.adopt(f"a{self.made['adopted']}", self.rng.choice(INSTANCES), "one", state, self.rng.randrange(99))

    def change_instance(self) -> None:
        rng = self.rng
        if rng.random() < 0.5:
            self.twins.set_state(rng.choice(INSTANCES), rng.choice([*InstanceState]), None, False)
        else:
            window, running = rng.choice((1, 500, 2000)), rng.randrange(1, 5)
            self.twins.put_instance(rng.choice(INSTANCES), InstanceState.READY, window, running, 12, 9)

    def make_ready(self) -> None:
        for instance_id in INSTANCES:
            self.twins.becomes_ready(instance_id)

    def drift(self) -> None:
        sum_name = self.rng.choice(("pending_tokens", "late_tokens", "context_tokens"))
        self.twins.drift_and_repair(self.rng.choice(INSTANCES), sum_name, self.rng.randrange(-300, 300))


class QuietTraffic(Traffic):
    """The calls of a fleet that is idle more often than not."""

    def __init__(self, twins: Twins, seed: int) -> None:
        super().__init__(twins, seed)
        self._calls = {
            self.newcomer: 60,
            self.arrive: 2,
            self.pass_time: 15,
            self.first_token: 50,
            self.finish: 60,
            self.change_instance: 2,
            self.make_ready: 8,
        }

    def newcomer(self) -> None:
        rng = self.rng
        self.made["newcomers"] += 1
        decision = self.twins.newcomer(
            tuple(rng.sample(INSTANCES, rng.choice((1, 2, 2, 2)))),
            f"n{self.made['newcomers']}",
            rng.choice(REPLICAS),
            rng.choice(CHAINS),
            rng.choice((20, 150, 500, 2000, 60_000)),
        )
        self.made["reserved at once"] += decision is not None


def all_through(
    traffic_of: Callable[[Twins, int], Traffic], server: EmbeddedValkey, scheduling: SchedulingSettings
) -> Counter[str]:
    """A day of such traffic on three instances, on which the twins agree; what it has led to."""
    twins = type("TwinsOnThisServer", (Twins,), {"server": server, "scheduling": scheduling})()
    try:
        twins.two_ready_instances_and_a_leader()
        for instance_id in INSTANCES:
            twins.put_instance(instance_id, InstanceState.READY, 500, 4, 12, 9)
        traffic = traffic_of(twins, int(SEED or 1))
        for _ in range(STEPS):
            traffic.step()
        twins.grants_agree()
        twins.kv_metadata_and_arrivals_agree()
    finally:
        twins.teardown()
    return traffic.made


@pytest.mark.parametrize("scheduling", [SCHEDULING, DEADLINE], ids=["fifo", "deadline"])
def test_memory_and_valkey_agree_all_through_a_busy_day(
    valkey_server: EmbeddedValkey, scheduling: SchedulingSettings
) -> None:
    made = all_through(Traffic, valkey_server, scheduling)

    assert min(made["arrived"], made["queued"]) > 50
    assert made["migrated"] > 10
    if scheduling is DEADLINE:
        assert made["late"] > 50
        assert made["holders"] > 100


def test_memory_and_valkey_agree_all_through_a_quiet_day(valkey_server: EmbeddedValkey) -> None:
    made = all_through(QuietTraffic, valkey_server, DEADLINE)

    assert made["reserved at once"] > 15
    assert made["newcomers"] - made["reserved at once"] > 10
