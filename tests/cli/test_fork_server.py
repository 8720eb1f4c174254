"""Processes that are forked: like those that are started as commands, and gone with their starter."""

from __future__ import annotations

import asyncio
import json
import os
import signal
import stat
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest

from dualmap.cli.errors import CommandError
from dualmap.cli.fork_server import ForkServer, can_fork
from dualmap.cli.up import CHILDREN_IMPORT
from tests.support.fork_servers import executed_fork_server

DEADLINE_S = 60.0
_BY_UP = ("dualmap.cli.configuration", "dualmap.cli.own_policies", "dualmap.cli.up")
_WORDS = ("router", "--name", "router-1", "--router.ops_port", "8123")


def describe(words: Sequence[str]) -> int:
    """In a fork: print what it is, and wait for the end, which is that of its server at the latest."""
    from dualmap.cli.parent import end_with_parent

    end_with_parent(os.environ)
    described = {
        "session": os.getsid(0),
        "words": sys.argv[1:],
        "stdin": os.path.samestat(os.fstat(0), Path(os.devnull).stat()),
        "sockets": [number for number in range(100) if _is_socket(number)],
        "home": os.environ["HOME"],
        "shown": Path("/proc/self/cmdline").read_bytes().rstrip(b"\0").decode(),
    }
    print(json.dumps(described), flush=True)
    signal.pause()
    return 0


def _is_socket(descriptor: int) -> bool:
    try:
        return stat.S_ISSOCK(os.fstat(descriptor).st_mode)
    except OSError:
        return False


def import_all(words: Sequence[str]) -> int:
    """In a fork: run a command up to its refusal of a store for one process, and print what it imported for that."""
    from dualmap.cli.main import main

    before = set(sys.modules)
    code = main(words)
    print(json.dumps(sorted(name for name in set(sys.modules) - before if name.startswith("dualmap"))))
    return code


@pytest.fixture
def server() -> Iterator[ForkServer]:
    with executed_fork_server(f"{__name__}:describe") as server:
        yield server


async def until(condition: Callable[[], bool], what: str) -> None:
    deadline_s = time.monotonic() + DEADLINE_S
    while not condition():
        assert time.monotonic() < deadline_s, f"never: {what}"
        await asyncio.sleep(0.01)


async def described(log: Path) -> dict[str, Any]:
    await until(lambda: log.read_text().endswith("\n"), "the fork says what it is")
    return said(log)


def said(log: Path) -> dict[str, Any]:
    found: dict[str, Any] = json.loads(log.read_text())
    return found


def parent_of(pid: int) -> int:
    return int(Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[1])


def is_there(pid: int) -> bool:
    return Path(f"/proc/{pid}").exists()


async def test_a_fork_is_a_process_of_its_own(server: ForkServer, tmp_path: Path) -> None:
    log = tmp_path / "router-1.log"

    process = await server.start(_WORDS, log)
    found = await described(log)

    assert found["session"] == process.pid
    assert found["words"] == list(_WORDS)
    assert found["stdin"]
    assert found["sockets"] == []
    assert found["home"] == os.environ["HOME"]
    server.close()


async def test_a_fork_is_shown_by_its_words_however_few_its_server_was_started_with(
    server: ForkServer, tmp_path: Path
) -> None:
    for number, words in enumerate((_WORDS, (*_WORDS, *map(str, range(300))), ("worker",))):
        log = tmp_path / f"{number}.log"
        await server.start(words, log)

        shown = str((await described(log))["shown"])

        assert shown.endswith(f"-m dualmap {' '.join(words)}")
    server.close()


async def test_what_cannot_be_started_is_an_error_and_the_next_one_starts(server: ForkServer, tmp_path: Path) -> None:
    with pytest.raises(FileNotFoundError):
        await server.start(_WORDS, tmp_path / "nowhere" / "router-1.log")

    assert (await server.start(_WORDS, tmp_path / "router-1.log")).pid > 0
    server.close()


async def test_a_signal_reaches_no_process_that_has_ended(server: ForkServer, tmp_path: Path) -> None:
    process = await server.start(_WORDS, tmp_path / "router-1.log")
    other = await server.start(_WORDS, tmp_path / "router-2.log")
    process.kill()
    assert await process.wait() == -signal.SIGKILL

    process.kill()
    server._send({"pid": process.pid, "signal": int(signal.SIGKILL)})  # as if its end were not known here yet
    server._send({"pid": os.getpid(), "signal": int(signal.SIGKILL)})  # no process that it started

    other.terminate()
    assert await other.wait() == -signal.SIGTERM
    server.close()


async def test_forks_end_with_their_server_which_starts_no_more(tmp_path: Path) -> None:
    with executed_fork_server(f"{__name__}:sleep_watched") as server:
        processes = [await server.start(("router",), tmp_path / f"{number}.log") for number in range(2)]

        os.kill(parent_of(processes[0].pid), signal.SIGKILL)

        assert [await process.wait() for process in processes] == [-signal.SIGTERM] * 2
        assert server.ended.is_set()
        await until(lambda: not any(is_there(process.pid) for process in processes), "both have ended")
        with pytest.raises(CommandError, match="has ended"):
            await server.start(("router",), tmp_path / "late.log")


def sleep_watched(_: Sequence[str]) -> int:
    from dualmap.cli.parent import end_with_parent

    end_with_parent(os.environ)
    signal.pause()
    return 0


@pytest.mark.parametrize("command", ["router", "worker"])
async def test_a_child_of_a_fleet_imports_nothing_that_its_starter_has_not(command: str, tmp_path: Path) -> None:
    log = tmp_path / "child.log"
    with executed_fork_server(f"{__name__}:import_all", (*_BY_UP, *CHILDREN_IMPORT)) as server:
        process = await server.start((command, "--store.url", "memory://"), log)
        code = await process.wait()
        server.close()

    *_, refusal, imported = log.read_text().splitlines()
    assert (code, json.loads(imported)) == (2, []), refusal


def test_a_process_of_several_threads_is_not_forked() -> None:
    source = (
        "import threading; from dualmap.cli.fork_server import can_fork; print(can_fork());"
        "end = threading.Event(); thread = threading.Thread(target=end.wait); thread.start();"
        "print(can_fork()); end.set()"
    )
    done = subprocess.run([sys.executable, "-c", source], capture_output=True, text=True, timeout=60, check=True)

    assert done.stdout.split() == [str(sys.platform == "linux"), "False"]
    assert not can_fork() or sys.platform == "linux"
