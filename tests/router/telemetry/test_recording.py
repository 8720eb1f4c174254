import io
import json
from pathlib import Path

import pytest
from pydantic import SecretStr

from dualmap.router.settings import RouterSettings
from dualmap.router.telemetry.recording import TrafficRecorder, open_recorder
from dualmap.scheduling.prompts.chain import Chain

CHAIN = Chain((7, 8), 128, 300)


def test_a_line_holds_times_lengths_and_salted_hashes_and_nothing_else() -> None:
    file = io.BytesIO()

    TrafficRecorder(file, "salt").record(1700000000.5, CHAIN, 310, 42)

    row = json.loads(file.getvalue())
    assert row.keys() == {"timestamp", "input_length", "output_length", "hash_ids", "block_tokens", "salt"}
    assert row["salt"] != "salt", "a fingerprint tells salts apart and does not give them away"
    assert (row["timestamp"], row["input_length"], row["output_length"]) == (1700000000500, 310, 42)
    assert len(row["hash_ids"]) == 2
    assert not set(row["hash_ids"]) & {7, 8}


def test_replicas_with_one_salt_agree_and_without_one_they_do_not(tmp_path: Path) -> None:
    def hashes(replica_id: str, **salt: SecretStr) -> list[int]:
        recorder = open_recorder(RouterSettings(record_dir=tmp_path, **salt), replica_id)
        assert recorder is not None
        recorder.record(1.0, CHAIN, 300, 1)
        recorder.close()
        found: list[int] = json.loads((tmp_path / f"{replica_id}.jsonl").read_text())["hash_ids"]
        return found

    assert hashes("a", record_salt=SecretStr("s")) == hashes("b", record_salt=SecretStr("s"))
    assert hashes("c") != hashes("d")


def test_nothing_is_recorded_unless_asked_for() -> None:
    assert open_recorder(RouterSettings(), "a") is None


def test_a_file_that_cannot_be_written_stops_the_recording_and_not_the_replica(
    caplog: pytest.LogCaptureFixture,
) -> None:
    class Full(io.BytesIO):
        def write(self, _: object) -> int:
            raise OSError("No space left on device")

    recorder = TrafficRecorder(Full(), "salt")
    recorder.record(1.0, CHAIN, 300, 1)
    recorder.record(2.0, CHAIN, 300, 1)
    recorder.close()

    assert [record.getMessage() for record in caplog.records] == [
        "recording stops, its file cannot be written: No space left on device"
    ]


def test_a_folder_that_cannot_be_made_is_an_error_at_the_start(tmp_path: Path) -> None:
    (tmp_path / "file").touch()

    with pytest.raises(OSError, match="file"):
        open_recorder(RouterSettings(record_dir=tmp_path / "file" / "folder"), "a")
