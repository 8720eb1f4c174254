"""Pulls whose source is killed or stopped in the middle of them: what becomes of the requests.

    python benchmarks/lost_pulls.py [--pulls 1000] [--at-once 24] [--time-scale 2]

Six emulated instances compute prompts of 20,000 tokens and are parked; six others are asked about these, and pull
them. In every fourth round the sources are stopped: no pull from them ever ends. In the others they are killed while
pulls are under way. Rounds go on until so many pulls were lost, which is counted by the routers as requests that were
sent once more without a source; an engine that loses a pull fails the request (vLLM's default). A first round, with
prompts that no instance has, says how long computing takes with as many requests at once.

The exit code is 1 where a request was not answered, something stays booked, or the 99th percentile of what lost pulls
added to a first token is more than twice what computing takes.
"""

from __future__ import annotations

import argparse
import http.client
import json
import re
import sys
import tempfile
import threading
import time
import urllib.request
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

from live_vs_simulated import fleet

from dualmap.simulation.workload.trace_figures import quantile

SOURCES, TARGETS = 6, 6
WORDS = 16_000
"""Words of a prompt, of about 20,000 tokens, which the engines compute in 3 s of their clock, and pull in 0.6 s."""
PRESET = "qwen2.5-7b-910b4-tp1:kv_capacity_tokens=400000"
"""A source keeps all that it computes in a round."""
LINK_GB_PER_S = "2"
KILLED_AFTER_S = 0.25
NOTICED_S = 4.0
"""Until the worker has noticed that an engine was restarted, and forgotten what it had."""
LONGEST_S = 120.0
MOST_ADDED = 2.0
"""Of the time that computing takes."""
PULL_RETRIES = re.compile(r'^dualmap_retries_total\{[^}]*failure="pull"[^}]*\} (\S+)$', re.M)


@dataclass
class Rounds:
    """What became of the requests."""

    asked: int = 0
    unanswered: list[str] = field(default_factory=list)
    lost_s: list[float] = field(default_factory=list)
    """Times to the first token of requests that were sent twice."""
    lost: int = 0


class PullingFleet:
    def __init__(self, url: str) -> None:
        self._url = url
        names = sorted(each["id"] for each in self.instances())
        self.sources, self.targets = names[:SOURCES], names[SOURCES:]
        self._urls = {each["id"]: each["url"] for each in self.instances()}
        self.model = self.get("/v1/models")["data"][0]["id"]

    def get(self, path: str) -> Any:
        with urllib.request.urlopen(self._url + path, timeout=60) as answer:
            return json.load(answer)

    def post(self, url: str, body: Any) -> None:
        words = json.dumps(body).encode()
        request = urllib.request.Request(url, words, {"content-type": "application/json"})
        urllib.request.urlopen(request, timeout=60).close()

    def instances(self) -> list[dict[str, Any]]:
        found: list[dict[str, Any]] = self.get("/admin/instances")["instances"]
        return found

    def only(self, serving: list[str]) -> None:
        """Have these instances alone serve; the others are parked."""
        wanted = {each["id"]: "ready" if each["id"] in serving else "standby" for each in self.instances()}
        asked: dict[str, str] = {}
        until = time.monotonic() + 60
        while time.monotonic() < until:
            now = {each["id"]: each["state"] for each in self.instances()}
            if now == wanted:
                return
            for name, state in now.items():
                order = "resume" if wanted[name] == "ready" else "drain"
                if state != wanted[name] and state in ("ready", "standby", "draining") and asked.get(name) != state:
                    asked[name] = state
                    self.post(f"{self._url}/admin/instances/{name}/{order}", {})
            time.sleep(0.1)
        raise TimeoutError(f"instances stay {now}")

    def ask(self, number: int) -> tuple[int, float, int]:
        """Status, time to the first token, and tries of a streamed answer about a prompt."""
        at = urlsplit(self._url)
        connection = http.client.HTTPConnection(at.hostname or "", at.port, timeout=LONGEST_S)
        prompt = f"{number} " + "word " * WORDS
        body = {"model": self.model, "prompt": prompt, "max_tokens": 4, "stream": True}
        began_s = time.monotonic()
        try:
            connection.request("POST", "/v1/completions", json.dumps(body), {"content-type": "application/json"})
            response = connection.getresponse()
            first = response.readline()
            first_s = time.monotonic() - began_s
            whole = first + response.read()
            is_whole = response.status == 200 and b"[DONE]" in whole and b'"error"' not in whole
            tries = int(response.headers["x-dualmap-attempts"] or 0)
            return (200 if is_whole else response.status or 1), first_s, tries
        finally:
            connection.close()

    def order(self, names: list[str], path: str, body: dict[str, Any]) -> None:
        for name in names:
            self.post(self._urls[name] + path, body)

    def lost_pulls(self) -> float:
        with urllib.request.urlopen(f"{self._url}/metrics", timeout=60) as answer:
            return sum(map(float, PULL_RETRIES.findall(answer.read().decode())))

    def booked(self) -> list[str]:
        """Instances on which something stays booked, a while after the last request."""
        until = time.monotonic() + 30
        while time.monotonic() < until:
            left = [
                each["id"]
                for each in self.instances()
                if each["load"] and (each["load"]["pending_tokens"] or each["load"]["running_requests"])
            ]
            if not left and not self.get("/admin/requests"):
                return []
            time.sleep(0.5)
        return left or ["requests"]


