"""Ranks of data parallelism behind one port are instances of their own: load, KV events and capacity."""

from __future__ import annotations

import contextlib
import re
import subprocess
import sys
import urllib.request
from collections import Counter
from collections.abc import Iterator
from pathlib import Path

import pytest

from dualmap.research.chaos.fleet_process import unconfigured
from tests.fleet.fleet_process import Fleet, running_fleet, until
from tests.fleet.kv_views import complete, views
from tests.support.ports import first_port

BLOCK_TOKENS = 128
CAPACITY_TOKENS = 30 * BLOCK_TOKENS
MODEL = "qwen2.5-7b"


@pytest.fixture
def server() -> Iterator[str]:
    """One emulated server with two engines; its URL."""
    port = first_port(24_000)
    options = {
        "port": port, "data_parallel_size": 2, "kv_events_port_offset": 10, "kv_capacity_tokens": CAPACITY_TOKENS,
        "max_model_len": 3000, "time_scale": 20,
    }  # fmt: skip
    words = [word for name, value in options.items() for word in (f"--emulator.{name}", str(value))]
    environment = unconfigured()
    process = subprocess.Popen([sys.executable, "-m", "dualmap", "emulate", *words], env=environment)
    url = f"http://127.0.0.1:{port}"
    until(lambda: urllib.request.urlopen(f"{url}/health", timeout=2).status == 200, "the server is up", 30.0)
    yield url
    process.kill()
    process.wait()


@contextlib.contextmanager
def ranks_of(server: str, tmp_path: Path) -> Iterator[Fleet]:
    config = tmp_path / "fleet.yaml"
    config.write_text(
        f"""pools:
  - name: default
    model: {MODEL}
    kv_events: {{endpoint: 'tcp://{{host}}:{{port+10}}', replay_endpoint: 'tcp://{{host}}:{{port+20}}'}}
    instances:
      - {{id: r0, url: '{server}', data_parallel_rank: 0}}
      - {{id: r1, url: '{server}', data_parallel_rank: 1}}
"""
    )
    with running_fleet(tmp_path, ("--config", str(config), "--replicas", "1", "--workers", "1")) as fleet:
        yield fleet


def prompt_tokens(server: str) -> dict[str, int]:
    """By engine, as the server counts them."""
    with urllib.request.urlopen(f"{server}/metrics", timeout=60) as answer:
        page = answer.read().decode()
    found = re.findall(r'^vllm:prompt_tokens_total\{.*?engine="(\d)".*?\} (\S+)$', page, re.MULTILINE)
    return {f"r{rank}": int(float(tokens)) for rank, tokens in found}


def test_each_rank_has_its_own_requests_events_and_capacity(server: str, tmp_path: Path) -> None:
    with ranks_of(server, tmp_path) as fleet:
        until(lambda: views(fleet) == {"exact"}, "both ranks are followed", 20.0)
        until(
            lambda: {each["kv_capacity_tokens"] for each in fleet.instances().values()} == {CAPACITY_TOKENS},
            "the capacity of one rank is known",
            20.0,
        )
        before, sent, wrong = prompt_tokens(server), Counter[str](), []
        for turn in range(1, 5):
            for session in range(8):
                ids = [1000 + session] * BLOCK_TOKENS + list(range(BLOCK_TOKENS * turn))
                expected, cached, instance_id = complete(fleet, ids)
                sent[instance_id] += len(ids)
                if abs(expected - cached) > 16:
                    wrong.append((session, turn, instance_id, expected, cached))
        after = prompt_tokens(server)

    assert set(sent) == {"r0", "r1"}
    assert {rank: after[rank] - before[rank] for rank in after} == sent
    assert len(wrong) <= 2, wrong  # an event may come later than the next request
