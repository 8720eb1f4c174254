"""The layerwise connector over real processes: whatever fails, the client is answered and nothing is left over."""

from __future__ import annotations

import http.client
import json
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any
from urllib.parse import urlsplit

import pytest

from tests.fleet.fleet_process import QUICK, Fleet, running_fleet, until

PREFILL, DECODE = ("prefill-1", "prefill-2"), ("decode-1", "decode-2")
OPTIONS = (
    "--prefill", "2", "--decode", "2", "--replicas", "1", "--workers", "1", "--connector", "mooncake-layerwise",
    "--scheduling.split.mode", "always", "--emulator.transfer.latency_ms", "8000",
)  # fmt: skip
"""At a time scale of 20, the last layer takes 0.4 s."""
LONG = 24_000


@pytest.fixture(scope="module")
def layerwise(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Fleet]:
    with running_fleet(tmp_path_factory.mktemp("layerwise"), (*QUICK, *OPTIONS)) as fleet:
        yield fleet


@pytest.fixture(autouse=True)
def nothing_outlives_its_request(layerwise: Fleet) -> Iterator[None]:
    until(lambda: all(each["state"] == "ready" for each in layerwise.instances().values()), "all are ready")
    yield
    layerwise.until_idle()
    until(lambda: all(each["state"] == "ready" for each in layerwise.instances().values()), "all are back")
    until(lambda: not any(sum(busy(layerwise, name).values()) for name in (*PREFILL, *DECODE)), "no engine is at work")
    loads = [each["load"] for each in layerwise.instances().values() if each["load"]]
    assert [load["context_tokens"] + load["running_requests"] for load in loads] == [0] * len(loads)


def busy(fleet: Fleet, name: str) -> dict[str, int]:
    told = fleet.emulator(name, "/emulator/statistics")
    return {what: told[what] for what in ("running", "waiting", "pulling", "staged")}


def connected(fleet: Fleet, number: int, words: int, max_tokens: int, *, stream: bool) -> http.client.HTTPConnection:
    at = urlsplit(fleet.endpoint)
    connection = http.client.HTTPConnection(at.hostname or "", at.port, timeout=30)
    prompt = f"{number:05d} " + "some words of a prompt " * (words // 4)
    body = {"model": fleet.model, "prompt": prompt, "max_tokens": max_tokens, "stream": stream}
    connection.request("POST", "/v1/completions", json.dumps(body), {"content-type": "application/json"})
    return connection


def ask(
    fleet: Fleet, number: int, *, words: int = 400, max_tokens: int = 6, stream: bool = True
) -> tuple[http.client.HTTPResponse, bytes]:
    connection = connected(fleet, number, words, max_tokens, stream=stream)
    try:
        response = connection.getresponse()
        return response, response.read()
    finally:
        connection.close()


def at_work(fleet: Fleet, names: tuple[str, ...], *what: str) -> str:
    """The first of these instances that does one of these."""

    def found() -> list[str]:
        return [name for name in names if any(busy(fleet, name)[each] for each in what)]

    return until(found, f"one of {names} is {' or '.join(what)}")[0]


def die(fleet: Fleet, name: str, *, abruptly: bool = True) -> None:
    fleet.emulator(name, "/emulator/die", {"abruptly": abruptly, "revive_after_s": 0.5})


@pytest.mark.parametrize("stream", [False, True])
def test_a_prefill_instance_that_dies_at_work_is_replaced(layerwise: Fleet, stream: bool) -> None:
    with ThreadPoolExecutor(1) as pool:
        for name in PREFILL:
            layerwise.emulator(name, "/emulator/pause", {})
        asked = pool.submit(ask, layerwise, 100 + stream, words=LONG, stream=stream)
        # A paused engine may have begun its first step, which does not end.
        died = at_work(layerwise, PREFILL, "waiting", "running")
        die(layerwise, died)
        (other,) = set(PREFILL) - {died}
        layerwise.emulator(other, "/emulator/resume", {})

    response, body = asked.result()
    assert response.status == 200, body
    assert response.headers["x-dualmap-prefill-instance"] == other
    assert response.headers["x-dualmap-instance"] in DECODE


@pytest.mark.parametrize("stream", [False, True])
def test_a_decoder_that_dies_while_it_waits_for_kv_is_replaced(layerwise: Fleet, stream: bool) -> None:
    with ThreadPoolExecutor(1) as pool:
        asked = pool.submit(ask, layerwise, 200 + stream, stream=stream)
        died = at_work(layerwise, DECODE, "pulling")
        die(layerwise, died)

    response, body = asked.result()
    assert response.status == 200, body
    assert response.headers["x-dualmap-instance"] != died


def test_a_stream_whose_decoder_dies_goes_on_from_another(layerwise: Fleet) -> None:
    with ThreadPoolExecutor(1) as pool:
        asked = pool.submit(ask, layerwise, 300, max_tokens=3000)
        died = until(
            lambda: [name for name in DECODE if busy(layerwise, name)["running"] > busy(layerwise, name)["pulling"]],
            "an answer has begun",
        )
        die(layerwise, died[0], abruptly=False)

    _, body = asked.result()
    assert b'"error"' not in body
    assert body.count(b'"finish_reason":"length"') == 1
    assert body.endswith(b"data: [DONE]\n\n")


@pytest.mark.parametrize("fault", [{"status": 500}, {"answer": "empty"}])
def test_a_decoder_that_fails_its_leg_is_replaced(layerwise: Fleet, fault: dict[str, Any]) -> None:
    layerwise.emulator(DECODE[0], "/emulator/fail", {"count": 1, **fault})

    answers = [ask(layerwise, 400 + 20 * ("answer" in fault) + number) for number in range(6)]

    layerwise.emulator(DECODE[0], "/emulator/fail", {"count": 0})
    assert [response.status for response, _ in answers] == [200] * 6


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize(("names", "what"), [(PREFILL, "running"), (DECODE, "pulling"), (DECODE, "running")])
def test_a_client_that_leaves_leaves_nothing_behind(
    layerwise: Fleet, names: tuple[str, ...], what: str, stream: bool
) -> None:
    number = 500 + 10 * stream + len(what) + (names is DECODE)
    connection = connected(layerwise, number, LONG, 2000, stream=stream)

    try:
        at_work(layerwise, names, what)
    finally:
        connection.close()

    # what must not be there is looked for after every test
    layerwise.until_idle()
