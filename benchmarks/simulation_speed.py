"""How fast runs are simulated: CPU seconds and peak memory, against their limits.

    python benchmarks/simulation_speed.py [--policies dualmap,preble] [--repetitions 3] [--skip-large]
    python benchmarks/simulation_speed.py --bound --instances 128 --requests 1500

Small: 4,000 Conversation requests on 8 instances, one policy, at most 6 s of one core.
Large: 32,000 requests on 32 instances, one policy, at most 90 s of one core and 1 GB.
Each run has a process of its own, so that peak memory is its own too. Exit code 1 when a limit is passed.

``--bound``: what a run would cost if the store cost nothing, or the engine model. One run records the reply of each
script and command with what was published, or of each call of an engine; the next one gets these in their place.
"""

from __future__ import annotations

import argparse
import multiprocessing
import resource
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, ExitStack
from dataclasses import dataclass, replace
from functools import partial
from operator import itemgetter
from typing import Any, Generic, TypeVar
from unittest.mock import patch

from dualmap.research.studies.plan import DEFAULT_POLICY, FULL, variant_of
from dualmap.scheduling.settings import PolicyName
from dualmap.simulation.commands.options import policies_of
from dualmap.simulation.engine.engine import Engine
from dualmap.simulation.engine.engine_types import EngineRequest, EngineStatistics, Event
from dualmap.simulation.virtual_time import cluster
from dualmap.statestore.memory import store
from dualmap.statestore.memory.server import MemoryServer

Reply = TypeVar("Reply")


@dataclass(frozen=True, slots=True)
class Case:
    name: str
    trace: str
    requests: int
    instances: int
    cpu_limit_s: float
    memory_limit_mb: float


CASES = (
    Case("small", "conversation", 4_000, 8, 6.0, 1024),
    Case("large", "toolagent", 32_000, 32, 90.0, 1024),
)
LOAD = 0.85
BOUND_RUNS = 4
"""Runs of which the fastest counts where parts are left out."""


def measure(case: Case, policy: PolicyName) -> tuple[float, float, float]:
    """(CPU s, peak memory in MB, share on time) of making the trace and running it."""
    started = time.process_time()
    workload = replace(FULL.workload(case.trace, requests=case.requests), instances=case.instances)
    result = FULL.run(workload, variant_of(policy), FULL.rate(workload, LOAD)).job.run()
    cpu_s = time.process_time() - started
    return cpu_s, resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024, result.effective_capacity


class Replies(Generic[Reply]):
    """The replies of one run, in the order of its calls, which the next runs get in place of what made them."""

    def __init__(self) -> None:
        self._kept: list[Reply] = []
        self._next: Iterator[Reply] | None = None

    def begin(self) -> None:
        """Have the run that follows get the replies."""
        self._next = iter(self._kept)

    def of(self, call: Callable[[], Reply]) -> Reply:
        if self._next is not None:
            return next(self._next)
        reply = call()
        self._kept.append(reply)
        return reply


class ReplayedServer(MemoryServer):
    """A server that replies what another one did."""

    replies: Replies[tuple[Any, list[tuple[bytes, bytes]]]]
    """Each with the messages that the call published, and their channels."""

    def __init__(self) -> None:
        super().__init__()
        self._messages: list[tuple[bytes, bytes]] = []
        self._commands[b"PUBLISH"] = self.do_publish

    def run(self, name: bytes, *words: Any) -> Any:
        return self._replayed(partial(super().run, name, *words))

    def run_function(self, name: str, key: bytes, arguments: Sequence[bytes]) -> Any:
        return self._replayed(partial(super().run_function, name, key, arguments))

    def _replayed(self, call: Callable[[], Any]) -> Any:
        reply, messages = self.replies.of(lambda: (call(), self._published_now()))
        for channel, message in messages:
            super().do_publish(channel, message)
        return reply

    def do_publish(self, channel: bytes, message: bytes) -> int:
        self._messages.append((channel, message))
        return 0

    def _published_now(self) -> list[tuple[bytes, bytes]]:
        messages, self._messages = self._messages, []
        return messages


