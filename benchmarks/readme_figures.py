"""The table and the picture of the README, from one run of the simulator.

python benchmarks/readme_figures.py             # run it: a minute, and write docs/research/results/readme.json
python benchmarks/readme_figures.py --from      # write table and picture again from that file
"""

from __future__ import annotations

import argparse
import json
import re
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

from simulation.laboratory.provenance import Provenance

ROOT = Path(__file__).resolve().parents[1]
RESULTS = ROOT / "docs" / "research" / "results" / "readme.json"
PICTURE = ROOT / "docs" / "images" / "hit-rate-and-balance.svg"
README = ROOT / "README.md"

POLICIES = (
    "dualmap-least-cost", "dualmap", "min-ttft", "dynamo", "preble", "llm-d", "sglang", "least-loaded", "round-robin",
    "cache-affinity",
)  # fmt: skip
RUN = (
    "simulate", "--trace", "toolagent", "--rate", "10.5", "--instances", "8", "--requests", "4000", "--skip", "500",
    "--max-input-tokens", "20480", "--policy", ",".join(POLICIES),
)  # fmt: skip
_BLOCK = re.compile(r"(<!-- readme_figures -->\n).*?(<!-- end -->)", re.DOTALL)
WIDTH, HEIGHT, LEFT, RIGHT, BOTTOM, TOP = 800, 380, 66, 520, 52, 20


def measured() -> dict[str, Any]:
    """Run the simulator, and keep of its results what is shown."""
    made = Provenance.here(RUN)
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "results.json"
        subprocess.run([sys.executable, "-m", "cli.main", *RUN, "--json", str(path)], check=True, cwd=ROOT)
        runs = json.loads(path.read_text())
    rows = {
        run["policy"]: {
            "on_time": run["effective_capacity"], "hit_rate": run["hit_rate"], "load_cv": run["load_cv"],
            "ttft_p50_s": run["ttft_s"]["p50"], "ttft_p99_s": run["ttft_s"]["p99"],
        }
        for run in runs
    }  # fmt: skip
    return {"commit": made.commit, "date": made.date, "command": made.command, "policies": rows}


def table(results: dict[str, Any]) -> str:
    rows = sorted(results["policies"].items(), key=lambda entry: (-entry[1]["on_time"], entry[1]["ttft_p99_s"]))
    lines = ["| policy | on time | first token P50, P99 | found in cache |", "| --- | ---: | ---: | ---: |"]
    for policy, row in rows:
        name = {"dualmap-least-cost": "**`dualmap-least-cost`**, the default", "dualmap": "`dualmap`, the paper's"}
        lines.append(
            f"| {name.get(policy, f'`{policy}`')} | {row['on_time']:.1%} |"
            f" {row['ttft_p50_s']:.2f} s, {row['ttft_p99_s']:.1f} s | {row['hit_rate']:.1%} |"
        )
    return "\n".join([*lines, "", f"Commit {results['commit']}, {results['date']}:\n`{results['command']}`"])


def picture(results: dict[str, Any]) -> str:
    """Hit rate to the right, evenness of load upwards: the better corner is the upper right one."""
    rows = results["policies"]
    hits, loads = [row["hit_rate"] for row in rows.values()], [row["load_cv"] for row in rows.values()]
    low_hit, high_hit = min(hits) - 0.02, max(hits) + 0.006
    low_cv, high_cv = min(loads) - 0.07, max(loads) + 0.08

    def place(row: dict[str, float]) -> tuple[float, float]:
        across = (row["hit_rate"] - low_hit) / (high_hit - low_hit)
        up = (row["load_cv"] - low_cv) / (high_cv - low_cv)
        return LEFT + across * (RIGHT - LEFT - 10), TOP + up * (HEIGHT - TOP - BOTTOM)

    parts = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {HEIGHT}" font-family="system-ui, sans-serif" font-size="13">',
        "<style>:root{--ink:#1f2937;--dim:#6b7280;--line:#d6dae1;--ours:#2f6fe4;--paper:#c26a00}"
        "@media(prefers-color-scheme:dark){:root{--ink:#e5e9f0;--dim:#8e99ab;--line:#333c4a;--ours:#74a7ff;--paper:#f2ad4c}}"
        "text{fill:var(--ink)}.axis{fill:var(--dim)}</style>",
        f'<path d="M{LEFT} {TOP}V{HEIGHT - BOTTOM}H{RIGHT}" fill="none" stroke="var(--line)"/>',
    ]
    for percent in range(round(100 * low_hit) + 1, round(100 * high_hit), 2):
        x, _ = place({"hit_rate": percent / 100, "load_cv": low_cv})
        parts.append(
            f'<text class="axis" x="{x:.0f}" y="{HEIGHT - BOTTOM + 18}" text-anchor="middle">{percent}%</text>'
        )
    for step in range(round(10 * low_cv) + 1, round(10 * high_cv), 2):
        _, y = place({"hit_rate": low_hit, "load_cv": step / 10})
        parts.append(f'<text class="axis" x="{LEFT - 8}" y="{y + 4:.0f}" text-anchor="end">{step / 10:.1f}</text>')
    parts.append(
        f'<text class="axis" x="{(RIGHT + LEFT) // 2}" y="{HEIGHT - 8}" text-anchor="middle">prompt tokens found in a cache →</text>'
    )
    parts.append(
        f'<text class="axis" x="16" y="{HEIGHT // 2 - 10}" text-anchor="middle" transform="rotate(-90 16 {HEIGHT // 2 - 10})">variation of load: even is up →</text>'
    )
    column_y = 0.0
    for policy, row in sorted(rows.items(), key=lambda entry: entry[1]["load_cv"]):
        x, y = place(row)
        fill = {"dualmap-least-cost": "var(--ours)", "dualmap": "var(--paper)"}.get(policy, "var(--dim)")
        bold = ' font-weight="700"' if fill != "var(--dim)" else ""
        label_x, label_y = x + 12, y + 4
        if x > LEFT + 200:  # a crowd: names in a column beside it, with lines to them
            label_x, label_y = RIGHT + 24, max(y + 4, column_y + 19)
            column_y = label_y
            parts.append(f'<path d="M{x:.0f} {y:.0f}L{RIGHT + 18} {label_y - 4:.0f}" stroke="var(--line)"/>')
        parts.append(f'<circle cx="{x:.0f}" cy="{y:.0f}" r="{7 if bold else 5}" fill="{fill}"/>')
        parts.append(
            f'<text x="{label_x:.0f}" y="{label_y:.0f}"{bold}>{policy}'
            f' <tspan class="axis">{row["on_time"]:.1%} on time</tspan></text>'
        )
    return "\n".join([*parts, "</svg>\n"])


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--from", dest="again", action="store_true", help="run nothing: write from the kept results")
    if not parser.parse_args().again:
        RESULTS.parent.mkdir(parents=True, exist_ok=True)
        RESULTS.write_text(json.dumps(measured(), indent=1) + "\n", "utf-8")
    results = json.loads(RESULTS.read_text("utf-8"))
    PICTURE.write_text(picture(results), "utf-8")
    shown = _BLOCK.sub(lambda found: f"{found[1]}{table(results)}\n{found[2]}", README.read_text("utf-8"))
    README.write_text(shown, "utf-8")


if __name__ == "__main__":
    main()
