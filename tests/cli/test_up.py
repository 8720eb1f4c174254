"""A fleet that cannot start; one that does is seen in tests/fleet."""

from __future__ import annotations

import asyncio
import io
import json
import subprocess
import sys
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, HTTPServer
from pathlib import Path

import pytest
from rich.console import Console

from dualmap.cli.configuration import load_settings, split_flags
from dualmap.cli.fleet_plan import FleetPlan, FleetSize, plan_fleet
from dualmap.cli.live_status import LiveStatus
from dualmap.cli.main import main
from dualmap.cli.settings import Settings
from dualmap.cli.up import listed_model, show_until, unserved_models
from dualmap.scheduling.settings import SchedulingSettings
from dualmap.statestore.errors import StoreUnavailableError
from dualmap.statestore.memory import MemoryStore
from dualmap.statestore.pool import PoolStore
from tests.support.ports import free_port


def test_a_store_that_cannot_be_reached_is_named_and_no_empty_folder_stays_behind(tmp_path: Path) -> None:
    nowhere = f"unix://{tmp_path}/nobody.sock"

    ended = subprocess.run(
        [sys.executable, "-m", "dualmap", "up", "--port", "0", "--store.url", nowhere],
        env={"TMPDIR": str(tmp_path), "PATH": ""},
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )

    assert ended.returncode == 1
    assert "cannot connect to the store" in ended.stderr
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("interval", ["0", "-1", "nan", "inf", "soon"])
def test_an_interval_that_is_none_is_refused(interval: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        main(["up", "--status-interval-s", interval])

    assert "--status-interval-s" in capsys.readouterr().err


class FlakyStore(MemoryStore):
    """A store that is away or there, as the test says each time it is asked."""

    def __init__(self, answers: list[bool], stopping: asyncio.Event) -> None:
        super().__init__(SchedulingSettings())
        self._answers = answers
        self._stopping = stopping

    def pool(self, name: str) -> PoolStore:
        if len(self._answers) == 1:
            self._stopping.set()
        if not self._answers.pop(0):
            raise StoreUnavailableError("nobody is there")
        return super().pool(name)


async def test_an_outage_of_the_store_is_told_when_it_begins_and_when_it_ends() -> None:
    stopping, out = asyncio.Event(), io.StringIO()
    store = FlakyStore([True, False, False, False, True, True, False, True], stopping)

    with LiveStatus(Console(file=out, width=300), line_every=100) as status:
        await show_until(stopping, plan("http://127.0.0.1:1"), store, status, 0.001)

    told = [line.partition(" ")[2] for line in out.getvalue().splitlines() if line.startswith("the store")]
    begins, ends = (
        "store does not answer, and replicas continue from what they saw last: nobody is there",
        "store answers again, after 0 s",
    )
    assert told == [begins, ends, begins, ends]


class ModelsHandler(BaseHTTPRequestHandler):
    """A vLLM server, as far as its list of models goes."""

    def do_GET(self) -> None:
        found = self.path == "/v1/models"
        self.send_response(200 if found else 404)
        self.end_headers()
        if found:
            self.wfile.write(json.dumps({"data": [{"id": "qwen"}]}).encode())

    def log_message(self, *_: object) -> None:
        pass


@pytest.fixture
def server() -> Iterator[str]:
    with HTTPServer(("127.0.0.1", 0), ModelsHandler) as listening:
        thread = threading.Thread(target=listening.serve_forever, kwargs={"poll_interval": 0.01}, daemon=True)
        thread.start()
        yield f"http://127.0.0.1:{listening.server_port}"
        listening.shutdown()
        thread.join()


def plan(server: str, *words: str) -> FleetPlan:
    flags, _ = split_flags(("--router.port", "0", *words), {})
    return plan_fleet(load_settings(flags, {}), FleetSize(1, 1, 1), (server,), "fleet.yaml")


async def test_a_server_of_another_model_is_named_with_the_way_out(server: str) -> None:
    (warning,) = await unserved_models(plan(server))

    assert "serves qwen, and not 'default'" in warning
    assert "--model qwen" in warning


async def test_the_one_model_that_all_servers_list_needs_no_setting(server: str) -> None:
    nothing = f"http://127.0.0.1:{free_port()}"
    assert await listed_model(Settings(), [server, f"{server}/", nothing]) == "qwen"
    assert await listed_model(Settings(), [nothing]) is None
    assert await listed_model(Settings(), []) is None
    named = Settings.model_validate({"pools": [{"model": "other"}]})
    assert await listed_model(named, [server]) is None


async def test_a_server_of_the_pools_model_is_nothing_to_warn_of(server: str) -> None:
    assert await unserved_models(plan(server, "--pools", '[{"model": "qwen"}]')) == []
