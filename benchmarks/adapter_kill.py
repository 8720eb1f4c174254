"""How soon adapters answer again after an instance that had them was killed.

    python -m benchmarks.adapter_kill [--instances 8] [--adapters 32] [--rounds 3] [--host-slots 64]

Starts a fleet of emulated instances in real time (two routers, a worker), registers adapters at a router, and has one
client for each that sends requests one after the other, so that every adapter is hot. Then it kills the instance that
has most of them, as often as there are rounds: its port closes at once, and it comes back after ten seconds without
any adapter. For each adapter that was loaded there one more request is sent at once, since the clients' own next ones
wait for answers under way, and it takes the time from the kill to its first token. Prints the worst and the median of
each round, and what was lost: answers that failed, or broke off. The aim is the time of a load and a second.
"""

from __future__ import annotations

import http.client
import json
import tempfile
import threading
import time
import urllib.request
from argparse import ArgumentParser
from collections import Counter
from pathlib import Path
from statistics import median
from typing import Any
from urllib.parse import urlsplit

from dualmap.research.chaos.fleet_process import FleetProcess

READY_S, BACK_S = 90.0, 10.0
HOST_S, DISK_S = 0.02, 0.5
"""Times of a load, as the preset has them."""
AIM_S = HOST_S + DISK_S + 1.0
TOKENS = 40


class Client(threading.Thread):
    """Sends requests for one adapter, one after the other."""

    def __init__(self, endpoint: str, adapter: str) -> None:
        super().__init__(daemon=True)
        self.adapter = adapter
        self.first_tokens: list[tuple[float, float]] = []
        """When each request was sent, and when its first token came."""
        self.lost: list[str] = []
        self.ended = threading.Event()
        self._address = urlsplit(endpoint).netloc

    def run(self) -> None:
        turn = 0
        while not self.ended.is_set():
            turn += 1
            self.send(f"{self.adapter}, turn {turn}: " + "word " * 200)

    def send(self, prompt: str) -> None:
        """One request, to its end."""
        why = self._send(prompt)
        if why:
            self.lost.append(why)

    def _send(self, prompt: str) -> str:
        """One request; returns why it was lost, or nothing."""
        sent_s, first_s, ends = time.monotonic(), 0.0, False
        connection = http.client.HTTPConnection(self._address, timeout=60)
        body = {"model": self.adapter, "prompt": prompt, "max_tokens": TOKENS, "stream": True}
        try:
            connection.request("POST", "/v1/completions", json.dumps(body), {"content-type": "application/json"})
            answer = connection.getresponse()
            if answer.status != 200:
                return f"{answer.status} {answer.read()[:200]!r}"
            for line in answer:
                if b"error" in line:
                    return repr(line[:200])
                if line.startswith(b"data:") and not first_s:
                    first_s = time.monotonic()
                ends = ends or line.startswith(b"data: [DONE]")
        except (OSError, http.client.HTTPException) as error:
            return repr(error)
        finally:
            connection.close()
        if not ends:
            return "broke off"
        self.first_tokens.append((sent_s, first_s))
        return ""


def call(url: str, body: dict[str, Any] | None = None) -> Any:
    data = None if body is None else json.dumps(body).encode()
    request = urllib.request.Request(url, data, {"content-type": "application/json"})
    with urllib.request.urlopen(request, timeout=60) as answer:
        text = answer.read()
        return json.loads(text) if text.startswith((b"{", b"[")) else text.decode()


def until(probe: Any, what: str, within_s: float) -> None:
    end_s = time.monotonic() + within_s
    while not probe():
        if time.monotonic() > end_s:
            raise SystemExit(f"never within {within_s:g} s: {what}")
        time.sleep(0.1)


def answers(url: str) -> bool:
    try:
        return bool(call(f"{url}/v1/models"))
    except OSError:
        return False


def loaded(endpoint: str) -> dict[str, list[str]]:
    """The instances that each registered adapter is loaded on."""
    rows = call(f"{endpoint}/admin/adapters")["adapters"]
    return {row["adapter"]: row["registered"]["loaded"] for row in rows if row["registered"]}


