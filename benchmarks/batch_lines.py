"""Lines of batches beside interactive requests, in virtual time: what they add, what people notice, and what an ideal
would add.

    python -m benchmarks.batch_lines [--rates 1.8 3.6 4.8] [--seeds 1 2] [--requests 1500] [--fixed 64] [--ideal]
        [--stopping 40,8,4] [--priority] [--brief] [--line-tokens 12000]

Eight instances serve the generator ``toolagent`` at these rates: 0.3, 0.6 and 0.8 of the rate (6/s) at which 92 % of
its requests are on time. Beside them lies an endless batch: 12 shared documents of 4,096 tokens, each line with 300
tokens of its own and an answer of 200.

*alone* has no batch. *as room is* begins lines as the fleet does (``scheduling.batches.slack``). *N at once* keeps N
lines under way, whatever comes.

Every other run places each interactive request where *alone* did, so that the difference is that of the lines: where
requests are placed again, one more or less on an instance changes all that follow, and P99 of some hundred requests
differ by 10 to 20 % from run to run without any cause. *as room is, placed again* is the fleet as it is; *shuffled* has
the lines in another order than that of their documents; ``--brief`` leaves both out. ``--priority`` adds *by priority*:
engines that take the requests of people first.

The *ideal* knows all arrivals, and what becomes of them: it keeps lines away from those requests that are the 99th
percentiles. So many lines as are *free* are on each instance, but only *critical* ones while it has, or within 15 s
will have, a request of the slowest *share* by its first token or by its time per token. The best of a grid of these
that keeps the bounds counts: P99 of first tokens and of the time per token at most 5 % above *alone*, on time at most
0.5 points below. These bounds do not see the median of the time per token, and the ideal doubles it: *same median* is
the best of the grid whose median is no more than half a point above that of *as room is*.

``--stopping MOST,FEWEST,S`` is a rule that knows the present alone: so many lines on each instance, and all but the
fewest are stopped while more than S seconds of prompts wait there. A stopped line continues with 16 tokens computed
again, which is less than any engine could.

With several seeds a line a rate takes the requests of all of them together, with the interval that holds 95 % of the
changes of P99 of the time per token among 500 draws of as many requests (bootstrap, each with its two times).

*recomputed* are tokens of stopped lines that were computed a second time, as a part of all that lines computed. *hits*
are the cached part of the prompts of lines, *bound* what they would be if each document were computed once in all.
"""

from __future__ import annotations

from argparse import ArgumentParser, Namespace
from collections import Counter, defaultdict
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from itertools import count, islice
from random import Random
from statistics import fmean

from dualmap.scheduling.request.machine import RequestMachine
from dualmap.scheduling.settings import PriorityClassSettings, SchedulingSettings
from dualmap.simulation.engine.presets import find_preset
from dualmap.simulation.figures.results import Percentiles, RequestOutcome
from dualmap.simulation.virtual_time.scenario import Scenario
from dualmap.simulation.virtual_time.simulate import Simulation
from dualmap.simulation.workload.arrivals import Loop
from dualmap.simulation.workload.generators.conversation import toolagent
from dualmap.simulation.workload.traces import Trace, TraceRequest

INSTANCES = 8
BATCH = "batch"
DOCUMENTS, DOCUMENT_TOKENS, LINE_TOKENS, ANSWER_TOKENS = 12, 4096, 300, 200
LINES = 40_000
FIRST_ID = 1 << 40
"""Above the ids of blocks that the generator gives."""
AHEAD_S = 15.0
"""About the time of a line."""
GRID = ((0.03, 24, 12), (0.03, 26, 12), (0.03, 28, 12), (0.03, 56, 12), (0.06, 56, 12))
"""Of the ideal: share, free and critical."""
MEDIAN_MARGIN = 0.005
DRAWS = 500
STARTS = 6
"""Lines that the ideal begins on an instance at a time."""
Homes = Mapping[int, str]
"""The instance of each interactive request, by its place in the trace."""


@dataclass(frozen=True, slots=True)
class Figures:
    """What people had, and what was done of the batch until the last of them came."""

    ttft_p99_s: float
    tpot_p50_s: float
    tpot_p99_s: float
    on_time: float
    lines_per_s: float
    hits: float
    bound: float
    recomputed: float

    def keeps(self, alone: Figures) -> bool:
        return (
            self.ttft_p99_s <= 1.05 * alone.ttft_p99_s
            and self.tpot_p99_s <= 1.05 * alone.tpot_p99_s
            and self.on_time >= alone.on_time - 0.005
        )

    def is_as_slow(self, other: Figures, alone: Figures) -> bool:
        """Whether the median of the time per token is about that of the other at most."""
        return self.tpot_p50_s <= other.tpot_p50_s + MEDIAN_MARGIN * alone.tpot_p50_s


