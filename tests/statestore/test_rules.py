"""Rules that are declared in Python and run by the scripts: the Lua of each gives what its Python gives."""

from __future__ import annotations

import json
import random
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict
from types import SimpleNamespace
from typing import Any

import pytest
import redis

from dualmap.scheduling.estimates.adapters import adapter_disk_s, adapter_host_s, slot_turns
from dualmap.scheduling.estimates.kv_tiers import is_slow, load_time_s
from dualmap.scheduling.estimates.pulls import copy_s, pull_ends_s, pull_pays
from dualmap.scheduling.estimates.weights import Form, features_at, idle_features, rank_s
from dualmap.scheduling.queues.queue_order import finds_memory, is_calm
from dualmap.scheduling.runs import admission
from dualmap.scheduling.state.instance import COUNTED, InstanceLoad, InstanceState, overtaken_tokens
from dualmap.scheduling.state.instance import stalled_s as stalled_for_s
from dualmap.scheduling.state.legs import Leg
from dualmap.scheduling.state.request import (
    REPORTED_FIELDS,
    RequestState,
    StoredRequest,
    context_tokens_of,
    counts_of,
    growth_at_prefill,
)
from dualmap.statestore.memory.lua import LuaFunctions
from dualmap.statestore.pool.rules import COUNTING, RULES, rules_module
from dualmap.statestore.pool.translated import Translation, UntranslatableError

CASES = 200
NOW_MS = 1_795_369_287_264
CALL = """
local rules, reply = (function() %s end)(), {}
for place, case in ipairs(cjson.decode(ARGV[1])) do
  local found = rules[case[1]](unpack(case[2]))
  if case[3] then -- a rule that changes the instance it is given
    found = {}
    for index, name in ipairs(case[3]) do found[index] = case[2][2][name] end
  end
  found = type(found) == 'table' and found or { found == true and 1 or found or 0 }
  for index, figure in ipairs(found) do found[index] = string.format('%%.17g', figure) end
  reply[place] = found
end
return reply
"""
Case = tuple[str, list[Any], Sequence[str] | None, list[float]]


def load_of(rng: random.Random) -> InstanceLoad:
    deferred, dispatched, held = (rng.choice((0, rng.randrange(20_000))) for _ in range(3))
    counts = {name: rng.choice((0, rng.randrange(20_000))) for name in COUNTED}
    return InstanceLoad(
        "a",
        InstanceState.READY,
        prefill_tokens_per_s=rng.choice((8000.0, rng.uniform(50.0, 30_000.0))),
        kv_capacity_tokens=rng.randrange(1, 2_000_000),
        passed_over_tokens=rng.choice((0, rng.randrange(20_000))),
        max_running_requests=rng.randrange(1, 500),
        **counts
        | {
            "pending_tokens": deferred + dispatched + held,
            "dispatched_tokens": dispatched,
            "deferred_tokens": deferred,
            "context_tokens": rng.randrange(3_000_000),
        },
    )


def request_of(rng: random.Random) -> StoredRequest:
    return StoredRequest(
        "r",
        "one",
        "a",
        rng.choice([*RequestState]),
        1,
        uncached_tokens=rng.randrange(1, 30_000),
        prompt_tokens=rng.randrange(1, 60_000),
        expected_output_tokens=rng.randrange(4000),
        slo_ms=5000,
        deferred=rng.random() < 0.5,
        stored_tokens=rng.choice((0, rng.randrange(9000))),
        leg=rng.choice([*Leg]),
        band=rng.choice((0, 0, 1, 47)),
    )


def instance_table(load: InstanceLoad) -> dict[str, Any]:
    return asdict(load) | {"tokens_per_s": load.prefill_tokens_per_s}


def request_table(request: StoredRequest) -> dict[str, Any]:
    values = asdict(request) | {"deferred": int(request.deferred)}
    return values | {"told": {name: values.pop(name) for name in REPORTED_FIELDS}}


