"""The table of a comparison."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
from real_fleet.errors import LackingError
from real_fleet.results import RECORDS, Results, Run, joined, pictures, rows_of, table

from dualmap.simulation.replay.replay_report import ReplayedRequest, record_lines

RESULTS = Results(
    provenance={"commit": "abc", "date": "2026-11-26", "command": "python -m benchmarks.real_fleet"},
    machine={},
    machine_sentence="2 × a card",
    set_up={"Instances": "8 of them"},
    slo_ttft_s=3.0,
    slo_tpot_s=0.1,
    skip_requests=1,
    time_scale=1.0,
    runs=(),
)


def request(index: int, ttft_s: float, tpot_s: float, tokens: int, failure: str | None = None) -> ReplayedRequest:
    return ReplayedRequest(
        index=index, arrival_s=0.0, lag_s=0.0, input_tokens=100, slo_s=3.0, failure=failure, ttft_s=ttft_s,
        e2e_s=None if failure else ttft_s + tpot_s * (tokens - 1), prompt_tokens=100, completion_tokens=tokens,
        cached_tokens=40,
    )  # fmt: skip


def kept(folder: Path, run: Run, requests: list[ReplayedRequest]) -> None:
    (folder / RECORDS).mkdir(exist_ok=True)
    (folder / RECORDS / run.records).write_bytes(record_lines(requests))


def test_rounds_are_pooled_and_both_slos_hold_for_each_request(tmp_path: Path) -> None:
    first = Run("default", 21.0, 1, cpu_s=0.03, on_time=1.0, both_slos=0.5)
    second = Run("default", 21.0, 2, cpu_s=0.01, on_time=0.5, both_slos=0.5)
    kept(tmp_path, first, [request(0, 9, 9, 2), request(1, 1, 0.05, 101), request(2, 2, 0.2, 11)])
    kept(tmp_path, second, [request(0, 9, 9, 2), request(1, 1, 0.09, 2), request(2, 4, 0.01, 2, failure="timeout")])

    (row,) = rows_of(replace(RESULTS, runs=(first, second)), tmp_path)

    assert (row.report.effective_capacity, row.report.both_slos) == (3 / 4, 2 / 4)
    assert row.tpot_by_tokens_s == pytest.approx((100 * 0.05 + 10 * 0.2 + 0.09) / 111)
    assert row.cpu_per_request_s == pytest.approx(0.04 / 6)
    written = table(replace(RESULTS, runs=(first, second)), [row])
    assert "| `default` | 75.0% (100.0, 50.0) |" in written and "| 1 of 4 |" in written
    assert "- **Machine**: 2 × a card\n- **Instances**: 8 of them\n- **Made**: commit abc" in written


def test_what_was_not_measured_is_left_empty_and_a_failed_run_is_named(tmp_path: Path) -> None:
    silent = Run("default", None, 1, on_time=1.0, both_slos=1.0, p99_lag_s=0.4)
    failed = Run("vllm-router:kv_aware", None, 1, failure="it ended with 1: the end of its log:\nTraceback")
    kept(tmp_path, silent, [replace(request(1, 1, 0.05, 1), cached_tokens=None)])
    results = replace(RESULTS, runs=(silent, failed))

    written = table(results, rows_of(results, tmp_path))

    (cells,) = [line.split("|")[1:-1] for line in written.splitlines() if line.startswith("| `default`")]
    assert [cell.strip() for cell in cells][5:8] == ["", "100.0%", ""]
    assert "At the trace's own times:" in written
    assert "- `vllm-router:kv_aware`, round 1: it ended with 1: the end of its log:\n" in written
    assert "The client was up to 0.40 s late" in written


def test_results_are_read_as_they_were_written_and_drawn(tmp_path: Path) -> None:
    run = Run("default", 21.0, 1, cpu_s=0.03, on_time=1.0, both_slos=0.5)
    kept(tmp_path, run, [request(index, 1.0 + index, 0.05, 5) for index in range(5)])
    results = replace(RESULTS, runs=(run,))
    results.write(tmp_path)

    assert Results.read(tmp_path) == results
    pytest.importorskip("matplotlib")
    assert list(pictures(results, rows_of(results, tmp_path))) == ["ttft-21.svg"]


def test_comparisons_of_one_set_up_become_rounds_of_one_table(tmp_path: Path) -> None:
    folders = [tmp_path / "first", tmp_path / "second"]
    for folder, commit, ttft_s in zip(folders, ("abc", "def"), (1.0, 4.0), strict=True):
        folder.mkdir()
        run = Run("default", 21.0, 1, on_time=float(ttft_s < 3), both_slos=0.0)
        kept(folder, run, [request(index, ttft_s, 0.05, 5) for index in range(3)])
        replace(RESULTS, provenance={**RESULTS.provenance, "commit": commit}, runs=(run,)).write(folder)
    (out := tmp_path / "out" / RECORDS).mkdir(parents=True)

    both = joined(folders, out.parent)

    assert [run.turn for run in both.runs] == [1, 2]
    written = table(both, rows_of(both, out.parent))
    assert "| `default` | 50.0% (100.0, 0.0) |" in written and "commit abc, def, 2026-11-26" in written
    replace(RESULTS, skip_requests=2).write(folders[1])
    with pytest.raises(LackingError, match="differ"):
        joined(folders, out.parent)
