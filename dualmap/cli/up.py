"""``dualmap up``: a whole fleet on this machine, with a private store, until Ctrl-C."""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import json
import math
import os
import shutil
import signal
import sys
import time
from collections.abc import AsyncIterator, Iterator, Mapping, Sequence
from pathlib import Path

from rich.console import Console

from dualmap.cli.errors import CommandError, of_store
from dualmap.cli.figures import FleetCounts, RecentCounts, ReplicaCounts, fleet_figures
from dualmap.cli.fleet_folder import CONFIG, fleet_folder, running_fleets
from dualmap.cli.fleet_plan import STOP_INSTANCES, FleetPlan, FleetSize, plain, plan_fleet
from dualmap.cli.fork_server import can_fork, fork_server
from dualmap.cli.hang_watch import hung_ones_killed
from dualmap.cli.instance_trust import instance_trust
from dualmap.cli.live_status import LiveStatus
from dualmap.cli.main import main
from dualmap.cli.parent import end_with_parent
from dualmap.cli.private_store import private_store
from dualmap.cli.processes import Commands, ProcessGroup, Starter
from dualmap.cli.readiness import Readiness
from dualmap.cli.settings import Settings
from dualmap.scheduling.scaling.scale_settings import AutoscaleSettings, autoscale_of
from dualmap.statestore.connect import Store, open_store
from dualmap.statestore.errors import StoreError
from dualmap.workers.probe import Prober

_STATUS_INTERVAL_S = 1.0
_LINE_EVERY = 10
_LISTED_INSTANCES = 8
_PROBE_TIMEOUT_S = 2.0

CHILDREN_IMPORT = (
    "uvloop",
    "dualmap.cli.serve_router",
    "dualmap.router.serving.serve",
    "dualmap.cli.serve_worker",
    "dualmap.workers.serve",
    "dualmap.cli.serve_emulator",
    "dualmap.simulation.emulator.serve",
)
"""The modules that its children need, each with all that it imports."""

SHORTHANDS = {
    "--policy": "scheduling.policy",
    "--port": "router.port",
    "--preset": "emulator.preset",
    "--time-scale": "emulator.time_scale",
}


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--replicas", type=_count, default=3, metavar="N", help="router replicas on the one port")
    parser.add_argument("--workers", type=_count, default=2, metavar="N", help="workers, of which one leads")
    parser.add_argument(
        "--instances",
        type=_count,
        metavar="N",
        help="emulated instances that prefill and decode, by default 4; none beside --prefill or --decode",
    )
    parser.add_argument("--prefill", type=_count, default=0, metavar="N", help="emulated prefill instances")
    parser.add_argument("--decode", type=_count, default=0, metavar="N", help="emulated decode instances")
    parser.add_argument(
        "--autoscale",
        type=_bounds,
        metavar="MIN:MAX",
        help="the fleet changes its size itself: MIN instances are ready at the start, up to MAX wait as spares",
    )
    parser.add_argument(
        "--connector",
        choices=("nixl", "mooncake", "mooncake-layerwise"),
        help="how KV moves from prefill to decode instances, by default nixl",
    )
    for option, setting in SHORTHANDS.items():
        parser.add_argument(option, default=argparse.SUPPRESS, help=f"short for --{setting}")
    parser.add_argument(
        "--instance-url",
        action="append",
        default=[],
        metavar="URL",
        help="a running vLLM server to use instead of emulated ones; repeat for more",
    )
    parser.add_argument(
        "--model",
        metavar="NAME",
        help="the model that the instances serve, by default the one that they list; the first pool's model",
    )
    parser.add_argument(
        "--ready-within-s",
        type=_seconds,
        metavar="S",
        help="how long it may take until a worker leads, every router is ready, and the instances are: all of them, or,"
        " where --instance-url names them, one; by default 60, and without limit for instances that are named",
    )
    parser.add_argument(
        "--status-interval-s",
        type=_seconds,
        default=_STATUS_INTERVAL_S,
        metavar="S",
        help="how often figures are refreshed",
    )


