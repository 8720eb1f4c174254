"""Contexts that move: the first token of the turns that moved, beside computing them again and beside a bound.

    python -m benchmarks.pulls [--scenarios grow drain kill new uniform] [--requests 1200] [--seeds 1]

Forty agents go on with contexts of 30,000 to 140,000 tokens, on instances of ``qwen2.5-7b`` that keep a million tokens
each and whose links move 5 GB/s. After 900 seconds four instances become eight (*grow*), one of six is drained
(*drain*), or one of six dies, whose contexts a pool of 5 GB/s has too (*kill*). A turn has moved if its instance is
another one than that of its run's turn before it; one for each run counts, the first behind the event. A run has few
of them, so a P90 is that of several seeds together, which are the line *all*.

*new* is short traffic on eight instances, 10 requests a second, in which from second 60 on 30 % ask about one document
of 30,000 tokens that nothing has computed yet: what those that ask, and the others, wait in the minute behind that.
*uniform* are 80 documents that fit on each of eight instances, where a pull can gain nothing. What differs between
systems that are equal is shown beside it: two early requests come in each other's place.

*bound* is, for each of these turns, the time over idle links of all that its context could bring, and the prefill of
the rest on an idle instance: no placement can have less, unless the turn does not move. For a new document it is the
time until its first copy is computed, which is made once, and then the prefill of the rest; for the request that
computes it, its own time.

*llm-d* counts blocks in tiers by constants, loads all of them, and pulls from a fixed number of tokens on.
"""

from __future__ import annotations

from argparse import ArgumentParser, Namespace
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import pairwise
from typing import Any

from dualmap.scheduling.estimates.kv_tiers import Tier
from dualmap.scheduling.settings import SchedulingSettings
from dualmap.simulation.engine.engine_types import EngineConfig
from dualmap.simulation.engine.presets import find_preset
from dualmap.simulation.figures.results import RequestOutcome
from dualmap.simulation.virtual_time.scenario import EngineFault, FleetChange, Scenario
from dualmap.simulation.virtual_time.simulate import Simulation
from dualmap.simulation.workload.generators import contexts, documents, newdocument
from dualmap.simulation.workload.generators.contexts import DOCUMENT_TOKENS, FROM_S
from dualmap.simulation.workload.trace_figures import quantile
from dualmap.simulation.workload.traces import Trace

EVENT_S, LINK_BYTES_PER_S = 900.0, 5e9
CARD = find_preset("qwen2.5-7b-910b4").engine
ENGINE = replace(CARD, max_model_len=160_000, transfer=replace(CARD.transfer, bytes_per_s=LINK_BYTES_PER_S))
POOLED = ENGINE.with_tier(Tier.POOL, tokens=8_000_000, bytes_per_s=LINK_BYTES_PER_S)
KILLED = {"faults": (EngineFault(EVENT_S, "i002", 1e6),)}
SCENARIOS: dict[str, tuple[int, Mapping[str, Any]]] = {
    "grow": (4, {"changes": (FleetChange(EVENT_S, 8),)}),
    "drain": (6, {"changes": (FleetChange(EVENT_S, 5),)}),
    "kill": (6, KILLED),
}
EXCHANGED = (30, 60, 90)
"""Places of requests that come behind the next one."""
LLM_D_PULLS: Mapping[str, Any] = {"policy": "llm-d", "policy_options": {"pull_from_tokens": 2048}}
"""llm-d with its source of pulls, from as many tokens on as its guide recommends."""
OURS: Mapping[str, Any] = {}
WAYS: dict[str, dict[str, tuple[EngineConfig, bool, Mapping[str, Any]]]] = {
    "grow": {"computed": (ENGINE, False, OURS), "pulled": (ENGINE, True, OURS), "llm-d": (ENGINE, True, LLM_D_PULLS)},
    "drain": {"computed": (ENGINE, False, OURS), "pulled": (ENGINE, True, OURS), "llm-d": (ENGINE, True, LLM_D_PULLS)},
    "kill": {
        "computed": (ENGINE, False, OURS),
        "loaded from the pool": (POOLED, False, OURS),
        "loaded from the pool, or pulled": (POOLED, True, OURS),
        "llm-d": (POOLED, True, LLM_D_PULLS),
    },
}


