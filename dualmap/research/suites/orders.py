"""The first variant's lead, divided into queue order and placement.

Placement is its lead over the best other *with the same order*; order is what the same policy gains by its order.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from dualmap.research.confidence import Comparison
from dualmap.research.suites.results import GoodputResult, Rate, RateResult, SuiteResult
from dualmap.research.table import ABSENT, Table, shown
from dualmap.research.targets import BOTH, Target
from dualmap.research.variant import Variant
from dualmap.scheduling.placing.policies.registry import granting_order
from dualmap.simulation.figures.mean import Mean
from dualmap.simulation.figures.on_time import TPOT_SLO_S


def order_tables(outcome: SuiteResult) -> list[Table]:
    """One for each target of the goodputs and one for each rate; none unless the first policy ran with two orders
    or more, beside others with the same."""
    orders = by_order(outcome.variants)
    if len(orders) < 2:
        return []
    tables = []
    targets = dict.fromkeys(target for result in outcome.goodputs for target in result.targets)
    for target in targets:
        tables.append(_goodput_table(outcome, orders, target))
    for rate in dict.fromkeys(result.rate for result in outcome.rates):
        tables.append(_rate_table(outcome, orders, rate))
    return tables


def by_order(variants: Sequence[Variant]) -> dict[str, tuple[str, ...]]:
    """Names of the variants by their order, the first variant's policy first; its own order first. Orders that it did
    not run with, or alone, are left out."""
    ours = variants[0].scheduling.policy
    orders: dict[str, list[str]] = {}
    for variant in sorted(variants, key=lambda one: one.scheduling.policy != ours):
        if variant.options.router_queue is None:
            orders.setdefault(granting_order(variant.scheduling), []).append(variant.name)
    first = {order: names[0] for order, names in orders.items()}
    policies = {variant.name: variant.scheduling.policy for variant in variants}
    return {order: tuple(names) for order, names in orders.items() if policies[first[order]] == ours and len(names) > 1}


def _goodput_table(outcome: SuiteResult, orders: Mapping[str, tuple[str, ...]], target: Target) -> Table:
    def row(result: GoodputResult) -> tuple[str, ...]:
        return (result.workload.title, *_cells(result.of(target), orders, relative=True, digits=2, factor=1))

    return Table(
        f"Order and placement: goodput with {target.title}",
        _columns(orders),
        tuple(row(result) for result in outcome.goodputs if target in result.targets),
        (f"{_NOTE} {_both_slos(outcome)}" if target is BOTH else _NOTE,),
    )


def _both_slos(outcome: SuiteResult) -> str:
    slos = dict.fromkeys(result.workload.traffic.slo_tpot_s or TPOT_SLO_S for result in outcome.goodputs)
    return f"Both SLOs: on time, and at most {' or '.join(f'{1000 * slo_s:g}' for slo_s in slos)} ms a token."


def _rate_table(outcome: SuiteResult, orders: Mapping[str, tuple[str, ...]], rate: Rate) -> Table:
    def row(result: RateResult) -> tuple[str, ...]:
        return (result.workload.title, *_cells(result.values("on_time"), orders, relative=False, digits=1, factor=100))

    rows = tuple(row(result) for result in outcome.rates if result.rate == rate)
    return Table(f"Order and placement: on time at {rate.label}", _columns(orders), rows, (_NOTE,))


_NOTE = "Placement: against the best other with the same order. Order: the same policy with its own order or the other."


def _columns(orders: Mapping[str, tuple[str, ...]]) -> tuple[str, ...]:
    own, *others = orders
    columns = ["fleet"]
    for order in orders:
        columns += [f"{order}: ours", "best other", "placement"]
    return (*columns, *(f"order, {own} for {other}" for other in others), "best of all others", "lead")


def _cells(
    values: Mapping[str, Sequence[float]],
    orders: Mapping[str, tuple[str, ...]],
    *,
    relative: bool,
    digits: int,
    factor: float,
) -> list[str]:
    cells: list[str] = []
    for names in orders.values():
        found = Comparison.of({name: values[name] for name in names})
        other = f"{_policy(found.best_other)} {factor * found.other.value:.{digits}f}"
        cells += [f"{factor * found.own.value:.{digits}f}", other, _difference(found, relative=relative)]
    own, *others = orders
    for other_order in others:
        pair = {name: values[name] for name in (orders[own][0], orders[other_order][0])}
        cells.append(_difference(Comparison.of(pair), relative=relative))
    ours = {names[0] for names in orders.values()} - {orders[own][0]}
    overall = {orders[own][0]: values[orders[own][0]]} | {n: v for n, v in values.items() if n not in ours}
    found = Comparison.of(overall)
    cells += [f"{found.best_other} {factor * found.other.value:.{digits}f}", _difference(found, relative=relative)]
    return cells


def _policy(name: str) -> str:
    """A variant's name without its order, which the column says."""
    return name.rsplit(" ", 1)[0]


def _difference(found: Comparison, *, relative: bool) -> str:
    difference: Mean | None = found.percent if relative else found.points
    if difference is None:
        return ABSENT
    return f"{shown(difference, 1, sign=True)} {'%' if relative else 'points'}"
