"""What is called exact: nothing before an engine has confirmed it, and nothing that one has refuted."""

from __future__ import annotations

import itertools

import pytest

from dualmap.scheduling.prompts.token_trust import (
    AGREED_AGAIN,
    AGREED_IN_ROW,
    MAX_KINDS,
    MISTRUSTED_S,
    TRANSITIONS,
    WINDOW_COUNTS,
    TokenEvidence,
    TokenTrust,
    Trust,
)

UNVERIFIED, EXACT, MISTRUSTED = Trust.UNVERIFIED, Trust.EXACT, Trust.MISTRUSTED


@pytest.fixture
def trust() -> TokenTrust:
    made = TokenTrust()
    made.compared(agreed=True, now_s=0)
    return made


def test_every_state_has_an_answer_to_all_evidence_and_only_a_lapse_leaves_mistrust() -> None:
    assert set(TRANSITIONS) == set(itertools.product(Trust, TokenEvidence))
    left = {evidence for (state, evidence), then in TRANSITIONS.items() if state is MISTRUSTED and then is not state}
    assert left == {TokenEvidence.LAPSED}
    assert {then for (_, evidence), then in TRANSITIONS.items() if evidence is TokenEvidence.DIFFERED} == {MISTRUSTED}


def test_a_count_is_exact_once_texts_were_compared_and_an_engine_counted_its_kind() -> None:
    trust = TokenTrust()
    assert trust.is_comparison_due(0) and trust.of("chat", 0) is UNVERIFIED
    trust.counted("chat", agreed=True, now_s=0)
    assert trust.of("chat", 0) is UNVERIFIED
    trust.compared(agreed=True, now_s=0)
    assert (trust.of("chat", 0), trust.of("tools", 0)) == (EXACT, UNVERIFIED)
    assert not trust.is_comparison_due(1e9)


def test_counts_of_engines_stand_for_a_comparison_where_none_tokenizes() -> None:
    trust = TokenTrust()
    for _ in range(AGREED_IN_ROW):
        assert trust.of("chat", 0) is UNVERIFIED
        trust.counted("chat", agreed=True, now_s=0)
    assert trust.of("chat", 0) is EXACT


def test_one_count_that_differs_withdraws_it_from_its_kind_and_from_no_other(trust: TokenTrust) -> None:
    for kind in ("chat", "tools"):
        trust.counted(kind, agreed=True, now_s=0)
    assert trust.counted("tools", agreed=False, now_s=1)
    assert not trust.counted("tools", agreed=False, now_s=1), "it was mistrusted before"
    for _ in range(100):
        trust.counted("tools", agreed=True, now_s=1)  # those that were on their way
    assert (trust.of("tools", 2), trust.of("chat", 2), trust.mistrusted_kinds(2)) == (MISTRUSTED, EXACT, 1)


def test_a_kind_is_tried_again_later_each_time_and_needs_several_counts_in_a_row(trust: TokenTrust) -> None:
    now_s, paused_s = 0.0, []
    for _ in range(3):
        trust.counted("chat", agreed=False, now_s=now_s)
        before_s = now_s
        while trust.of("chat", now_s) is MISTRUSTED:
            now_s += MISTRUSTED_S / 2
        paused_s.append(now_s - before_s)
    assert paused_s == [MISTRUSTED_S, 2 * MISTRUSTED_S, 4 * MISTRUSTED_S]
    trust.compared(agreed=True, now_s=now_s)
    for _ in range(AGREED_AGAIN):
        assert trust.of("chat", now_s) is UNVERIFIED
        trust.counted("chat", agreed=True, now_s=now_s)
    assert trust.of("chat", now_s) is EXACT


def test_more_than_a_few_miscounts_in_a_hundred_are_a_reason_to_compare_again(trust: TokenTrust) -> None:
    for number in range(3 * WINDOW_COUNTS):  # one in a hundred
        trust.counted(number % 100, agreed=number % 100 != 0, now_s=0)
        assert not trust.is_comparison_due(0)
    for number in range(WINDOW_COUNTS):
        trust.counted(number % 20, agreed=number % 20 != 0, now_s=0)
        if trust.is_comparison_due(0):
            break
    assert trust.whole is UNVERIFIED and trust.of(50, 0) is UNVERIFIED
    trust.compared(agreed=True, now_s=0)
    assert trust.of(50, 0) is EXACT and trust.of(0, 0) is MISTRUSTED


def test_texts_that_differ_withdraw_everything_until_they_agree_again(trust: TokenTrust) -> None:
    trust.counted("chat", agreed=True, now_s=0)
    trust.compared(agreed=False, now_s=0)
    for _ in range(AGREED_IN_ROW):
        trust.counted("chat", agreed=True, now_s=0)
    assert trust.of("chat", 0) is trust.of("new", 0) is MISTRUSTED
    assert not trust.is_comparison_due(MISTRUSTED_S - 1) and trust.is_comparison_due(MISTRUSTED_S)
    trust.compared(agreed=True, now_s=MISTRUSTED_S)
    assert trust.of("chat", MISTRUSTED_S) is EXACT


def test_kinds_are_bounded(trust: TokenTrust) -> None:
    for kind in range(2 * MAX_KINDS):
        trust.counted(kind, agreed=False, now_s=0)
    assert trust.mistrusted_kinds(0) == MAX_KINDS
