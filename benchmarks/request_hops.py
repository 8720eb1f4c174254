"""How a request passes through the project's modules: which, how many calls, and how often it changes the module.

One replica in this process with its HTTP front, an embedded Valkey, a mock instance that streams its answer. A profile
hook notes every Python call from the first byte of the client's request, twice: until the request is written to its
instance, and until the answer has ended and all is settled that follows in the background. A change of module is a call
in another module than the call before it: what a reader who follows the request must open.

Of several requests the one with the fewest calls counts, as background work may run in the midst of another. A
coroutine that goes on counts as a call, and so do comprehensions; functions written in C, and constructors that
dataclasses generate, do not.

With ``--bytecodes`` it counts, of the whole request, the bytecodes that each module executes, those of the standard
library included, and how many there were at each write for which somebody waits. Unlike times they are the same on a
busy machine.

    python benchmarks/request_hops.py [--prompt-bytes 2048] [--chunks 1] [--split] [--functions]
    python benchmarks/request_hops.py --bytecodes [--chunks 0] [--tenants] [--functions]    # 0: it does not stream
    python benchmarks/request_hops.py --bytecodes [--runs] [--session]    # turns of agents' runs
    python benchmarks/request_hops.py --idle 12    # what a replica executes by itself
"""

from __future__ import annotations

import argparse
import asyncio
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Sequence
from contextlib import suppress
from functools import partial
from itertools import pairwise
from pathlib import Path
from types import FrameType
from typing import Any

import router_overhead
import uvloop

from dualmap.router.serving.serve import serve
from dualmap.router.settings import RouterSettings
from dualmap.runtime.pool_settings import PoolSettings
from dualmap.scheduling.settings import SchedulingSettings, SplitSettings
from dualmap.scheduling.state.instance import InstanceSpec, InstanceState, Role
from dualmap.statestore.connect import open_store
from dualmap.statestore.settings import StoreSettings

PROJECT = "dualmap."
FIRST = "ClientConnection.data_received"
WRITTEN = "UpstreamConnection.start"
WRITES = {
    "Wire.send": "the store is called",
    WRITTEN: "its instance has the request",
    "ClientConnection.write": "its client has the answer",
}
LOAD = frozenset({"__main__", "asyncio.streams", "router_overhead"})
INSTANCES = 8
REQUESTS = 20
SETTLE_S = 0.05
"""Time after which the background work of a request is done."""
PAUSE_S = 0.002
"""Time without a bytecode before a wake-up that is for something else. The waits for the store are shorter."""
BREAK_S = 0.0001
"""Time without a bytecode in which a request that has come would be read."""

Call = tuple[str, str]
"""The module, and the function in it."""


class Trace:
    """Calls of the project's functions, in order, from the first one for a request."""

    def __init__(self) -> None:
        self.calls: list[Call] = []
        self.written: int | None = None
        """How many there were when the request was written to its first instance."""

    def __call__(self, frame: FrameType, event: str, _: Any) -> None:
        if event != "call":
            return
        module, function = frame.f_globals.get("__name__", ""), frame.f_code.co_qualname
        if not module.startswith(PROJECT) or not (self.calls or function == FIRST):
            return
        self.calls.append((module.removeprefix(PROJECT), function))
        if function == WRITTEN and self.written is None:
            self.written = len(self.calls)


class Bytecodes:
    """Bytecodes by function, from the first call for a request, without those of the load and the mock instance."""

    def __init__(self) -> None:
        self.counts: Counter[Call] = Counter()
        self.until: dict[str, int] = {}
        """How many there were at the first write of each kind."""

    def __call__(self, frame: FrameType, event: str, _: Any) -> Any:
        module, function = frame.f_globals.get("__name__", ""), frame.f_code.co_qualname
        if module in LOAD or not (self.counts or function == FIRST):
            return None
        if function in WRITES:
            self.until.setdefault(WRITES[function], self.counts.total())
        frame.f_trace_opcodes, frame.f_trace_lines = True, False
        executed = partial(self._executed, (module.removeprefix(PROJECT), function))
        executed(frame, event, None)
        return executed

    def _executed(self, call: Call, _: FrameType, event: str, __: Any) -> Any:
        self.counts[call] += event == "opcode"
        return partial(self._executed, call)

    def by_module(self) -> Counter[str]:
        counts: Counter[str] = Counter()
        for (module, _), count in self.counts.items():
            counts[module] += count
        return counts


