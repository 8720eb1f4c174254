"""One large batch, answered while everything around it is killed; or how much memory it takes.

    python -m benchmarks.batch_job [--lines 50000] [--bytes 1000000000] [--kill-every 8] [--seed 1]

A fleet of two routers, two workers and four emulated instances answers a file of so many lines, of so many bytes
together. With ``--kill-every`` a router, a worker, an instance and the store are killed in turn (SIGKILL), at that
interval in seconds, or once a line was answered since the last kill where that takes longer: ``dualmap up`` starts the
first three again, this program the store, which writes every change to disk before it answers. At the end each line
must be in the files of answers and errors once, with the answer that belongs to it: the id of its request, the length
of its prompt and that of its answer all depend on the line.

Without kills the memory of each router and worker is read twice a second (its resident set). It is *flat* where no
process has more than ``--most-growth-mb`` above what it had when the first tenth of the lines was answered; what the
upload takes is shown as well.

The exit code is 1 where a line is missing, doubled or wrong, or where memory is not flat.
"""

from __future__ import annotations

import argparse
import http.client
import json
import os
import random
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from itertools import cycle
from pathlib import Path
from typing import Any, BinaryIO
from urllib.parse import urlsplit

from redis import Redis
from redis.exceptions import RedisError

from dualmap.research.chaos.fleet_process import FleetProcess
from dualmap.statestore.embedded import server_binary

INSTANCES, ROUTERS, WORKERS = 4, 2, 2
TIME_SCALE = "100"
READY_S = 120.0
STORE_DOWN_S = 1.0
LOOKED_AT_EVERY_S = 0.5
PATH = "/v1/completions"
BOUNDARY = "edge"


def expected_tokens(number: int) -> int:
    """Tokens of the answer to a line."""
    return 2 + number % 5


