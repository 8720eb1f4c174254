"""``dualmap replay`` as a process, against an emulated server."""

from __future__ import annotations

import asyncio
import signal
import sys
from collections.abc import Awaitable, Callable
from pathlib import Path

import orjson
import pytest

from dualmap.simulation.emulator.instance import EmulatedInstance

PROGRAM = """
import argparse, sys
from dualmap.simulation.commands import replay
parser = argparse.ArgumentParser()
replay.add_arguments(parser)
sys.exit(replay.run(parser.parse_args()))
"""
Eventually = Callable[[Callable[[], bool]], Awaitable[None]]


@pytest.fixture
def trace_file(tmp_path: Path) -> Path:
    lines = [
        {"timestamp": index * 500, "input_length": 700, "output_length": 5, "hash_ids": [0, index + 1]}
        for index in range(10)
    ]
    path = tmp_path / "trace.jsonl"
    path.write_bytes(b"".join(orjson.dumps(line) + b"\n" for line in lines))
    return path


async def start_replay(*words: str) -> asyncio.subprocess.Process:
    pipe = asyncio.subprocess.PIPE
    return await asyncio.create_subprocess_exec(sys.executable, "-c", PROGRAM, *words, stdout=pipe, stderr=pipe)


async def test_a_trace_is_replayed_and_reported_as_table_json_and_records(
    emulator: EmulatedInstance, trace_file: Path, tmp_path: Path
) -> None:
    files = ("--json", str(tmp_path / "out.json"), "--records", str(tmp_path / "out.jsonl"))
    limits = ("--limit", "8", "--skip", "2", "--rate", "4", "--time-scale", "20", "--slo-tpot-ms", "0.5", "--quiet")
    process = await start_replay("--trace", str(trace_file), "--url", f"{emulator.url}/v1", *limits, *files)
    out, err = await asyncio.wait_for(process.communicate(), 60)
    assert process.returncode == 0, err.decode()
    assert "8 / 8 / 0" in out.decode()
    report = orjson.loads((tmp_path / "out.json").read_bytes())
    assert (report["sent"], report["answered"], report["skipped"]) == (8, 8, 2)
    assert report["rate_per_s"] == pytest.approx(4.0)
    assert report["slo_tpot_s"] == 0.0005
    assert report["effective_capacity"] >= report["both_slos"] >= 0
    records = [orjson.loads(line) for line in (tmp_path / "out.jsonl").read_bytes().splitlines()]
    assert [record["prompt_tokens"] for record in records] == [700] * 8


async def test_clients_may_send_a_trace_for_a_time(
    emulator: EmulatedInstance, trace_file: Path, tmp_path: Path
) -> None:
    limits = ("--concurrency", "2", "--seconds", "600", "--skip-s", "0.001", "--time-scale", "20", "--quiet")
    process = await start_replay(
        "--trace", str(trace_file), "--url", emulator.url, *limits, "--json", str(tmp_path / "out.json")
    )
    out, err = await asyncio.wait_for(process.communicate(), 60)
    assert process.returncode == 0, err.decode()
    report = orjson.loads((tmp_path / "out.json").read_bytes())
    assert (report["sent"], report["concurrency"], report["skipped"]) == (10, 2, 2)
    assert report["answers_per_s"] > 0
    assert "2 clients" in out.decode()


async def test_ctrl_c_gives_a_report_of_what_there_is(
    emulator: EmulatedInstance, trace_file: Path, eventually: Eventually
) -> None:
    process = await start_replay("--trace", str(trace_file), "--url", emulator.url, "--rate", "0.5", "--quiet")
    await eventually(lambda: emulator.generator.metrics.finished["length"] >= 1)
    process.send_signal(signal.SIGINT)
    out, _err = await asyncio.wait_for(process.communicate(), 60)
    assert process.returncode == 1
    assert "not sent (stopped)" in out.decode()


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (("--rate", "0"), "--rate must be more than 0"),
        (("--slo-tpot-ms", "0"), "--slo-tpot-ms must be more than 0"),
        (("--time-scale", "-1"), "--time-scale must be more than 0"),
        (("--url", "localhost:8000"), "--url must start with http"),
        (("--skip", "10"), "leaves nothing of 10 requests"),
    ],
)
async def test_wrong_options_are_named_with_exit_code_2(trace_file: Path, words: tuple[str, ...], message: str) -> None:
    process = await start_replay("--trace", str(trace_file), "--quiet", *words)
    _out, err = await asyncio.wait_for(process.communicate(), 60)
    assert process.returncode == 2
    assert message in err.decode()


async def test_an_endpoint_that_does_not_answer_is_no_wrong_option(trace_file: Path) -> None:
    process = await start_replay("--trace", str(trace_file), "--quiet", "--url", "http://127.0.0.1:1")
    _out, err = await asyncio.wait_for(process.communicate(), 60)
    assert process.returncode == 1
    assert "cannot connect" in err.decode()
