"""The worth of work for the idle when the fleet changes: shares on time with and without it.

Four instances become eight under overload (``join``), or one of eight falls to a third of its speed (``slow``) or
stands still (``hang``), 60 s after the start. The rate is a multiple of the best other policy's goodput on eight
instances; four sustain half of it.

Two more runs of each say what any work for the idle could gain. ``nothing held``: all that is held at the change
disappears, so that nothing waits before what arrives after it; no move of held requests can free more for these.
``changed from the start``: eight instances from the start, or one of them slow, with queues, caches and learned rates
settled.

    python -m benchmarks.fleet_changes --seeds 2 --rates 0.9
"""

from __future__ import annotations

from argparse import ArgumentParser
from collections.abc import Sequence
from statistics import fmean

from dualmap.scheduling.request.machine import Refusal, TurnedAway
from dualmap.scheduling.settings import SchedulingSettings
from dualmap.simulation.engine.presets import find_preset
from dualmap.simulation.figures.mean import Mean
from dualmap.simulation.figures.results import RequestOutcome, RunRecord
from dualmap.simulation.virtual_time.event_queue import Priority
from dualmap.simulation.virtual_time.scenario import FleetChange, Scenario, SpeedChange
from dualmap.simulation.virtual_time.simulate import Simulation
from dualmap.simulation.workload.sources import TraceSource

CHANGE_S, END_S = 60.0, 140.0
INSTANCES = 8
WINDOWS_S = ((-5.0, 0.0), (0.0, 30.0), (-5.0, 25.0), (30.0, 80.0))
"""Windows of arrivals, counted from the change. Requests that are due in 5 s are due in the 30 s after it in
the third."""
SLOWDOWNS = {"slow": 3.0, "hang": 1000.0}
SATURATION_PER_S = {
    ("conversation", "qwen2.5-7b-910b4"): 6.44,
    ("conversation", "qwen2.5-14b-910b3"): 5.33,
    ("toolagent", "qwen2.5-7b-910b4"): 13.34,
    ("toolagent", "qwen2.5-14b-910b3"): 10.92,
    ("uniform", "qwen2.5-7b-910b4"): 15.12,
    ("uniform", "qwen2.5-14b-910b3"): 7.57,
}
WITHOUT, WITH, CLEARED, SETTLED = KINDS = ("without", "with", "nothing held", "changed from the start")
LONGEST_PROMPTS = {"qwen2.5-7b-910b4": 20_480, "qwen2.5-14b-910b3": 10_240}
"""Longest prompts of the traces that are not generated for a context limit."""


class Cleared(Simulation):
    """A run in which all that is held at the change is refused."""

    def run(self) -> RunRecord:
        self._events.push(CHANGE_S, Priority.MEMBERSHIP, self._clear)
        return super().run()

    def _clear(self, _: float) -> None:
        requests = self.replicas[0].requests
        for held in self.replicas[0].pool.held():
            requests.report(requests.live[held.request_id], TurnedAway(Refusal.HELD_TOO_LONG))


def run(change: str, trace: str, preset: str, rate: float, seed: int, kind: str) -> tuple[list[float], int]:
    """Shares on time by window, and the number of migrations."""
    rate_per_s = rate * SATURATION_PER_S[trace, preset]
    most_tokens = None if trace == "uniform" else LONGEST_PROMPTS[preset]
    source = TraceSource(trace, round(END_S * rate_per_s), most_tokens, seed=seed)
    joins = change == "join"
    settled = kind == SETTLED
    scenario = Scenario(
        SchedulingSettings(),
        find_preset(preset).engine,
        instances=INSTANCES // 2 if joins and not settled else INSTANCES,
        changes=(FleetChange(CHANGE_S, INSTANCES),) if joins and not settled else (),
        speed_changes=() if joins else (SpeedChange(0.0 if settled else CHANGE_S, "i003", SLOWDOWNS[change]),),
        idle_work=kind == WITH,
    )
    record = (Cleared if kind == CLEARED else Simulation)(source.load(rate_per_s), scenario).run()
    return [_on_time(record.outcomes, *window_s) for window_s in WINDOWS_S], record.migrations


def _on_time(outcomes: Sequence[RequestOutcome], from_s: float, to_s: float) -> float:
    arrived = [one for one in outcomes if CHANGE_S + from_s <= one.arrival_s < CHANGE_S + to_s]
    return fmean(one.on_time for one in arrived)


def compare(change: str, rate: float, seeds: Sequence[int]) -> None:
    """Print a row per trace, preset and kind of run, and what was gained and could be over all pairs of runs."""
    points: dict[str, list[list[float]]] = {kind: [] for kind in KINDS[1:]}
    for trace, preset in SATURATION_PER_S:
        found: dict[str, list[list[float]]] = {}
        for kind in KINDS:
            runs = [run(change, trace, preset, rate, seed, kind) for seed in seeds]
            found[kind] = [shares for shares, _ in runs]
            cells = " | ".join(f"{fmean(values):.1%}" for values in zip(*found[kind], strict=True))
            moved = fmean(count for _, count in runs)
            print(f"| {change} | {rate:g} | {trace} | {preset} | {kind} | {cells} | {moved:g} |", flush=True)
        for kind, own in points.items():
            own += _differences(found[kind], found[WITHOUT])
    for kind, own in points.items():
        means = [Mean.of(values) for values in zip(*own, strict=True)]
        cells = " | ".join(f"{mean.value:+.1f} ± {mean.half_width:.1f}" for mean in means)
        print(f"| {change} | {rate:g} | all | all | points, {kind} | {cells} | |", flush=True)


def _differences(more: Sequence[Sequence[float]], less: Sequence[Sequence[float]]) -> list[list[float]]:
    """The differences in points, run by run and window by window."""
    return [[100 * (a - b) for a, b in zip(one, two, strict=True)] for one, two in zip(more, less, strict=True)]


def main() -> None:
    parser = ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--changes", default="join,slow,hang", help="of join, slow and hang (%(default)s)")
    parser.add_argument("--rates", default="0.9", help="multiples of saturation (%(default)s)")
    parser.add_argument("--seeds", type=int, default=2, help="(%(default)s)")
    arguments = parser.parse_args()
    print(
        "| change | rate | trace | preset | work for the idle | 5 s before | 30 s after | due in them | later | moved |"
    )
    print("| --- " * 10 + "|")
    for change in arguments.changes.split(","):
        for rate in arguments.rates.split(","):
            compare(change, float(rate), range(1, arguments.seeds + 1))


if __name__ == "__main__":
    main()
