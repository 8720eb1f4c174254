import json
from dataclasses import replace
from pathlib import Path

import pytest

from dualmap.router.telemetry.recording import Recorded, TrafficRecorder
from dualmap.scheduling.prompts.chain import Chain
from dualmap.simulation.errors import TraceError
from dualmap.simulation.workload.generators import agents
from dualmap.simulation.workload.recording import merge_recordings, render_mooncake
from dualmap.simulation.workload.traces import Measured, Trace, read_trace

SHARED = (11 << 60, 12 << 60)


def replica(path: Path, *requests: tuple[float, Chain, int, int], salt: str = "s") -> Path:
    recorder = TrafficRecorder(path, salt)
    for request in requests:
        recorder.record(recorded(*request))
    recorder.close()
    return path


def recorded(received_unix_s: float, chain: Chain, prompt_tokens: int, output_tokens: int) -> Recorded:
    return Recorded(
        received_unix_s=received_unix_s, chain=chain, prompt_tokens=prompt_tokens, output_tokens=output_tokens,
        duration_s=2.0,
    )  # fmt: skip


def round_trip(tmp_path: Path, *recordings: Path) -> Trace:
    (tmp_path / "trace.jsonl").write_text(render_mooncake(merge_recordings(recordings)))
    return read_trace(tmp_path / "trace.jsonl")


def test_the_slo_that_a_request_asked_for_is_recorded_and_read_back(tmp_path: Path) -> None:
    recorder = TrafficRecorder(tmp_path / "a.jsonl", "s")
    recorder.record(replace(recorded(1000.0, Chain(SHARED, 128, 300), 300, 40), slo_s=2.5))
    recorder.record(recorded(1001.0, Chain(SHARED, 128, 300), 300, 40))
    recorder.close()

    assert [r.slo_ttft_s for r in round_trip(tmp_path, tmp_path / "a.jsonl").requests] == [2.5, None]


def test_who_it_was_for_and_how_it_was_served_reads_back(tmp_path: Path) -> None:
    recorder = TrafficRecorder(tmp_path / "a.jsonl", "s")
    seen = replace(
        recorded(1000.0, Chain(SHARED, 128, 300), 300, 40), ttft_s=0.25, cached_tokens=256, tenant="acme",
        priority="high", adapter="sql",
    )  # fmt: skip
    recorder.record(seen)
    recorder.record(recorded(1001.0, Chain(SHARED, 128, 300), 300, 40))
    recorder.close()

    first, second = round_trip(tmp_path, tmp_path / "a.jsonl").requests

    assert (first.tenant, first.priority, first.adapter) == ("acme", "high", "sql")
    assert first.measured == Measured(2.0, 0.25, 256)
    assert second.measured == Measured(2.0)


def test_a_turn_of_a_run_comes_a_think_time_after_the_answer_before_it(tmp_path: Path) -> None:
    recorder = TrafficRecorder(tmp_path / "a.jsonl", "s")
    for second, run in ((1000.0, "0a"), (1001.0, "0b"), (1005.0, "0a"), (1005.5, "0a"), (1006.0, "")):
        recorder.record(replace(recorded(second, Chain(SHARED, 128, 300), 300, 40), run=run))
    recorder.close()

    requests = round_trip(tmp_path, tmp_path / "a.jsonl").requests

    assert requests[0].session == requests[2].session == requests[3].session != requests[1].session
    assert [request.think_s for request in requests] == [None, None, 3.0, None, None], "the fourth did not wait"


def test_what_replicas_recorded_reads_back_as_one_trace_in_order_of_arrival(tmp_path: Path) -> None:
    one = replica(
        tmp_path / "a.jsonl",
        (1002.5, Chain((*SHARED, 13), 128, 384), 384, 7),
        (1000.0, Chain(SHARED, 128, 300), 300, 40),
    )
    other = replica(tmp_path / "b.jsonl", (1001.0, Chain((5,), 128, 90), 90, 1))

    trace = round_trip(tmp_path, one, other)

    assert trace.block_tokens == 128
    assert [r.arrival_s for r in trace.requests] == [0.0, 1.0, 2.5]
    assert [r.input_tokens for r in trace.requests] == [300, 90, 384]
    assert [r.output_tokens for r in trace.requests] == [40, 1, 7]
    first, alone, second = (r.hash_ids for r in trace.requests)
    assert first[:2] == second[:2]
    assert len(first) == 3, "the partial block has a number of its own"
    assert not set(alone) & {*first, *second}


