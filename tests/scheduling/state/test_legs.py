from __future__ import annotations

from dualmap.scheduling.state.instance import Counts, Role
from dualmap.scheduling.state.legs import Leg, decode_leg_id, request_id_of, serves
from dualmap.scheduling.state.request import RequestState, StoredRequest


def request(leg: Leg, state: RequestState) -> StoredRequest:
    return StoredRequest(
        "r",
        "one",
        "a",
        state,
        1,
        uncached_tokens=300,
        prompt_tokens=1000,
        expected_output_tokens=50,
        slo_ms=5000,
        leg=leg,
    )


def test_a_prefill_leg_goes_to_no_decode_instance_and_a_decode_leg_to_no_prefill_instance() -> None:
    assert {leg: {role for role in Role if serves(role, leg)} for leg in Leg} == {
        Leg.WHOLE: set(Role),
        Leg.PREFILL: {Role.PREFILL, Role.MIXED},
        Leg.DECODE: {Role.DECODE, Role.MIXED},
    }


def test_a_prefill_leg_takes_the_memory_of_its_prompt_until_it_ends() -> None:
    assert request(Leg.PREFILL, RequestState.DISPATCHED).counts == Counts(
        pending_tokens=300, dispatched_tokens=300, context_tokens=1000, running_requests=1
    )
    assert request(Leg.PREFILL, RequestState.PREFILLED).counts == Counts(context_tokens=1000, running_requests=1)


def test_a_decode_leg_counts_as_context_alone() -> None:
    assert request(Leg.DECODE, RequestState.PREFILLED).counts == Counts(context_tokens=1050, running_requests=1)


def test_the_legs_of_a_request_have_ids_of_their_own() -> None:
    assert decode_leg_id("r") != "r"
    assert request_id_of(decode_leg_id("r")) == request_id_of("r") == "r"
