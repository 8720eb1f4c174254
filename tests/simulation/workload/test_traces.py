import json
from pathlib import Path

import pytest

from dualmap.simulation.errors import TraceError
from dualmap.simulation.workload.sources import TraceSource
from dualmap.simulation.workload.traces import Trace, TraceRequest, read_mooncake, read_trace


def line(timestamp: object = 0, tokens: object = 600, output: object = 5, ids: object = (0, 1), **more: object) -> str:
    row = {"timestamp": timestamp, "input_length": tokens, "output_length": output, "hash_ids": ids, **more}
    return json.dumps(row) + "\n"


def write(tmp_path: Path, text: str, name: str = "trace.jsonl") -> Path:
    path = tmp_path / name
    path.write_text(text)
    return path


def test_a_mooncake_line_becomes_a_request_in_seconds_and_tokens(tmp_path: Path) -> None:
    (first, second) = read_mooncake(write(tmp_path, line(0) + line(3000, 1500, 7, (0, 1, 2))))

    assert first.arrival_s == 0
    assert (second.arrival_s, second.input_tokens, second.output_tokens) == (3.0, 1500, 7)
    assert second.hash_ids == (0, 1, 2)


def test_a_line_may_say_which_slo_its_request_asks_for(tmp_path: Path) -> None:
    first, second = read_mooncake(write(tmp_path, line(0, slo_ttft_ms=2500) + line(1, slo_ttft_ms=None)))

    assert (first.slo_ttft_s, second.slo_ttft_s) == (2.5, None)


def test_a_turn_of_a_session_may_have_a_delay_in_the_place_of_a_time(tmp_path: Path) -> None:
    turn = json.dumps({"input_length": 700, "output_length": 5, "hash_ids": [0, 1], "session_id": 7, "delay": 1500})

    first, second, third = read_mooncake(
        write(tmp_path, line(2000, session_id="7") + turn + "\n" + line(5000, session_id="b", delay=0, after=["7"]))
    )

    assert (first.session, first.think_s, first.arrival_s) == ("7", None, 0.0)
    assert (second.session, second.think_s, second.arrival_s) == ("7", 1.5, 0.0)
    assert (third.session, third.think_s, third.arrival_s, third.after) == ("b", 0.0, 3.0, ("7",))


def test_think_times_stay_where_the_rate_changes() -> None:
    requests = (
        TraceRequest(0.0, 600, 5, (0, 1), session="a"), TraceRequest(8.0, 600, 5, (0, 1), session="a", think_s=3.0)
    )  # fmt: skip

    scaled = Trace("t", 512, requests).at_rate(1.0)

    assert [(one.arrival_s, one.think_s) for one in scaled.requests] == [(0.0, None), (2.0, 3.0)]


@pytest.mark.parametrize(
    ("bad", "reason"),
    [
        (line(delay=5), "a line with delay is a turn of a session: it needs session_id"),
        (line(session_id=None), "session ids must be texts or whole numbers"),
        (line(session_id="a", delay=-1), "delay must be at least 0"),
        (line(session_id="a", delay=1, after="b"), "after must be a list"),
        (line(slo_ttft_ms=0), "slo_ttft_ms must be at least 1"),
        ("{broken\n", "not a JSON object"),
        ("[1, 2]\n", "not a JSON object"),
        (line(tokens=-600), "input_length must be at least 1"),
        (line(output=-1), "output_length must be at least 0"),
        (line(timestamp=-1), "timestamp must be at least 0"),
        (line(timestamp="soon"), "timestamp must be a number"),
        (line(tokens=600.5), "input_length must be a whole number"),
        (line(tokens=True), "input_length must be a number"),
        (line(ids=["a", "b"]), "hash_ids must be a list of whole numbers"),
        (line(ids=None), "hash_ids must be a list"),
        (line(ids=[0, 1, 2]), "3 hash_ids do not fit input_length 600"),
        (line(ids=[]), "0 hash_ids do not fit"),
    ],
)
def test_a_broken_line_is_refused_with_file_line_and_reason(tmp_path: Path, bad: str, reason: str) -> None:
    path = write(tmp_path, line(100) + "\n" + bad)

    with pytest.raises(TraceError, match=r"trace\.jsonl:3: ") as caught:
        read_mooncake(path)

    assert caught.value.line == 3
    assert reason in caught.value.reason


def test_the_partial_last_block_may_be_left_out_and_blank_lines_are_skipped(tmp_path: Path) -> None:
    assert len(read_mooncake(write(tmp_path, line(0) + "\n" + line(500, ids=[0])))) == 2


def test_an_unsorted_trace_is_refused_at_the_line_that_goes_back(tmp_path: Path) -> None:
    with pytest.raises(TraceError, match=r":2: arrives before the request above it"):
        read_mooncake(write(tmp_path, line(3000) + line(0)))