class WakeUps:
    """Bytecodes of what a replica does by itself: those of each wake-up, behind a pause of ``PAUSE_S``; and those of
    each piece of it that nothing interrupts, behind one of ``BREAK_S``."""

    def __init__(self) -> None:
        self.counts: list[Counter[Call]] = []
        self.pieces: list[Counter[Call]] = []
        self._last_s = 0.0

    def __call__(self, frame: FrameType, event: str, _: Any) -> Any:
        module = frame.f_globals.get("__name__", "")
        if module in LOAD:
            return None
        frame.f_trace_opcodes, frame.f_trace_lines = True, False
        return partial(self._executed, (module.removeprefix(PROJECT), frame.f_code.co_qualname))

    def _executed(self, call: Call, _: FrameType, event: str, __: Any) -> Any:
        now_s = time.monotonic()
        if now_s - self._last_s > PAUSE_S:
            self.counts.append(Counter())
        if now_s - self._last_s > BREAK_S:
            self.pieces.append(Counter())
        self._last_s = now_s
        if self.counts:
            self.counts[-1][call] += event == "opcode"
            self.pieces[-1][call] += event == "opcode"
        return partial(self._executed, call)


def modules_of(calls: Sequence[Call]) -> set[str]:
    return {module for module, _ in calls}


def changes_of(calls: Sequence[Call]) -> int:
    """How often a call is in another module than the call before it."""
    return sum(one != other for (one, _), (other, _) in pairwise(calls))


def entries_of(calls: Sequence[Call]) -> Counter[str]:
    """The number of entries from another module, by module."""
    modules = [module for module, _ in calls]
    return Counter(modules[:1] + [other for one, other in pairwise(modules) if one != other])


async def trace_requests(
    prompt_bytes: int,
    chunks: int,
    *,
    split: bool,
    bytecodes: bool = False,
    tenants: bool = False,
    runs: bool = False,
    session: bool = False,
    idle_s: float = 0.0,
) -> tuple[list[Trace], list[Bytecodes], WakeUps]:
    """The traces of some requests, of one kind or the other, and of so much time without any."""
    mock = await asyncio.get_running_loop().create_server(router_overhead.MockInstance, "127.0.0.1", 0)
    url = f"http://127.0.0.1:{mock.sockets[0].getsockname()[1]}"
    settings = StoreSettings(url=f"embedded://{Path(tempfile.mkdtemp(prefix='dualmap-')) / 'valkey.sock'}")
    scheduling = SchedulingSettings(split=SplitSettings(mode="always" if split else "auto"), admit_runs=runs)
    store = await open_store(settings, scheduling=scheduling)
    ready: asyncio.Future[int] = asyncio.get_running_loop().create_future()
    try:
        for number in range(INSTANCES):
            role = router_overhead.SPLIT_ROLES[number % 2] if split else Role.MIXED
            spec = InstanceSpec(f"instance-{number}", url, role, InstanceState.READY, prefill_tokens_per_s=1e7)
            await store.pool("default").members.put_instance(spec)
        router = asyncio.ensure_future(
            serve(
                RouterSettings(port=0, settle_s=0.0),
                scheduling,
                settings,
                [PoolSettings()],
                tenants=router_overhead.tenants() if tenants else (),
                on_ready=lambda port, _: ready.set_result(port),
            )
        )
        (client,) = await router_overhead.connect(await ready, 1)
        traces, counted = [], []
        for number in range(REQUESTS):
            trace, counting = Trace(), Bytecodes()
            key = router_overhead.key_of("tenants" if tenants else "full", number)
            wire = router_overhead.request(prompt_bytes, number, f"{chunks},0" if chunks else None, key)
            if session:
                wire = wire.replace(b"\r\n\r\n", b"\r\nx-session-id: run-%d\r\n\r\n" % number, 1)
            if number and bytecodes:  # the first one opens connections
                sys.settrace(counting)
            elif number:
                sys.setprofile(trace)
            await client.ask(wire)
            await asyncio.sleep(SETTLE_S)
            sys.settrace(None)
            sys.setprofile(None)
            if trace.written is not None:
                traces.append(trace)
            if counting.counts:
                counted.append(counting)
        wake_ups = WakeUps()
        if idle_s:
            sys.settrace(wake_ups)
            await asyncio.sleep(idle_s)
            sys.settrace(None)
        client.close()
        router.cancel()
        with suppress(asyncio.CancelledError):
            await router
        return traces, counted, wake_ups
    finally:
        await store.close()
        mock.close()


