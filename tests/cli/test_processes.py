"""Children of a fleet: started again when they end, stopped within a bound, never left behind."""

from __future__ import annotations

import asyncio
import os
import signal
import sys
import time
from collections.abc import AsyncIterator, Callable, Iterator, Sequence
from pathlib import Path

import pytest

from dualmap.cli.errors import CommandError
from dualmap.cli.processes import ChildSpec, Commands, ProcessGroup, Starter
from tests.support.fork_servers import executed_fork_server

SLEEPER = "import time; print('up', flush=True); time.sleep(60)"
STUBBORN = f"import signal; signal.signal(signal.SIGTERM, signal.SIG_IGN); {SLEEPER}"
DEADLINE_S = 60.0


@pytest.fixture
def said() -> list[str]:
    return []


@pytest.fixture
def at_once() -> asyncio.Event:
    return asyncio.Event()


@pytest.fixture(params=["commands", "forks"])
def starter(request: pytest.FixtureRequest) -> Iterator[Starter]:
    """Starts a child whose first word is its source."""
    if request.param == "commands":
        yield Commands(os.environ, (sys.executable, "-c"))
    else:
        with executed_fork_server(f"{__name__}:run_source") as server:
            yield server


def run_source(words: Sequence[str]) -> int:
    exec(words[0], {})
    return 0


@pytest.fixture
async def group(
    tmp_path: Path, starter: Starter, said: list[str], at_once: asyncio.Event
) -> AsyncIterator[ProcessGroup]:
    group = ProcessGroup(tmp_path, starter, said.append)
    yield group
    await group.stop(0.5, at_once)


def script(name: str, source: str, stage: int = 0) -> ChildSpec:
    return ChildSpec(name, (source,), stage)


async def until(condition: Callable[[], bool], what: str) -> None:
    deadline_s = time.monotonic() + DEADLINE_S
    while not condition():
        assert time.monotonic() < deadline_s, f"never: {what}"
        await asyncio.sleep(0.02)


def alive(pid: int) -> bool:
    """Runs, and is no zombie."""
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    stat = Path(f"/proc/{pid}/stat")
    return not stat.exists() or stat.read_text().rpartition(")")[2].split()[0] != "Z"


async def test_a_child_that_is_killed_is_started_again(group: ProcessGroup, said: list[str]) -> None:
    child = await group.start(script("sleeper", SLEEPER))
    group.settled()
    first = child.pid
    assert first is not None

    os.kill(first, signal.SIGKILL)

    await until(lambda: child.pid not in (None, first), "the child runs again")
    assert child.restarts == 1
    assert said == [
        "sleeper was killed by SIGKILL; starting it again in 0.25 s",
        f"sleeper runs again, as process {child.pid}",
    ]


async def test_a_child_may_stay_away_for_a_while_before_it_is_started_again(
    group: ProcessGroup, said: list[str]
) -> None:
    child = await group.start(ChildSpec("instance-1", (SLEEPER,), 0, restart_after_s=0.4))
    group.settled()
    assert child.pid is not None

    os.kill(child.pid, signal.SIGTERM)

    await until(lambda: child.restarts == 1 and child.pid is not None, "the child runs again")
    assert said[0] == "instance-1 was killed by SIGTERM; starting it again in 0.4 s"


async def test_a_file_of_the_current_folder_is_not_taken_for_a_package(
    tmp_path: Path, said: list[str], at_once: asyncio.Event, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in ("click", "pydantic", "yaml", "uvicorn", "redis", "rich", "json", "logging"):
        (tmp_path / f"{name}.py").write_text(f"raise SystemExit('the wrong {name}')")
    monkeypatch.chdir(tmp_path)
    group = ProcessGroup(tmp_path, Commands(os.environ), said.append)

    child = await group.start(ChildSpec("settings", ("settings", "--json"), 0))
    assert child.process is not None
    code = await child.process.wait()
    await group.stop(0.5, at_once)

    assert (code, "the wrong" in child.log.read_text()) == (0, False)


async def test_a_child_that_ends_before_the_fleet_is_up_fails_the_start_with_its_last_words(
    group: ProcessGroup,
) -> None:
    child = await group.start(script("broken", "import sys; print('no such thing'); sys.exit(3)"))
    await until(lambda: child.pid is None and "no such thing" in child.log.read_text(), "the child ended")

    with pytest.raises(CommandError, match=r"broken ended with exit code 3:\n  no such thing"):
        group.check()


async def test_stopping_goes_by_stages_and_kills_who_does_not_listen(
    group: ProcessGroup, at_once: asyncio.Event
) -> None:
    stubborn = await group.start(script("stubborn", STUBBORN, stage=0))
    polite = await group.start(script("polite", SLEEPER, stage=1))
    for child in (stubborn, polite):
        await until(lambda child=child: child.log.read_text() != "", "the child is up")

    await group.stop(0.3, at_once)

    assert stubborn.process is not None
    assert polite.process is not None
    assert stubborn.process.returncode == -signal.SIGKILL
    assert polite.process.returncode == -signal.SIGTERM


async def test_a_second_interrupt_waits_for_no_stage(group: ProcessGroup, at_once: asyncio.Event) -> None:
    # given children of two stages that do not listen, and a stop that waits for the first
    children = [await group.start(script(f"stubborn-{stage}", STUBBORN, stage)) for stage in (0, 1)]
    for child in children:
        await until(lambda child=child: child.log.read_text() != "", "the child is up")
    stop = asyncio.create_task(group.stop(1000.0, at_once))
    await asyncio.sleep(0.05)
    assert not stop.done()

    at_once.set()
    await stop

    assert [child.process.returncode for child in children if child.process] == [-signal.SIGKILL] * 2


async def test_a_stopped_fleet_does_not_come_back(group: ProcessGroup, said: list[str], at_once: asyncio.Event) -> None:
    child = await group.start(script("sleeper", SLEEPER))
    group.settled()
    await group.stop(5.0, at_once)
    await asyncio.sleep(0.4)  # longer than the first restart delay
    assert child.pid is None
    assert said == []


async def test_children_end_with_a_parent_that_is_killed_outright(tmp_path: Path) -> None:
    """The parent gets SIGKILL and can clean up nothing; the pipe it held does it."""
    child = (
        "import os, time; from dualmap.cli.parent import end_with_parent; end_with_parent(os.environ);"
        "print(os.getpid(), flush=True); time.sleep(60)"
    )
    parent_source = (
        "import asyncio, os, sys; from pathlib import Path; from dualmap.cli.processes import *\n"
        "async def main():\n"
        "    group = ProcessGroup(Path(sys.argv[1]), Commands(os.environ, (sys.executable, '-c')), print)\n"
        "    await group.start(ChildSpec('orphan', (sys.argv[2],), 0))\n"
        "    await asyncio.sleep(60)\n"
        "asyncio.run(main())"
    )
    parent = await asyncio.create_subprocess_exec(sys.executable, "-c", parent_source, str(tmp_path), child)
    log = tmp_path / "orphan.log"
    try:
        await until(lambda: log.exists() and log.read_text().strip().isdigit(), "the child is up")
        pid = int(log.read_text())
    finally:
        parent.kill()
        await parent.wait()

    await until(lambda: not alive(pid), "the child ended too")
