"""The usage that requests are metered by."""

from __future__ import annotations

import pytest

from dualmap.scheduling.request.charge import Charge
from dualmap.scheduling.request.metering import LOST, Account, Counts, UsageRecord, used_by, used_by_lost
from dualmap.scheduling.request.outcome import Outcome
from dualmap.scheduling.state.legs import decode_leg_id
from dualmap.scheduling.state.request import RequestState, StoredRequest

ACME = Account("acme", "ci", "batch", "a model with blanks")


def stored(
    request_id: str = "x", state: RequestState = RequestState.PREFILLED, account: str = str(ACME)
) -> StoredRequest:
    return StoredRequest(
        request_id,
        "one",
        "a",
        state,
        1,
        uncached_tokens=0,
        prompt_tokens=300,
        expected_output_tokens=50,
        slo_ms=5000,
        account=account,
    )


@pytest.mark.parametrize("account", [ACME, Account("acme", "ci", "", "m"), Account("a-b_c.d", "0", "", "org/m:7b")])
def test_an_account_is_read_as_it_was_written(account: Account) -> None:
    assert Account.parse(str(account)) == account


@pytest.mark.parametrize("text", ["", "acme", "acme ci -", "1 2"])
def test_what_is_no_account_and_what_are_no_counts_is_refused(text: str) -> None:
    with pytest.raises(ValueError, match=r"values|counts|literal"):
        Account.parse(text)
    with pytest.raises(ValueError, match=r"values|counts|literal"):
        Counts.parse(text)


def test_counts_add_up_and_are_read_as_they_were_written() -> None:
    total = Counts(1, 100, 64, 20) + Counts(2, 7, 0, 1, 1, 1, 5)

    assert total == Counts(3, 107, 64, 21, 1, 1, 5)
    assert Counts.parse(str(total)) == total


def test_a_record_of_the_log_is_read_as_scripts_write_it() -> None:
    used = used_by(Outcome.COMPLETED, Charge(100, 20, reported=True))

    record = UsageRecord.parse(f"1795369287264 {used} r-1 {ACME}")

    assert record == UsageRecord(1795369287264, "r-1", ACME, Counts(1, 100, 0, 20), "completed", True)


def test_what_a_dead_replica_left_counts_its_prompt_if_that_was_computed() -> None:
    for state, prompt in ((RequestState.PREFILLED, 300), (RequestState.DISPATCHED, 0), (RequestState.HELD, 0)):
        assert used_by_lost(stored(state=state), ()) == f"1 {prompt} 0 0 0 1 0 {LOST} expected"
    assert used_by_lost(stored(account=""), ()) == ""


def test_of_two_legs_one_is_metered() -> None:
    leg = stored(decode_leg_id("x"))

    assert used_by_lost(leg, {"x", leg.request_id}) == ""
    assert used_by_lost(leg, {leg.request_id}) != ""
