"""Ranks of data parallelism behind one port are instances of their own: load, KV events and capacity."""

from __future__ import annotations

import contextlib
import json
import re
import urllib.request
from collections import Counter
from collections.abc import Iterator
from pathlib import Path

import pytest

from dualmap.research.chaos.fleet_process import unconfigured
from tests.fleet.fleet_process import Fleet, running_fleet, until
from tests.fleet.kv_views import complete, views
from tests.support.fork_servers import start_command
from tests.support.ports import free_port

BLOCK_TOKENS = 128
CAPACITY_TOKENS = 30 * BLOCK_TOKENS
MODEL = "qwen2.5-7b"


@pytest.fixture
def server(tmp_path: Path) -> Iterator[str]:
    """One emulated server with two engines; its URL."""
    port = free_port(10, 11, 20, 21)
    options = {
        "port": port, "data_parallel_size": 2, "kv_events_port_offset": 10, "kv_capacity_tokens": CAPACITY_TOKENS,
        "max_model_len": 3000, "time_scale": 20,
    }  # fmt: skip
    words = [word for name, value in options.items() for word in (f"--emulator.{name}", str(value))]
    process = start_command("emulate", *words, out=tmp_path / "emulator.log", environment=unconfigured())
    url = f"http://127.0.0.1:{port}"
    until(lambda: urllib.request.urlopen(f"{url}/health", timeout=2).status == 200, "the server is up")
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
        until(lambda: views(fleet) == {"exact"}, "both ranks are followed")
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


def respond(fleet: Fleet, text: str) -> tuple[int, int, str]:
    """Expected and reported cached tokens of a response, and the instance that it counts at."""
    body = json.dumps({"model": fleet.model, "input": text, "max_output_tokens": 2}).encode()
    request = urllib.request.Request(f"{fleet.endpoint}/v1/responses", body, {"content-type": "application/json"})
    with urllib.request.urlopen(request, timeout=60) as answer:
        details = json.loads(answer.read())["usage"]["input_tokens_details"]
        return (
            int(answer.headers["x-dualmap-cached-tokens"]),
            details["cached_tokens"],
            answer.headers["x-dualmap-instance"],
        )


def test_responses_whose_rank_the_server_chooses_say_nothing_of_the_cache_of_one(server: str, tmp_path: Path) -> None:
    """vLLM ignores the header on this API, so what a response leaves is at a rank that nobody named."""
    with ranks_of(server, tmp_path) as fleet:
        until(lambda: views(fleet) == {"exact"}, "both ranks are followed")
        found = [respond(fleet, f"session {session} " * 200) for _ in range(3) for session in range(4)]
        wrong = []
        for session in range(6):
            for _ in range(2):
                ids = [2000 + session] * (3 * BLOCK_TOKENS)
                expected, cached, instance_id = complete(fleet, ids)
                if expected != cached:
                    wrong.append((session, instance_id, expected, cached))
        fleet.until_idle(10.0)

    assert {expected for expected, _, _ in found} == {0}
    assert any(cached for _, cached, _ in found), "the server found some of them at the rank that it chose"
    assert len(wrong) <= 1, wrong  # an event may come later than the next request
