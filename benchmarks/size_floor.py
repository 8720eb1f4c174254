"""The instance-hours of a day that a share on time takes if the rate of every half minute is known in advance.

A table tells the share on time of each size at each steady rate. From it, the plan of least cost for a price:
instance-hours, times to start included, times the price, and the requests that are late. Each plan is then run.

python -m benchmarks.size_floor 0.05 0.1 0.2 0.25 0.3
"""

from __future__ import annotations

from argparse import ArgumentParser
from bisect import bisect_left
from dataclasses import replace
from itertools import pairwise

from dualmap.research.bench import Bench
from dualmap.research.studies.autoscaling import COLD_START_S, day_of
from dualmap.research.studies.clairvoyant import paid_hours, steady
from dualmap.research.studies.plan import DEFAULT_POLICY, FULL, PAPER_INSTANCES, Plan, variant_of
from dualmap.research.workload import Workload
from dualmap.scheduling.values import value
from dualmap.simulation.virtual_time.runs import default_workers
from dualmap.simulation.virtual_time.scenario import FleetChange

STEP_S = 30.0
SIZES = range(1, 12)
LOADS = (0.5, 0.6, 0.7, 0.8, 0.9, 1.0, 1.1, 1.2, 1.35, 1.5, 1.75, 2.0, 2.5)
"""Multiples of the reference rate of each size."""


@value
class Table:
    """The share on time of each size, a row, at each of ``LOADS``, a column; rates are requests a second."""

    rate_of_one: float
    shares: tuple[tuple[float, ...], ...]

    def share(self, size: int, rate: float) -> float:
        load = rate / self.rate_of_one / size
        row = self.shares[SIZES.index(size)]
        place = bisect_left(LOADS, load)
        if place == 0:
            return row[0]
        if place == len(LOADS):
            return row[-1] * LOADS[-1] / load
        part = (load - LOADS[place - 1]) / (LOADS[place] - LOADS[place - 1])
        return (1 - part) * row[place - 1] + part * row[place]


def measured(day: Workload, plan: Plan) -> Table:
    """The table of the day's requests, at steady rates."""
    rate_of_one = plan.rate(plan.like_generated(), 1) / PAPER_INSTANCES
    runs = [
        plan.run(steady(day, size, 700 + 500 * size), variant_of(DEFAULT_POLICY), rate_of_one * size * load)
        for size in SIZES
        for load in LOADS
    ]
    found = [figures.on_time for figures in Bench(default_workers()).figures("table", runs)]
    rows = (tuple(found[size * len(LOADS) : (size + 1) * len(LOADS)]) for size in range(len(SIZES)))
    return Table(rate_of_one, tuple(rows))


def cheapest(rates: list[float], table: Table, price: float) -> tuple[FleetChange, ...]:
    """The sizes whose cost is least, by dynamic programming over the steps; ``price``: of an instance-second, in late
    requests."""
    costs, came_from = dict.fromkeys(SIZES, 0.0), []
    for rate in rates:
        # Moves lead to the size that serves in this step, from the cheapest of the step before.
        former = {size: min((_moved(costs, one, size, price), one) for one in SIZES)[1] for size in SIZES}
        costs = {
            size: _moved(costs, former[size], size, price)
            + STEP_S * (price * size + rate * (1 - table.share(size, rate)))
            for size in SIZES
        }
        came_from.append(former)
    sizes = [min(SIZES, key=lambda size: costs[size])]
    for former in reversed(came_from[1:]):
        sizes.append(former[sizes[-1]])
    sizes.reverse()
    turns = [step for step, (a, b) in enumerate(pairwise(sizes), 1) if a != b]
    return tuple(FleetChange(step * STEP_S, sizes[step]) for step in (0, *turns))


def _moved(costs: dict[int, float], size: int, to: int, price: float) -> float:
    return costs[size] + price * COLD_START_S * max(0, to - size)


def main() -> None:
    parser = ArgumentParser(description=__doc__)
    parser.add_argument("prices", nargs="+", type=float, help="of an instance-second, in late requests")
    parser.add_argument("--seed", type=int, default=1)
    arguments = parser.parse_args()
    plan = replace(FULL, seed=arguments.seed)
    day = day_of(plan)
    arrivals = [request.arrival_s for request in plan.trace(day).requests]
    cuts = [bisect_left(arrivals, step * STEP_S) for step in range(int(plan.day_s / STEP_S) + 1)]
    rates = [(end - begin) / STEP_S for begin, end in pairwise(cuts)]
    table = measured(day, plan)
    for price in arguments.prices:
        changes = cheapest(rates, table, price)
        planned = replace(day, instances=changes[0].instances, changes=changes[1:])
        run = plan.run(planned, variant_of(DEFAULT_POLICY)).job.run()
        hours = paid_hours(changes, plan.day_s, COLD_START_S)
        print(
            f"price {price:g}: {100 * run.effective_capacity:.2f} % on time, {hours:.2f} instance-hours, "
            f"{len(changes) - 1} changes, {run.refused} refused",
            flush=True,
        )


if __name__ == "__main__":
    main()