class Beside(Simulation):
    """A run whose interactive requests are placed where they were before, if that is said."""

    homes: Homes | None = None
    recomputed_tokens = 0

    def _enter(self, place: int, pinned_to: str | None = None) -> None:
        if self.homes is not None and pinned_to is None:
            pinned_to = self.homes.get(place)
        super()._enter(place, pinned_to)

    def _stop(self, machine: RequestMachine) -> int:
        tokens = super()._stop(machine)
        self.recomputed_tokens += tokens
        return tokens

    def outcomes(self) -> Sequence[RequestOutcome]:
        return self._outcomes

    def counted(self) -> Sequence[RequestOutcome]:
        """Interactive requests, without the first fifth of them, which found empty instances."""
        people = [each for each in self._outcomes if each.tenant != BATCH]
        return people[len(people) // 5 :]

    def documents(self) -> int:
        """The documents that lines had."""
        requests = [self._trace.requests[place] for place in self._places]
        return len({each.hash_ids[0] for each in requests if each.tenant == BATCH})

    def placed(self) -> Homes:
        """Where each request was, by its place in the trace."""
        return {self._places[number]: each.instance_id for number, each in enumerate(self._outcomes)}


class Knowing(Beside):
    """The ideal."""

    free = critical = 0
    windows: Mapping[str, Sequence[tuple[float, float]]]

    def _begin_lines(self) -> None:
        (replica,) = self.replicas
        lines = Counter(each.instance_id for each in replica.requests.live.values() if self._is_line(each.request_id))
        loads = replica.pool.loads()
        for place, (name, load) in enumerate(sorted(loads.items())):
            is_critical = any(first <= self._now_s <= last for first, last in self.windows.get(name, ()))
            most = self.critical if is_critical else self.free
            if not load.pending_tokens:
                for _ in range(min(STARTS, most - lines[name])):
                    self._begin_line(name, place, len(loads))


class Stopping(Beside):
    """Lines leave while long prompts wait, and come back."""

    most = fewest = 0
    stop_s = 0.0

    def _begin_lines(self) -> None:
        (replica,) = self.replicas
        lines = Counter(each.instance_id for each in replica.requests.live.values() if self._is_line(each.request_id))
        loads = replica.pool.loads()
        for place, (name, load) in enumerate(sorted(loads.items())):
            if load.pending_tokens > self.stop_s * load.prefill_tokens_per_s:
                replica.requests.evict_lines(name, lines[name] - self.fewest)
            elif load.pending_tokens < load.dispatch_window_tokens // 2:
                for _ in range(min(STARTS, self.most - lines[name])):
                    self._begin_line(name, place, len(loads))

    def _prompt_tokens(self, machine: RequestMachine, traced: TraceRequest) -> int:
        is_continued = machine.sent_tokens and self._is_line(machine.request_id)
        return DOCUMENT_TOKENS + 16 if is_continued else super()._prompt_tokens(machine, traced)


def windows_of(outcomes: Sequence[RequestOutcome], share: float) -> Mapping[str, Sequence[tuple[float, float]]]:
    """The times, by instance, in which lines would be in the way of the slowest share of the requests."""
    firsts = sorted(each.ttft_s for each in outcomes)
    per_token = sorted(each.tpot_s or 0.0 for each in outcomes)
    slow = int(len(outcomes) * (1 - share))
    windows: dict[str, list[tuple[float, float]]] = defaultdict(list)
    for each in outcomes:
        if each.first_token_s is not None and each.ttft_s >= firsts[slow]:
            windows[each.instance_id].append((each.arrival_s - AHEAD_S, each.first_token_s))
        if each.first_token_s is not None and each.finish_s is not None and (each.tpot_s or 0.0) >= per_token[slow]:
            windows[each.instance_id].append((each.first_token_s - AHEAD_S, each.finish_s))
    return windows


def with_lines(people: Trace, seed: int, line_tokens: int, *, shuffled: bool = False) -> Trace:
    """The trace, and the lines of a batch, in the order of its documents unless they are shuffled."""
    ids, rng, block = count(FIRST_ID), Random(seed), people.block_tokens
    documents = [tuple(next(ids) for _ in range(DOCUMENT_TOKENS // block)) for _ in range(DOCUMENTS)]
    lines = [
        TraceRequest(
            people.requests[-1].arrival_s,
            DOCUMENT_TOKENS + line_tokens,
            max(1, round(rng.gauss(ANSWER_TOKENS, ANSWER_TOKENS / 4))),
            (*documents[number * DOCUMENTS // LINES], *islice(ids, -(-line_tokens // block))),
            priority=BATCH,
            tenant=BATCH,
        )
        for number in range(LINES)
    ]
    if shuffled:
        rng.shuffle(lines)
    return Trace(people.name, block, (*people.requests, *lines))


def scenario_of(loop: Loop, *, by_priority: bool = False) -> Scenario:
    classes = (
        PriorityClassSettings(name="default"),
        PriorityClassSettings(name=BATCH, slo_ttft_s=3600.0, evictable=True, engine_priority=10),
    )
    scheduling = SchedulingSettings(classes=classes, engine_priorities=by_priority)
    preset = find_preset("qwen2.5-7b-910b4:by_priority" if by_priority else "qwen2.5-7b-910b4")
    return Scenario(scheduling, preset.engine, INSTANCES, loop=loop)


def figures_of(run: Beside) -> Figures:
    outcomes = run.run().outcomes
    counted = run.counted()
    begun_s, ended_s = counted[0].arrival_s, counted[-1].arrival_s
    lines = [each for each in outcomes if each.tenant == BATCH and each.finish_s is not None]
    done = sum(begun_s <= each.finish_s <= ended_s for each in lines if each.finish_s is not None)
    per_token = Percentiles.of([each.tpot_s for each in counted if each.tpot_s is not None])
    prompts = sum(each.input_tokens for each in lines)
    cached = sum(each.cached_tokens or 0 for each in lines)
    computed = prompts - cached + sum(each.output_tokens for each in lines)
    return Figures(
        Percentiles.of([each.ttft_s for each in counted]).p99,
        per_token.p50,
        per_token.p99,
        fmean(each.ttft_s <= each.slo_s for each in counted),
        done / (ended_s - begun_s),
        cached / max(1, prompts),
        max(0, len(lines) - run.documents()) * DOCUMENT_TOKENS / max(1, prompts),
        run.recomputed_tokens / max(1, computed + run.recomputed_tokens),
    )


@dataclass(frozen=True, slots=True)
class Pair:
    """An interactive request without and with lines beside it."""

    alone: RequestOutcome
    beside: RequestOutcome


def show_pooled(rate_per_s: float, pairs: Sequence[Pair]) -> None:
    """Print what the requests of several seeds had, taken together."""
    random = Random(1)

    def change(drawn: Sequence[Pair], time_of: Callable[[RequestOutcome], float | None], rank: float) -> float:
        before = sorted(found for each in drawn if (found := time_of(each.alone)) is not None)
        after = sorted(found for each in drawn if (found := time_of(each.beside)) is not None)
        return after[int(rank * len(after))] / before[int(rank * len(before))] - 1

    def per_token(outcome: RequestOutcome) -> float | None:
        return outcome.tpot_s

    drawn = sorted(change(random.choices(pairs, k=len(pairs)), per_token, 0.99) for _ in range(DRAWS))
    low, high = drawn[round(0.025 * DRAWS)], drawn[round(0.975 * DRAWS) - 1]
    on_time = fmean(
        (each.beside.ttft_s <= each.beside.slo_s) - (each.alone.ttft_s <= each.alone.slo_s) for each in pairs
    )
    print(
        f"{rate_per_s:5.1f}  all: {len(pairs)} requests, P99 of first tokens"
        f" {change(pairs, lambda each: each.ttft_s, 0.99):+.1%}, of the time per token"
        f" {change(pairs, per_token, 0.99):+.1%} ({low:+.1%} to {high:+.1%}), its median"
        f" {change(pairs, per_token, 0.5):+.1%}, on time {100 * on_time:+.2f} points"
    )


def compare(rate_per_s: float, seed: int, options: Namespace) -> Sequence[Pair]:
    """One seed: its rows, and what its interactive requests had without and with lines as room is."""
    people = toolagent(options.requests, seed).at_rate(rate_per_s)
    both = with_lines(people, seed, options.line_tokens)
    lines = Loop(lines=BATCH)

    def show(name: str, found: Figures, alone: Figures) -> None:
        print(
            f"{rate_per_s:5.1f} {seed:4} {name:>26} {found.lines_per_s:7.2f} {found.ttft_p99_s:9.2f}"
            f" {found.ttft_p99_s / alone.ttft_p99_s - 1:+7.1%} {1000 * found.tpot_p99_s:9.0f}"
            f" {found.tpot_p99_s / alone.tpot_p99_s - 1:+7.1%} {found.tpot_p50_s / alone.tpot_p50_s - 1:+7.1%}"
            f" {found.on_time:8.1%} {found.recomputed:7.1%} {found.hits:6.1%} {found.bound:6.1%}"
            f"  {'' if found.keeps(alone) else 'beyond the bounds'}",
            flush=True,
        )

    first = Beside(people, scenario_of(Loop()))
    placed_again = figures_of(first)
    homes = first.placed()
    again = Beside(people, scenario_of(Loop()))
    again.homes = homes
    alone = figures_of(again)
    show("alone", alone, alone)

    def beside(run: Beside) -> Figures:
        run.homes = homes
        return figures_of(run)

    as_room_is = Beside(both, scenario_of(lines))
    by_room = beside(as_room_is)
    show("as room is", by_room, alone)
    if options.priority:
        show("by priority", beside(Beside(both, scenario_of(lines, by_priority=True))), alone)
    if not options.brief:
        apart = with_lines(people, seed, options.line_tokens, shuffled=True)
        show("as room is, shuffled", beside(Beside(apart, scenario_of(lines))), alone)
        show("as room is, placed again", figures_of(Beside(both, scenario_of(lines))), placed_again)
    for number in options.fixed:
        show(f"{number} at once", beside(Beside(both, scenario_of(Loop(lines=BATCH, lines_at_once=number)))), alone)
    for text in options.stopping:
        most, fewest, stop_s = text.split(",")
        stopping = Stopping(both, scenario_of(lines))
        stopping.most, stopping.fewest, stopping.stop_s = int(most), int(fewest), float(stop_s)
        show(f"stopping {text}", beside(stopping), alone)
    if options.ideal:
        tried: list[tuple[Figures, str]] = []
        for share, free, critical in GRID:
            knowing = Knowing(both, scenario_of(lines))
            knowing.windows, knowing.free, knowing.critical = windows_of(again.outcomes(), share), free, critical
            tried.append((beside(knowing), f"({share:.0%}, {free}, {critical})"))
        keeping = [each for each in tried if each[0].keeps(alone)]
        alike = [each for each in keeping if each[0].is_as_slow(by_room, alone)]
        for name, found in (("ideal", keeping), ("same median", alike)):
            if found:
                best, what = max(found, key=lambda each: each[0].lines_per_s)
                show(f"{name} {what}", best, alone)
                part = by_room.lines_per_s / best.lines_per_s
                print(f"{rate_per_s:5.1f} {seed:4} as room is: {part:.0%} of that")
    return [Pair(*each) for each in zip(again.counted(), as_room_is.counted(), strict=True)]


def main() -> None:
    parser = ArgumentParser(description=__doc__.partition("\n\n")[0])
    parser.add_argument("--rates", type=float, nargs="+", default=[1.8, 3.6, 4.8])
    parser.add_argument("--seeds", type=int, nargs="+", default=[1])
    parser.add_argument("--requests", type=int, default=1500)
    parser.add_argument("--fixed", type=int, nargs="*", default=[])
    parser.add_argument("--line-tokens", type=int, default=LINE_TOKENS, help="tokens of each line of its own")
    parser.add_argument("--ideal", action="store_true")
    parser.add_argument("--stopping", nargs="*", default=[])
    parser.add_argument("--priority", action="store_true")
    parser.add_argument("--brief", action="store_true")
    options = parser.parse_args()
    print(
        " rate seed                        way lines/s TTFT P99 s         TPOT P99 ms             P50  on time"
        " recomp.  hits  bound"
    )
    for rate_per_s in options.rates:
        pairs = [pair for seed in options.seeds for pair in compare(rate_per_s, seed, options)]
        if len(options.seeds) > 1:
            show_pooled(rate_per_s, pairs)


if __name__ == "__main__":
    main()
