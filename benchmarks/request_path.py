"""The modules that a plain request passes from the socket to its dispatch, and the functions called in each.

One replica in this process with its HTTP front, an embedded Valkey, a mock instance that answers at once. A profile
hook notes every Python call from the first byte of the client's request until the request is written to the instance.
Of several requests the one with the fewest calls counts: background work may run in the midst of another.
Comprehensions count as calls; functions written in C, and constructors that dataclasses generate, do not.

    python benchmarks/request_path.py [--prompt-bytes 2048] [--functions]
"""

from __future__ import annotations

import argparse
import asyncio
import sys
import tempfile
from collections import Counter
from contextlib import suppress
from pathlib import Path
from types import FrameType
from typing import Any

import router_overhead
import uvloop

import dualmap
from dualmap.router.serve import serve
from dualmap.router.settings import RouterSettings
from dualmap.runtime.pool_settings import PoolSettings
from dualmap.scheduling.settings import SchedulingSettings
from dualmap.scheduling.state.instance import InstanceSpec, InstanceState
from dualmap.statestore.connect import open_store
from dualmap.statestore.settings import StoreSettings

ROOT = Path(dualmap.__file__).parent
ROOMS = ("api_bodies", "router", "runtime", "scheduling", "statestore")
INSTANCES = 8
REQUESTS = 20
SETTLE_S = 0.05
"""What a request leaves to the background is done by then."""


class CallTrace:
    """Calls of the project's functions by file, between two functions of the data plane."""

    def __init__(self) -> None:
        self.calls: Counter[tuple[str, str]] = Counter()
        self._running = False

    def __call__(self, frame: FrameType, event: str, _: Any) -> None:
        if event != "call":
            return
        code = frame.f_code
        if code.co_name == "data_received" and code.co_filename.endswith("router/http/client.py"):
            self._running = True
        path = Path(code.co_filename)
        if self._running and path.is_relative_to(ROOT) and path.relative_to(ROOT).parts[0] in ROOMS:
            self.calls[str(path.relative_to(ROOT)), code.co_qualname] += 1
        if code.co_qualname == "UpstreamConnection.start":
            self._running = False
            sys.setprofile(None)

    @property
    def modules(self) -> set[str]:
        return {module for module, _ in self.calls}


async def trace_requests(prompt_bytes: int) -> CallTrace:
    """The trace of the request with the fewest calls."""
    mock = await asyncio.get_running_loop().create_server(router_overhead.MockInstance, "127.0.0.1", 0)
    url = f"http://127.0.0.1:{mock.sockets[0].getsockname()[1]}"
    settings = StoreSettings(url=f"embedded://{Path(tempfile.mkdtemp(prefix='dualmap-')) / 'valkey.sock'}")
    store = await open_store(settings, scheduling=SchedulingSettings())
    ready: asyncio.Future[int] = asyncio.get_running_loop().create_future()
    try:
        for number in range(INSTANCES):
            spec = InstanceSpec(f"instance-{number}", url, state=InstanceState.READY, prefill_tokens_per_s=1e7)
            await store.pool("default").put_instance(spec)
        router = asyncio.ensure_future(
            serve(
                RouterSettings(port=0, settle_s=0.0),
                SchedulingSettings(),
                settings,
                [PoolSettings()],
                on_ready=lambda port, _: ready.set_result(port),
            )
        )
        (client,) = await router_overhead.connect(await ready, 1)
        traces = []
        for number in range(REQUESTS):
            trace = CallTrace()
            wire = router_overhead.request(prompt_bytes, number)
            if number:  # the first one opens connections
                sys.setprofile(trace)
            await client.ask(wire)
            sys.setprofile(None)
            if trace.calls:
                traces.append(trace)
            await asyncio.sleep(SETTLE_S)
        client.close()
        router.cancel()
        with suppress(asyncio.CancelledError):
            await router
        return min(traces, key=lambda trace: sum(trace.calls.values()))
    finally:
        await store.close()
        mock.close()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--prompt-bytes", type=int, default=2048)
    parser.add_argument("--functions", action="store_true", help="also every function, and how often it was called")
    options = parser.parse_args()
    trace = uvloop.run(trace_requests(options.prompt_bytes))
    for module in sorted(trace.modules):
        called = {name: count for (path, name), count in trace.calls.items() if path == module}
        print(f"{sum(called.values()):4} {module}")
        if options.functions:
            for name, count in sorted(called.items()):
                print(f"      {count:4} {name}")
    print(f"{len(trace.modules)} modules, {sum(trace.calls.values())} calls")


if __name__ == "__main__":
    main()
