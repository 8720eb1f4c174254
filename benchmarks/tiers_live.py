"""Hits of a live fleet whose instances keep evicted blocks in host memory, beside the simulator's.

    python benchmarks/tiers_live.py [--requests 900] [--skip 300] [--rate 6] [--time-scale 2]

Eight emulated instances with 184,000 tokens each on the device, 800,000 in host memory and KV events are asked about
300 documents of 12,288 tokens, 2.5 times what the devices keep, by Zipf's law. The fleet runs twice: once with
``pools.kv_tiers``, once without, so that blocks in host memory get no credit; its engines load from there all the same.
Then the simulator runs. Hits are the cached part of prompt tokens as instances report it, on the device or loaded. The
exit code is 1 where hits of the fleet that knows its tiers are more than a point from the simulator's, or where half of
the instances are expected to load a document in a time that is more than a fifth from what their engines take.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import tempfile
import urllib.request
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from live_vs_simulated import fleet

from dualmap.scheduling.estimates.kv_tiers import LoadPrice
from dualmap.scheduling.settings import SchedulingSettings
from dualmap.simulation.engine.presets import find_preset
from dualmap.simulation.virtual_time.scenario import Scenario
from dualmap.simulation.virtual_time.simulate import simulate
from dualmap.simulation.workload.sources import TraceSource
from dualmap.simulation.workload.trace_figures import quantile

INSTANCES, DEVICE_TOKENS, HOST_TOKENS = 8, 184_000, 800_000
HIT_POINTS = 1.0
DOCUMENT_TOKENS, LOAD_SHARE = 12_288, 0.2
EVENTS_PORT_OFFSET = 100
PRESET = f"qwen2.5-7b-910b4-tp1:kv_capacity_tokens={DEVICE_TOKENS}"
WITH_HOST = f"{PRESET}+host_kv_tokens={HOST_TOKENS}"


@dataclass(frozen=True)
class Row:
    """One run."""

    name: str
    hit_rate: float
    ttft_p50_s: float
    ttft_p90_s: float
    expected: str = "-"
    load_errors: tuple[float, ...] = ()
    """Of each instance, how far the expected time of a load is from what its engine takes, as a share of that."""

    def shown(self) -> str:
        figures = f"{self.hit_rate:.1%} | {self.ttft_p50_s:.2f}, {self.ttft_p90_s:.2f} s"
        return f"| {self.name} | {figures} | {self.expected} |"


def main() -> int:
    arguments = _arguments()
    live = [_live(arguments, knows_tiers=knows_tiers) for knows_tiers in (True, False)]
    simulated = _simulated(arguments)
    print("| fleet | cached share of prompt tokens | TTFT P50, P90 | expected cached tokens |")
    print("| --- | ---: | ---: | --- |")
    for row in (*live, simulated):
        print(row.shown())
    points = 100 * abs(live[0].hit_rate - simulated.hit_rate)
    print(f"live beside simulated: {points:.2f} points (limit {HIT_POINTS:g})")
    error, most = (quantile(sorted(live[0].load_errors), share) for share in (0.5, 1.0))
    print(f"time of a load beside the engine's own: {error:.1%} off (P50), {most:.1%} at most (limit {LOAD_SHARE:.0%})")
    return int(points > HIT_POINTS or error > LOAD_SHARE)


def _arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--requests", type=int, default=900)
    parser.add_argument("--skip", type=int, default=300)
    parser.add_argument("--rate", type=float, default=6.0, help="requests in a second of the engines (%(default)s)")
    parser.add_argument("--time-scale", type=float, default=2.0)
    return parser.parse_args()


def _live(arguments: argparse.Namespace, *, knows_tiers: bool) -> Row:
    pool: dict[str, Any] = {"name": "default", "kv_events": "instances"}
    if knows_tiers:
        pool["kv_tiers"] = {"host_tokens": HOST_TOKENS}
    with tempfile.TemporaryDirectory() as folder:
        config, report = Path(folder) / "fleet.yaml", Path(folder) / "replay.json"
        config.write_text(json.dumps({"pools": [pool]}))
        words = ["--config", str(config), "--instances", str(INSTANCES), "--replicas", "2", "--preset", WITH_HOST]
        words += ["--emulator.kv_events_port_offset", str(EVENTS_PORT_OFFSET), "--emulator.stream_interval", "64"]
        words += ["--time-scale", str(arguments.time_scale)]
        with fleet(words) as url:
            _replay(arguments, url, report)
            errors = _load_errors(url, arguments.time_scale) if knows_tiers else ()
        found = json.loads(report.read_text())
    name = "live, tiers known" if knows_tiers else "live, no credit for host memory"
    return replace(_row(name, found), load_errors=errors)


def _load_errors(url: str, time_scale: float) -> tuple[float, ...]:
    with urllib.request.urlopen(f"{url}/admin/instances", timeout=60) as answer:
        instances = json.load(answer)["instances"]
    (engine_tier,) = find_preset(WITH_HOST).engine.instance_tiers().tiers
    takes_s = engine_tier.price.load_s(DOCUMENT_TOKENS) / time_scale
    prices = [LoadPrice(**each["tiers"][0]["price"]) for each in instances]
    return tuple(abs(price.load_s(DOCUMENT_TOKENS) / takes_s - 1) for price in prices)


def _replay(arguments: argparse.Namespace, url: str, report: Path) -> None:
    words = ["replay", "--quiet", "--url", url, "--trace", "documents", "--requests", str(arguments.requests)]
    words += ["--rate", str(arguments.rate), "--skip", str(arguments.skip), "--send-as", "token-ids"]
    words += ["--time-scale", str(arguments.time_scale), "--json", str(report)]
    ended = subprocess.run([sys.executable, "-m", "dualmap", *words], check=False, stdout=subprocess.DEVNULL)
    if not report.exists():
        raise RuntimeError(f"dualmap replay ended with {ended.returncode}")


def _row(name: str, found: dict[str, Any]) -> Row:
    error = found["cached_error"] or {}
    within = f"{error['within_128']:.1%} within 128" if error else "-"
    return Row(name, found["hit_rate"], found["ttft_s"]["p50"], found["ttft_s"]["p90"], within)


def _simulated(arguments: argparse.Namespace) -> Row:
    engine = find_preset(WITH_HOST).engine
    trace = TraceSource("documents", arguments.requests).load(arguments.rate)
    scenario = Scenario(
        SchedulingSettings(), engine, INSTANCES, skip_requests=arguments.skip, instance_name="instance-{}"
    )
    result = simulate(trace, scenario)
    return Row("simulated, tiers known", result.hit_rate, result.ttft_s.p50, result.ttft_s.p90)


if __name__ == "__main__":
    sys.exit(main())
