"""The simulated figures of the README and of the core comparison: their runs, their tables and the picture.

python benchmarks/published_figures.py             # run all of it: about eight minutes on two cores
python benchmarks/published_figures.py --from      # write tables and picture again from docs/research/results
"""

from __future__ import annotations

import argparse
import json
import re
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path
from statistics import fmean
from typing import Any

from dualmap.research.provenance import Provenance

ROOT = Path(__file__).resolve().parents[1]
RESULTS = ROOT / "docs" / "research" / "results"
PICTURE = ROOT / "docs" / "images" / "on-time-and-p99.svg"
README = ROOT / "README.md"
EVALUATION = ROOT / "docs" / "research" / "evaluation.md"

POLICIES = (
    "dualmap-least-cost", "dualmap", "min-ttft", "dynamo", "preble", "llm-d", "sglang", "least-loaded", "round-robin",
    "cache-affinity",
)  # fmt: skip
RUN = (
    "simulate", "--trace", "toolagent", "--rate", "10.5", "--instances", "8", "--requests", "4000", "--skip", "500",
    "--max-input-tokens", "20480", "--policy", ",".join(POLICIES),
)  # fmt: skip

CORE_POLICIES = ("dualmap-least-cost", "dualmap", "min-ttft", "dynamo", "preble", "llm-d-latency", "sglang")
CORE_RATES = {"toolagent": (10.5, 13.7), "conversation": (6.2, 8.1), "agents": (0.5, 0.65)}
"""Requests a second: where the default begins to be late, and 1.3 times as many."""
CORE_ORDERS = {"deadline": "by deadline", "fifo": "first come, first served"}
CORE_SEEDS = (1, 2)

CLOSED_POLICIES = ("dualmap-least-cost", "dualmap", "llm-d", "llm-d-latency", "preble", "dynamo", "sglang")
CLOSED_CLIENTS = (260, 340)
"""Agents at work on eight instances: some are late with the first number, and most policies with the second."""
CLOSED_SEEDS = (1,)

README_SHOWS = ("on_time", "both_slos", "ttft_p50_s", "ttft_p99_s", "hit_rate")
CORE_SHOWS = ("on_time", "both_slos", "ttft_p99_s")
CLOSED_SHOWS = ("answers_per_s", "on_time", "ttft_p99_s", "hit_rate")
"""The figures that each page shows of a run, which are all that is kept."""

WIDTH, ROW, NAMES, GAP = 800, 27, 170, 36


def core_run(trace: str, order: str, seed: int) -> tuple[str, ...]:
    # The sessions of agents are long: cut, they would not fill the KV memory.
    longest = () if trace == "agents" else ("--max-input-tokens", "20480")
    return (
        "simulate", "--trace", trace, "--rate", ",".join(map(str, CORE_RATES[trace])), "--instances", "8",
        "--requests", "1500", "--skip", "300", *longest, "--policy", ",".join(CORE_POLICIES), "--seed", str(seed),
        "--scheduling.queue_order", order,
    )  # fmt: skip


def closed_run(clients: int, order: str, seed: int) -> tuple[str, ...]:
    return (
        "simulate", "--trace", "tasks:requests=12000", "--concurrency", str(clients), "--seconds", "150", "--skip-s",
        "30", "--instances", "8", "--preset", "qwen2.5-7b-910b4:kv_capacity_tokens=200000", "--policy",
        ",".join(CLOSED_POLICIES), "--seed", str(seed), "--scheduling.queue_order", order,
    )  # fmt: skip


def simulated(words: Sequence[str]) -> list[dict[str, Any]]:
    """Run the simulator; its results, with what is shown of each."""
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "results.json"
        command = [sys.executable, "-m", "dualmap", *words, "--quiet", "--json", str(path)]
        subprocess.run(command, check=True, cwd=ROOT, stdout=subprocess.DEVNULL)
        runs = json.loads(path.read_text())
    return [
        {
            "policy": run["policy"], "rate_per_s": run["rate_per_s"], "on_time": run["effective_capacity"],
            "both_slos": run["on_time"]["both_slos"], "answers_per_s": run["answers_per_s"],
            "hit_rate": run["hit_rate"], "ttft_p50_s": run["ttft_s"]["p50"], "ttft_p99_s": run["ttft_s"]["p99"],
        }
        for run in runs
    ]  # fmt: skip


def readme_results() -> dict[str, Any]:
    made = Provenance.here(RUN)
    rows = {run["policy"]: shown(run, README_SHOWS) for run in simulated(RUN)}
    return {"commit": made.commit, "date": made.date, "command": made.command, "policies": rows}


