"""A child that stopped answering is killed; one that is slow to start, drains or answers badly is not."""

from __future__ import annotations

import asyncio
import os
import signal
import sys
import time
from collections.abc import AsyncIterator, Callable
from contextlib import AsyncExitStack
from pathlib import Path

import pytest

from dualmap.cli.fleet_plan import free_ports
from dualmap.cli.hang_watch import Patience, hung_ones_killed
from dualmap.cli.processes import Child, ChildSpec, Commands, ProcessGroup

DEADLINE_S = 60.0
IMPATIENT = Patience(every_s=0.02, answer_within_s=0.3, questions=3)
SERVER = """
import http.server, os, signal, sys
class Handler(http.server.BaseHTTPRequestHandler):
    def do_GET(self):
        self.send_response(503)
        self.end_headers()
server = http.server.HTTPServer(("127.0.0.1", int(sys.argv[1])), Handler)
{more}
server.serve_forever()
"""


@pytest.fixture
def said() -> list[str]:
    return []


@pytest.fixture
async def start(tmp_path: Path, said: list[str]) -> AsyncIterator[Callable[..., object]]:
    """Starts a server with ``more`` lines in it, kept and watched."""
    async with AsyncExitStack() as stack:

        async def start(more: str = "") -> Child:
            (port,) = free_ports(1)
            url = f"http://127.0.0.1:{port}/health"
            group = ProcessGroup(tmp_path, Commands(os.environ, (sys.executable, "-c")), said.append)
            stack.push_async_callback(group.stop, 0.5, asyncio.Event())
            child = await group.start(ChildSpec("server", (SERVER.format(more=more), str(port)), 0, health_url=url))
            group.settled()
            await stack.enter_async_context(hung_ones_killed(group.children, said.append, IMPATIENT))
            return child

        yield start


async def until(condition: Callable[[], bool], what: str) -> None:
    deadline_s = time.monotonic() + DEADLINE_S
    while not condition():
        assert time.monotonic() < deadline_s, f"never: {what}"
        await asyncio.sleep(0.02)


def requests(child: Child) -> int:
    return child.log.read_text().count("GET /health")


async def test_a_child_that_hangs_is_killed_and_started_again(start: Callable[..., object], said: list[str]) -> None:
    child = await start()
    await until(lambda: requests(child) > 1, "it answers")
    hung = child.pid

    os.kill(hung, signal.SIGSTOP)

    await until(lambda: child.pid not in (None, hung), "another runs in its place")
    answers = requests(child)
    await until(lambda: requests(child) > answers, "it answers")
    assert said == [
        "server has not answered for 0.9 s and is killed",
        "server was killed by SIGKILL; starting it again in 0.25 s",
        f"server runs again, as process {child.pid}",
    ]


async def test_a_child_is_given_the_time_it_takes_to_start(start: Callable[..., object], said: list[str]) -> None:
    # given one whose connections wait in its queue for longer than a hung one would be given
    child = await start(more="import time; time.sleep(1.2)")
    first = child.pid

    await until(lambda: requests(child) > 1, "it answers")

    assert (child.pid, said) == (first, [])


async def test_a_child_that_closed_its_port_to_drain_is_left_alone(
    start: Callable[..., object], said: list[str]
) -> None:
    drains = (
        "signal.signal(signal.SIGTERM, lambda *_: (server.server_close(), print('drains', flush=True), signal.pause()))"
    )
    child = await start(more=drains)
    await until(lambda: requests(child) > 1, "it answers")
    first = child.pid

    os.kill(first, signal.SIGTERM)

    await until(lambda: "drains" in child.log.read_text(), "its port is closed")
    await asyncio.sleep(1.2)  # longer than a hung one is given
    assert (child.pid, said) == (first, [])
    child.kill()
