"""Agents in a closed loop on a live fleet with and without admission of runs, where one of two routers is killed.

    python benchmarks/parked_runs.py [--agents 85] [--seconds 240] [--skip-s 60] [--time-scale 2] [--seed 2]

Two emulated instances hold the contexts of about 65 of the agents. Each agent thinks between its turns and begins a new
run when one ends; its turns name their session. After half of the time router 1 is killed with SIGKILL, and started
again by its parent. The fleet runs twice: with ``scheduling.admit_runs`` and without.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import tempfile
import time
import urllib.request
from pathlib import Path
from typing import Any

from dualmap.research.chaos.fleet_process import FleetProcess

INSTANCES, DEVICE_TOKENS = 2, 200_000
READY_S = 60.0


def main() -> int:
    arguments = _arguments()
    print("| runs wait | turns/s | on time | both SLOs | cached | TTFT P50, P90, P99 | failed | wait at the end |")
    print("| --- | ---: | ---: | ---: | ---: | ---: | ---: | ---: |")
    for admits in (True, False):
        print(_row(admits, _measured(arguments, admits=admits)), flush=True)
    return 0


def _arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--agents", type=int, default=85)
    parser.add_argument("--seconds", type=float, default=240.0, help="of the engines (%(default)s)")
    parser.add_argument("--skip-s", type=float, default=60.0, help="left out of the figures (%(default)s)")
    parser.add_argument("--time-scale", type=float, default=2.0)
    parser.add_argument("--seed", type=int, default=2)
    return parser.parse_args()


def _measured(arguments: argparse.Namespace, *, admits: bool) -> dict[str, Any]:
    """The report of a replay, with the ledger of runs at its end."""
    scale = ("--time-scale", str(arguments.time_scale))
    with tempfile.TemporaryDirectory() as folder:
        report = Path(folder) / "replay.json"
        words = ["--port", "0", "--instances", str(INSTANCES), "--replicas", "2", *scale]
        words += ["--preset", f"qwen2.5-7b-910b4:kv_capacity_tokens={DEVICE_TOKENS}"]
        words += ["--scheduling.admit_runs", str(admits).lower(), "--emulator.stream_interval", "16"]
        fleet = FleetProcess.start(Path(folder), words)
        try:
            _wait_until_ready(fleet)
            replay = ["replay", "--quiet", "--url", fleet.endpoint, "--trace", "tasks:requests=9000", *scale]
            replay += ["--seed", str(arguments.seed), "--concurrency", str(arguments.agents)]
            replay += ["--seconds", str(arguments.seconds), "--skip-s", str(arguments.skip_s)]
            replay += ["--send-as", "token-ids", "--json", str(report)]
            running = subprocess.Popen([sys.executable, "-m", "dualmap", *replay], stdout=subprocess.DEVNULL)
            time.sleep(arguments.seconds / arguments.time_scale / 2)
            fleet.kill("router-1")
            running.wait()
            found: dict[str, Any] = json.loads(report.read_text())
            with urllib.request.urlopen(f"{fleet.endpoint}/admin/runs?limit=1", timeout=10) as answer:
                found["ledger"] = json.load(answer)["memory"]
            fleet.stop()
        finally:
            fleet.kill_all()
    return found


def _wait_until_ready(fleet: FleetProcess) -> None:
    deadline_s = time.monotonic() + READY_S
    while not fleet.is_ready:
        if time.monotonic() > deadline_s:
            raise TimeoutError(f"the fleet was not ready within {READY_S:g} s")
        time.sleep(0.2)


def _row(admits: bool, found: dict[str, Any]) -> str:
    first, ledger = found["ttft_s"], found["ledger"]
    figures = (
        f"{found['answers_per_s']:.1f}",
        f"{found['effective_capacity']:.1%}",
        f"{found['both_slos']:.1%}",
        f"{found['hit_rate']:.1%}",
        f"{first['p50']:.2f}, {first['p90']:.2f}, {first['p99']:.1f} s",
        f"{found['failed']} of {found['sent']}",
        f"{ledger['waiting_turns']}",
    )
    return f"| {'yes' if admits else 'no'} | {' | '.join(figures)} |"


if __name__ == "__main__":
    sys.exit(main())
