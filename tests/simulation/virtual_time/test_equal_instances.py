"""Two instances under a constant number of clients: whatever happened before, equal ones share the work evenly, and one
at half speed is known."""

from __future__ import annotations

import random

import pytest

from dualmap.scheduling.settings import SchedulingSettings
from dualmap.simulation.engine.presets import find_preset
from dualmap.simulation.virtual_time.scenario import Scenario, SpeedChange
from dualmap.simulation.virtual_time.simulate import Simulation
from dualmap.simulation.workload.arrivals import Loop
from dualmap.simulation.workload.traces import Trace, TraceRequest

ENGINE = find_preset("qwen2.5-7b-910b4").engine
TROUBLE_S, SETTLES_S, KNOWN_S = 20.0, 20.0, 30.0
"""Until when something may happen to the second instance, how long after that the shares are even, and how long it
takes at most until one at half speed is known."""
END_S, LATE_END_S = TROUBLE_S + SETTLES_S + 20.0, TROUBLE_S + KNOWN_S + 30.0
"""When a run ends, and one in which the second instance falls to half speed late."""
SECOND = "i002"


class Watched(Simulation):
    """A run that notes how the learned rates compare."""

    def _sample(self) -> None:
        super()._sample()
        rates = {name: load.prefill_tokens_per_s for name, load in self.replicas[0].pool.loads().items()}
        self.ratios = [*getattr(self, "ratios", ()), (self._now_s, rates[SECOND] / rates["i001"])]

    def share(self, from_s: float) -> float:
        """Of the requests since then, those of the second instance."""
        chosen = [one.instance_id for one in self._outcomes if one.arrival_s >= from_s and one.instance_id]
        return chosen.count(SECOND) / len(chosen)


def prompts(count: int) -> Trace:
    """Prompts around 1,200 tokens that share nothing, with short answers."""
    rng, blocks = random.Random(1), 16
    requests = [
        TraceRequest(
            0.0,
            tokens := rng.randint(800, 1600),
            1 + round(rng.expovariate(1 / 20)),
            tuple(range(blocks * n, blocks * n + -(-tokens // 128))),
        )
        for n in range(count)
    ]
    return Trace("closed loop", 128, tuple(requests))


def run(clients: int, changes: tuple[SpeedChange, ...], end_s: float = END_S) -> Watched:
    loop = Loop(concurrency=clients, seconds=end_s)
    scenario = Scenario(SchedulingSettings(), ENGINE, instances=2, speed_changes=changes, loop=loop)
    simulation = Watched(prompts(4000), scenario)
    simulation.run()
    return simulation


def noise(sigma: float, slower: float = 1.0) -> tuple[SpeedChange, ...]:
    """Both change their speed at random, four times a second; the second one is slower by a factor."""
    rng = random.Random(1)
    return tuple(
        SpeedChange(turn / 4, name, times * rng.lognormvariate(0, sigma))
        for turn in range(round(4 * END_S))
        for name, times in (("i001", 1.0), (SECOND, slower))
    )


def slow(times: float, from_s: float, to_s: float) -> tuple[SpeedChange, ...]:
    """The second instance is slower for a while; steps that began in it keep their length."""
    return SpeedChange(from_s, SECOND, times), SpeedChange(to_s, SECOND, 1.0)


TROUBLES = {
    "nothing": (),
    "noise": noise(0.3),
    "much noise": noise(0.6),
    "a first request that compiles": slow(100.0, 0.0, 0.1),
    "a second of compiling": slow(40.0, 0.0, 1.0),
    "a pause": slow(100.0, 10.0, 10.05),
    "three pauses": (*slow(60.0, 8.0, 8.1), *slow(60.0, 12.0, 12.1), *slow(60.0, 16.0, 16.1)),
    "half speed for a while": slow(2.0, 0.0, TROUBLE_S),
    "a tenth for a while": slow(10.0, 0.0, TROUBLE_S),
}


@pytest.mark.parametrize("clients", [8, 32, 128])
@pytest.mark.parametrize("trouble", TROUBLES)
def test_whatever_happened_before_equal_instances_share_the_work_evenly(trouble: str, clients: int) -> None:
    assert run(clients, TROUBLES[trouble]).share(TROUBLE_S + SETTLES_S) == pytest.approx(0.5, abs=0.1)


@pytest.mark.parametrize("clients", [8, 32, 128])
@pytest.mark.parametrize("sigma", [0.0, 0.3])
def test_one_at_half_speed_is_known_and_stays_known(clients: int, sigma: float) -> None:
    simulation = run(clients, noise(sigma, slower=2.0))

    known = [ratio for at_s, ratio in simulation.ratios if at_s > KNOWN_S]
    assert max(known) < 0.95
    assert sum(known) / len(known) < 0.75
    assert simulation.share(KNOWN_S) < 0.4


@pytest.mark.parametrize("clients", [8, 32, 128])
def test_one_that_falls_to_half_speed_later_is_known_soon(clients: int) -> None:
    simulation = run(clients, (SpeedChange(TROUBLE_S, SECOND, 2.0),), LATE_END_S)

    known = [ratio for at_s, ratio in simulation.ratios if at_s > TROUBLE_S + KNOWN_S]
    assert max(known) < 0.95
    assert known[-1] < 0.85