@dataclass(frozen=True)
class Moved:
    """A turn whose context lies on another instance."""

    outcome: RequestOutcome
    context_tokens: int
    """Tokens of the turn before it, in whole blocks."""

    def bound_s(self, engine: EngineConfig) -> float:
        return engine.transfer.alone_s(self.context_tokens) + rest_s(engine, self.outcome, self.context_tokens)


@dataclass(frozen=True)
class Behind:
    """First tokens behind the event, in seconds: of the turns that moved, of these at best, and of all."""

    moved: Sequence[float] = ()
    bounds: Sequence[float] = ()
    all: Sequence[float] = ()

    def __add__(self, other: Behind) -> Behind:
        return Behind([*self.moved, *other.moved], [*self.bounds, *other.bounds], [*self.all, *other.all])

    def shown(self) -> str:
        times = " | ".join(_pair(each) for each in (self.moved, self.bounds, self.all))
        return f"{len(self.all)} | {len(self.moved)} | {times}"


def rest_s(engine: EngineConfig, outcome: RequestOutcome, known_tokens: int) -> float:
    """The prefill, on an idle instance, of what lies behind so many tokens of a prompt."""
    rest = outcome.input_tokens - known_tokens
    return engine.costs.step_s(rest, round(rest * (known_tokens + rest / 2)), 0, 0, 1)


def new_document(arguments: Namespace, seed: int) -> None:
    """Print what requests for a new document, and all others, wait in its first minute."""
    trace = newdocument(requests=1300, seed=seed)
    known_tokens = DOCUMENT_TOKENS // trace.block_tokens * trace.block_tokens
    for pulls in (False, True):
        scenario = Scenario(
            SchedulingSettings(policy=arguments.policy), ENGINE, 8, pulls=pulls, kv_events=arguments.kv_events
        )
        outcomes = Simulation(trace, scenario).run().outcomes
        minute = [each for each in outcomes if FROM_S <= each.arrival_s < FROM_S + 60]
        asking = [each for each in minute if each.input_tokens >= known_tokens]
        there_s = asking[0].arrival_s + asking[0].ttft_s
        behind = [max(0.0, there_s - each.arrival_s) + rest_s(ENGINE, each, known_tokens) for each in asking[1:]]
        bounds = [asking[0].ttft_s, *behind]
        others = [each.ttft_s for each in minute if each.input_tokens < known_tokens]
        shown = " | ".join(_times(each) for each in ([each.ttft_s for each in asking], bounds, others))
        print(f"| new | {seed} | {len(asking)} | {'pulled' if pulls else 'computed'} | {shown} |", flush=True)


def uniform(arguments: Namespace, seed: int) -> None:
    """Print what requests wait where every prompt is cached on some instance, and fits on all."""
    trace = documents(requests=3000, seed=seed, documents=80, skew=0.0)
    ways = [("computed", trace, False), ("pulled", trace, True)]
    ways += [(f"computed, request {place} behind the next", exchanged(trace, place), False) for place in EXCHANGED]
    for way, requests, pulls in ways:
        scenario = Scenario(
            SchedulingSettings(policy=arguments.policy), ENGINE, 8, pulls=pulls, kv_events=arguments.kv_events
        )
        times = [each.ttft_s for each in Simulation(requests, scenario).run().outcomes[1000:]]
        print(f"| uniform | {seed} | {len(times)} | {way} | {_times(times)} | – | – |", flush=True)


def exchanged(trace: Trace, place: int) -> Trace:
    """The trace with two neighbours in each other's place."""
    requests = list(trace.requests)
    one, other = requests[place : place + 2]
    requests[place : place + 2] = replace(other, arrival_s=one.arrival_s), replace(one, arrival_s=other.arrival_s)
    return replace(trace, requests=tuple(requests))