def cases(rng: random.Random) -> Iterator[Case]:
    """One of each rule: its name in Lua, the arguments there, the names of what it changes, and what Python says."""
    load, request = load_of(rng), request_of(rng)
    table, uncached, prompt = instance_table(load), rng.randrange(1, 40_000), rng.randrange(40_000, 90_000)

    def one(rule: Callable[..., Any], given: Any, *more: float) -> Case:
        found = rule(given, *more)
        tables = {InstanceLoad: instance_table, StoredRequest: request_table}
        written = tables[type(given)](given) if type(given) in tables else given
        return rule.__name__, [written, *more], None, [*found] if isinstance(found, Form) else [float(found)]

    stamps = SimpleNamespace(
        pending_tokens=load.pending_tokens,
        deferred_tokens=load.deferred_tokens,
        last_prefill_ms=NOW_MS - rng.randrange(-100, 9000),
        work_since_ms=NOW_MS - rng.randrange(9000),
    )
    stalled_s, slack = rng.choice((0.0, rng.uniform(0.0, 9.0))), rng.randrange(5000)
    loads_s = [rng.random() for _ in range(4)] + [rng.choice((0.0, rng.random()))]
    yield one(features_at, load, slack, stalled_s, 3.0, uncached, prompt, rng.choice((0, prompt)), *loads_s)
    yield one(idle_features, rng.uniform(1.0, 9000.0), uncached, prompt, rng.choice((0, prompt)), *loads_s[:2])
    room = SimpleNamespace(
        adapter_slots=rng.randrange(1, 4),
        adapter_host_slots=rng.randrange(4, 9),
        adapter_host_ms=20,
        adapter_disk_ms=500,
    )
    place, running = rng.randrange(10), rng.randrange(6)
    share, requests = rng.choice((1.0, 0.25, 4.0)), rng.randrange(9)
    yield "adapter_host_s", [vars(room), place, share], None, [adapter_host_s(room, place, share)]
    yield "adapter_disk_s", [vars(room), place, share], None, [adapter_disk_s(room, place, share)]
    yield "slot_turns", [vars(room), running, requests], None, [slot_turns(room, running, requests)]
    yield one(rank_s, load, slack, 4.0)
    yield "stalled_s", [vars(stamps), NOW_MS], None, [stalled_for_s(stamps, NOW_MS)]
    yield one(overtaken_tokens, load, rng.choice((0, load.yielding_tokens)))
    yield "finds_memory", [uncached, table, 400_000], None, [float(finds_memory(uncached, load, 400_000))]
    yield one(pull_pays, *(rng.choice((1.0, 2.0, rng.uniform(0.0, 3.0))) for _ in range(4)))
    yield one(pull_ends_s, *(rng.choice((0.0, rng.uniform(0.0, 9.0))) for _ in range(4)))
    yield one(copy_s, load, uncached, 16)
    yield one(is_calm, slack, 800.0, NOW_MS, NOW_MS + rng.randrange(9000))
    yield one(context_tokens_of, request)
    yield one(load_time_s, rng.random(), rng.random(), rng.choice((0, uncached)))
    yield one(is_slow, rng.choice((1e-6, 1e-3)), load.prefill_tokens_per_s)
    used, service, now_ms = (
        rng.choice((0, rng.randrange(900_000))),
        rng.uniform(0, 1e8),
        NOW_MS + rng.randrange(400_000),
    )
    mean, ended = rng.uniform(0, 1e8), rng.randrange(1, 400)
    waited_ms = rng.randrange(0, 3 * round(admission.AGED_S * 1000))
    yield one(admission.goes_as, now_ms - waited_ms, now_ms, rng.randrange(2), rng.randrange(9))
    yield one(admission.room_tokens, rng.randrange(3), 1_000_000, now_ms - rng.randrange(20_000), now_ms)
    yield one(admission.missing_tokens, prompt, rng.choice((0, used)), rng.uniform(0, 1e6))
    yield one(admission.silent_since_ms, now_ms)
    yield one(admission.waiting_rank, service, rng.randrange(2), rng.randrange(8))
    yield one(admission.waiting_since, NOW_MS, rng.randrange(8))
    yield one(admission.has_had_quantum, service, rng.uniform(0, service), ended, mean)
    yield one(admission.gives_way, service, rng.uniform(0, 1e8), rng.randrange(2), used, 500_000)
    yield one(admission.mean_service_with, service, ended, mean)
    yield one(admission.continues, prompt, rng.randrange(40_000, 90_000), rng.choice((0, rng.randrange(3000))))
    for name, rule in {"count": counts_of, "count_prefill": growth_at_prefill}.items():
        for sign in (1, -1):
            grown = asdict(rule(request))
            after = [float(table[each] + sign * grown[each]) for each in COUNTED]
            yield name, [request_table(request), table, sign], COUNTED, after


def all_cases() -> list[Case]:
    rng = random.Random(7)
    return [each for _ in range(CASES) for each in cases(rng)]


def assert_agree(made: Sequence[Case], replies: Sequence[Sequence[bytes]]) -> None:
    for (name, given, _, wanted), found in zip(made, replies, strict=True):
        assert [*map(float, found)] == pytest.approx(wanted, rel=1e-12, abs=1e-12), (name, given)


def argument(made: Sequence[Case]) -> bytes:
    return json.dumps([[name, given, *([changed] if changed else [])] for name, given, changed, _ in made]).encode()


def test_every_rule_is_compared() -> None:
    assert {name for name, *_ in all_cases()} == {rule.__name__ for rule in RULES} | {*COUNTING}


def test_rules_say_in_the_lua_of_a_server_what_they_say_in_python(server_url: str) -> None:
    made = all_cases()

    with redis.Redis.from_url(server_url) as client:
        replies = client.eval(CALL % rules_module(), 0, argument(made))

    assert_agree(made, replies)


def test_rules_say_in_the_lua_of_this_process_what_they_say_in_python() -> None:
    made, functions = all_cases(), LuaFunctions(lambda *words: None)
    functions.load(
        "#!lua name=rules\nredis.register_function('rules', function(keys, ARGV)\n" + CALL % rules_module() + "\nend)"
    )

    assert_agree(made, functions.call("rules", b"", [argument(made)]))


FEW_FIGURES = (1.0, 2.0)


def indexed(place: int) -> float:
    return FEW_FIGURES[place]


def looped(count: int) -> float:
    total = 0.0
    for each in range(count):
        total += each
    return total


def calls_what_is_no_expression(count: int) -> float:
    return looped(count)


@pytest.mark.parametrize(
    ("rule", "named"), [(indexed, "indexed"), (looped, "looped"), (calls_what_is_no_expression, "looped")]
)
def test_a_rule_that_no_script_can_run_is_refused(rule: Callable[..., float], named: str) -> None:
    with pytest.raises(UntranslatableError, match=named):
        Translation().function(rule)