class ReplayedEngine(Engine):
    """An engine that does what another one did."""

    replies: Replies[Any]

    def submit(self, request: EngineRequest, now_s: float) -> None:
        self.replies.of(partial(super().submit, request, now_s))

    def advance(self, until_s: float) -> list[Event]:
        events: list[Event] = self.replies.of(partial(super().advance, until_s))
        return events

    def next_event_s(self) -> float | None:
        at_s: float | None = self.replies.of(super().next_event_s)
        return at_s

    def statistics(self) -> EngineStatistics:
        found: EngineStatistics = self.replies.of(super().statistics)
        return found


def bound(instances: int, requests: int, policy: PolicyName) -> None:
    """CPU of a run as it is, and with the replies of a store, of engines, and of both that cost nothing."""
    workload = replace(FULL.workload("conversation", requests=requests), instances=instances)
    job = FULL.run(workload, variant_of(policy), FULL.rate(workload, LOAD)).job
    job.source.load(job.rate_per_s)

    def cpu_us(begin: Callable[[], None] = lambda: None) -> tuple[float, object]:
        """The least of several runs, and their result."""
        found: list[tuple[float, object]] = []
        for _ in range(BOUND_RUNS):
            begin()
            started = time.process_time()
            result = job.run()
            found.append((1e6 * (time.process_time() - started) / requests, result))
        return min(found, key=itemgetter(0))

    def begin() -> None:
        ReplayedServer.replies.begin()
        ReplayedEngine.replies.begin()

    job.run()  # what is loaded and compiled once is left out
    whole_us, result = cpu_us()
    server = patch.object(store, "MemoryServer", ReplayedServer)
    engine = patch.object(cluster, "Engine", ReplayedEngine)
    print(f"{instances} instances, {requests} requests: {whole_us:.0f} µs of CPU a request")
    parts: Sequence[tuple[str, list[AbstractContextManager[object]]]] = (
        ("the store", [server]), ("the engines", [engine]), ("both", [server, engine]),
    )  # fmt: skip
    for name, patches in parts:
        ReplayedServer.replies, ReplayedEngine.replies = Replies(), Replies()
        with ExitStack() as stack:
            for each in patches:
                stack.enter_context(each)
            job.run()
            without_us, replayed = cpu_us(begin)
        assert replayed == result, "the replies led to another run"
        print(f"without {name}: {without_us:.0f} µs, {without_us / whole_us:.2f}")


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--policies", default="dualmap,preble,llm-d")
    parser.add_argument("--repetitions", type=int, default=3)
    parser.add_argument("--skip-large", action="store_true")
    parser.add_argument("--bound", action="store_true", help="what runs cost without the store and the engines")
    parser.add_argument("--instances", type=int, default=8)
    parser.add_argument("--requests", type=int, default=1500)
    arguments = parser.parse_args()
    if arguments.bound:
        bound(arguments.instances, arguments.requests, DEFAULT_POLICY)
        return 0
    too_slow = False
    print(f"{'case':<7}{'policy':<24}{'CPU s':>8}{'limit':>7}{'MB':>7}{'limit':>7}{'on time':>9}")
    for case in CASES[: 1 if arguments.skip_large else 2]:
        for policy in policies_of(arguments.policies):
            with multiprocessing.get_context("spawn").Pool(1, maxtasksperchild=1) as pool:
                runs = [pool.apply(measure, (case, policy)) for _ in range(arguments.repetitions)]
            cpu_s, memory_mb = min(run[0] for run in runs), max(run[1] for run in runs)
            too_slow |= cpu_s > case.cpu_limit_s or memory_mb > case.memory_limit_mb
            print(
                f"{case.name:<7}{policy:<24}{cpu_s:>8.2f}{case.cpu_limit_s:>7.0f}{memory_mb:>7.0f}"
                f"{case.memory_limit_mb:>7.0f}{runs[0][2]:>9.1%}"
            )
    return 1 if too_slow else 0


if __name__ == "__main__":
    sys.exit(main())
