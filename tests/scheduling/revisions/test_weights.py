"""Who is served by which revision."""

from __future__ import annotations

from dataclasses import replace

import pytest

from dualmap.scheduling.revisions.weights import (
    NO_WEIGHTS,
    Home,
    RevisionShare,
    RevisionWeights,
    WeightError,
    chosen,
    fixed,
    is_shadowed,
    point,
    stands,
    with_shadow,
    with_tenant,
    with_weights,
    without,
)

BOTH = {"v1", "v2"}
SESSIONS = [f"{number:016x}" for number in range(20_000)]


def weights(**percents: float) -> RevisionWeights:
    return with_weights(NO_WEIGHTS, percents)


def taken_by(revision: str, given: RevisionWeights, among: set[str] = BOTH) -> set[str]:
    return {session for session in SESSIONS if chosen(given, among, session) == revision}


@pytest.mark.parametrize("percent", [0.0, 1.0, 5.0, 50.0, 100.0])
def test_a_revision_gets_its_part_of_all_sessions(percent: float) -> None:
    part = len(taken_by("v2", weights(v1=100 - percent, v2=percent))) / len(SESSIONS)

    assert part == pytest.approx(percent / 100, abs=0.006)


def test_a_growing_weight_takes_sessions_and_gives_none_away() -> None:
    three = weights(v1=90.0, v2=5.0, v3=5.0)
    grown = with_weights(three, {"v2": 20.0})

    assert taken_by("v2", three, {"v1", "v2", "v3"}) < taken_by("v2", grown, {"v1", "v2", "v3"})
    assert grown.shares["v1"].weight / grown.shares["v3"].weight == pytest.approx(18.0)


def test_a_session_lies_at_one_place_for_a_revision_in_every_process() -> None:
    assert point("0000000000000001", "v2") == 0.8386754329685522


def test_a_revision_without_a_ready_instance_leaves_its_sessions_to_others() -> None:
    given = weights(v1=50.0, v2=50.0)

    assert taken_by("v2", given, {"v1"}) == set()
    assert chosen(given, set(), SESSIONS[0]) in BOTH, "requests may wait for the first instance"


def test_no_weight_names_no_revision() -> None:
    assert chosen(NO_WEIGHTS, BOTH, SESSIONS[0]) == ""


def test_a_home_stands_while_its_revision_lives_and_was_not_left() -> None:
    started = weights(v1=95.0, v2=5.0)
    home = Home("v1", started.version)

    assert stands(with_weights(started, {"v2": 50.0}), home, BOTH), "a growing weight takes new sessions alone"
    assert stands(with_weights(started, {"v2": 100.0}), home, BOTH), "the last sessions of a revision end there"
    assert not stands(started, home, {"v2"}), "no instance of it is ready"
    assert not stands(without(started, "v1"), home, BOTH)


def test_moving_ends_homes_on_revisions_that_lose_weight_alone() -> None:
    started = weights(v1=50.0, v2=50.0)
    back = with_weights(started, {"v2": 0.0}, move=True)

    assert not stands(back, Home("v2", started.version), BOTH)
    assert stands(back, Home("v1", started.version), BOTH)
    again = with_weights(back, {"v2": 5.0})
    assert not stands(again, Home("v2", started.version), BOTH), "what was moved away does not come back as a home"
    assert stands(again, Home("v2", again.version), BOTH)


def test_others_share_what_is_left_as_they_did() -> None:
    changed = with_weights(weights(v1=60.0, v2=20.0, v3=20.0), {"v3": 60.0})

    assert {name: share.weight for name, share in changed.shares.items()} == {"v1": 30.0, "v2": 10.0, "v3": 60.0}


@pytest.mark.parametrize(
    ("given", "why"),
    [
        ({"v2": 5.0}, "no other revision has a weight"),
        ({"v1": 60.0, "v2": 60.0}, "more than 100"),
        ({"v1": 100.0, "v2": -1.0}, "between 0 and 100"),
        ({"v1": float("nan")}, "between 0 and 100"),
        ({"": 100.0}, "no label"),
        ({"a b": 100.0}, "no label"),
        ({f"v{number}": 1.0 for number in range(17)} | {"v0": 84.0}, "16 revisions at most"),
    ],
)
def test_weights_that_make_no_sense_are_refused_with_the_reason(given: dict[str, float], why: str) -> None:
    with pytest.raises(WeightError, match=why):
        with_weights(NO_WEIGHTS, given)


