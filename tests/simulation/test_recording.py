import io
import json
from pathlib import Path

from scheduling.chain import Chain
from simulation.recording import TraceRecorder
from simulation.traces import read_trace


def test_a_recording_reads_back_as_the_trace_it_was(tmp_path: Path) -> None:
    shared = (11 << 60, 12 << 60)
    with (tmp_path / "live.jsonl").open("wb") as file:
        recorder = TraceRecorder(file)
        recorder.write(1_000_000, Chain(shared, 128, 300), 40)
        recorder.write(1_002_500, Chain((*shared, 13), 128, 384), 7)
        recorder.write(1_002_400, Chain((5,), 128, 90), 1)

    trace = read_trace(tmp_path / "live.jsonl")

    assert trace.block_tokens == 128
    assert [r.arrival_s for r in trace.requests] == [0.0, 2.5, 2.5]
    assert [r.input_tokens for r in trace.requests] == [300, 384, 90]
    assert [r.output_tokens for r in trace.requests] == [40, 7, 1]
    first, second, third = (r.hash_ids for r in trace.requests)
    assert first[:2] == second[:2]
    assert len(first) == 3, "the partial block has a number of its own"
    assert not set(third) & {*first, *second}


def test_blocks_of_text_that_do_not_match_the_tokens_still_make_a_readable_line(tmp_path: Path) -> None:
    path = tmp_path / "live.jsonl"
    with path.open("wb") as file:
        TraceRecorder(file).write(0, Chain(tuple(range(1, 9)), 128, 600), 3)

    assert len(read_trace(path).requests[0].hash_ids) == 5


def test_known_blocks_are_bounded_and_hashes_do_not_show() -> None:
    file = io.BytesIO()
    recorder = TraceRecorder(file, max_known_blocks=2)
    for block_hash in (7 << 50, 8 << 50, 9 << 50, 7 << 50):
        recorder.write(0, Chain((block_hash,), 128, 128), 1)

    ids = [json.loads(line)["hash_ids"] for line in file.getvalue().splitlines()]

    assert ids == [[0], [1], [2], [3]], "forgotten, so new"
