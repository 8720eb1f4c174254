"""Two equal instances of which one was slow once: both have work again soon after."""

from __future__ import annotations

import json
import threading
import time
import urllib.request
from collections import Counter
from pathlib import Path

from tests.fleet.fleet_process import Fleet, running_fleet, until

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

    def share(self, name: str, last: int) -> float:
        """The share of one instance in the last answers, as many as are given here."""
        return Counter(self.placed[-last:])[name] / last


def test_an_instance_that_was_paused_under_load_has_its_work_again(tmp_path: Path) -> None:
    with running_fleet(tmp_path, OPTIONS) as fleet, Clients(fleet) as clients:
        first, second = sorted(fleet.instances())

        until(lambda: Counter(clients.placed)[second] > 40, "both have work")
        fleet.emulator(second, "/emulator/pause", {})
        time.sleep(1.5)  # so long no step of it ends
        fleet.emulator(second, "/emulator/resume", {})
        resumed = len(clients.placed)

        def is_even() -> bool:
            rates = {name: each["load"]["prefill_tokens_per_s"] for name, each in fleet.instances().items()}
            return 0.4 <= clients.share(second, 150) <= 0.6 and rates[second] > 0.7 * rates[first]

        until(lambda: len(clients.placed) >= resumed + 150, "requests are answered")
        until(is_even, "both share the work evenly")
        even = len(clients.placed)
        until(lambda: len(clients.placed) >= even + 150, "more requests are answered")

        assert 0.35 <= clients.share(second, 150) <= 0.65, "and do so from then on"