def test_a_session_is_written_as_it_is_read(tmp_path: Path) -> None:
    trace = agents(requests=300, seed=4)
    path = tmp_path / "trace.jsonl"
    path.write_text(render_mooncake(trace))

    read = read_trace(path).requests

    assert [(one.session, one.after) for one in read] == [(one.session, one.after) for one in trace.requests]
    thinks_s = [(one.think_s, other.think_s) for one, other in zip(read, trace.requests, strict=True)]
    assert all(one == other or abs((one or 0) - (other or 0)) < 0.001 for one, other in thinks_s)
    assert any(one.after for one in read)


def test_blocks_of_text_that_do_not_match_the_tokens_still_make_a_readable_trace(tmp_path: Path) -> None:
    recording = replica(
        tmp_path / "a.jsonl",
        (1.0, Chain(tuple(range(1, 9)), 128, 600), 600, 3),
        (2.0, Chain((1, 2), 110, 900), 900, 3),
        (3.0, Chain((1, 2), 128, 200), 200, 3),
    )

    trace = round_trip(tmp_path, recording)

    assert trace.block_tokens == 128
    assert [len(r.hash_ids) for r in trace.requests] == [5, 8, 2]
    assert trace.requests[0].hash_ids[:2] == trace.requests[1].hash_ids[:2] == trace.requests[2].hash_ids


def test_reading_tells_how_many_bytes_it_has_read(tmp_path: Path) -> None:
    paths = [replica(tmp_path / f"{name}.jsonl", (1000.0, Chain(SHARED, 128, 300), 300, 40)) for name in "ab"]
    read: list[int] = []

    merge_recordings(paths, read=read.append)

    assert sum(read) == sum(path.stat().st_size for path in paths)


def test_hashes_are_salted(tmp_path: Path) -> None:
    recording = replica(tmp_path / "a.jsonl", (1.0, Chain(SHARED, 128, 256), 256, 1))

    recorded = json.loads(recording.read_text())["hash_ids"]

    assert not set(recorded) & set(SHARED)
    assert max(recorded) < 1 << 63


def test_recordings_of_different_salts_are_refused_as_nothing_would_seem_shared(tmp_path: Path) -> None:
    chain = Chain(SHARED, 128, 256)
    one = replica(tmp_path / "a.jsonl", (2.0, chain, 256, 1), salt="one")
    other = replica(tmp_path / "b.jsonl", (1.0, chain, 256, 1), salt="other")

    with pytest.raises(TraceError, match=r"b\.jsonl:1: recorded with another salt .* set router\.record_salt"):
        merge_recordings([one, other])
    replica(one, (3.0, chain, 256, 1), salt="made up anew")
    with pytest.raises(TraceError, match=r"a\.jsonl:2: recorded with another salt"):
        merge_recordings([one])


NO_TOKENS = '{"timestamp": 0, "input_length": 0, "output_length": 1, "hash_ids": [], "block_tokens": 128, "salt": "s"}'


@pytest.mark.parametrize("line", ["{", "{}", '{"timestamp": 0}', "[]", NO_TOKENS])
def test_a_broken_recording_is_refused_with_file_and_line(tmp_path: Path, line: str) -> None:
    recording = replica(tmp_path / "a.jsonl", (1.0, Chain((1,), 128, 128), 128, 1))
    with recording.open("a") as file:
        file.write(line + "\n")

    with pytest.raises(TraceError, match=r"a\.jsonl:2: no line of a recording"):
        merge_recordings([recording])


def test_missing_and_empty_recordings_are_refused(tmp_path: Path) -> None:
    (tmp_path / "empty.jsonl").touch()

    with pytest.raises(TraceError, match="holds no requests"):
        merge_recordings([tmp_path / "empty.jsonl"])
    with pytest.raises(TraceError, match="cannot be read"):
        merge_recordings([tmp_path / "missing.jsonl"])
