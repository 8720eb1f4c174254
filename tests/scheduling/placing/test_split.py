from __future__ import annotations

from collections.abc import Callable
from typing import Any, Self

import pytest

from dualmap.scheduling.estimates.learned import Learned
from dualmap.scheduling.placing.decision import Policy, Reason, RouteQuery
from dualmap.scheduling.placing.placement import Placed, PlaceStatus, Search, SearchFailed, SearchRules
from dualmap.scheduling.placing.policies.decode_legs import DecodeLegs
from dualmap.scheduling.placing.split import SplitRule
from dualmap.scheduling.prompts.chain import Chain
from dualmap.scheduling.queues.queue_order import QueueOrder
from dualmap.scheduling.settings import POLICIES, SchedulingSettings, SplitSettings
from dualmap.scheduling.state.hotness import HotnessTree
from dualmap.scheduling.state.instance import InstanceSpec, InstanceState, Role
from dualmap.scheduling.state.legs import Leg, decode_leg_id
from dualmap.scheduling.state.request import RequestState, StoredRequest
from dualmap.scheduling.state.view import ClusterView
from dualmap.scheduling.steps import at_once, drive_now
from dualmap.statestore.memory import MemoryStore

SCHEDULING = SchedulingSettings(block_tokens=100)
BLOCKS = 100


class Fleet:
    """A split fleet over the books in memory."""

    learned = Learned()

    def __init__(self, prefill: int = 3, decode: int = 3, mixed: int = 0) -> None:
        self.pool = MemoryStore(SCHEDULING, now_ms=lambda: 1_000_000).pool("default")
        for role, number in ((Role.PREFILL, prefill), (Role.DECODE, decode), (Role.MIXED, mixed)):
            for index in range(number):
                name = f"{role}{index}"
                at_once(self.pool.members.put_instance(InstanceSpec(name, f"http://{name}", role, InstanceState.READY)))
        at_once(self.refresh())

    async def refresh(self) -> None:
        told = await self.pool.membership()
        self.view = ClusterView.build(
            epoch=told.epoch, tree_version=0, instances=told.instances, tree=HotnessTree(), virtual_nodes=16
        )

    @property
    def sight(self) -> Self:
        return self

    def blocked(self) -> frozenset[str]:
        return frozenset()

    async def place(self, placement: Any) -> Any:
        return await self.pool.place(placement)

    async def observe(self, names: tuple[str, ...], chain: Chain) -> Any:
        return await self.pool.observe(names, chain)


def chain(first: int = 1, blocks: int = BLOCKS) -> Chain:
    return Chain(tuple(range(first, first + blocks)), 100, blocks * 100)


Built = Callable[..., Placed]


@pytest.fixture
def put(policy: Callable[..., Policy]) -> Built:
    def build(
        fleet: Fleet, request_id: str, asked: Chain, *, name: str = "dualmap", failed: frozenset[str] = frozenset(),
        **settings: Any,
    ) -> Placed:  # fmt: skip
        rule = SplitRule(SplitSettings(**settings))
        slo_s = rule.prefill_slo_s(5.0, asked.prompt_tokens, fleet.view, fleet.learned)
        slo_ms = round(slo_s * 1000)
        request = StoredRequest(
            request_id,
            "one",
            "",
            RequestState.HELD,
            1,
            uncached_tokens=0,
            prompt_tokens=asked.prompt_tokens,
            expected_output_tokens=50,
            slo_ms=slo_ms,
        )
        query = RouteQuery(asked, slo_s, excluded=failed)
        rules = SearchRules(policy(name), QueueOrder(True, 30.0), fleet, 3.0, split=rule)
        return drive_now(Search(rules, query, request).run(), fleet).placed

    return build


def decode(fleet: Fleet, request_id: str, asked: Chain) -> Placed:
    made = DecodeLegs(4.0, SplitRule(SplitSettings()))
    request = StoredRequest(
        decode_leg_id(request_id),
        "one",
        "",
        RequestState.HELD,
        1,
        uncached_tokens=0,
        prompt_tokens=asked.prompt_tokens,
        expected_output_tokens=50,
        slo_ms=5000,
    )
    rules = SearchRules(made, QueueOrder(True, 30.0), fleet, 3.0)
    search = Search(rules, RouteQuery(asked, 5.0), request, leg=Leg.DECODE)
    return drive_now(search.run(), fleet).placed


@pytest.mark.parametrize("name", POLICIES)
def test_under_every_policy_a_long_prompt_is_split_where_decoding_would_wait_for_it(put: Built, name: str) -> None:
    fleet = Fleet()
    for number in range(60):
        decode(fleet, f"busy{number}", chain(10_000 + 100 * number, 10))

    placed = put(fleet, "r", chain(), name=name)

    assert placed.reply.chosen.leg is Leg.PREFILL
    assert placed.instance_id.startswith("prefill")


@pytest.mark.parametrize("name", POLICIES)
def test_under_every_policy_a_prompt_that_a_decode_instance_holds_is_served_whole(put: Built, name: str) -> None:
    fleet, asked = Fleet(), chain()
    where = decode(fleet, "before", asked).instance_id

    placed = put(fleet, "r", asked, name=name)

    assert placed.reply.chosen.leg is Leg.WHOLE
    # To vllm-kv-aware the answer that runs there costs as much as the cache of its prompt saves.
    indifferent = ("round-robin", "least-loaded", "dualmap-least-loaded", "vllm-kv-aware")
    assert placed.instance_id == where or name in indifferent