def line_of(number: int, line_bytes: int, model: str) -> bytes:
    head = f"{number} " + "word " * (1 + number % 7)
    body = {"model": model, "prompt": head, "max_tokens": expected_tokens(number), "ignore_eos": True}
    bare = {"custom_id": f"line-{number}", "method": "POST", "url": PATH, "body": body}
    missing = line_bytes - len(json.dumps(bare)) - 1
    if missing > 0:
        body["prompt"] = head + ("filler " * (missing // 7 + 1))[:missing]
    return json.dumps(bare).encode() + b"\n"


class DurableStore:
    """A Valkey that is the same after it was killed."""

    def __init__(self, folder: Path) -> None:
        with socket.socket() as probe:
            probe.bind(("127.0.0.1", 0))
            self._port = int(probe.getsockname()[1])
        self._folder = folder
        self.url = f"redis://127.0.0.1:{self._port}/0"

    def start(self) -> None:
        options = {
            "bind": "127.0.0.1",
            "port": str(self._port),
            "dir": str(self._folder),
            "save": "",
            "appendonly": "yes",
            "appendfsync": "always",
            "maxmemory-policy": "noeviction",
        }
        words = [word for name, value in options.items() for word in (f"--{name}", value)]
        self._process = subprocess.Popen([str(server_binary()), *words], stdout=subprocess.DEVNULL)
        self._wait()

    def _wait(self) -> None:
        until = time.monotonic() + READY_S
        with Redis(port=self._port, socket_timeout=1.0) as probe:
            while time.monotonic() < until:
                try:
                    probe.ping()
                    return
                except RedisError:
                    time.sleep(0.05)
        raise TimeoutError("the store does not answer")

    def kill(self) -> None:
        self._process.kill()
        self._process.wait()

    def used_bytes(self) -> int:
        with Redis(port=self._port) as asked:
            return int(asked.info("memory")["used_memory"])


class Client:
    """The endpoint, by requests that are repeated while nobody answers: a router may just have been killed."""

    def __init__(self, url: str) -> None:
        at = urlsplit(url)
        self._address = (at.hostname or "", at.port or 80)

    def call(self, method: str, path: str, body: bytes | None = None) -> Any:
        return json.loads(self._repeat(method, path, body, http.client.HTTPResponse.read))

    def save(self, path: str, file: BinaryIO) -> None:
        def copy(answer: http.client.HTTPResponse) -> None:
            file.seek(0)
            file.truncate()
            while piece := answer.read(1 << 20):
                file.write(piece)

        self._repeat("GET", path, None, copy)

    def _repeat(
        self, method: str, path: str, body: bytes | None, read: Callable[[http.client.HTTPResponse], Any]
    ) -> Any:
        until = time.monotonic() + READY_S
        while True:
            connection = http.client.HTTPConnection(*self._address, timeout=60)
            try:
                connection.request(method, path, body, {"content-type": "application/json"} if body else {})
                answer = connection.getresponse()
                if answer.status < 500:
                    if answer.status != 200:
                        raise RuntimeError(f"{method} {path}: {answer.status} {answer.read()!r}")
                    return read(answer)
            except (OSError, http.client.HTTPException):
                if time.monotonic() > until:
                    raise
            finally:
                connection.close()
            time.sleep(0.2)

    def upload(self, lines: Iterator[bytes]) -> str:
        """Upload a file without having it whole anywhere; its id."""
        connection = http.client.HTTPConnection(*self._address, timeout=600)
        head = (
            f'--{BOUNDARY}\r\ncontent-disposition: form-data; name="purpose"\r\n\r\nbatch\r\n'
            f'--{BOUNDARY}\r\ncontent-disposition: form-data; name="file"; filename="lines.jsonl"\r\n\r\n'
        )

        def form() -> Iterator[bytes]:
            yield head.encode()
            gathered = bytearray()
            for line in lines:
                gathered += line
                if len(gathered) > 1 << 20:
                    yield bytes(gathered)
                    gathered.clear()
            yield bytes(gathered)
            yield f"\r\n--{BOUNDARY}--\r\n".encode()

        fields = {"content-type": f"multipart/form-data; boundary={BOUNDARY}", "transfer-encoding": "chunked"}
        connection.request("POST", "/v1/files", form(), fields, encode_chunked=True)
        answer = connection.getresponse()
        found = json.loads(answer.read())
        if answer.status != 200:
            raise RuntimeError(f"the upload was refused: {found}")
        return str(found["id"])


@dataclass
class Memory:
    """Resident sets of routers and workers, in MB, by the share of the lines that was answered."""

    after_upload: dict[str, float] = field(default_factory=dict)
    samples: list[tuple[float, dict[str, float]]] = field(default_factory=list)

    def growth(self) -> dict[str, float]:
        """What each process had at most above its highest in the first tenth of the lines."""
        early, later = self._most(0.0, 0.1), self._most(0.1, 1.01)
        return {name: later[name] - early.get(name, later[name]) for name in later}

    def _most(self, first: float, last: float) -> dict[str, float]:
        most: dict[str, float] = {}
        for share, found in self.samples:
            if first <= share < last:
                most |= {name: max(size, most.get(name, 0.0)) for name, size in found.items()}
        return most

    def table(self) -> list[str]:
        names = sorted(self.after_upload)
        rows = [("uploaded", self.after_upload)]
        rows += [(f"up to {part:.0%}", self._most(part - 0.1, part)) for part in (0.1, 0.3, 0.5, 0.7, 0.9)]
        rows.append(("to the end", self._most(0.9, 1.01)))
        lines = [f"{'MB':>12}" + "".join(f"{name:>12}" for name in names)]
        return lines + [
            f"{title:>12}" + "".join(f"{row.get(name, 0.0):12.0f}" for name in names) for title, row in rows
        ]


def resident_mb(fleet: FleetProcess) -> dict[str, float]:
    found: dict[str, float] = {}
    for name, pid in fleet.pids().items():
        if name.startswith(("router", "worker")):
            try:
                pages = int(Path(f"/proc/{pid}/statm").read_text().split()[1])
            except (OSError, IndexError):
                continue
            found[name] = pages * os.sysconf("SC_PAGE_SIZE") / 1e6
    return found


class Killer:
    """Kills one process after the other."""

    def __init__(self, fleet: FleetProcess, store: DurableStore, every_s: float, seed: int) -> None:
        self._fleet = fleet
        self._store = store
        self._every_s = every_s
        self._rng = random.Random(seed)
        self._kinds = cycle(("router", "worker", "instance", "store"))
        self._due_s = time.monotonic() + every_s
        self.killed: dict[str, int] = {}
        self._done = -1

    def look(self, done: int) -> None:
        """Kill what is next, if it is time, and if more lines are done than at the last kill."""
        if not self._every_s or time.monotonic() < self._due_s or done <= self._done:
            return
        kind = next(self._kinds)
        if kind == "store":
            self._store.kill()
            time.sleep(STORE_DOWN_S)
            self._store.start()
        else:
            names = sorted(name for name in self._fleet.pids() if name.startswith(kind))
            try:
                self._fleet.kill(self._rng.choice(names))
            except ProcessLookupError:
                return  # it is being started again
        self.killed[kind] = self.killed.get(kind, 0) + 1
        self._done = done
        self._due_s = time.monotonic() + self._every_s


def faults_in(files: Sequence[Path], lines: int) -> list[str]:
    """What is wrong with the answers: each line once, and its own."""
    found: dict[int, int] = {}
    faults: list[str] = []
    for path in files:
        with path.open("rb") as read:
            for text in read:
                each = json.loads(text)
                number = int(each["custom_id"].removeprefix("line-"))
                found[number] = found.get(number, 0) + 1
                if (fault := _fault_of(each, number)) is not None:
                    faults.append(f"line {number}: {fault}")
    missing = [number for number in range(lines) if number not in found]
    doubled = [number for number, count in found.items() if count > 1]
    faults += [f"line {number} is missing" for number in missing] + [f"line {number} is doubled" for number in doubled]
    return faults + [f"line {number} was never sent" for number in found if not 0 <= number < lines]


def _fault_of(each: dict[str, Any], number: int) -> str | None:
    response = each["response"]
    if response is None or response["status_code"] != 200:
        return f"not answered: {json.dumps(each)[:300]}"
    if not each["id"].endswith(f"_{number + 1}") or not response["request_id"].startswith(each["id"]):
        return f"its answer is that of {each['id']}, {response['request_id']}"
    used = response["body"]["usage"]["completion_tokens"]
    return None if used == expected_tokens(number) else f"its answer has {used} tokens"


def run(arguments: argparse.Namespace, folder: Path) -> int:
    store = DurableStore(folder)
    store.start()
    file_bytes = arguments.bytes + arguments.lines * 300
    words = ["--port", "0", "--instances", str(INSTANCES), "--replicas", str(ROUTERS), "--workers", str(WORKERS)]
    words += ["--time-scale", TIME_SCALE, "--store.url", store.url, "--ready-within-s", str(int(READY_S))]
    words += ["--router.batches.storage", str(folder / "files"), "--router.batches.max_lines", str(arguments.lines)]
    words += ["--router.batches.max_file_bytes", str(file_bytes)]
    fleet = FleetProcess.start(folder, words)
    try:
        until = time.monotonic() + READY_S
        while not fleet.is_ready and time.monotonic() < until:
            time.sleep(0.2)
        return follow(arguments, folder, fleet, store)
    finally:
        fleet.stop()
        store.kill()


def follow(arguments: argparse.Namespace, folder: Path, fleet: FleetProcess, store: DurableStore) -> int:
    client, memory, began_s = Client(fleet.endpoint), Memory(), time.monotonic()
    line_bytes = arguments.bytes // arguments.lines
    before = resident_mb(fleet)
    file_id = client.upload(line_of(number, line_bytes, fleet.model) for number in range(arguments.lines))
    memory.after_upload = resident_mb(fleet)
    print(f"uploaded in {time.monotonic() - began_s:.0f} s; before: {before}", flush=True)
    new = {"input_file_id": file_id, "endpoint": PATH, "completion_window": "24h"}
    batch = client.call("POST", "/v1/batches", json.dumps(new).encode())
    killer = Killer(fleet, store, arguments.kill_every, arguments.seed)
    began_s, shown, done = time.monotonic(), 0, 0
    most_store_bytes = 0
    while batch["status"] not in ("completed", "failed", "expired", "cancelled"):
        time.sleep(LOOKED_AT_EVERY_S)
        killer.look(done)
        batch = client.call("GET", f"/v1/batches/{batch['id']}")
        done = batch["request_counts"]["completed"] + batch["request_counts"]["failed"]
        memory.samples.append((done / arguments.lines, resident_mb(fleet)))
        most_store_bytes = max(most_store_bytes, store.used_bytes())
        if done >= shown + arguments.lines // 20:
            shown = done
            print(f"{time.monotonic() - began_s:6.0f} s  {done} lines", flush=True)
    took_s = time.monotonic() - began_s
    files = []
    for name in ("output_file_id", "error_file_id"):
        if batch[name]:
            files.append(folder / name)
            with files[-1].open("wb") as file:
                client.save(f"/v1/files/{batch[name]}/content", file)
    faults = faults_in(files, arguments.lines)
    counts = batch["request_counts"]
    print(f"{batch['status']} in {took_s:.0f} s: {counts}; killed: {killer.killed or 'nothing'}")
    print(f"{len(faults)} faults{''.join(chr(10) + each for each in faults[:10])}")
    growth = {name: round(size) for name, size in memory.growth().items()}
    if arguments.kill_every:
        return int(bool(faults) or counts["completed"] != arguments.lines)
    print("\n".join(memory.table()))
    print(f"growth behind the first tenth, MB: {growth}; the store had {most_store_bytes / 1e6:.1f} MB at most")
    is_flat = all(each <= arguments.most_growth_mb for each in growth.values())
    uploaded = {name: memory.after_upload[name] - before.get(name, 0.0) for name in memory.after_upload}
    is_flat = is_flat and all(each <= arguments.most_growth_mb for each in uploaded.values())
    return int(bool(faults) or not is_flat)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--lines", type=int, default=50_000, help="of the batch (%(default)s)")
    parser.add_argument("--bytes", type=int, default=10_000_000, help="of all lines together (%(default)s)")
    parser.add_argument("--kill-every", type=float, default=0.0, help="seconds between kills; 0: none (%(default)s)")
    parser.add_argument("--most-growth-mb", type=float, default=40.0, help="that counts as flat (%(default)s)")
    parser.add_argument("--seed", type=int, default=1, help="of what is killed (%(default)s)")
    arguments = parser.parse_args()
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(1))
    with tempfile.TemporaryDirectory() as folder:
        return run(arguments, Path(folder))


if __name__ == "__main__":
    sys.exit(main())
