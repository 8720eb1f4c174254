"""What work for the idle is worth when the fleet changes: shares on time with and without it.

Four instances become eight under overload (``join``), or one of eight falls to a third of its speed (``slow``) or
stands still (``hang``), 60 s after the start. The rate is a multiple of the best other policy's goodput on eight
instances.

    python -m benchmarks.fleet_changes --seeds 2 --rate 0.9
"""

from __future__ import annotations

from argparse import ArgumentParser
from collections.abc import Sequence
from statistics import fmean

from scheduling.settings import SchedulingSettings
from simulation.presets import find_preset
from simulation.results import RequestOutcome
from simulation.scenario import FleetChange, Scenario, SpeedChange
from simulation.simulate import Simulation
from simulation.sources import TraceSource

CHANGE_S, END_S = 60.0, 140.0
INSTANCES = 8
WINDOWS_S = ((-5.0, 0.0), (0.0, 30.0), (30.0, 80.0))
"""Of arrivals, counted from the change."""
SLOWDOWNS = {"slow": 3.0, "hang": 1000.0}
SATURATION_PER_S = {
    ("conversation", "qwen2.5-7b-910b4"): 6.44,
    ("conversation", "qwen2.5-14b-910b3"): 5.33,
    ("toolagent", "qwen2.5-7b-910b4"): 13.34,
    ("toolagent", "qwen2.5-14b-910b3"): 10.92,
    ("uniform", "qwen2.5-7b-910b4"): 15.12,
    ("uniform", "qwen2.5-14b-910b3"): 7.57,
}
LONGEST_PROMPTS = {"qwen2.5-7b-910b4": 20_480, "qwen2.5-14b-910b3": 10_240}
"""Of the traces that are not generated for a context limit."""


def run(change: str, trace: str, preset: str, rate: float, seed: int, *, idle_work: bool) -> tuple[list[float], int]:
    """Shares on time by window, and the number of migrations."""
    rate_per_s = rate * SATURATION_PER_S[trace, preset]
    most_tokens = None if trace == "uniform" else LONGEST_PROMPTS[preset]
    source = TraceSource(trace, round(END_S * rate_per_s), most_tokens, seed=seed)
    joins = change == "join"
    scenario = Scenario(
        SchedulingSettings(),
        find_preset(preset).engine,
        instances=INSTANCES // 2 if joins else INSTANCES,
        changes=(FleetChange(CHANGE_S, INSTANCES),) if joins else (),
        speed_changes=() if joins else (SpeedChange(CHANGE_S, "i003", SLOWDOWNS[change]),),
        idle_work=idle_work,
    )
    record = Simulation(source.load(rate_per_s), scenario).run()
    return [_on_time(record.outcomes, *window_s) for window_s in WINDOWS_S], record.migrations


def _on_time(outcomes: Sequence[RequestOutcome], from_s: float, to_s: float) -> float:
    arrived = [one for one in outcomes if CHANGE_S + from_s <= one.arrival_s < CHANGE_S + to_s]
    return fmean(one.on_time for one in arrived)


def main() -> None:
    parser = ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--changes", default="join,slow,hang", help="of join, slow and hang (%(default)s)")
    parser.add_argument("--rate", type=float, default=0.9, help="multiple of saturation (%(default)s)")
    parser.add_argument("--seeds", type=int, default=2, help="(%(default)s)")
    arguments = parser.parse_args()
    print("| change | trace | preset | idle work | 5 s before | 30 s after | 30 to 80 s after | moved |")
    print("| --- " * 8 + "|")
    for change in arguments.changes.split(","):
        for trace, preset in SATURATION_PER_S:
            for idle_work in (False, True):
                runs = [
                    run(change, trace, preset, arguments.rate, seed, idle_work=idle_work)
                    for seed in range(1, arguments.seeds + 1)
                ]
                shares = " | ".join(f"{fmean(values):.1%}" for values in zip(*(each for each, _ in runs), strict=True))
                moved = fmean(count for _, count in runs)
                print(f"| {change} | {trace} | {preset} | {'yes' if idle_work else 'no'} | {shares} | {moved:g} |")


if __name__ == "__main__":
    main()