@pytest.mark.parametrize("reader", [read_mooncake, read_trace])
def test_an_empty_or_missing_file_is_refused(tmp_path: Path, reader: object) -> None:
    assert callable(reader)
    with pytest.raises(TraceError, match="holds no requests"):
        reader(write(tmp_path, "\n"))
    with pytest.raises(TraceError, match="cannot be read: No such file"):
        reader(tmp_path / "missing.jsonl")


def test_the_wrong_block_size_is_noticed(tmp_path: Path) -> None:
    with pytest.raises(TraceError, match="another block size"):
        read_mooncake(write(tmp_path, line(tokens=600, ids=(0, 1))), block_tokens=128)


def test_a_recording_brings_its_own_block_size(tmp_path: Path) -> None:
    path = write(tmp_path, line(tokens=250, ids=(0, 1), block_tokens=128))

    assert read_trace(path).block_tokens == 128
    with pytest.raises(TraceError, match="recorded with 128"):
        read_trace(path, block_tokens=512)


def test_azure_requests_share_nothing_and_start_at_zero(tmp_path: Path) -> None:
    text = (
        "TIMESTAMP,ContextTokens,GeneratedTokens\r\n"
        "2023-11-16 18:15:46.6805900,1374,44\n"
        "2023-11-16 18:15:50.9951690,396,109\n"
    )

    trace = read_trace(write(tmp_path, text, "azure.csv"))

    assert [r.input_tokens for r in trace.requests] == [1374, 396]
    assert trace.requests[0].arrival_s == 0
    assert trace.requests[1].arrival_s == pytest.approx(4.314579)
    assert trace.requests[0].hash_ids == (0, 1, 2)
    assert trace.requests[1].hash_ids == (3,)


@pytest.mark.parametrize(
    ("row", "reason"),
    [
        ("2023-11-16 18:15:46,374", "expected 3 columns"),
        ("2023-11-16 18:15:46,0,5", "ContextTokens must be at least 1"),
        ("2023-11-16 18:15:46,12,-5", "GeneratedTokens at least 0"),
        ("2023-11-16 18:15:46,many,5", "invalid literal"),
        ("yesterday,12,5", "Invalid isoformat"),
        ("2023-11-15 18:15:46+00:00,12,5", "offset"),
        ("2023-11-15 18:15:46,12,5", "arrives before"),
    ],
)
def test_a_broken_azure_row_is_refused(tmp_path: Path, row: str, reason: str) -> None:
    text = f"TIMESTAMP,ContextTokens,GeneratedTokens\n2023-11-16 18:15:46,374,44\n{row}\n"

    with pytest.raises(TraceError, match=f"azure.csv:3: .*{reason}"):
        read_trace(write(tmp_path, text, "azure.csv"))


def test_another_azure_header_is_refused(tmp_path: Path) -> None:
    with pytest.raises(TraceError, match="header must be"):
        read_trace(write(tmp_path, "TIMESTAMP,Prompt\n", "azure.csv"))


def test_scaling_keeps_the_pattern_and_gives_the_rate(tmp_path: Path) -> None:
    trace = read_trace(write(tmp_path, line(1000) + line(1000) + line(4000) + line(7000)))

    scaled = trace.at_rate(4.0)

    assert [r.arrival_s for r in scaled.requests] == pytest.approx([0, 0, 0.5, 1.0])
    assert scaled.rate_per_s == pytest.approx(4.0)


def test_a_trace_that_arrives_at_once_has_no_rate(tmp_path: Path) -> None:
    with pytest.raises(TraceError, match="arrive at once"):
        read_trace(write(tmp_path, line(0) + line(0))).at_rate(4.0)


def test_capping_cuts_tokens_and_blocks_of_long_prompts_only(tmp_path: Path) -> None:
    trace = read_trace(write(tmp_path, line(0, 600) + line(0, 2000, 5, (0, 1, 2, 3)))).capped(1024)

    assert [r.input_tokens for r in trace.requests] == [600, 1024]
    assert trace.requests[1].hash_ids == (0, 1)


def test_a_trace_begins_with_its_first_request(tmp_path: Path) -> None:
    trace = read_trace(write(tmp_path, line(timestamp=3_600_000) + line(timestamp=3_602_000)))

    assert [request.arrival_s for request in trace.requests] == [0.0, 2.0]


def test_windows_of_a_trace_are_disjoint_and_each_begins_with_its_first_request(tmp_path: Path) -> None:
    path = write(tmp_path, "".join(line(timestamp=1000 * number, output=number) for number in range(60)))

    windows = [TraceSource(str(path), requests=20, start=start).load() for start in (0, 20, 40)]

    assert [request.output_tokens for window in windows for request in window.requests] == [*range(60)]
    for window in windows:
        assert [request.arrival_s for request in window.requests] == [float(second) for second in range(20)]
    with pytest.raises(TraceError, match="has 60 requests, none from number 60 on"):
        TraceSource(str(path), start=60).load()