def _count(text: str) -> int:
    if not text.isdecimal() or int(text) < 1:
        raise argparse.ArgumentTypeError(f"takes a whole number of at least 1: not {text!r}")
    return int(text)


def _bounds(text: str) -> AutoscaleSettings:
    try:
        return autoscale_of(text)
    except ValueError as error:
        raise argparse.ArgumentTypeError(str(error)) from error


def _seconds(text: str) -> float:
    try:
        seconds = float(text)
    except ValueError:
        seconds = 0.0
    if not 0 < seconds < math.inf:
        raise argparse.ArgumentTypeError(f"takes a number of seconds above 0: not {text!r}")
    return seconds


def run(arguments: argparse.Namespace, settings: Settings) -> int:
    with _starter() as starter:
        end_with_parent(os.environ)
        with fleet_folder() as folder:
            return asyncio.run(_up(arguments, settings, folder, starter))


@contextlib.contextmanager
def _starter() -> Iterator[Starter]:
    """Starts the children: by forks where that is safe, as commands elsewhere."""
    # Values of the environment are in the children's settings file; in a child they would override the file again.
    environment = {name: value for name, value in os.environ.items() if not name.startswith("DUALMAP_")}
    if can_fork():
        with fork_server(CHILDREN_IMPORT, environment, main) as server:
            yield server
    else:
        yield Commands(environment)


class StopSignals:
    """The user's signals. To be made where the event loop runs; handles signals from then on."""

    def __init__(self) -> None:
        self.stopping = asyncio.Event()
        """End the fleet in order: Ctrl-C, SIGTERM or SIGHUP came."""
        self.at_once = asyncio.Event()
        """Kill what still runs: another Ctrl-C came. A terminal that closes may send SIGHUP twice by itself."""
        loop = asyncio.get_running_loop()
        loop.add_signal_handler(signal.SIGINT, self._interrupted)
        for signal_number in (signal.SIGTERM, signal.SIGHUP):
            loop.add_signal_handler(signal_number, self.stopping.set)

    def _interrupted(self) -> None:
        if self.stopping.is_set():
            self.at_once.set()
        self.stopping.set()


async def _up(arguments: argparse.Namespace, settings: Settings, directory: Path, starter: Starter) -> int:
    signals = StopSignals()
    stopping = signals.stopping
    prefill, decode = arguments.prefill, arguments.decode
    mixed = arguments.instances or (0 if prefill or decode else 4)
    size = FleetSize(arguments.replicas, arguments.workers, mixed, arguments.autoscale, prefill, decode)
    config = directory / CONFIG
    if arguments.connector is not None:
        pools = [pool.model_copy(update={"connector": arguments.connector}) for pool in settings.pools]
        settings = settings.model_copy(update={"pools": tuple(pools)})
    if (model := arguments.model or await listed_model(settings, arguments.instance_url)) is not None:
        first = settings.pools[0].model_copy(update={"model": model})
        settings = settings.model_copy(update={"pools": (first, *settings.pools[1:])})
    plan = plan_fleet(settings, size, arguments.instance_url, str(config))
    started_s = time.monotonic()
    with LiveStatus(Console(), _LINE_EVERY) as status:
        status.say("starting …")
        async with (
            _store(plan, directory, status) as (plan, store),
            _children(plan, config, starter, status, signals.at_once) as group,
        ):
            if await Readiness(plan, store, status.say).wait(arguments.ready_within_s, group.check, stopping):
                group.settled()
                pids = {child.spec.name: child.pid for child in group.children if child.pid is not None}
                status.say(welcome(plan, time.monotonic() - started_s, directory, own_command(), pids))
                if len(running_fleets()) > 1:
                    status.say(
                        "Other fleets run on this machine, and commands that name none mean the youngest. For this "
                        f"one, add\n  --config {config}\n"
                    )
                for warning in await unserved_models(plan):
                    status.say(warning)
                async with hung_ones_killed(group.children, status.say), stopped_with(starter, stopping):
                    await show_until(stopping, plan, store, status, arguments.status_interval_s)
            status.say("stopping … (another Ctrl-C kills what still runs)")
    return 0


