"""First tokens teach an instance's prefill rate, and nothing else does."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import replace
from itertools import pairwise
from random import Random

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from dualmap.scheduling.estimates.prefill_rate import (
    CONFIRMED_S,
    FORGOTTEN_S,
    MEMORY_S,
    BusyTime,
    PeerRates,
    runs_of,
    step_tokens_of,
)
from dualmap.scheduling.state.instance import InstanceLoad, InstanceSpec, InstanceState

STEP_TOKENS = 2048
RATE = 8000.0
TOKENS = 800
"""The sample of a prefill that takes 0.1 s at that rate."""


class Peers:
    """Instances that are peers, on a clock of their own, and what they have learn."""

    def __init__(self, *names: str, tokens_per_s: float = RATE, window: int = 2 * STEP_TOKENS) -> None:
        self.instances = {name: InstanceSpec(name, "", prefill_tokens_per_s=tokens_per_s) for name in names}
        self.loads = {
            name: InstanceLoad(
                name, InstanceState.READY, prefill_tokens_per_s=tokens_per_s, dispatch_window_tokens=window
            )
            for name in names
        }
        self.rates = PeerRates.prior(self.loads, self.instances)
        self.now_ms = 1_000_000

    def learn(self, name: str, times: Iterable[BusyTime]) -> None:
        self.rates.learn({name: times}, self.loads, self.instances)

    def now(self) -> dict[str, float]:
        return self.rates.rates(self.loads, self.instances, self.now_ms)

    def ratio(self) -> float:
        """The rate of the last one, over that of the first."""
        first, *_, last = self.now().values()
        return last / first

    def serve(
        self, seconds: int, slowness: dict[str, float], per_s: int = 4, noise: float = 0.0, seed: int = 1
    ) -> None:
        """Each that is named prefills some prompts in each second, in so many times its time, and a leader learns."""
        random = Random(seed)
        for _ in range(seconds):
            seen = {}
            for name, times in slowness.items():
                gap_ms = 1000 // per_s
                busy = [round(100 * times * random.lognormvariate(0, noise)) for _ in range(per_s)]
                began = [self.now_ms + gap_ms * number for number in range(per_s)]
                seen[name] = [BusyTime(TOKENS, 1, at, at + ms, 1) for at, ms in zip(began, busy, strict=True)]
            self.now_ms += 1000
            self.rates.learn(seen, self.loads, self.instances)
            self.now()


def prior(tokens_per_s: float = RATE, window: int = 2 * STEP_TOKENS) -> One:
    return One(tokens_per_s, window)


class One(Peers):
    """An instance without peers."""

    def __init__(self, tokens_per_s: float, window: int) -> None:
        super().__init__("a", tokens_per_s=tokens_per_s, window=window)

    def after(self, times: list[BusyTime]) -> One:
        """The instance after some more prefills."""
        copy = One.__new__(One)
        copy.__dict__ = {**self.__dict__, "rates": replace(self.rates)}
        copy.learn("a", times)
        return copy

    @property
    def tokens_per_s(self) -> float:
        return self.now()["a"]


def apart(tokens: int, busy_s: float, count: int) -> list[BusyTime]:
    """Prefills of one size with gaps between them."""
    busy_ms = round(1000 * busy_s)
    return [BusyTime(tokens, 1, 10 * busy_ms * number, (10 * number + 1) * busy_ms) for number in range(1, count + 1)]


def in_a_row(tokens: int, ends_ms: list[int]) -> list[BusyTime]:
    """Prefills of one size that follow each other; the first one begins at the first time."""
    return [BusyTime(tokens, 1, began_ms, ended_ms) for began_ms, ended_ms in pairwise(ends_ms)]


def test_without_experience_the_described_rate_is_believed() -> None:
    assert prior(8000.0).tokens_per_s == pytest.approx(8000.0)
    assert prior(8000.0).after([]).tokens_per_s == pytest.approx(8000.0)


def test_the_learned_rate_approaches_what_is_seen() -> None:
    # given prefills of ten steps at 2,000 tokens/s
    seen = apart(20_480, 10.24, 5)
    assert prior().after(seen).after(seen).tokens_per_s == pytest.approx(2000.0, rel=0.05)


@pytest.mark.parametrize("tokens", [20, 100, 400])
def test_prompts_that_fill_no_step_teach_nothing(tokens: int) -> None:
    rate = prior()

    assert rate.after(apart(tokens, 0.04, 500)).tokens_per_s == rate.tokens_per_s


def test_the_fixed_cost_of_a_step_is_told_from_the_rate() -> None:
    # given an engine that needs 80 ms for a step and 0.1 ms for a token, and prompts of less than a step
    rate = prior()
    for _ in range(20):
        seen = apart(600, 0.140, 3) + apart(1200, 0.200, 3)
        rate = rate.after(seen)

    full_step_s, shares_of_steps = 0.08 + 0.0001 * STEP_TOKENS, 1800 / 0.340
    assert rate.tokens_per_s == pytest.approx(STEP_TOKENS / full_step_s, rel=0.15)
    assert rate.tokens_per_s > 1.15 * shares_of_steps


def test_prefills_of_one_step_are_counted_together() -> None:
    # given 80 prompts of 400 tokens each that end by fives, every 250 ms
    ends_ms = [0] + [250 * (number // 5 + 1) for number in range(80)]

    assert prior().after(in_a_row(400, ends_ms)).tokens_per_s == pytest.approx(8000.0, rel=0.05)
    assert prior(2000.0).after(in_a_row(400, ends_ms)).tokens_per_s == pytest.approx(8000.0, rel=0.15)


def test_prefills_in_a_row_have_their_right_time_together() -> None:
    # given prompts of 2,000 tokens of which every other one ends together with a part of the next
    ends_ms = [0]
    for number in range(40):
        ends_ms.append(ends_ms[-1] + (400 if number % 2 else 100))

    assert prior().after(in_a_row(2000, ends_ms)).tokens_per_s == pytest.approx(8000.0, rel=0.05)


@pytest.mark.parametrize(("factor", "memories"), [(0.5, 2), (2.0, 2), (4.0, 4), (10.0, 8)])
def test_a_change_of_speed_shows_after_some_times_the_memory(factor: float, memories: int) -> None:
    rate = prior().after(apart(8000, 1.0, 200))

    for _ in range(int(memories * MEMORY_S / factor)):
        rate = rate.after(apart(8000, factor, 1))

    assert rate.tokens_per_s == pytest.approx(8000.0 / factor, rel=0.2)


@pytest.mark.parametrize("pause_s", [3.0, 60.0, 3600.0])
def test_a_pause_or_a_clock_that_was_set_forward_is_no_speed(pause_s: float) -> None:
    rate = prior().after(apart(8000, 1.0, 60))

    paused = rate.after([BusyTime(8000, 1, 0, round(1000 * (1.0 + pause_s)))])

    assert paused.tokens_per_s == pytest.approx(rate.tokens_per_s, rel=0.15)


def test_an_engine_that_decodes_for_seconds_now_and_then_has_its_mean_rate() -> None:
    rate = prior()

    for _ in range(20):
        rate = rate.after(apart(8000, 1.0, 4) + apart(8000, 6.0, 1))

    assert rate.tokens_per_s == pytest.approx(4000.0, rel=0.2)


def test_without_a_limit_of_the_window_steps_are_still_believed_to_have_one() -> None:
    endless = prior(window=1 << 60)

    assert step_tokens_of(endless.loads["a"]) == 16_384
    assert endless.tokens_per_s == pytest.approx(8000.0)


def test_prefills_without_a_gap_are_one_run_up_to_some_steps() -> None:
    runs = list(runs_of([*in_a_row(2048, [0, 250, 500, 750]), BusyTime(2048, 1, 900, 1150, 1)], 1024))

    assert runs == [BusyTime(6144, 3, 0, 750), BusyTime(2048, 1, 900, 1150, 1)]


# peers ---------------------------------------------------------------------------------------------------------------
@pytest.mark.parametrize("noise", [0.0, 0.3, 0.6])
@pytest.mark.parametrize("seed", range(5))
def test_peers_that_differ_by_noise_alone_have_equal_rates_nearly_always(noise: float, seed: int) -> None:
    peers, apart = Peers("a", "b"), 0

    for second in range(60):
        peers.serve(1, {"a": 1.0, "b": 1.0}, noise=noise, seed=100 * seed + second)
        apart += peers.ratio() != 1.0

    assert apart <= (6 if noise > 0.5 else 0)
    assert peers.ratio() == pytest.approx(1.0, abs=0.25)


def test_a_peer_without_work_has_the_rate_that_the_others_taught() -> None:
    peers = Peers("a", "b", "idle")

    peers.serve(30, {"a": 0.25, "b": 0.25})

    rates = peers.now()
    assert rates["a"] > 2.5 * RATE
    assert rates["a"] == rates["b"] == rates["idle"]


@pytest.mark.parametrize("first", [3.0, 40.0, 1000.0])
def test_the_first_requests_of_a_new_server_and_a_pause_teach_nothing_of_its_speed(first: float) -> None:
    for learned_s in (0, 1, 30):
        peers = Peers("a", "b")
        peers.serve(learned_s, {"a": 1.0, "b": 1.0})

        peers.serve(1, {"a": 1.0, "b": first}, per_s=1)

        assert peers.ratio() == 1.0
        assert peers.now()["a"] > 0.25 * RATE


@pytest.mark.parametrize("noise", [0.0, 0.3])
@pytest.mark.parametrize("before_s", [0, 60])
def test_one_at_half_speed_is_known_within_seconds_and_stays_so(noise: float, before_s: int) -> None:
    peers = Peers("a", "b", "c", "slow")
    peers.serve(before_s, dict.fromkeys(peers.loads, 1.0), noise=noise)

    peers.serve(10, {"a": 1.0, "b": 1.0, "c": 1.0, "slow": 2.0}, noise=noise, seed=2)

    for second in range(120):
        peers.serve(1, {"a": 1.0, "b": 1.0, "c": 1.0, "slow": 2.0}, noise=noise, seed=3 + second)
        assert 0.35 < peers.ratio() < 0.75
        rates = peers.now()
        assert rates["b"] == pytest.approx(rates["a"], rel=0.3)


def test_of_two_the_one_at_half_speed_is_known_although_it_gets_little_work() -> None:
    peers = Peers("a", "slow")
    peers.serve(10, {"a": 1.0, "slow": 2.0})

    for _ in range(40):
        peers.serve(2, {"a": 1.0})
        peers.serve(1, {"a": 1.0, "slow": 2.0}, per_s=1)

    assert 0.4 < peers.ratio() < 0.65


@pytest.mark.parametrize("slowness", [2.0, 10.0, 1000.0])
def test_one_that_was_slow_and_gets_no_work_returns_to_its_peers(slowness: float) -> None:
    peers = Peers("a", "b")
    peers.serve(60, {"a": 1.0, "b": slowness}, per_s=1)
    assert peers.ratio() < 0.75

    seen = []
    for _ in range(int(FORGOTTEN_S) + 1):
        peers.serve(1, {"a": 1.0})
        seen.append(peers.ratio())

    steps = [after / before for before, after in pairwise(seen)]
    assert min(steps) > 0.98, "it only returns"
    assert seen[int(CONFIRMED_S) - 3] < 0.75
    assert seen[-1] == 1.0


def test_a_clock_that_was_set_back_keeps_no_judgement() -> None:
    peers = Peers("a", "b")
    peers.serve(30, {"a": 1.0, "b": 3.0})
    peers.now_ms -= 3_600_000
    assert peers.ratio() < 0.75

    peers.now_ms += round(1000 * FORGOTTEN_S)

    assert peers.ratio() == 1.0


def test_time_alone_returns_it_where_nobody_gets_work() -> None:
    peers = Peers("a", "b")
    peers.serve(30, {"a": 1.0, "b": 3.0})

    peers.now_ms += round(1000 * FORGOTTEN_S)

    assert peers.ratio() == 1.0


def test_a_long_prefill_under_way_is_no_time_without_work() -> None:
    peers = Peers("a", "b")
    peers.serve(30, {"a": 1.0, "b": 3.0}, per_s=1)
    known = peers.ratio()

    peers.now_ms += 60_000
    peers.loads = {name: replace(load, stalled_s=60.0) for name, load in peers.loads.items()}

    assert peers.ratio() == pytest.approx(known)


def test_one_that_is_as_fast_as_its_peers_again_shows_it_within_seconds() -> None:
    peers = Peers("a", "b")
    peers.serve(60, {"a": 1.0, "b": 4.0}, per_s=1)

    peers.serve(20, {"a": 1.0, "b": 1.0})

    assert peers.ratio() == 1.0


def test_light_load_on_one_of_them_is_no_difference() -> None:
    # given an engine that needs 40 ms to begin, which prefills in a row do not show
    peers = Peers("busy", "calm")

    for second in range(60):
        at_ms = peers.now_ms + 1000 * second
        row = in_a_row(TOKENS, [at_ms + 40 + 100 * number for number in range(9)])
        seen = {
            "busy": [BusyTime(TOKENS, 1, at_ms - 100, at_ms + 40, 1), *row],
            "calm": [BusyTime(TOKENS, 1, at_ms, at_ms + 140, 1)],
        }
        peers.rates.learn(seen, peers.loads, peers.instances)
    peers.now_ms += 60_000

    assert peers.ratio() == 1.0


def test_a_described_difference_is_believed_until_there_is_evidence() -> None:
    peers = Peers("a", "b")
    peers.instances["b"] = replace(peers.instances["b"], prefill_tokens_per_s=2 * RATE)
    peers.loads["b"] = replace(peers.loads["b"], prefill_tokens_per_s=2 * RATE)
    peers.rates = PeerRates.prior(peers.loads, peers.instances)

    peers.serve(20, {"a": 1.0})
    assert peers.ratio() == pytest.approx(2.0)
    peers.serve(20, {"a": 1.0, "b": 1.0})
    assert peers.ratio() == pytest.approx(1.0, abs=0.2)


def test_a_new_leader_believes_what_is_published() -> None:
    peers = Peers("a", "b")
    peers.loads = {name: replace(load, prefill_tokens_per_s=30_000.0) for name, load in peers.loads.items()}

    assert PeerRates.prior(peers.loads, peers.instances).rates(peers.loads, peers.instances, 0) == {
        "a": pytest.approx(30_000.0), "b": pytest.approx(30_000.0)
    }  # fmt: skip


def test_what_left_and_came_back_is_a_peer_like_any_other() -> None:
    peers = Peers("a", "b")
    peers.serve(30, {"a": 1.0, "b": 3.0})

    peers.rates.forget_all_but({"a"})

    assert peers.ratio() == 1.0


times = st.builds(
    lambda tokens, ends, began_ms, busy_ms: BusyTime(tokens, ends, began_ms, began_ms + busy_ms),
    st.integers(1, 200_000),
    st.just(1),
    st.integers(0, 1_000_000),
    st.integers(0, 10_000_000),
)


@given(seen=st.lists(times, max_size=40), tokens_per_s=st.floats(1.0, 1e9))
@settings(max_examples=100)
def test_whatever_it_is_told_the_rate_can_be_divided_by(seen: list[BusyTime], tokens_per_s: float) -> None:
    rate = prior(tokens_per_s)

    assert 1.0 <= rate.after(sorted(seen, key=lambda time: time.ended_ms)).tokens_per_s <= 60 * rate.tokens_per_s


def two_kinds() -> Peers:
    """Two instances described as twice as fast as two others."""
    peers = Peers("a1", "a2", "b1", "b2")
    peers.instances = {
        name: replace(spec, prefill_tokens_per_s=RATE * (2 if name.startswith("b") else 1))
        for name, spec in peers.instances.items()
    }
    peers.rates = PeerRates.prior(peers.loads, peers.instances)
    return peers


def test_an_instance_without_work_is_as_fast_as_others_of_its_kind() -> None:
    # given a kind that is described as twice as fast, and takes as long as the other one
    peers = two_kinds()
    peers.serve(30, {"a1": 1.0, "b1": 1.0}, noise=0.05)

    rates = peers.now()

    assert rates["b2"] == pytest.approx(rates["b1"], rel=0.05)
    assert rates["a2"] == pytest.approx(rates["a1"], rel=0.05)
    assert rates["b1"] == pytest.approx(rates["a1"], rel=0.25)


def test_a_kind_that_was_described_rightly_differs_by_its_description_alone() -> None:
    peers = two_kinds()
    peers.serve(30, {"a1": 1.0, "a2": 1.0, "b1": 0.5, "b2": 0.5}, noise=0.1)

    rates = peers.now()

    assert rates["b1"] == rates["b2"] == pytest.approx(2 * rates["a1"], rel=1e-9)
    assert rates["a1"] == rates["a2"]


def test_a_kind_that_nothing_renews_returns_to_its_description() -> None:
    peers = two_kinds()
    peers.serve(30, {"a1": 1.0, "a2": 1.0, "b1": 1.0, "b2": 1.0})
    peers.serve(round(FORGOTTEN_S) + 5, {"a1": 1.0, "a2": 1.0})

    rates = peers.now()

    assert rates["b1"] == rates["b2"] == pytest.approx(2 * rates["a1"], rel=1e-9)


def test_one_that_is_slower_than_its_kind_differs_alone() -> None:
    peers = two_kinds()
    peers.serve(40, {"a1": 1.0, "a2": 1.0, "b1": 0.5, "b2": 1.5}, noise=0.05)

    rates = peers.now()

    assert rates["b2"] < 0.6 * rates["b1"]
    assert rates["b1"] > 1.4 * rates["a1"]
