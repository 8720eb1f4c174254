"""Searches for an instance in virtual time, as a router makes them: for requests, and for decode legs."""

from __future__ import annotations

from dataclasses import dataclass, field

from dualmap.scheduling.estimates.answer_length import expected_answer_tokens
from dualmap.scheduling.placing.decision import Policy, RouteQuery
from dualmap.scheduling.placing.placement import Placed, Search, SearchFailed
from dualmap.scheduling.placing.policies.decode_legs import DecodeLegs
from dualmap.scheduling.placing.split import SplitRule
from dualmap.scheduling.prompts.chain import Chain
from dualmap.scheduling.queues.queue_order import QueueOrder
from dualmap.scheduling.settings import SchedulingSettings
from dualmap.scheduling.state.legs import Leg
from dualmap.scheduling.state.request import Request, RequestState
from dualmap.scheduling.steps import drive_now
from dualmap.simulation.simulated_fleet import SimulatedFleet
from dualmap.simulation.simulated_pool import REPLICA


@dataclass
class Searches:
    """Of one run."""

    fleet: SimulatedFleet
    scheduling: SchedulingSettings
    policy: Policy
    order: QueueOrder
    refuses_late: bool
    at_once: bool
    """Nothing is held in the fleet."""
    _rule: SplitRule = field(init=False)
    _decode_legs: DecodeLegs = field(init=False)

    def __post_init__(self) -> None:
        settings = self.scheduling
        self._rule = SplitRule(settings.split)
        self._decode_legs = DecodeLegs(settings.max_key_blocks, settings.kv_weight_s, self._rule)

    def of_request(self, request_id: str, chain: Chain, slo_s: float, output_limit: int) -> Search:
        """``output_limit`` 0: the request has none."""
        slo_s = self._rule.prefill_slo_s(slo_s, chain.prompt_tokens, self.fleet.view, self.fleet.learned)
        query, request = self._asked(request_id, chain, slo_s, output_limit)
        stall_s, refuses = self.scheduling.decode_stall_s, self.refuses_late
        return Search(
            self.policy, self.order, query, request, self.fleet, refuses, stall_s, self._rule, at_once=self.at_once
        )

    def of_decode_leg(self, leg_id: str, chain: Chain, slo_s: float, output_limit: int) -> Search:
        query, request = self._asked(leg_id, chain, slo_s, output_limit)
        stall_s = self.scheduling.decode_stall_s
        return Search(self._decode_legs, self.order, query, request, self.fleet, False, stall_s, leg=Leg.DECODE)

    def run(self, search: Search) -> Placed | None:
        """Search and reserve; None if no instance takes it."""
        try:
            return drive_now(search.run(), self.fleet)
        except SearchFailed:
            return None

    def _asked(self, leg_id: str, chain: Chain, slo_s: float, output_limit: int) -> tuple[RouteQuery, Request]:
        output_tokens = expected_answer_tokens(self.fleet.learned.answer_tokens, output_limit)
        query = RouteQuery(chain, slo_s, expected_output_tokens=output_tokens)
        tokens, slo_ms = chain.prompt_tokens, round(slo_s * 1000)
        return query, Request(leg_id, REPLICA, "", RequestState.HELD, 1, 0, tokens, output_tokens, slo_ms)