def core_results() -> dict[str, Any]:
    made = Provenance.here(core_run("toolagent", "deadline", 1))
    runs = [
        {
            "trace": trace, "order": order, "seed": seed, "rate": CORE_RATES[trace][number // len(CORE_POLICIES)],
            "policy": run["policy"], **shown(run, CORE_SHOWS),
        }
        for trace in CORE_RATES
        for order in CORE_ORDERS
        for seed in CORE_SEEDS
        for number, run in enumerate(by_rate(simulated(core_run(trace, order, seed))))
    ]  # fmt: skip
    return {"commit": made.commit, "date": made.date, "command": made.command, "runs": runs}


def closed_results() -> dict[str, Any]:
    made = Provenance.here(closed_run(CLOSED_CLIENTS[0], "deadline", 1))
    runs = [
        {"clients": clients, "order": order, "seed": seed, "policy": run["policy"], **shown(run, CLOSED_SHOWS)}
        for clients in CLOSED_CLIENTS
        for order in CORE_ORDERS
        for seed in CLOSED_SEEDS
        for run in simulated(closed_run(clients, order, seed))
    ]
    return {"commit": made.commit, "date": made.date, "command": made.command, "runs": runs}


def shown(run: dict[str, Any], names: Sequence[str]) -> dict[str, Any]:
    return {name: run[name] for name in names}


def lines(results: dict[str, Any]) -> str:
    """The results as JSON, a line for each run."""
    parts = []
    for name, value in results.items():
        if isinstance(value, list):
            text = "[\n  " + ",\n  ".join(map(json.dumps, value)) + "\n ]"
        elif isinstance(value, dict):
            text = (
                "{\n  " + ",\n  ".join(f"{json.dumps(key)}: {json.dumps(own)}" for key, own in value.items()) + "\n }"
            )
        else:
            text = json.dumps(value)
        parts.append(f" {json.dumps(name)}: {text}")
    return "{\n" + ",\n".join(parts) + "\n}\n"


def by_rate(runs: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """The runs of the lower rate first: a trace that is cut short has nearly the rate that was asked for."""
    return sorted(runs, key=lambda run: run["rate_per_s"])


def table(results: dict[str, Any]) -> str:
    rows = in_order(results)
    lines = [
        "| policy | on time | both | first token P50, P99 | found in cache |",
        "| --- | ---: | ---: | ---: | ---: |",
    ]
    for policy, row in rows:
        name = {"dualmap-least-cost": "**`dualmap-least-cost`**, the default", "dualmap": "`dualmap`, the paper's"}
        lines.append(
            f"| {name.get(policy, f'`{policy}`')} | {row['on_time']:.1%} | {row['both_slos']:.1%} |"
            f" {row['ttft_p50_s']:.2f} s, {row['ttft_p99_s']:.1f} s | {row['hit_rate']:.1%} |"
        )
    return "\n".join([*lines, "", f"Commit {results['commit']}, {results['date']}:\n`{results['command']}`"])


def picture(results: dict[str, Any]) -> str:
    """A row for each policy: what is on time to the left, the 99th percentile of the first token to the right."""
    rows = in_order(results)
    longest_s = max(row["ttft_p99_s"] for _, row in rows)
    bars = (WIDTH - NAMES - GAP) // 2
    height = ROW * (len(rows) + 1) + 6
    parts = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {height}" font-family="system-ui, sans-serif" font-size="13">',
        "<style>:root{--ink:#1f2937;--dim:#6b7280;--bar:#c3c9d4;--ours:#2f6fe4;--paper:#c26a00}"
        "@media(prefers-color-scheme:dark){:root{--ink:#e5e9f0;--dim:#8e99ab;--bar:#465064;--ours:#74a7ff;--paper:#f2ad4c}}"
        "text{fill:var(--ink)}.axis{fill:var(--dim)}</style>",
        f'<text class="axis" x="{NAMES}" y="17">requests on time (simulated): longer is better</text>',
        f'<text class="axis" x="{NAMES + bars + GAP}" y="17">P99 of the first token: shorter is better</text>',
    ]
    for number, (policy, row) in enumerate(rows, 1):
        fill = {"dualmap-least-cost": "var(--ours)", "dualmap": "var(--paper)"}.get(policy, "var(--bar)")
        bold = ' font-weight="700"' if policy in ("dualmap-least-cost", "dualmap") else ""
        y = ROW * number
        parts.append(f'<text x="{NAMES - 10}" y="{y + 15}" text-anchor="end"{bold}>{policy}</text>')
        for left, share, label in (
            (NAMES, row["on_time"], f"{row['on_time']:.1%}"),
            (NAMES + bars + GAP, row["ttft_p99_s"] / longest_s, f"{row['ttft_p99_s']:.1f} s"),
        ):
            length = max(2, round(share * (bars - 60)))
            parts.append(f'<rect x="{left}" y="{y + 3}" width="{length}" height="{ROW - 9}" rx="2" fill="{fill}"/>')
            parts.append(f'<text class="axis" x="{left + length + 6}" y="{y + 15}">{label}</text>')
    return "\n".join([*parts, "</svg>\n"])


def in_order(results: dict[str, Any]) -> list[tuple[str, dict[str, Any]]]:
    return sorted(results["policies"].items(), key=lambda entry: (-entry[1]["on_time"], entry[1]["ttft_p99_s"]))


def core_tables(results: dict[str, Any]) -> str:
    """A table for each queue order: the mean over the seeds, the best of each column in bold."""
    parts = []
    for order, words in CORE_ORDERS.items():
        cases = [(trace, rate) for trace, rates in CORE_RATES.items() for rate in rates]
        found = {
            (policy, case): [
                run for run in results["runs"]
                if (run["policy"], run["order"], (run["trace"], run["rate"])) == (policy, order, case)
            ]
            for policy in CORE_POLICIES for case in cases
        }  # fmt: skip
        on_time = {key: round(100 * fmean(run["on_time"] for run in runs), 1) for key, runs in found.items()}
        both = {key: 100 * fmean(run["both_slos"] for run in runs) for key, runs in found.items()}
        late_s = {key: fmean(run["ttft_p99_s"] for run in runs) for key, runs in found.items()}
        parts += [f"**Queues {words}**", ""]
        parts.append(f"| policy | {' | '.join(f'{trace} at {rate:g}/s' for trace, rate in cases)} |")
        parts.append(f"| --- |{' ---: |' * len(cases)}")
        for policy in CORE_POLICIES:
            cells = []
            for case in cases:
                best = max(on_time[other, case] for other in CORE_POLICIES)
                share = f"{on_time[policy, case]:.1f}%"
                text = f"**{share}**" if on_time[policy, case] == best else share
                cells.append(f"{text}, {both[policy, case]:.1f}%, {late_s[policy, case]:.1f} s")
            parts.append(f"| `{policy}` | {' | '.join(cells)} |")
        parts.append("")
    seeds = " and ".join(map(str, CORE_SEEDS))
    parts.append(
        f"Commit {results['commit']}, {results['date']}, seeds {seeds}, and with the other traces (agents without a longest input) and `fifo` for `deadline`:\n`{results['command']}`"
    )
    return "\n".join(parts)


def closed_table(results: dict[str, Any]) -> str:
    """A row for each policy and order, the mean over the seeds; the best of each column in bold."""
    rows: dict[tuple[str, str], dict[int, dict[str, float]]] = {
        (policy, order): {} for policy in CLOSED_POLICIES for order in CORE_ORDERS
    }
    for (policy, order), cells in rows.items():
        for clients in CLOSED_CLIENTS:
            own = [
                run
                for run in results["runs"]
                if (run["policy"], run["order"], run["clients"]) == (policy, order, clients)
            ]
            cells[clients] = {name: fmean(run[name] for run in own) for name in CLOSED_SHOWS}
    heads = [
        head for clients in CLOSED_CLIENTS for head in (f"{clients} agents: turns/s", "on time", "P99", "in cache")
    ]
    parts = [f"| policy | order | {' | '.join(heads)} |", f"| --- | --- |{' ---: |' * len(heads)}"]
    for (policy, order), cells in rows.items():
        texts = []
        for clients, cell in cells.items():
            for name, form in (("answers_per_s", "{:.1f}"), ("on_time", "{:.1%}")):
                best = max(other[clients][name] for other in rows.values())
                text = form.format(cell[name])
                texts.append(f"**{text}**" if form.format(best) == text else text)
            texts += [f"{cell['ttft_p99_s']:.1f} s", f"{cell['hit_rate']:.1%}"]
        parts.append(f"| `{policy}` | {order} | {' | '.join(texts)} |")
    seeds = "seeds " + " and ".join(map(str, CLOSED_SEEDS)) if len(CLOSED_SEEDS) > 1 else f"seed {CLOSED_SEEDS[0]}"
    return "\n".join([*parts, "", (
        f"Commit {results['commit']}, {results['date']}, {seeds}, and with the other number of clients and `fifo`:\n"
        f"`{results['command']}`"
    )])  # fmt: skip


def write(page: Path, name: str, content: str) -> None:
    """Put the content into the page's block of that name."""
    block = re.compile(rf"(<!-- {name} -->\n).*?(<!-- end -->)", re.DOTALL)
    page.write_text(block.sub(lambda found: f"{found[1]}{content}\n{found[2]}", page.read_text("utf-8"), 1), "utf-8")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--from", dest="again", action="store_true", help="run nothing: write from the kept results")
    parser.add_argument("--only", choices=("readme", "core", "closed"), help="one of the three")
    options = parser.parse_args()
    for name, measured in (("readme", readme_results), ("core", core_results), ("closed", closed_results)):
        if options.only in (None, name):
            path = RESULTS / f"{name}.json"
            if not options.again:
                path.write_text(lines(measured()), "utf-8")
            results = json.loads(path.read_text("utf-8"))
            if name == "readme":
                PICTURE.write_text(picture(results), "utf-8")
                write(README, "simulated", table(results))
            else:
                tables = core_tables(results) if name == "core" else closed_table(results)
                write(EVALUATION, name, tables)


if __name__ == "__main__":
    main()
