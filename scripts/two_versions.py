"""Two versions of one fleet beside each other, as during a rolling update: `two_versions.py FORMER PRESENT`.

FORMER and PRESENT are the two `dualmap` commands. They share one Valkey and the emulated instances. The update goes as
an operator's does, under load all the time: the former version alone; both, the former one leading; both, the present
one leading, and a router of the former version that starts again, as when going back; the present one alone. It fails
unless every request is answered, each version's requests were granted by the other version, no process logged an error,
and no count and no request is left in the store.
"""

from __future__ import annotations

import contextlib
import itertools
import json
import re
import signal
import socket
import subprocess
import sys
import tempfile
import threading
import time
import urllib.error
import urllib.request
from collections import Counter
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import redis

from dualmap.statestore.embedded import EmbeddedValkey

CLIENTS = 12
REQUESTS = 240
"""In each phase."""
READY_S = 60.0
ANSWER_S = 60.0
STOP_S = 40.0
COUNTS = (
    *("pending_tokens", "dispatched_tokens", "deferred_tokens", "context_tokens", "queued_requests"),
    "running_requests",
)
POOL = "dualmap:{default}:"
OF_REQUESTS = ("request:", "queue:", "running:")
TROUBLE = re.compile(r" (ERROR|CRITICAL) |Traceback|unreadable|mended|repaired", re.IGNORECASE)


class Process:
    """A running command, with what it logged."""

    def __init__(self, name: str, log: Path, command: list[str]) -> None:
        self.name, self.log = name, log
        with log.open("ab") as output:
            self._process = subprocess.Popen(command, stdout=output, stderr=output, cwd=log.parent)

    @property
    def pid(self) -> int:
        return self._process.pid

    @property
    def logged(self) -> str:
        return self.log.read_text("utf-8", "replace")

    def check_runs(self) -> None:
        if self._process.poll() is not None:
            raise SystemExit(f"{self.name} ended with {self._process.returncode}:\n{self.logged}")

    def stop(self) -> None:
        """Stop the process as a supervisor does."""
        if self._process.poll() is None:
            self._process.send_signal(signal.SIGTERM)
            try:
                self._process.wait(STOP_S)
            except subprocess.TimeoutExpired:
                self._process.kill()
                raise SystemExit(f"{self.name} did not end within {STOP_S:g} s of SIGTERM") from None


class Router(Process):
    def __init__(self, name: str, log: Path, dualmap: str, config: Path) -> None:
        self.port = free_port()
        flags = ["--config", str(config), f"--router.port={self.port}", f"--router.replica_id={name}"]
        super().__init__(name, log, [dualmap, "router", *flags, "--router.settle_s=0.5"])
        until(lambda: self.check_runs() or answers(f"http://127.0.0.1:{self.port}/ready"), f"{name} is ready")


class Load:
    """Requests through the routers in turn, from so many clients at a time."""

    def __init__(self, model: str) -> None:
        self.model = model
        self.answered: Counter[str] = Counter()
        self.failed: list[str] = []
        self._numbers = itertools.count()

    def send(self, routers: list[Router], requests: int = REQUESTS) -> None:
        with ThreadPoolExecutor(CLIENTS) as clients:
            list(clients.map(self._ask, itertools.islice(itertools.cycle(routers), requests)))

    def _ask(self, router: Router) -> None:
        number = next(self._numbers)
        words = f"Request {number}. " + f"What prefix {number % 7} shares. " * 100
        body = {
            "model": self.model,
            "messages": [{"role": "user", "content": words}],
            "max_tokens": 8,
            "stream": bool(number % 2),
        }
        request = urllib.request.Request(
            f"http://127.0.0.1:{router.port}/v1/chat/completions",
            json.dumps(body).encode(),
            {"content-type": "application/json"},
        )
        try:
            with OPENER.open(request, timeout=ANSWER_S) as response:
                text = response.read().decode()
            whole = text.rstrip().endswith("data: [DONE]") if body["stream"] else json.loads(text)["choices"]
        except (OSError, ValueError, LookupError) as error:
            body_of_error = error.read().decode() if isinstance(error, urllib.error.HTTPError) else ""
            self.failed.append(f"{router.name}: {error!r} {body_of_error}")
            return
        if whole:
            self.answered[router.name] += 1
        else:
            self.failed.append(f"{router.name}: no whole answer: {text[-300:]}")


class Grants:
    """The grants that were published to each replica. A replica needs no message for its own, so each is another's."""

    def __init__(self, url: str) -> None:
        self.published: Counter[str] = Counter()
        self._channels = redis.Redis.from_url(url).pubsub()
        self._channels.psubscribe(f"{POOL}grants:*")
        threading.Thread(target=self._count, daemon=True).start()

    def _count(self) -> None:
        with contextlib.suppress(redis.RedisError, ValueError, OSError):
            for message in self._channels.listen():
                if message["type"] == "pmessage":
                    self.published[message["channel"].decode().rpartition("grants:")[2]] += 1

    def during(self, phase: Callable[[], None]) -> Counter[str]:
        before = self.published.copy()
        phase()
        return self.published - before


OPENER = urllib.request.build_opener(urllib.request.ProxyHandler({}))


def free_port() -> int:
    with socket.create_server(("127.0.0.1", 0)) as listener:
        port: int = listener.getsockname()[1]
        return port


def answers(url: str) -> bool:
    with contextlib.suppress(OSError), OPENER.open(url, timeout=5):
        return True
    return False


def until(holds: Callable[[], Any], what: str) -> None:
    end_s = time.monotonic() + READY_S
    while not holds():
        if time.monotonic() > end_s:
            raise SystemExit(f"never within {READY_S:g} s: {what}")
        time.sleep(0.1)


