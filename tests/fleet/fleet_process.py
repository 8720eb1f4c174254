"""A real fleet under test: `dualmap up` as a process, with what tests ask of it."""

from __future__ import annotations

import contextlib
import io
import json
import re
import time
import urllib.request
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any, Literal, Self, TypeVar

from dualmap.cli.main import main
from dualmap.research.chaos.fleet_process import FleetProcess, SomeProcess, unconfigured
from tests.support.fork_servers import ForkedCommand, start_command
from tests.support.ports import free_port

T = TypeVar("T")

READY_S = 60.0
MOST_EMULATED = 8
_LONGEST_PAUSE_S = 0.15
_SERVES = re.compile(r"serves (http://\S+)")
_KV_EVENTS_AT = "--emulator.kv_events_port_offset"
QUICK = (
    "--router.replica_lease_s", "1.5", "--worker.lease_s", "0.8",
    "--worker.health_interval_s", "0.3", "--emulator.store_responses", "true",
)  # fmt: skip
"""Options with short leases, so that what follows a crash is seen soon."""


def until(probe: Callable[[], T | Literal[False] | None], what: str, deadline_s: float = 90.0) -> T:
    """The first truthy result of ``probe``, which is called again and again, less often the longer it takes: a probe
    costs the processes that it reads. Fails with ``what`` when none comes."""
    end_s, pause_s = time.monotonic() + deadline_s, 0.02
    while True:
        with contextlib.suppress(OSError):
            if found := probe():
                return found
        assert time.monotonic() < end_s, f"never within {deadline_s:g} s: {what}"
        time.sleep(pause_s)
        pause_s = min(1.2 * pause_s, _LONGEST_PAUSE_S)


class Fleet(FleetProcess):
    """A running `dualmap up`, and what its HTTP interfaces say."""

    def __init__(self, process: SomeProcess, output: Path) -> None:
        super().__init__(process, output)
        self._urls: dict[str, str] = {}

    @classmethod
    def fork(cls, directory: Path, options: Sequence[str]) -> Self:
        """Start it as ``start`` does, by a fork: nothing is imported again."""
        output = directory / "up.out"
        environment = unconfigured() | {"TMPDIR": str(directory)}
        return cls(start_command("up", *options, out=output, environment=environment), output)

    def get(self, path: str) -> Any:
        with urllib.request.urlopen(f"{self.endpoint}{path}", timeout=60) as answer:
            return json.loads(answer.read())

    def post(self, path: str, body: dict[str, Any]) -> Any:
        request = urllib.request.Request(
            f"{self.endpoint}{path}", json.dumps(body).encode(), {"content-type": "application/json"}
        )
        with urllib.request.urlopen(request, timeout=60) as answer:
            return json.loads(answer.read())

    def placement(self, prompt: str) -> str:
        """Where a one-token completion of the prompt was answered; over a connection of its own, so any replica."""
        body = json.dumps({"model": self.model, "prompt": prompt, "max_tokens": 1}).encode()
        request = urllib.request.Request(f"{self.endpoint}/v1/completions", body, {"content-type": "application/json"})
        with urllib.request.urlopen(request, timeout=60) as answer:
            answer.read()
            return str(answer.headers["x-dualmap-instance"])

    def instances(self) -> dict[str, dict[str, Any]]:
        return {each["id"]: each for each in self.get("/admin/instances")["instances"]}

    def emulator(self, instance_id: str, path: str, order: dict[str, Any] | None = None) -> Any:
        """The answer of an emulated instance to an order, or to a question. One that died a moment ago is asked again
        until it is back."""
        if instance_id not in self._urls:
            self._urls[instance_id] = self.instances()[instance_id]["url"]
        data = None if order is None else json.dumps(order).encode()
        request = urllib.request.Request(self._urls[instance_id] + path, data)

        def answered() -> list[Any]:
            with urllib.request.urlopen(request, timeout=60) as answer:
                return [json.loads(answer.read())]

        return until(answered, f"{instance_id} answers {path}")[0]

    def pending_tokens(self) -> int:
        return sum(each["load"]["pending_tokens"] for each in self.instances().values() if each["load"])

    def live_requests(self) -> list[dict[str, Any]]:
        found: list[dict[str, Any]] = self.get("/admin/requests")
        return found

    def until_idle(self, deadline_s: float = 60.0) -> None:
        """Wait until nothing is left of any request: no record, no pending token."""
        until(lambda: not self.live_requests() and self.pending_tokens() == 0, "nothing is left over", deadline_s)

    def dualmap(self, *words: str, exit_codes: Sequence[int] = (0,)) -> str:
        """Run a `dualmap` command against this fleet, in this process, which has the modules already; its standard
        output, given one of the exit codes."""
        printed, errors = io.StringIO(), io.StringIO()
        with contextlib.redirect_stdout(printed), contextlib.redirect_stderr(errors):
            code = main(words)
        assert code in exit_codes, f"exit code {code}:\n{printed.getvalue()}{errors.getvalue()}"
        return printed.getvalue()

    def replay(self, *words: str, exit_codes: Sequence[int] = (0,)) -> None:
        """Run `dualmap replay` against this fleet, as a process of its own: its clients do not wait for this one."""
        out = self.directory / "replay.out"
        code = start_command("replay", "--url", self.endpoint, *words, out=out).wait(60)
        assert code in exit_codes, f"exit code {code}:\n{out.read_text()}"


@contextlib.contextmanager
def emulated(log: Path, *options: str, count: int = 1, port: int = 0) -> Iterator[tuple[list[str], ForkedCommand]]:
    """So many emulated instances that no fleet has started, in one process: their URLs, and the process."""
    shape = ("--instances", str(count), "--port", str(port), "--time-scale", "20")
    process = start_command("emulate", *shape, *options, out=log)
    try:
        yield until(lambda: len(urls := _SERVES.findall(log.read_text())) == count and urls, "they listen"), process
    finally:
        process.kill()
        process.wait()


def _emulated_ports(options: Sequence[str]) -> int:
    """The first of a row of ports for instances, and of those on which they publish and replay KV events."""
    row = range(MOST_EMULATED)
    if _KV_EVENTS_AT not in options:
        return free_port(*row[1:])
    offset = int(options[options.index(_KV_EVENTS_AT) + 1])
    return free_port(*row[1:], *(offset + place for place in row), *(2 * offset + place for place in row))


@contextlib.contextmanager
def running_fleet(
    directory: Path, options: Sequence[str] = (), start: Callable[[Path, Sequence[str]], Fleet] = Fleet.fork
) -> Iterator[Fleet]:
    """A fleet on free ports for the time of the context; it must stop by itself within a bound. ``Fleet.start`` starts
    it as its users do."""
    ports = ("--port", "0", "--emulator.port", str(_emulated_ports(options)))
    fleet = start(directory, (*ports, "--time-scale", "20", *options))
    try:
        until(lambda: fleet.is_ready, "the fleet is ready", READY_S)
        yield fleet
        fleet.stop()
    finally:
        fleet.kill_all()
