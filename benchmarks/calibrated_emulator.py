"""Does an emulator calibrated from a server answer as the server does? The same replays against both.

    python benchmarks/calibrated_emulator.py http://127.0.0.1:8000 [--requests 80] [--rate 3] [--rounds 2]
    python benchmarks/calibrated_emulator.py http://127.0.0.1:8000 --preset measured.yaml ...   (calibrated before)

Runs ``dualmap calibrate`` on the server, starts ``dualmap emulate`` with what it wrote, and replays a trace as token
ids through the server and the emulator in turns, each round with other texts, so that nothing is cached by the round
before. Agreement: TTFT P50 and P90, medians over the rounds, within 20 %; exit code 1 otherwise. Nothing else should
use the machine: what slows the server between calibration and replay is no property of the model.
"""

from __future__ import annotations

import argparse
import json
import os
import signal
import socket
import statistics
import subprocess
import sys
import tempfile
import time
import urllib.error
import urllib.request
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

LIMIT = 0.20
START_TIMEOUT_S = 60.0
DUALMAP = (sys.executable, "-m", "dualmap")
FIGURES = {"TTFT P50": ("ttft_s", "p50"), "TTFT P90": ("ttft_s", "p90"), "TPOT P50": ("tpot_s", "p50")}
JUDGED = ("TTFT P50", "TTFT P90")


def main() -> int:
    arguments = _arguments()
    reports: dict[str, list[dict[str, Any]]] = {"server": [], "emulator": []}
    with tempfile.TemporaryDirectory() as folder:
        preset: Path = arguments.preset or Path(folder) / "measured.yaml"
        if arguments.preset is None:
            words = ("calibrate", arguments.url, "--out", str(preset), "--repetitions", str(arguments.repetitions))
            subprocess.run([*DUALMAP, *words], check=True)
        print(preset.read_text())
        with _emulator(preset) as emulator_url:
            salt = time.time_ns()
            for number in range(arguments.rounds):
                for name, url in (("server", arguments.url), ("emulator", emulator_url)):
                    report = Path(folder) / f"{name}-{number}.json"
                    _replay(arguments, url, f"{salt}-{number}", report)
                    reports[name].append(json.loads(report.read_text()))
    return _compare(reports)


def _arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("url", help="the server, with nothing else to do")
    parser.add_argument("--preset", type=Path, help="what dualmap calibrate wrote (default: calibrate now)")
    parser.add_argument("--repetitions", type=int, default=5, help="of the calibration")
    parser.add_argument("--trace", default="conversation")
    parser.add_argument("--requests", type=int, default=80)
    parser.add_argument("--max-input-tokens", type=int, default=6000)
    parser.add_argument("--rate", type=float, default=3.0)
    parser.add_argument("--rounds", type=int, default=2)
    return parser.parse_args()


@contextmanager
def _emulator(preset: Path) -> Iterator[str]:
    """The URL of one emulated instance; it stops with the block."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    command = [*DUALMAP, "emulate", "--config", str(preset), "--port", str(port)]
    process = subprocess.Popen(command, stdout=subprocess.DEVNULL)
    url = f"http://127.0.0.1:{port}"
    try:
        _wait_until_healthy(url, process)
        yield url
    finally:
        process.send_signal(signal.SIGTERM)
        process.wait(30)


def _wait_until_healthy(url: str, process: subprocess.Popen[bytes]) -> None:
    deadline_s = time.monotonic() + START_TIMEOUT_S
    while time.monotonic() < deadline_s:
        if process.poll() is not None:
            raise RuntimeError(f"dualmap emulate ended with {process.returncode}")
        try:
            urllib.request.urlopen(f"{url}/health", timeout=2).close()
            return
        except (urllib.error.URLError, OSError):
            time.sleep(0.2)
    raise TimeoutError(f"the emulator at {url} did not answer within {START_TIMEOUT_S:g} s")


def _replay(arguments: argparse.Namespace, url: str, salt: str, report: Path) -> None:
    words = ["replay", "--url", url, "--trace", arguments.trace, "--requests", str(arguments.requests)]
    words += ["--max-input-tokens", str(arguments.max_input_tokens), "--rate", str(arguments.rate), "--salt", salt]
    words += ["--send-as", "token-ids", "--json", str(report), "--quiet"]
    subprocess.run([*DUALMAP, *words], check=True, stdout=subprocess.DEVNULL, env={**os.environ, "COLUMNS": "120"})


def _compare(reports: dict[str, list[dict[str, Any]]]) -> int:
    agree = True
    for label, (figure, quantile) in FIGURES.items():
        found = {name: [row[figure][quantile] for row in rows] for name, rows in reports.items()}
        server, emulator = (statistics.median(found[name]) for name in ("server", "emulator"))
        off = emulator / server - 1
        if label in JUDGED:
            agree = agree and abs(off) <= LIMIT
        rounds = "; ".join(f"{name} {', '.join(f'{1000 * s:.0f}' for s in each)} ms" for name, each in found.items())
        print(f"{label}: {off:+.0%} ({rounds})")
    print(
        f"hit rate: server {reports['server'][-1]['hit_rate']:.1%}, emulator {reports['emulator'][-1]['hit_rate']:.1%}"
    )
    print(f"TTFT P50 and P90 {'agree' if agree else 'DISAGREE'} (limit {LIMIT:.0%})")
    return 0 if agree else 1


if __name__ == "__main__":
    sys.exit(main())