def moved_turns(outcomes: Sequence[RequestOutcome], block_tokens: int) -> list[Moved]:
    """The first turn of each run behind the event that is on another instance than the one before it."""
    runs: dict[str, list[RequestOutcome]] = {}
    for outcome in outcomes:
        runs.setdefault(outcome.run, []).append(outcome)
    found: list[Moved] = []
    for turns in runs.values():
        for former, turn in pairwise(turns):
            if turn.arrival_s >= EVENT_S and turn.instance_id != former.instance_id:
                found.append(Moved(turn, former.input_tokens // block_tokens * block_tokens))
                break
    return found


STANDING: Mapping[str, Callable[[Namespace, int], None]] = {"new": new_document, "uniform": uniform}


def main() -> None:
    parser = ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--scenarios", nargs="+", choices=[*SCENARIOS, *STANDING], default=[*SCENARIOS, *STANDING])
    parser.add_argument("--requests", type=int, default=1200, help="(%(default)s)")
    parser.add_argument("--seeds", type=int, nargs="+", default=[1], help="(%(default)s)")
    parser.add_argument("--policy", default="dualmap-least-cost", help="(%(default)s)")
    parser.add_argument("--kv-events", action="store_true", help="the store knows what the caches have")
    arguments = parser.parse_args()
    moving = [name for name in arguments.scenarios if name in SCENARIOS]
    standing = [name for name in arguments.scenarios if name in STANDING]
    if moving:
        print_moved(arguments, moving)
    if standing:
        print("| scenario | seed | requests | way | P50, P90, P99 of those | bound | of all others |")
        print("| --- | ---: | ---: | --- | ---: | ---: | ---: |")
    for name in standing:
        for seed in arguments.seeds:
            STANDING[name](arguments, seed)


def print_moved(arguments: Namespace, names: Sequence[str]) -> None:
    print("| scenario | seed | way | turns behind the event | moved | P50, P90 of those | bound | P50, P90 of all |")
    print("| --- | ---: | --- | ---: | ---: | ---: | ---: | ---: |")
    for name in names:
        found: dict[str, list[Behind]] = {way: [] for way in WAYS[name]}
        for seed in arguments.seeds:
            trace = contexts(requests=arguments.requests, seed=seed)
            for way, behind in found.items():
                behind.append(_behind(arguments, trace, name, way))
                print(f"| {name} | {seed} | {way} | {behind[-1].shown()} |", flush=True)
        for way, behind in found.items() if len(arguments.seeds) > 1 else ():
            print(f"| {name} | all | {way} | {sum(behind, Behind()).shown()} |", flush=True)


def _behind(arguments: Namespace, trace: Trace, name: str, way: str) -> Behind:
    engine, pulls, policy = WAYS[name][way]
    instances, happens = SCENARIOS[name]
    scheduling = SchedulingSettings(**{"policy": arguments.policy, "slo_ttft_s": 30.0, **policy})
    scenario = Scenario(scheduling, engine, instances, pulls=pulls, kv_events=arguments.kv_events, **happens)
    outcomes = Simulation(trace, scenario).run().outcomes
    moved = moved_turns(outcomes, trace.block_tokens)
    return Behind(
        [each.outcome.ttft_s for each in moved],
        [each.bound_s(engine) for each in moved],
        [each.ttft_s for each in outcomes if each.arrival_s >= EVENT_S],
    )


def _times(times: Sequence[float]) -> str:
    return ", ".join(f"{quantile(sorted(times), share):.3f}" for share in (0.5, 0.9, 0.99)) + " s"


def _pair(times: Sequence[float]) -> str:
    return ", ".join(f"{quantile(sorted(times), share):.2f}" for share in (0.5, 0.9)) + " s" if times else "–"


if __name__ == "__main__":
    main()