def ask_all(pulling: PullingFleet, numbers: range, at_once: int, rounds: Rounds | None) -> list[float]:
    """Ask about prompts, so many at once; the times to the first token."""
    times: list[float] = []
    lock = threading.Lock()

    def one(number: int) -> None:
        try:
            status, first_s, tries = pulling.ask(number)
        except (OSError, http.client.HTTPException) as error:
            status, first_s, tries = 0, LONGEST_S, 0
            print(f"request {number}: {error!r}", file=sys.stderr)
        with lock:
            times.append(first_s)
            if rounds is not None:
                rounds.asked += 1
                if tries > 1:
                    rounds.lost_s.append(first_s)
                if status != 200:
                    rounds.unanswered.append(f"{number}: {status}")

    with ThreadPoolExecutor(at_once) as askers:
        list(askers.map(one, numbers))
    return times


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--pulls", type=int, default=1000, help="that are to be lost (%(default)s)")
    parser.add_argument("--at-once", type=int, default=24, help="requests (%(default)s)")
    parser.add_argument("--time-scale", type=float, default=2.0, help="speed of the engines' clock (%(default)s)")
    arguments = parser.parse_args()
    at_once, rounds = arguments.at_once, Rounds()
    with tempfile.TemporaryDirectory() as folder:
        config = Path(folder) / "fleet.yaml"
        config.write_text("pools:\n  - {model: qwen2.5-7b, pulls: {enabled: true}}\n")
        words = ["--config", str(config), "--instances", str(SOURCES + TARGETS), "--replicas", "1"]
        words += ["--emulator.peer_pulls", "true", "--emulator.transfer.gb_per_s", LINK_GB_PER_S, "--preset", PRESET]
        words += ["--time-scale", f"{arguments.time_scale:g}", "--scheduling.policy", "dualmap-least-cost"]
        with fleet(words) as url:
            pulling = PullingFleet(url)
            while not all(each["pulls"] for each in pulling.instances()):
                time.sleep(0.2)
            pulling.only(pulling.targets)
            computed = ask_all(pulling, range(1_000_000, 1_000_000 + 2 * at_once), at_once, None)
            first, number = pulling.lost_pulls(), 0
            while rounds.lost < arguments.pulls:
                kills, asked = (number // at_once) % 4 != 1, range(number, number + at_once)
                number += at_once
                pulling.only(pulling.sources)
                time.sleep(NOTICED_S)
                ask_all(pulling, asked, at_once, None)
                pulling.only(pulling.targets)
                if kills:
                    death = {"abruptly": True, "revive_after_s": 0.2}
                    timer = threading.Timer(KILLED_AFTER_S, pulling.order, (pulling.sources, "/emulator/die", death))
                    timer.start()
                else:
                    pulling.order(pulling.sources, "/emulator/peer/stall", {"count": 1_000_000})
                before = len(rounds.lost_s)
                ask_all(pulling, asked, at_once, rounds)
                if not kills:
                    pulling.order(pulling.sources, "/emulator/peer/stall", {"count": 0})
                rounds.lost = round(pulling.lost_pulls() - first)
                how = "killed" if kills else "stopped"
                slowest_s = max(rounds.lost_s[before:], default=0.0)
                told = (
                    f"{how}: {rounds.lost} pulls lost so far in {rounds.asked} requests, the slowest {slowest_s:.1f} s"
                )
                print(told, file=sys.stderr, flush=True)
            booked = pulling.booked()
    return report(rounds, computed, booked)


def report(rounds: Rounds, computed: list[float], booked: list[str]) -> int:
    compute_s = quantile(sorted(computed), 0.5)
    added = sorted(max(0.0, each - compute_s) for each in rounds.lost_s)
    shares = [quantile(added, share) / compute_s for share in (0.5, 0.9, 0.99)]
    unanswered = len(rounds.unanswered)
    print(f"{rounds.lost} pulls lost in {rounds.asked} requests; {unanswered} not answered; left booked: {booked}")
    p50, p90, p99 = shares
    print(f"computing: {compute_s:.2f} s (P50); a lost pull adds {p50:.2f}, {p90:.2f}, {p99:.2f} of it (P50, P90, P99)")
    return int(bool(rounds.unanswered or booked or shares[2] > MOST_ADDED))


if __name__ == "__main__":
    sys.exit(main())
