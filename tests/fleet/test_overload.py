"""An overload is seen while it happens, by everybody who looks, also where no client ever gets a token."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import threading
import urllib.error
import urllib.request
from collections import Counter
from pathlib import Path

from tests.fleet.fleet_process import QUICK, Fleet, running_fleet, until

CLIENTS = 24


def left(fleet: Fleet, number: int, after_s: float, seen: Counter[str]) -> None:
    """A client that streams, and leaves after a while without an answer."""
    body = {"model": fleet.model, "prompt": f"{number} " * 400, "max_tokens": 4, "stream": True}
    headers = {"content-type": "application/json"}
    request = urllib.request.Request(f"{fleet.endpoint}/v1/completions", json.dumps(body).encode(), headers)
    try:
        with urllib.request.urlopen(request, timeout=after_s) as answer:
            answer.read()
        seen["answered"] += 1
    except (TimeoutError, urllib.error.URLError):
        seen["left"] += 1


def counted(fleet: Fleet) -> dict[str, float]:
    """The sums of the endpoint's counters, over both replicas."""
    with urllib.request.urlopen(f"{fleet.endpoint}/metrics", timeout=60) as answer:
        lines = answer.read().decode().splitlines()
    return {name: float(value) for name, _, value in (line.rpartition(" ") for line in lines if line[:1] != "#")}


def test_clients_that_time_out_are_late_and_the_page_top_health_and_metrics_say_so(tmp_path: Path) -> None:
    options = ("--replicas", "2", "--workers", "1", "--scheduling.slo_ttft_s", "1", *QUICK)
    with running_fleet(tmp_path, options) as fleet:
        for name in fleet.instances():
            fleet.emulator(name, "/emulator/pause", {})
        seen = Counter[str]()
        clients = [threading.Thread(target=left, args=(fleet, number, 4.0, seen)) for number in range(CLIENTS)]
        for each in clients:
            each.start()
        until(lambda: counted(fleet).get('dualmap_overdue_requests{pool="default"}') == CLIENTS, "all are overdue")
        for each in clients:
            each.join()
        assert seen == {"left": CLIENTS}

        late = 'dualmap_slo_total{pool="default",slo="missed"}'
        until(lambda: counted(fleet).get('dualmap_overdue_requests{pool="default"}') == 0, "none is overdue any more")
        figures = counted(fleet)
        assert (figures[late], figures['dualmap_slo_total{pool="default",slo="met"}']) == (CLIENTS, 0)
        health = until(lambda: (page := fleet.get("/health"))["status"] == "late" and page, "health says it")
        assert "are not on time" in health["pools"]["default"]["problem"]

        def first_line() -> str:
            return fleet.dualmap("top", "--once", "--store.url", fleet.store_url).splitlines()[0]

        until(lambda: "100 % of requests are not on time" in first_line(), "top says it first")
        for name in fleet.instances():
            fleet.emulator(name, "/emulator/resume", {})


def test_top_says_that_nobody_lives_where_all_but_the_store_is_dead(tmp_path: Path) -> None:
    with running_fleet(tmp_path, (*QUICK, "--replicas", "1", "--workers", "1", "--instances", "1")) as fleet:
        os.kill(fleet.process.pid, signal.SIGSTOP)  # or it would start them again
        try:
            for child, pid in fleet.pids().items():
                if child.startswith(("router", "worker")):
                    with contextlib.suppress(ProcessLookupError):
                        os.kill(pid, signal.SIGKILL)

            def told() -> str:
                return fleet.dualmap("top", "--once", "--store.url", fleet.store_url)

            page = until(lambda: (text := told()).startswith("Nobody lives: ") and text, "it says that nobody lives")
            assert "dualmap router" in page
            assert "instance-1" in page
        finally:
            os.kill(fleet.process.pid, signal.SIGCONT)
