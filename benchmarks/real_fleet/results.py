"""The results of a comparison: what is kept of each run, and the table and the pictures of all."""

from __future__ import annotations

import json
import shutil
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

import orjson

from dualmap.simulation.figures.plots import Series, lines
from dualmap.simulation.replay.replay_report import ReplayedRequest, ReplayRecord, ReplayReport, summarize_replay
from real_fleet.errors import LackingError

RESULTS, RECORDS, TABLE = "results.json", "records", "table.md"
_MOST_POINTS = 400


@dataclass(frozen=True, slots=True)
class Run:
    """One replay through one router."""

    router: str
    rate_per_s: float | None
    """None: the trace's own times."""
    turn: int
    """The round, from 1."""
    failure: str | None = None
    """Why there are no figures; None: there are."""
    cpu_s: float | None = None
    """CPU seconds of all processes of the router during the replay; None: not measured."""
    on_time: float | None = None
    both_slos: float | None = None
    answers_per_s: float | None = None
    load_error: float | None = None
    """How far expected times of loads from host memory are from what engines took, the median of the instances."""
    p99_lag_s: float | None = None
    """How late the client was: the figures are not to be trusted if it is large."""

    @property
    def records(self) -> str:
        """The name of the file with its requests."""
        return f"{self.turn}-{rate_title(self.rate_per_s)}-{self.router.replace(':', '-')}.jsonl"


@dataclass(frozen=True, slots=True)
class Results:
    """Everything but the requests, which are in a file for each run."""

    provenance: Mapping[str, str]
    """Commit, date and command."""
    machine: Mapping[str, Any]
    machine_sentence: str
    set_up: Mapping[str, str]
    """Sentences on instances, fleet, other routers and load, by subject."""
    slo_ttft_s: float
    slo_tpot_s: float
    skip_requests: int
    time_scale: float
    runs: tuple[Run, ...]
    concurrency: int | None = None
    """Number of clients that were always busy; None: the trace's times, or a rate."""
    skip_s: float = 0.0
    """Time at the start whose requests do not count, too."""

    def write(self, folder: Path) -> None:
        (folder / RESULTS).write_bytes(
            orjson.dumps(asdict(self), option=orjson.OPT_INDENT_2 | orjson.OPT_APPEND_NEWLINE)
        )

    @classmethod
    def read(cls, folder: Path) -> Results:
        kept = json.loads((folder / RESULTS).read_text())
        return cls(**{**kept, "runs": tuple(Run(**run) for run in kept["runs"])})


def joined(folders: Sequence[Path], out: Path) -> Results:
    """The runs of several comparisons as further rounds of the first one; their records go to ``out``.

    Raises:
        LackingError: they were not measured alike.
    """
    parts = [Results.read(folder) for folder in folders]
    alike = [
        (
            part.machine_sentence,
            part.set_up,
            part.slo_ttft_s,
            part.slo_tpot_s,
            part.skip_requests,
            part.time_scale,
            part.concurrency,
            part.skip_s,
        )
        for part in parts
    ]
    if any(other != alike[0] for other in alike):
        raise LackingError("the machine, the set-up or the SLOs differ: these rounds do not belong into one table")
    runs: list[Run] = []
    for part, folder in zip(parts, folders, strict=True):
        before = max((run.turn for run in runs), default=0)
        for run in part.runs:
            runs.append(replace(run, turn=run.turn + before))
            if run.failure is None:
                shutil.copyfile(folder / RECORDS / run.records, out / RECORDS / runs[-1].records)
    made = {key: ", ".join(dict.fromkeys(part.provenance[key] for part in parts)) for key in ("commit", "date")}
    return replace(parts[0], provenance={**parts[0].provenance, **made}, runs=tuple(runs))