def test_a_short_prompt_is_served_whole(put: Built) -> None:
    assert put(Fleet(), "r", chain(blocks=1)).reply.chosen.leg is Leg.WHOLE


def test_the_closer_answers_are_to_their_slo_the_more_a_prefill_beside_them_costs() -> None:
    rule = SplitRule(SplitSettings(slo_tpot_s=0.05))

    def weight(tpot_s: float | None) -> float:
        learned = Learned(tpot_s=tpot_s)
        return rule.decider(split=False, learned=learned).decoding_compute_s - learned.ttft.decoding_compute_s

    assert weight(None) == 4.0
    assert weight(0.025) == pytest.approx(4.33, rel=0.01)
    assert weight(0.045) == pytest.approx(20.6, rel=0.01)
    assert weight(0.05) == weight(0.5) == pytest.approx(200.0)


@pytest.mark.parametrize(("mode", "leg"), [("always", Leg.PREFILL), ("never", Leg.WHOLE)])
def test_a_mode_decides_for_all(put: Built, mode: str, leg: Leg) -> None:
    assert {put(Fleet(), "r", chain(blocks=blocks), mode=mode).reply.chosen.leg for blocks in (1, 100)} == {leg}


@pytest.mark.parametrize("mode", ["always", "auto"])
def test_where_every_prefill_instance_has_failed_a_request_is_served_whole(put: Built, mode: str) -> None:
    fleet = Fleet()

    placed = put(fleet, "r", chain(), failed=frozenset(fleet.view.of(Leg.PREFILL).ready), mode=mode)

    assert (placed.reply.chosen.leg, placed.reply.status) == (Leg.WHOLE, PlaceStatus.DISPATCHED)


def test_without_a_prefill_instance_requests_are_served_whole(put: Built) -> None:
    assert put(Fleet(prefill=0), "r", chain()).reply.chosen.leg is Leg.WHOLE


def test_where_every_instance_has_failed_the_search_fails(put: Built) -> None:
    fleet = Fleet()

    with pytest.raises(SearchFailed):
        put(fleet, "r", chain(), failed=frozenset(fleet.view.instances))


def test_a_mixed_pool_splits_nothing(put: Built) -> None:
    assert put(Fleet(0, 0, 4), "r", chain()).reply.chosen.leg is Leg.WHOLE


def test_decode_legs_of_one_prefix_stay_within_their_pair() -> None:
    fleet = Fleet(decode=8)

    where = {decode(fleet, f"r{number}", chain(blocks=10 + number)).instance_id for number in range(6)}

    assert len(where) <= 2


def test_decode_legs_spread_over_the_side_by_what_decodes_there() -> None:
    fleet = Fleet(decode=4)

    where = [decode(fleet, f"r{number}", chain(1 + 1000 * number)).instance_id for number in range(40)]

    assert {where.count(name) for name in set(where)} <= {9, 10, 11}
    assert len(set(where)) == 4


def test_what_transfers_were_seen_to_take_replaces_the_assumption(put: Built) -> None:
    def split(transfer: tuple[float, float] | None) -> bool:
        fleet = Fleet()
        fleet.learned = Learned(transfer=transfer)
        for number in range(6):
            decode(fleet, f"busy{number}", chain(10_000 + 100 * number, 10))
        return put(fleet, "r", chain()).reply.chosen.leg is Leg.PREFILL

    assert split(None)
    assert not split((30.0, 1e-3))


def test_the_prefill_of_a_split_request_has_to_end_before_its_transfer(put: Built) -> None:
    fleet = Fleet()
    fleet.learned = Learned(transfer=(0.3, 5e-5))  # 0.8 s in all

    placed = put(fleet, "r", chain(), mode="always")

    assert at_once(fleet.pool.records(["r"]))["r"].slo_ms == 4200
    assert placed.decision.expected_ttft_s > 0.8


@pytest.mark.parametrize(("prefill", "mode"), [(0, "auto"), (3, "never")])
def test_what_is_never_split_keeps_its_whole_slo(put: Built, prefill: int, mode: str) -> None:
    fleet = Fleet(prefill, 0 if prefill == 0 else 3, mixed=3)
    fleet.learned = Learned(transfer=(0.3, 5e-5))

    put(fleet, "r", chain(), mode=mode)

    assert at_once(fleet.pool.records(["r"]))["r"].slo_ms == 5000


def test_a_transfer_takes_no_more_than_half_of_an_slo(put: Built) -> None:
    fleet = Fleet()
    fleet.learned = Learned(transfer=(60.0, 0.0))

    put(fleet, "r", chain(), mode="always")

    assert at_once(fleet.pool.records(["r"]))["r"].slo_ms == 2500


def test_a_decode_leg_is_expected_to_wait_for_what_is_not_there() -> None:
    fleet = Fleet(decode=2)
    fleet.learned = Learned(transfer=(0.3, 1e-4))
    decode(fleet, "former", chain(blocks=40))

    decision = decode(fleet, "r", chain(blocks=100)).decision

    assert (decision.hit_blocks, decision.uncached_tokens) == (40, 6000)
    assert decision.expected_ttft_s == pytest.approx(0.9)
    assert decision.reason is Reason.COST
    assert decision.alternative_id not in (None, decision.instance_id)
