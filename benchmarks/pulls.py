"""Contexts that move: the first token of the turns that moved, beside computing them again and beside a bound.

    python -m benchmarks.pulls [--scenarios grow drain kill new uniform] [--requests 1200] [--seeds 1]

Forty agents go on with contexts of 30,000 to 140,000 tokens, on instances of ``qwen2.5-7b`` that keep a million tokens
each and whose links move 5 GB/s. After 900 seconds four instances become eight (*grow*), one of six is drained
(*drain*), or one of six dies, whose contexts a pool of 5 GB/s has too (*kill*). A turn has moved if its instance is
another one than that of its run's turn before it; one for each run counts, the first behind the event.

*new* is short traffic on eight instances, 10 requests a second, in which from second 60 on 30 % ask about one document
of 30,000 tokens that nothing has computed yet: what those that ask, and the others, wait in the minute behind that.
*uniform* are 80 documents that fit on each of eight instances, where a pull can gain nothing.

*bound* is, for each of these turns, the time over idle links of all that its context could bring, and the prefill of
the rest on an idle instance: no placement can have less, unless the turn does not move. For a new document it is the
time until its first copy is computed, which is made once, and then the prefill of the rest.
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
WAYS: dict[str, dict[str, tuple[EngineConfig, bool]]] = {
    "grow": {"computed": (ENGINE, False), "pulled": (ENGINE, True)},
    "drain": {"computed": (ENGINE, False), "pulled": (ENGINE, True)},
    "kill": {
        "computed": (ENGINE, False),
        "loaded from the pool": (POOLED, False),
        "loaded from the pool, or pulled": (POOLED, True),
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
        bounds = [max(0.0, there_s - each.arrival_s) + rest_s(ENGINE, each, known_tokens) for each in asking[1:]]
        others = [each.ttft_s for each in minute if each.input_tokens < known_tokens]
        shown = " | ".join(_times(each) for each in ([each.ttft_s for each in asking], bounds, others))
        print(f"| new | {seed} | {len(asking)} | {'pulled' if pulls else 'computed'} | {shown} |", flush=True)


def uniform(arguments: Namespace, seed: int) -> None:
    """Print what requests wait where every prompt is cached on some instance, and fits on all."""
    trace = documents(requests=3000, seed=seed, documents=80, skew=0.0)
    for pulls in (False, True):
        scenario = Scenario(
            SchedulingSettings(policy=arguments.policy), ENGINE, 8, pulls=pulls, kv_events=arguments.kv_events
        )
        times = [each.ttft_s for each in Simulation(trace, scenario).run().outcomes[1000:]]
        way = "pulled" if pulls else "computed"
        print(f"| uniform | {seed} | {len(times)} | {way} | {_times(times)} | – | – |", flush=True)


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
    print("| scenario | seed | turns behind the event | way | moved | P50, P90 of those | bound | P50, P90 of all |")
    print("| --- | ---: | ---: | --- | ---: | ---: | ---: | ---: |")
    for name in names:
        for seed in arguments.seeds:
            trace = contexts(requests=arguments.requests, seed=seed)
            for way, (engine, pulls) in WAYS[name].items():
                scheduling = SchedulingSettings(policy=arguments.policy, slo_ttft_s=30.0)
                instances, happens = SCENARIOS[name]
                scenario = Scenario(
                    scheduling, engine, instances, pulls=pulls, kv_events=arguments.kv_events, **happens
                )
                outcomes = Simulation(trace, scenario).run().outcomes
                moved = moved_turns(outcomes, trace.block_tokens)
                times = [each.outcome.ttft_s for each in moved]
                bounds = [each.bound_s(engine) for each in moved]
                later = [each.ttft_s for each in outcomes if each.arrival_s >= EVENT_S]
                shown = " | ".join(_pair(each) for each in (times, bounds, later))
                print(f"| {name} | {seed} | {len(later)} | {way} | {len(moved)} | {shown} |", flush=True)


def _times(times: Sequence[float]) -> str:
    return ", ".join(f"{quantile(sorted(times), share):.3f}" for share in (0.5, 0.9, 0.99)) + " s"


def _pair(times: Sequence[float]) -> str:
    return ", ".join(f"{quantile(sorted(times), share):.2f}" for share in (0.5, 0.9)) + " s" if times else "–"


if __name__ == "__main__":
    main()