@dataclass(frozen=True, slots=True)
class Row:
    """One router at one rate, its rounds pooled."""

    router: str
    rate_per_s: float | None
    runs: tuple[Run, ...]
    report: ReplayReport
    requests: tuple[ReplayedRequest, ...]
    """The requests of all rounds that count."""
    tpot_by_tokens_s: float | None
    """Time after the first token over tokens after the first, of all answers: a long answer counts as one."""
    cpu_per_request_s: float | None


def rows_of(results: Results, folder: Path) -> list[Row]:
    """The rows in order of rate and of routers; a router without a run that succeeded has none."""
    rates = dict.fromkeys(run.rate_per_s for run in results.runs)
    routers = dict.fromkeys(run.router for run in results.runs)
    rows = []
    for rate in rates:
        for router in routers:
            runs = [run for run in results.runs if (run.router, run.rate_per_s) == (router, rate) and not run.failure]
            if runs:
                rows.append(_row(results, router, rate, runs, folder))
    return rows


def _row(results: Results, router: str, rate: float | None, runs: Sequence[Run], folder: Path) -> Row:
    sent = [request for run in runs for request in _requests(folder / RECORDS / run.records)]
    record = ReplayRecord(
        trace="", url="", rate_per_s=rate or 0.0, time_scale=results.time_scale, slo_ttft_s=results.slo_ttft_s,
        skip_requests=results.skip_requests, requests=sent, unsent=0, samples=(), migrations=None,
        slo_tpot_s=results.slo_tpot_s, skip_s=results.skip_s, concurrency=results.concurrency,
    )  # fmt: skip
    counted = tuple(request for request in sent if record.counts(request))
    used = [run.cpu_s for run in runs if run.cpu_s is not None]
    return Row(
        router,
        rate,
        tuple(runs),
        summarize_replay(record),
        counted,
        _tpot_by_tokens_s(counted),
        sum(used) / len(sent) if len(used) == len(runs) else None,
    )


def _requests(path: Path) -> list[ReplayedRequest]:
    return [ReplayedRequest(**orjson.loads(line)) for line in path.read_bytes().splitlines()]


def _tpot_by_tokens_s(requests: Sequence[ReplayedRequest]) -> float | None:
    decoded = [one for one in requests if one.answered and one.tpot_s is not None]
    tokens = sum(one.completion_tokens - 1 for one in decoded)
    return sum((one.tpot_s or 0.0) * (one.completion_tokens - 1) for one in decoded) / tokens if tokens else None


def rate_title(rate_per_s: float | None) -> str:
    return "own-times" if rate_per_s is None else f"{rate_per_s:g}"


# the table -------------------------------------------------------------------------------------------------------
def table(results: Results, rows: Sequence[Row]) -> str:
    """The table of each rate in Markdown, and under it what belongs to every figure."""
    parts = []
    for rate in dict.fromkeys(row.rate_per_s for row in rows):
        title = "At the trace's own times" if rate is None else f"{rate:g} requests a second"
        if results.concurrency is not None:
            title = f"{results.concurrency} clients that are always busy"
        parts.append(f"{title}:\n\n{_rate_table(results, [row for row in rows if row.rate_per_s == rate])}")
    failed = [
        f"- `{run.router}`, round {run.turn}: {run.failure.splitlines()[0]}" for run in results.runs if run.failure
    ]
    if failed:
        parts.append("Without figures:\n\n" + "\n".join(failed))
    late = [run for run in results.runs if (run.p99_lag_s or 0.0) > 0.05 * results.slo_ttft_s]
    if late:
        worst_s = max(run.p99_lag_s or 0.0 for run in late)
        parts.append(
            f"The client was up to {worst_s:.2f} s late (P99) in {len(late)} runs: it was too slow for the rate."
        )
    errors = [run.load_error for run in results.runs if run.load_error is not None]
    if errors:
        parts.append(f"Loads from host memory took what was expected within {max(errors):.0%} (P50 of the instances).")
    parts.append("\n".join(f"- **{subject}**: {said}" for subject, said in under_it(results).items()))
    return "\n\n".join(parts) + "\n"