def print_table(calls: Sequence[Call], *, functions: bool) -> None:
    """Print calls by module, and how often it is entered from another one."""
    called, entered = Counter(module for module, _ in calls), entries_of(calls)
    print(" calls  entered")
    for module in sorted(called):
        print(f"{called[module]:6} {entered[module]:8}  {module}")
        if functions:
            names = Counter(name for other, name in calls if other == module)
            for name, count in sorted(names.items()):
                print(f"{count:6}             {name}")


def print_largest(counts: Sequence[Counter[Call]]) -> None:
    for each in sorted(counts, key=Counter.total, reverse=True)[:5]:
        print(f"{each.total():6}  {', '.join(f'{name} {count}' for (_, name), count in each.most_common(3))}")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--prompt-bytes", type=int, default=2048)
    parser.add_argument("--chunks", type=int, default=1, help="of the answer, before its end")
    parser.add_argument("--bytecodes", action="store_true", help="count these, by module")
    parser.add_argument("--split", action="store_true", help="prefill and decode on two instances")
    parser.add_argument("--tenants", action="store_true", help="each request has the key of a tenant with limits")
    parser.add_argument("--runs", action="store_true", help="agents' runs wait for memory (scheduling.admit_runs)")
    parser.add_argument("--session", action="store_true", help="each request names a run")
    parser.add_argument("--idle", type=float, default=0.0, help="bytecodes of so many seconds without requests")
    parser.add_argument("--functions", action="store_true", help="also every function, and its part")
    options = parser.parse_args()
    how = {"split": options.split, "bytecodes": options.bytecodes, "tenants": options.tenants}
    how |= {"runs": options.runs, "session": options.session}
    traces, counted, idle = uvloop.run(trace_requests(options.prompt_bytes, options.chunks, idle_s=options.idle, **how))
    if options.idle:
        total = sum(each.total() for each in idle.counts)
        print(f"{total} bytecodes in {len(idle.counts)} wake-ups in {options.idle:g} s; the largest:")
        print_largest(idle.counts)
        print(f"in {len(idle.pieces)} pieces that nothing interrupts; the largest:")
        print_largest(idle.pieces)
        return
    if options.bytecodes:
        fewest = min(counted, key=lambda each: each.counts.total())
        modules = fewest.by_module()
        for module, count in modules.most_common():
            print(f"{count:6}  {module}")
            for (other, name), part in fewest.counts.most_common() if options.functions else ():
                if other == module:
                    print(f"{part:6}      {name}")
        for when, count in fewest.until.items():
            print(f"{count:6} until {when}")
        print(f"{modules.total()} bytecodes in {len(modules)} modules")
        return
    trace = min(traces, key=lambda trace: len(trace.calls))
    for until, calls in (("written to its instance", trace.calls[: trace.written]), ("settled", trace.calls)):
        print(f"until {until}:")
        print_table(calls, functions=options.functions)
        print(f"{len(modules_of(calls))} modules, {len(calls)} calls, {changes_of(calls)} changes of module\n")


if __name__ == "__main__":
    main()