def test_a_revision_is_forgotten_unless_nothing_with_a_weight_is_left() -> None:
    done = with_weights(with_tenant(weights(v1=50.0, v2=50.0), "acme", "v1"), {"v1": 0.0})

    assert without(done, "v1").shares.keys() == {"v2"}
    assert without(done, "v1").tenants == {}
    with pytest.raises(WeightError, match="give one first"):
        without(done, "v2")
    with pytest.raises(WeightError, match="has no weight here"):
        without(done, "v9")
    assert not without(without(done, "v1"), "v2").in_force


def test_a_tenant_and_a_client_may_be_served_by_one_revision() -> None:
    given = with_tenant(weights(v1=100.0, v2=0.0), "acme", "v2")

    assert fixed(given, tenant="acme", asked="v1") == "v2", "the tenant's own wins"
    assert fixed(given, tenant="other", asked="v2") == "v2"
    assert fixed(given, tenant="other", asked="v9") == ""
    assert fixed(with_tenant(given, "acme", ""), tenant="acme", asked="") == ""
    with pytest.raises(WeightError):
        with_tenant(given, "acme", "v9")


def test_the_record_is_read_as_it_was_written() -> None:
    given = with_tenant(weights(v1=95.0, v2=5.0), "acme", "v2")

    assert RevisionWeights.parse(given.text()) == given
    assert Home.parse(Home("v 2", 7).text) == Home("v 2", 7)
    assert Home.parse("nonsense") is None
    assert RevisionShare() == RevisionShare(0.0, 0)


def test_sessions_that_a_client_picks_by_their_hashes_are_spread_by_a_salt_that_it_does_not_know() -> None:
    known = with_shadow(weights(v1=50.0, v2=50.0), "v3", 50.0)
    picked = [each for each in taken_by("v2", known) if is_shadowed(known, each)]
    salted = replace(known, salt="0123456789abcdef")

    assert len(picked) > 1000
    assert len(taken_by("v2", salted) & {*picked}) / len(picked) == pytest.approx(0.5, abs=0.05)
    assert sum(is_shadowed(salted, each) for each in picked) / len(picked) == pytest.approx(0.5, abs=0.05)
    assert RevisionWeights.parse(salted.text()) == salted
    assert with_weights(salted, {"v2": 10.0}).salt == salted.salt


@pytest.mark.parametrize("text", [b"{}", b"[]", b'{"shares":{"v":{"weight":-1,"since":0}},"version":1}', b"x"])
def test_a_record_that_is_none_is_not_taken_for_one(text: bytes) -> None:
    with pytest.raises((ValueError, TypeError, LookupError)):
        RevisionWeights.parse(text)


def test_a_part_of_all_sessions_is_copied_whatever_serves_them() -> None:
    given = with_shadow(weights(v1=50.0, v2=50.0), "v3", 10.0)

    copied = {session for session in SESSIONS if is_shadowed(given, session)}

    assert len(copied) / len(SESSIONS) == pytest.approx(0.1, abs=0.01)
    assert 0.4 < len(copied & taken_by("v2", given)) / len(copied) < 0.6
    assert RevisionWeights.parse(given.text()) == given
    assert not any(is_shadowed(weights(v1=100.0), session) for session in SESSIONS[:100])


@pytest.mark.parametrize(("revision", "percent"), [("v2", 0.0), ("v2", 101.0), ("v1", 10.0)])
def test_a_shadow_that_serves_or_gets_nothing_is_refused(revision: str, percent: float) -> None:
    with pytest.raises(WeightError):
        with_shadow(weights(v1=100.0), revision, percent)
    with pytest.raises(WeightError):
        with_shadow(NO_WEIGHTS, "v2", 10.0)


def test_a_shadow_that_begins_to_serve_gets_no_copies_any_more() -> None:
    shadowed = with_shadow(weights(v1=100.0), "v2", 10.0)

    assert with_weights(shadowed, {"v2": 0.0}).shadow == "v2"
    assert with_weights(shadowed, {"v2": 5.0}).shadow == ""
    assert with_shadow(shadowed, "", 0.0).shadow == ""
    assert without(shadowed, "v1").shadow == ""
