from __future__ import annotations

import pytest

from dualmap.scheduling.estimates.transfer_model import learn_transfer, transfer_cost, transfer_prior


def test_a_few_transfers_teach_latency_and_bandwidth() -> None:
    seen = [(tokens, 0.2 + tokens / 50_000) for tokens in (1_000, 20_000, 5_000, 40_000, 10_000, 3_000)] * 4

    latency_s, token_s = transfer_cost(learn_transfer(transfer_prior(), seen))

    assert latency_s == pytest.approx(0.2, abs=0.03)
    assert 1 / token_s == pytest.approx(50_000, rel=0.15)


def test_one_transfer_that_hung_changes_little() -> None:
    model = learn_transfer(transfer_prior(), [(tokens, 0.05 + tokens / 200_000) for tokens in (2_000, 30_000)] * 25)

    before, after = transfer_cost(model), transfer_cost(learn_transfer(model, [(8_000, 40.0)]))

    assert after[0] - before[0] < 0.1


def test_transfers_that_became_slower_are_followed() -> None:
    model = learn_transfer(transfer_prior(), [(tokens, 0.02 + tokens / 200_000) for tokens in (2_000, 30_000)] * 50)

    model = learn_transfer(model, [(tokens, 0.02 + tokens / 20_000) for tokens in (2_000, 30_000)] * 100)

    assert 1 / transfer_cost(model)[1] == pytest.approx(20_000, rel=0.3)


def test_nothing_costs_less_than_no_time() -> None:
    model = learn_transfer(transfer_prior(), [(1_000, 0.9), (50_000, 0.1)] * 30)

    assert min(transfer_cost(model)) >= 0