@contextlib.contextmanager
def instances(dualmap: str, folder: Path) -> Iterator[list[str]]:
    """Two emulated instances; their URLs."""
    ports = [free_port() for _ in range(2)]
    emulated = []
    for port in ports:
        name = f"instance-{port}"
        command = [dualmap, "emulate", "--instances=1", f"--port={port}"]
        emulated.append(Process(name, folder / f"{name}.log", command))
    urls = [f"http://127.0.0.1:{port}" for port in ports]
    try:
        for process, url in zip(emulated, urls, strict=True):
            until(lambda process=process, url=url: process.check_runs() or answers(f"{url}/health"), f"{url} answers")
        yield urls
    finally:
        for process in emulated:
            process.stop()


def configured(folder: Path, store_url: str, model: str, urls: list[str]) -> Path:
    """Settings for both versions. Few requests run at a time: most are held, and granted by the replica that makes
    room."""
    limits = {"max_running_requests": 2, "dispatch_window_tokens": 1024}
    members = [{"id": f"i{place}", "url": url, **limits} for place, url in enumerate(urls)]
    config = folder / "fleet.yaml"  # JSON is YAML
    pools = [{"name": "default", "model": model, "instances": members}]
    config.write_text(json.dumps({"store": {"url": store_url}, "pools": pools}))  # names that both versions know
    return config


def main() -> None:
    former, present = (str(Path(command).absolute()) for command in sys.argv[1:])
    with contextlib.ExitStack() as stack:
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="two-versions-")))
        server = stack.enter_context(EmbeddedValkey())
        client = stack.enter_context(redis.Redis.from_url(server.url))
        urls = stack.enter_context(instances(present, folder))
        with OPENER.open(f"{urls[0]}/v1/models", timeout=10) as response:
            model = json.load(response)["data"][0]["id"]
        config = configured(folder, server.url, model, urls)
        started: list[Process] = []
        stack.callback(lambda: [process.stop() for process in started])

        def start(kind: str, name: str, dualmap: str) -> Any:
            log = folder / f"{name}.log"
            started.append(
                Router(name, log, dualmap, config)
                if kind == "router"
                else Process(name, log, [dualmap, "worker", "--config", str(config)])
            )
            return started[-1]

        load, grants = Load(model), Grants(server.url)
        faults = update(load, grants, client, start, former, present)
        for process in started:
            process.stop()
        report([*faults, *faults_of(load, client, started)])


def update(
    load: Load, grants: Grants, client: redis.Redis, start: Callable[..., Any], former: str, present: str
) -> list[str]:
    """Whether grants went from one version to the other; else nothing was shown."""

    def leads(worker: Process) -> bool:
        owner = (client.hget(f"{POOL}leader", "owner") or b"").decode()
        worker.check_runs()
        return f"-{worker.pid}-" in owner

    old_worker, old_router = start("worker", "former-worker", former), start("router", "former-1", former)
    until(lambda: leads(old_worker), "the former version leads")
    until(lambda: ready_instances(client) == 2, "both instances are ready")
    load.send([old_router])

    new_worker, new_router = start("worker", "present-worker", present), start("router", "present-1", present)
    assert leads(old_worker)
    by_former = grants.during(lambda: load.send([old_router, new_router]))
    assert leads(old_worker)

    old_worker.stop()
    until(lambda: leads(new_worker), "the present version leads")
    by_present = grants.during(lambda: load.send([old_router, new_router]))

    again = start("router", "former-2", former)
    with ThreadPoolExecutor(1) as beside:
        under_way = beside.submit(load.send, [again, new_router])
        old_router.stop()
        under_way.result()
    again.stop()
    load.send([new_router])
    # Until its worker stopped, the former version made every grant to the only router of the present one. After that
    # the present version made every grant to the only router of the former one.
    print(f"grants by the former version to the present one: {by_former['present-1']}")
    print(f"grants by the present version to the former one: {by_present['former-1']}")
    granted = {"present": by_former["present-1"], "former": by_present["former-1"]}
    return [f"no request of the {version} version was granted by the other" for version, n in granted.items() if not n]


def ready_instances(client: redis.Redis) -> int:
    records = client.hgetall(f"{POOL}instances:records").values()
    return sum(json.loads(record)["state"] == "ready" for record in records)


def faults_of(load: Load, client: redis.Redis, started: list[Process]) -> list[str]:
    """List what went wrong, once all processes have ended."""
    faults = [f"unanswered: {each}" for each in load.failed]
    for name, text in client.hgetall(f"{POOL}instances:records").items():
        counts = {count: json.loads(text)[count] for count in COUNTS}
        faults += [f"{name.decode()} counts {count}={left}" for count, left in counts.items() if left]
    keys = [key.decode() for key in client.scan_iter()]
    faults += [f"left in the store: {key}" for key in keys if key.removeprefix(POOL).startswith(OF_REQUESTS)]
    for process in started:
        lines = process.logged.splitlines()
        faults += [f"{process.name} logged: {line}" for line in lines if TROUBLE.search(line)]
    meta = {name.decode(): text.decode() for name, text in client.hgetall(f"{POOL}meta").items()}
    print(f"answered: {dict(load.answered)}")
    print(f"schema {meta.get('schema')}, oldest_schema {meta.get('oldest_schema')}")
    return faults


def report(faults: list[str]) -> None:
    if faults:
        raise SystemExit("\n".join([f"{len(faults)} faults:", *faults[:40]]))
    print("every request was answered, and no count is left")


if __name__ == "__main__":
    main()
