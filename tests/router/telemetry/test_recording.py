import json
import logging
from contextlib import closing
from dataclasses import replace
from pathlib import Path

import pytest
from pydantic import SecretStr

from dualmap.router.settings import RouterSettings
from dualmap.router.telemetry.recording import Recorded, TrafficRecorder, open_recorder
from dualmap.scheduling.prompts.chain import Chain

CHAIN = Chain((7, 8), 128, 300)


REQUEST = Recorded(received_unix_s=1700000000.5, chain=CHAIN, prompt_tokens=310, output_tokens=42, duration_s=3.25)


def rows(path: Path) -> list[dict[str, object]]:
    return [json.loads(line) for line in path.read_text().splitlines()]


def test_a_line_holds_times_lengths_and_salted_hashes_and_nothing_else(tmp_path: Path) -> None:
    with closing(TrafficRecorder(tmp_path / "a.jsonl", "salt")) as recorder:
        recorder.record(REQUEST)

    (row,) = rows(tmp_path / "a.jsonl")
    assert row.keys() == {
        "timestamp", "input_length", "output_length", "hash_ids", "block_tokens", "salt", "duration_ms"
    }  # fmt: skip
    assert row["salt"] != "salt", "a fingerprint tells salts apart and does not give them away"
    assert (row["timestamp"], row["input_length"], row["output_length"]) == (1700000000500, 310, 42)
    assert row["duration_ms"] == 3250
    hashes = row["hash_ids"]
    assert isinstance(hashes, list) and len(hashes) == 2
    assert not set(hashes) & {7, 8}


def test_a_line_says_for_whom_it_was_and_how_it_was_served(tmp_path: Path) -> None:
    request = replace(
        REQUEST, ttft_s=0.4, cached_tokens=256, tenant="acme", priority="high", adapter="sql", run="00ff00ff00ff00ff"
    )

    with closing(TrafficRecorder(tmp_path / "a.jsonl", "salt")) as recorder:
        recorder.record(request)

    (row,) = rows(tmp_path / "a.jsonl")
    assert (row["ttft_ms"], row["cached_tokens"]) == (400, 256)
    assert (row["tenant"], row["priority"], row["adapter"]) == ("acme", "high", "sql")
    assert row["session_id"] != int("00ff00ff00ff00ff", 16), "salted as blocks are"


def test_a_recording_keeps_its_newest_lines_within_its_bytes(tmp_path: Path) -> None:
    with closing(TrafficRecorder(tmp_path / "a.jsonl", "salt", max_bytes=2000)) as recorder:
        for second in range(100):
            recorder.record(replace(REQUEST, received_unix_s=1700000000.0 + second))

    kept = [*rows(tmp_path / "a.old.jsonl"), *rows(tmp_path / "a.jsonl")]
    assert sum(path.stat().st_size for path in tmp_path.iterdir()) <= 2000
    assert len(list(tmp_path.iterdir())) == 2
    assert [row["timestamp"] for row in kept] == [1000 * (1700000000 + n) for n in range(100 - len(kept), 100)]
    assert len(kept) > 5


def test_a_replica_that_starts_again_counts_what_it_had_written(tmp_path: Path) -> None:
    for _ in range(2):
        recorder = TrafficRecorder(tmp_path / "a.jsonl", "salt", max_bytes=400)
        recorder.record(REQUEST)
        recorder.close()

    assert len(rows(tmp_path / "a.old.jsonl")) == len(rows(tmp_path / "a.jsonl")) == 1


def test_the_first_minutes_of_each_hour_are_recorded_whole(tmp_path: Path) -> None:
    hour_s = 3600 * 470_000

    with closing(TrafficRecorder(tmp_path / "a.jsonl", "salt", minutes_of_hour=15)) as recorder:
        for minute in (0, 14.9, 15, 59, 60, 80):
            recorder.record(replace(REQUEST, received_unix_s=hour_s + minute * 60))

    minutes = [(int(str(row["timestamp"])) / 1000 - hour_s) / 60 for row in rows(tmp_path / "a.jsonl")]
    assert minutes == [0, 14.9, 60]


def test_replicas_with_one_salt_agree_and_without_one_they_do_not(tmp_path: Path) -> None:
    def hashes(replica_id: str, **salt: SecretStr) -> list[int]:
        recorder = open_recorder(RouterSettings(record_dir=tmp_path, **salt), replica_id)
        assert recorder is not None
        recorder.record(REQUEST)
        recorder.close()
        found: list[int] = json.loads((tmp_path / f"{replica_id}.jsonl").read_text())["hash_ids"]
        return found

    assert hashes("a", record_salt=SecretStr("s")) == hashes("b", record_salt=SecretStr("s"))
    assert hashes("c") != hashes("d")


def test_nothing_is_recorded_unless_asked_for() -> None:
    assert open_recorder(RouterSettings(), "a") is None


def test_a_file_that_cannot_be_written_stops_the_recording_and_not_the_replica(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    (tmp_path / "a.jsonl").symlink_to("/dev/full")
    recorder = TrafficRecorder(tmp_path / "a.jsonl", "salt")

    with caplog.at_level(logging.ERROR):
        recorder.record(REQUEST)
        recorder.record(REQUEST)
    recorder.close()

    (said,) = [record.getMessage() for record in caplog.records]
    assert said.startswith("recording stops, its file cannot be written:") and "No space left on device" in said


def test_a_folder_that_cannot_be_made_is_an_error_at_the_start(tmp_path: Path) -> None:
    (tmp_path / "file").touch()

    with pytest.raises(OSError, match="file"):
        open_recorder(RouterSettings(record_dir=tmp_path / "file" / "folder"), "a")