def has_its_own(endpoint: str, instance_id: str) -> bool:
    """Whether an instance has the adapters whose home it is, or as many as the fleet knows room for."""
    found = call(f"{endpoint}/admin/adapters")
    rows = [row["registered"] for row in found["adapters"] if row["registered"]]
    own, has = (sum(instance_id in row[where] for row in rows) for where in ("homes", "loaded"))
    room: int = found["room"][instance_id]["host"]
    return has >= min(own, room)


def instances(endpoint: str) -> dict[str, Any]:
    return {each["id"]: each for each in call(f"{endpoint}/admin/instances")["instances"]}


def measure(fleet: FleetProcess, adapters: int, rounds: int) -> list[tuple[str, int, float, float]]:
    """By round: the instance, the adapters that it had, and the median and the worst time to the next first token."""
    endpoint = fleet.endpoint
    until(lambda: {each["state"] for each in instances(endpoint).values()} == {"ready"}, "all are ready", READY_S)
    names = [f"adapter-{number}" for number in range(adapters)]
    for name in names:
        call(f"{endpoint}/v1/load_lora_adapter", {"lora_name": name, "lora_path": f"/adapters/{name}"})
    clients = [Client(endpoint, name) for name in names]
    for client in clients:
        client.start()
    until(lambda: all(len(client.first_tokens) > 3 for client in clients), "all adapters answer", READY_S)
    found, everyone = [], [*clients]
    for _ in range(rounds):
        where = loaded(endpoint)
        counts = Counter(each for homes in where.values() for each in homes)
        dead = counts.most_common(1)[0][0]
        url = instances(endpoint)[dead]["url"]
        killed_s = time.monotonic()
        call(f"{url}/emulator/die", {"abruptly": True, "revive_after_s": BACK_S})
        asked = [Client(endpoint, name) for name in names if dead in where[name]]
        threads = [threading.Thread(target=each.send, args=(f"{each.adapter}: " + "word " * 200,)) for each in asked]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(READY_S)
        times = [first_s - killed_s for each in asked for _, first_s in each.first_tokens]
        found.append((dead, len(asked), median(times), max(times)))
        everyone += asked
        until(lambda u=url: answers(u), "its port is open again", READY_S)
        until(lambda d=dead: instances(endpoint)[d]["state"] == "ready", "it is back", READY_S)
        until(lambda d=dead: has_its_own(endpoint, d), "it has the adapters whose home it is", READY_S)
    for client in clients:
        client.ended.set()
    for client in clients:
        client.join(60)
    lost = [f"{client.adapter}: {why}" for client in everyone for why in client.lost]
    answered = sum(len(client.first_tokens) for client in everyone)
    print(f"{answered} requests answered, {len(lost)} lost")
    for why in lost[:10]:
        print(f"  {why}")
    return found


def main() -> None:
    parser = ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--instances", type=int, default=8)
    parser.add_argument("--adapters", type=int, default=32)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--host-slots", type=int, default=64)
    arguments = parser.parse_args()
    preset = f"qwen2.5-7b-910b4:adapter_slots=8+adapter_host_slots={arguments.host_slots}"
    shape = ("--instances", str(arguments.instances), "--preset", preset, "--time-scale", "1")
    with tempfile.TemporaryDirectory(prefix="adapters-") as folder:
        options = ("--replicas", "2", "--workers", "1", "--port", "0", *shape)
        fleet = FleetProcess.start(Path(folder), options)
        try:
            until(lambda: fleet.is_ready, "the fleet is ready", READY_S)
            rows = measure(fleet, arguments.adapters, arguments.rounds)
        finally:
            fleet.stop()
    print(f"\nfirst tokens of requests sent then; a load takes {HOST_S + DISK_S:g} s, so the aim is {AIM_S:g} s\n")
    print("| killed | adapters on it | median s | worst s |\n| --- | ---: | ---: | ---: |")
    for dead, count, middle_s, worst_s in rows:
        print(f"| {dead} | {count} | {middle_s:.2f} | {worst_s:.2f} |")


if __name__ == "__main__":
    main()
