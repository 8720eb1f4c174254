"""The room that interactive work leaves to batches."""

from __future__ import annotations

from dataclasses import replace

import pytest

from dualmap.scheduling.batches.slack import (
    PREFILL_PART,
    QUIET_S,
    SEQUENCES_PART,
    ExpectedLine,
    Room,
    in_turn,
    next_range,
    room_of,
    taken_by,
    worn_off,
)
from dualmap.scheduling.state.instance import InstanceLoad, InstanceState
from tests.support.batches import NEW_BATCH

LINE = ExpectedLine(context_tokens=100, prefill_tokens=50)


def load(**changes: object) -> InstanceLoad:
    fixed = {
        "instance_id": "a",
        "state": InstanceState.READY,
        "prefill_tokens_per_s": 8000.0,
        "kv_capacity_tokens": 100_000,
        "max_running_requests": 100,
        "dispatch_window_tokens": 4096,
    }
    return InstanceLoad(**(fixed | changes))


def room(
    found: InstanceLoad, lines: int = 0, quiet_s: float = 0.0, line: ExpectedLine = LINE, taken: float = 0.0
) -> Room:
    return room_of(found, lines, quiet_s, line, taken)


def test_beside_interactive_requests_lines_are_a_part_of_the_sequences() -> None:
    most = int(SEQUENCES_PART * 100)
    assert room(load()) == Room(most, most, is_open=True)
    assert room(load(running_requests=4 + most), lines=4) == Room(most, most - 4, is_open=True)
    assert room(load(), lines=most) == Room(most, 0, is_open=True), "a line that ends is followed by another"


def test_a_quiet_instance_is_used_as_a_whole() -> None:
    assert room(load(), quiet_s=QUIET_S).most == 100
    assert room(load(), quiet_s=QUIET_S).begins == 4096 // 50


def test_lines_above_the_part_are_too_many_once_interactive_requests_are_back() -> None:
    found = room(load(), lines=60)
    assert found.most < 60
    assert found.begins == 0
    assert not found.is_open


def test_no_more_begins_than_a_step_prefills_and_one_line_in_any_case() -> None:
    assert room(load(pending_tokens=1900)).begins == (2048 - 1900) // 50
    assert room(load(pending_tokens=2048)) == Room(int(SEQUENCES_PART * 100), 0, is_open=False)
    long = ExpectedLine(context_tokens=9000, prefill_tokens=8000)
    assert room(load(), line=long).begins == 1
    assert room(load(pending_tokens=1), line=long).begins == 0


def test_what_lines_have_taken_keeps_others_out_until_it_has_worn_off() -> None:
    assert room(load(), taken=1900).begins == (2048 - 1900) // 50
    assert not room(load(), taken=2048).is_open
    assert room(load(), quiet_s=QUIET_S, taken=1e6).begins == 4096 // 50, "no client is there to notice"
    long = ExpectedLine(context_tokens=9000, prefill_tokens=8000)
    assert not room(load(), line=long, taken=1).is_open
    assert room(load(), line=long, taken=0).begins == 1


def test_a_line_takes_what_its_prompt_has_beyond_a_quarter_of_a_step() -> None:
    assert taken_by(ExpectedLine(prefill_tokens=512), load()) == 0
    assert taken_by(ExpectedLine(prefill_tokens=512 + 300), load()) == 300


@pytest.mark.parametrize("places", [1, 4])
def test_long_prompts_take_a_part_of_the_time_of_an_instance(places: int) -> None:
    """Replicas that begin a line of 6,000 tokens each whenever what they have taken has worn off."""
    line, found, taken, begun = ExpectedLine(prefill_tokens=6000, context_tokens=6000), load(), [0.0] * places, 0
    for _ in range(4 * 600):  # ten minutes
        for place in range(places):
            taken[place] = worn_off(taken[place], found, 0.25, places)
            if room(found, line=line, taken=places * taken[place]).begins:
                taken[place] += taken_by(line, found)
                begun += 1
    of_time = begun * taken_by(line, found) / found.prefill_tokens_per_s / 600
    assert of_time == pytest.approx(PREFILL_PART, rel=0.1)


def test_memory_bounds_the_room_and_a_part_of_it_stays_free() -> None:
    long = ExpectedLine(context_tokens=10_000, prefill_tokens=50)
    assert room(load(), line=long).begins == 8
    assert room(load(context_tokens=60_000), line=long).begins == 2
    assert room(load(context_tokens=10_000, kv_used_tokens=75_000), line=long) == Room(
        int(SEQUENCES_PART * 100), 0, is_open=False
    )


@pytest.mark.parametrize("state", [state for state in InstanceState if state is not InstanceState.READY])
def test_instances_that_are_not_ready_take_nothing(state: InstanceState) -> None:
    assert room(load(state=state)) == Room()


@pytest.mark.parametrize("begins", range(8))
def test_replicas_share_what_may_begin_without_a_rest(begins: int) -> None:
    found = Room(100, begins, is_open=True)
    for places in (1, 2, 3, 5):
        assert sum(found.share(place + 7, places) for place in range(places)) == begins


def test_what_a_line_takes_is_learned_from_those_before() -> None:
    line = ExpectedLine()
    for _ in range(200):
        line = line.learned(5000, 300)
    assert line.context_tokens == pytest.approx(5000, rel=0.01)
    assert line.prefill_tokens == pytest.approx(300, rel=0.01)


def test_each_instance_begins_at_its_part_and_goes_on_where_others_have_not_been() -> None:
    free = list(range(12))
    taken: list[list[int]] = [[], [], []]
    for _ in range(4):
        for place in range(3):
            taken[place].append(free.pop(next_range(free, 12, place, 3)))
    assert taken == [[0, 1, 2, 3], [4, 5, 6, 7], [8, 9, 10, 11]]
    assert next_range([1, 2], 12, 2, 3) == 0, "its own part is done"


def test_tenants_take_turns_by_their_weights_and_a_short_window_counts_within_its_tenant() -> None:
    made = [("hasty", "h1", 60), ("hasty", "h2", 90), ("patient", "p1", 9000), ("patient", "p2", 8000)]
    batches = [replace(NEW_BATCH, tenant=tenant, batch_id=name, expires_s=at_s) for tenant, name, at_s in made]

    def order(weights: dict[str, float], **under_way: int) -> list[str]:
        return [each.batch_id for each in in_turn(batches, under_way, weights)]

    assert order({}) == ["h1", "h2", "p2", "p1"]
    assert order({}, hasty=1) == ["p2", "p1", "h1", "h2"]
    assert order({}, hasty=1, patient=1) == ["h1", "h2", "p2", "p1"]
    assert order({"hasty": 4.0}, hasty=3, patient=1) == ["h1", "h2", "p2", "p1"]
    assert order({"hasty": 4.0}, hasty=4, patient=1) == ["h1", "h2", "p2", "p1"]
    assert order({"hasty": 4.0}, hasty=5, patient=1) == ["p2", "p1", "h1", "h2"]
