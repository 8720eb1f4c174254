"""Processes that the benchmark starts: their readiness, their CPU, their end."""

from __future__ import annotations

import os
import signal
import subprocess
import time
import urllib.error
import urllib.request
from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path

from real_fleet.errors import LackingError

ROOT = Path(__file__).resolve().parents[2]
_POLL_S = 0.2
_LAST_BYTES = 3000


@contextmanager
def running(words: Sequence[str], log: Path, environment: Mapping[str, str]) -> Iterator[subprocess.Popen[bytes]]:
    """A process in a session of its own, with its output in ``log``. It and its descendants end with the block.

    Raises:
        LackingError: there is no such program.
    """
    log.parent.mkdir(parents=True, exist_ok=True)
    with log.open("wb") as output:
        try:
            process = subprocess.Popen(
                words, stdin=subprocess.DEVNULL, stdout=output, stderr=subprocess.STDOUT, cwd=ROOT,
                env=dict(environment), start_new_session=True,
            )  # fmt: skip
        except OSError as error:
            raise LackingError(f"{words[0]} cannot be started: {error.strerror}") from error
    try:
        yield process
    finally:
        process.terminate()
        try:
            process.wait(30)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()
        with suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)  # descendants that outlived it


def wait_until_answers(url: str, process: subprocess.Popen[bytes], log: Path, within_s: float) -> None:
    """Wait until ``url`` gives 200.

    Raises:
        LackingError: the process ended before, or the time is over; with the end of its log.
    """
    deadline_s = time.monotonic() + within_s
    while not answers(url):
        if process.poll() is not None:
            raise LackingError(f"it ended with {process.returncode}: {_end_of(log)}")
        if time.monotonic() > deadline_s:
            raise LackingError(f"{url} did not answer within {within_s:g} s: {_end_of(log)}")
        time.sleep(_POLL_S)


def answers(url: str) -> bool:
    try:
        with urllib.request.urlopen(url, timeout=5) as answer:
            return bool(answer.status == 200)
    except (urllib.error.URLError, OSError, ValueError):
        return False


def _end_of(log: Path) -> str:
    text = log.read_bytes()[-_LAST_BYTES:].decode(errors="replace").strip()
    return f"the end of {log}:\n{text}"


def cpu_s(pid: int) -> float | None:
    """CPU seconds of a process and of its descendants until now, ended ones included; None where the system has no
    /proc."""
    children: defaultdict[int, list[int]] = defaultdict(list)
    used: dict[int, int] = {}
    for stat in Path("/proc").glob("[0-9]*/stat"):
        try:
            fields = stat.read_text().rpartition(")")[2].split()  # the name before it may contain anything
        except OSError:
            continue  # it ended meanwhile
        one = int(stat.parent.name)
        children[int(fields[1])].append(one)
        used[one] = sum(map(int, fields[11:15]))  # its own, and of children that it waited for; user and system
    if pid not in used:
        return None
    ticks, open_ = 0, [pid]
    while open_:
        one = open_.pop()
        ticks += used[one]
        open_ += children[one]
    return ticks / os.sysconf("SC_CLK_TCK")