@contextlib.asynccontextmanager
async def stopped_with(starter: Starter, stopping: asyncio.Event) -> AsyncIterator[None]:
    """Set ``stopping`` if the starter of the children ends within the context, and them with it.

    Raises:
        CommandError: that happened.
    """
    ends = asyncio.create_task(starter.ended.wait(), name="starter of children")
    ends.add_done_callback(lambda _: stopping.set())
    try:
        yield
    finally:
        ended = ends.done()
        ends.cancel()
    if ended:
        raise CommandError("the process that starts the fleet's other processes was killed, and they ended with it")


@contextlib.asynccontextmanager
async def _store(plan: FleetPlan, directory: Path, status: LiveStatus) -> AsyncIterator[tuple[FleetPlan, Store]]:
    """The plan with its real store URL, and that store opened: the user's own if one was named, else a private one."""
    settings = plan.settings.store
    named = "url" in settings.model_fields_set and not settings.url.startswith("embedded://")
    async with contextlib.AsyncExitStack() as stack:
        if not named:
            plan = plan.with_store(await stack.enter_async_context(private_store(directory, status.say)))
        try:
            store = await open_store(plan.settings.store, scheduling=plan.settings.scheduling)
        except StoreError as error:
            raise of_store(error) from error
        stack.push_async_callback(store.close)
        yield plan, store


@contextlib.asynccontextmanager
async def _children(
    plan: FleetPlan, config: Path, starter: Starter, status: LiveStatus, at_once: asyncio.Event
) -> AsyncIterator[ProcessGroup]:
    write_config(plan, config)
    group = ProcessGroup(config.parent, starter, status.say)
    try:
        await asyncio.gather(*(group.start(child) for child in plan.children))
        yield group
    finally:
        await group.stop(plan.settings.router.stop_within_s, at_once)


def write_config(plan: FleetPlan, config: Path) -> None:
    """Write the children's settings: JSON, which is YAML; readable by this user alone, since it may hold keys."""
    config.touch(mode=0o600)
    config.write_text(json.dumps(plain(plan.settings)), encoding="utf-8")


async def show_until(
    stopping: asyncio.Event, plan: FleetPlan, store: Store, status: LiveStatus, interval_s: float
) -> None:
    fleet, before, before_s = FleetCounts(plan.ops_urls), ReplicaCounts(), time.monotonic()
    recent = RecentCounts()
    away_since_s: float | None = None
    while not stopping.is_set():
        counts, now_s = await fleet.read(), time.monotonic()
        rate = (counts.requests - before.requests) / max(now_s - before_s, 1e-3)
        before, before_s = counts, now_s
        try:
            snapshots = [await store.pool(pool.name).snapshot() for pool in plan.settings.pools]
        except StoreError as error:
            if away_since_s is None:
                away_since_s = now_s
                status.say(f"the store does not answer, and replicas continue from what they saw last: {error}")
        else:
            if away_since_s is not None:
                status.say(f"the store answers again, after {time.monotonic() - away_since_s:.0f} s")
                away_since_s = None
            status.show(fleet_figures(snapshots, counts, rate, recent.last_minute(counts, now_s)))
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(interval_s):
                await stopping.wait()


async def listed_model(settings: Settings, urls: Sequence[str]) -> str | None:
    """The one model that all of these servers list which answer by now. None if they disagree, or if none answers; and
    where the settings name the first pool's model, which counts then."""
    if "model" in settings.pools[0].model_fields_set or not urls:
        return None
    async with _prober(settings) as prober:
        facts = await asyncio.gather(*(prober.facts(url.rstrip("/")) for url in urls))
    models = {each.models[0] for each in facts if each.models}
    return models.pop() if len(models) == 1 else None