def under_it(results: Results) -> dict[str, str]:
    made = results.provenance
    return {
        "Machine": results.machine_sentence,
        **results.set_up,
        "Made": f"commit {made['commit']}, {made['date']}: `{made['command']}`",
    }


def _rate_table(results: Results, rows: Sequence[Row]) -> str:
    slo = f"{results.slo_ttft_s:g} s"
    closed = ("answers/s",) if results.concurrency is not None else ()
    heads = (
        "router", *closed, f"on time ({slo})", "TTFT P50, P90, P99", "TPOT P50; by tokens", "E2E P50", "found in cache",
        f"both ({slo}, {1000 * results.slo_tpot_s:g} ms a token)", "CPU a request", "failed",
    )  # fmt: skip
    written = ["| " + " | ".join(heads) + " |", "| --- |" + " ---: |" * (len(heads) - 1)]
    written += ["| " + " | ".join(_cells(row, closed=bool(closed))) + " |" for row in rows]
    return "\n".join(written)


def _cells(row: Row, *, closed: bool) -> tuple[str, ...]:
    report, ttft = row.report, row.report.ttft_s
    by_tokens = "" if row.tpot_by_tokens_s is None else f"; {1000 * row.tpot_by_tokens_s:.1f}"
    return (
        f"`{row.router}`",
        *((f"{_answers_per_s(row):.2f}",) if closed else ()),
        _share(report.effective_capacity, [run.on_time for run in row.runs]),
        f"{ttft.p50:.2f}, {ttft.p90:.2f}, {ttft.p99:.2f} s",
        f"{1000 * report.tpot_s.p50:.1f}{by_tokens} ms",
        f"{report.e2e_s.p50:.2f} s",
        "" if report.hit_rate is None else f"{report.hit_rate:.1%}",
        _share(report.both_slos, [run.both_slos for run in row.runs]),
        "" if row.cpu_per_request_s is None else f"{1000 * row.cpu_per_request_s:.1f} ms",
        f"{sum(not one.answered for one in row.requests)} of {len(row.requests)}",
    )


def _answers_per_s(row: Row) -> float:
    """The mean of the rounds: pooled, their times would overlap."""
    return sum(run.answers_per_s or 0.0 for run in row.runs) / len(row.runs)


def _share(pooled: float, of_runs: Sequence[float | None]) -> str:
    """The share over all rounds, with that of each where there are several."""
    if len(of_runs) < 2:
        return f"{pooled:.1%}"
    return f"{pooled:.1%} ({', '.join(f'{100 * (share or 0.0):.1f}' for share in of_runs)})"


# the pictures ----------------------------------------------------------------------------------------------------
def pictures(results: Results, rows: Sequence[Row]) -> dict[str, str]:
    """For each rate the share of requests that had their first token within a time, by router.

    Raises:
        PlottingUnavailableError: matplotlib is not installed.
    """
    drawn = {}
    for rate in dict.fromkeys(row.rate_per_s for row in rows):
        at_rate = [row for row in rows if row.rate_per_s == rate]
        drawn[f"ttft-{rate_title(rate)}.svg"] = lines(
            {row.router: _within(row) for row in at_rate},
            x=f"seconds to the first token (SLO {results.slo_ttft_s:g} s)",
            y="share of requests",
            title="" if rate is None else f"{rate:g} requests/s",
            markers=False,
        )
    return drawn


def _within(row: Row) -> Series:
    """The distribution of TTFTs over all requests that were sent: those that failed never have a first token."""
    ttfts = sorted(one.ttft_s for one in row.requests if one.answered and one.ttft_s is not None)
    if not ttfts:
        return [], []
    step = max(1, len(ttfts) // _MOST_POINTS)
    places = sorted({*range(0, len(ttfts), step), len(ttfts) - 1})
    return [ttfts[place] for place in places], [(place + 1) / len(row.requests) for place in places]
