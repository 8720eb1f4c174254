"""The comparison of routers as a command, on emulated instances."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest
from real_fleet.command import main

from dualmap.cli.fleet_plan import free_ports
from tests.benchmarks.real_fleet.stand_ins import environment, peer_wheel, programs

ROOT = Path(__file__).resolve().parents[3]
LOAD = ("--trace", "zipf", "--requests", "16", "--skip", "4", "--warm-up", "2", "--max-input-tokens", "4096")


def compared(*words: str, path: Path | None = None, timeout_s: float = 170) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "benchmarks.real_fleet", *words]
    return subprocess.run(
        command, cwd=ROOT, env=environment(path), capture_output=True, text=True, timeout=timeout_s, check=False
    )


def test_emulated_instances_give_one_table_of_fleet_and_peer(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    out, peers = tmp_path / "out", peer_wheel(tmp_path / "peers")
    words = ("--emulated", "--instances", "2", "--time-scale", "20", "--rates", "4", "--rounds", "2", "--slo-s", "20")
    routers = ("--routers", "default,vllm-router:kv_aware", "--peers", str(peers), "--replicas", "1")

    done = compared(*words, *routers, *LOAD, "--out", str(out))

    assert done.returncode == 0, done.stdout + done.stderr
    kept = json.loads((out / "results.json").read_text())
    turns = [(run["turn"], run["router"]) for run in kept["runs"]]
    assert turns == [
        (1, "default"), (1, "vllm-router:kv_aware"), (2, "vllm-router:kv_aware"), (2, "default")
    ]  # fmt: skip
    assert all(
        run["cpu_s"] > 0 and 0 < run["on_time"] <= 1 and run["both_slos"] <= run["on_time"] for run in kept["runs"]
    )
    table = (out / "table.md").read_text()
    assert table in done.stdout + "\n"
    assert "| `default` |" in table and "| `vllm-router:kv_aware` |" in table and "0 of 24" in table
    assert "**emulated**" in table and "NVIDIA" not in table
    for run in kept["runs"]:
        name = f"{run['turn']}-4-{run['router'].replace(':', '-')}.jsonl"
        assert len((out / "records" / name).read_text().splitlines()) == 16
    assert "--kv-event-source" in (out / "logs" / "vllm-router-kv_aware.log").read_text()
    assert "<svg" in (out / "ttft-4.svg").read_text()
    (out / "table.md").unlink()
    assert main(["--from", str(out)]) == 0
    assert capsys.readouterr().out.strip() == table.strip()
    assert (out / "table.md").read_text() == table


def test_vllm_is_started_in_parts_of_a_card_and_named_under_the_table(tmp_path: Path) -> None:
    pytest.importorskip("tokenizers")
    path, calls = programs(tmp_path / "bin")
    out = tmp_path / "out"
    words = (
        "--instances",
        "2",
        "--vllm",
        "vllm",
        "--vllm-args",
        "--max-num-seqs 64",
        "--host-tokens",
        "100000",
        "--rates",
        "20",
        "--replicas",
        "1",
    )

    done = compared(*words, "--routers", "default", *LOAD, "--out", str(out), path=path)

    assert done.returncode == 0, done.stdout + done.stderr
    served = [json.loads(line) for line in calls.read_text().splitlines()]
    assert len(served) == 2
    for called, variables in served:
        assert called[:2] == ["serve", str(out / "model")] and called[called.index("--load-format") + 1] == "dummy"
        assert "--max-num-seqs" in called and int(called[called.index("--kv-cache-memory-bytes") + 1]) > 20e9
        port = int(called[called.index("--port") + 1])
        events = json.loads(called[called.index("--kv-events-config") + 1])
        assert events["endpoint"] == f"tcp://*:{port + 10000}"
        offloading = json.loads(called[called.index("--kv-transfer-config") + 1])
        assert offloading["kv_connector_extra_config"]["cpu_bytes_to_use"] == 100_000 * 2 * 2 * 28 * 2 * 128
        assert variables["PYTHONHASHSEED"] == "0"
        assert variables["CUDA_VISIBLE_DEVICES"] == "0" and variables["CUDA_MPS_ACTIVE_THREAD_PERCENTAGE"] == "50"
        assert variables["CUDA_MPS_PIPE_DIRECTORY"] == (path / "mps-started").read_text().strip()
    assert json.loads((out / "fleet.yaml").read_text())["pools"][0]["kv_tiers"] == {"host_tokens": 100_000}
    table = (out / "table.md").read_text()
    assert "1 × NVIDIA Made-up 80GB (81,559 MiB, driver 580.1)" in table
    assert "2 instances on 1 card (50 % of the multiprocessors each, by MPS)" in table


def test_a_router_that_does_not_start_has_no_figures_and_the_others_have(tmp_path: Path) -> None:
    peers = peer_wheel(tmp_path / "peers")
    (peers / "vllm_router" / "launch_router.py").write_text("raise SystemExit('no such policy')")
    out = tmp_path / "out"
    words = ("--emulated", "--instances", "1", "--time-scale", "20", "--rates", "4", "--replicas", "1", *LOAD)

    done = compared(*words, "--routers", "vllm-router:none,default", "--peers", str(peers), "--out", str(out))

    assert done.returncode == 1, done.stdout + done.stderr
    assert "no such policy" in done.stderr
    table = (out / "table.md").read_text()
    assert (
        "| `default` |" in table and "| `vllm-router:none` |" not in table and "- `vllm-router:none`, round 1" in table
    )


def test_running_servers_are_measured_as_they_are_given(tmp_path: Path) -> None:
    out = tmp_path / "out"
    (port,) = free_ports(1)
    given = ("--url", f"http://127.0.0.1:{port}/", "--no-kv-events")
    emulate = [sys.executable, "-m", "dualmap", "emulate", "--port", str(port), "--time-scale", "20"]
    with subprocess.Popen(emulate, cwd=ROOT, stdout=subprocess.PIPE, text=True) as server:
        try:
            assert server.stdout is not None and "serves" in server.stdout.readline()
            done = compared(
                *given, "--routers", "default", "--replicas", "1", *LOAD, "--rates", "20", "--out", str(out)
            )
        finally:
            server.terminate()

    assert done.returncode == 0, done.stdout + done.stderr
    table = (out / "table.md").read_text()
    assert "1 running server, vLLM" in table and "no KV events" in table
    assert "kv_events" not in (out / "fleet.yaml").read_text()


def test_a_machine_without_cards_is_told_what_it_lacks(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("PATH", environment(None)["PATH"])

    assert main(["--routers", "default", *LOAD, "--out", str(tmp_path / "out")]) == 2

    said = capsys.readouterr().err
    assert "no NVIDIA card" in said and "--url" in said and "--emulated" in said
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize(
    ("routers", "said"),
    [
        ("best", "known are default"),
        ("default:soon", "known are default"),
        ("vllm-router", "name its policy"),
        ("sglang-router:cache_aware", "--install-peers"),
        ("default,default", "different names"),
    ],
)
def test_routers_that_cannot_be_compared_are_named_before_anything_starts(
    tmp_path: Path, routers: str, said: str, capsys: pytest.CaptureFixture[str]
) -> None:
    words = ("--emulated", "--routers", routers, *LOAD, "--peers", str(tmp_path), "--out", str(tmp_path / "out"))

    assert (main(words), (tmp_path / "out").exists()) == (2, False)
    assert said in capsys.readouterr().err