async def unserved_models(plan: FleetPlan) -> list[str]:
    """A warning for every instance that does not serve the model which its pool's requests will name."""
    if plan.emulated:
        return []
    probed = [(pool.model, instance) for pool in plan.settings.pools for instance in pool.instances]
    async with _prober(plan.settings) as prober:
        facts = await asyncio.gather(*(prober.facts(instance.url) for _, instance in probed))
    return [
        f"warning: {instance.id} at {instance.url} serves {', '.join(said.models)}, and not {model!r}: it gets no "
        f"requests for that. Set the pool's model (--model {said.models[0]}) or the server's --served-model-name."
        for (model, instance), said in zip(probed, facts, strict=True)
        if said.models and model not in said.models
    ]


def _prober(settings: Settings) -> Prober:
    key = settings.worker.upstream_api_key
    return Prober(
        timeout_s=_PROBE_TIMEOUT_S,
        canary_timeout_s=_PROBE_TIMEOUT_S,
        api_key=key.get_secret_value() if key is not None else None,
        trust=instance_trust(settings),
    )


def own_command() -> str:
    """How this user calls the command from the folder of now: by its name where the shell finds it."""
    called = Path(sys.argv[0])
    if called.name != "dualmap":
        return f"{sys.executable} -m dualmap"
    found = shutil.which("dualmap")
    if found is not None and Path(found).resolve() == called.resolve():
        return "dualmap"
    absolute = called.absolute()
    return str(absolute.relative_to(Path.cwd()) if absolute.is_relative_to(Path.cwd()) else absolute)


def welcome(
    plan: FleetPlan, took_s: float, directory: Path, command: str = "dualmap", pids: Mapping[str, int] | None = None
) -> str:
    """The message to the user once the fleet is ready; ``command`` is how the user calls ``dualmap``, ``pids`` are the
    processes of the children by their names."""
    model = plan.settings.pools[0].model
    body = json.dumps({"model": model, "messages": [{"role": "user", "content": "Hello!"}], "stream": True})
    emulated = "" if plan.emulated else " not"
    return "\n".join(
        (
            f"The fleet is ready after {took_s:.1f} s (its instances are{emulated} emulated). Ctrl-C stops it.",
            "",
            f"  endpoint  {plan.endpoint}/v1   (model {model!r}, any API key)",
            *((f"  live page {plan.endpoint}/ui",) if plan.settings.router.ui else ()),
            f"  store     {plan.store_shown_as}",
            *_instances(plan, pids or {}),
            f"  logs      {directory}   (deleted at a clean stop)",
            "",
            "Try it:",
            f"  curl -N {plan.endpoint}/v1/chat/completions -H 'content-type: application/json' -d '{body}'",
            "",
            "Look into it, from another terminal:",
            f"  {command} top                  what it does now",
            f"  {command} explain              the last requests, and where they went",
            f"  {command} inspect overview     what is in the store",
            "",
        )
    )


def _instances(plan: FleetPlan, pids: Mapping[str, int]) -> Iterator[str]:
    """The processes of the emulated instances, and what becomes of one that is killed."""
    emulated = [child for child in plan.children if child.stop_stage == STOP_INSTANCES and child.name in pids]
    for child in emulated[:_LISTED_INSTANCES]:
        yield f"  {child.name}  process {pids[child.name]}"
    if len(emulated) > _LISTED_INSTANCES:
        yield f"  … and {len(emulated) - _LISTED_INSTANCES} more, whose processes are in the .pid files beside the logs"
    if emulated:
        yield f"  (kill one with kill -9 PROCESS: it is started again after {emulated[0].restart_after_s:g} s)"
