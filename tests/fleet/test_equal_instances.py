"""Two equal instances of which one was slow once: both have work again soon after."""

from __future__ import annotations

import json
import threading
import time
import urllib.request
from collections import Counter
from pathlib import Path

from tests.fleet.fleet_process import Fleet, running_fleet

OPTIONS = ("--instances", "2", "--replicas", "2", "--workers", "1", "--time-scale", "5")
CLIENTS = 16


class Clients:
    """So many streaming clients, each of which sends a prompt of its own when its last answer ended."""

    def __init__(self, fleet: Fleet, clients: int = CLIENTS) -> None:
        self._fleet = fleet
        self._lock = threading.Lock()
        self._sent = 0
        self._over = threading.Event()
        self.placed: list[str] = []
        self._threads = [threading.Thread(target=self._run) for _ in range(clients)]

    def __enter__(self) -> Clients:
        for thread in self._threads:
            thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._over.set()
        for thread in self._threads:
            thread.join()

    def _run(self) -> None:
        while not self._over.is_set():
            with self._lock:
                self._sent += 1
                number = self._sent
            # Token ids: no prompt shares a block with another one.
            prompt = [1000 + number, *range(900)]
            body = {"model": self._fleet.model, "prompt": prompt, "max_tokens": 20, "stream": True}
            request = urllib.request.Request(
                f"{self._fleet.endpoint}/v1/completions",
                json.dumps(body).encode(),
                {"content-type": "application/json"},
            )
            with urllib.request.urlopen(request, timeout=60) as answer:
                answer.read()
                self.placed.append(str(answer.headers["x-dualmap-instance"]))

    def shares(self, seconds: float) -> Counter[str]:
        """Where the requests went that end in the next seconds."""
        before = len(self.placed)
        time.sleep(seconds)
        return Counter(self.placed[before:])


def test_an_instance_that_was_paused_under_load_has_its_work_again(tmp_path: Path) -> None:
    with running_fleet(tmp_path, OPTIONS) as fleet, Clients(fleet) as clients:
        first, second = sorted(fleet.instances())
        clients.shares(5.0)
        fleet.emulator(second, "/emulator/pause", {})
        clients.shares(1.5)
        fleet.emulator(second, "/emulator/resume", {})

        clients.shares(20.0)
        placed = clients.shares(15.0)

        assert placed.total() > 100
        assert 0.4 <= placed[second] / placed.total() <= 0.6
        rates = {name: each["load"]["prefill_tokens_per_s"] for name, each in fleet.instances().items()}
        assert rates[second] > 0.7 * rates[first]
