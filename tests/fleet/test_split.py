"""Split requests over real processes: two instances serve one, and nothing outlives it, whichever of them fails."""

from __future__ import annotations

import http.client
import json
import urllib.request
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any
from urllib.parse import urlsplit

import pytest

from tests.fleet.fleet_process import QUICK, Fleet, running_fleet, until

PREFILL, DECODE = ("prefill-1", "prefill-2"), ("decode-1", "decode-2")
SPLIT = (
    "--prefill", "2", "--decode", "2", "--replicas", "1", "--workers", "1",
    "--scheduling.split.mode", "always", "--emulator.transfer.latency_ms", "6000",
)  # fmt: skip
"""At a time scale of 20, a transfer takes 0.3 s."""


@pytest.fixture(scope="module")
def split_fleet(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Fleet]:
    """The fleet trusts its clients to say where KV comes from, which keeps their requests from being split."""
    trusts = ("--router.trust_transfers", "true")
    with running_fleet(tmp_path_factory.mktemp("split"), (*QUICK, *SPLIT, *trusts)) as fleet:
        yield fleet


@pytest.fixture(autouse=True)
def nothing_outlives_its_request(split_fleet: Fleet) -> Iterator[None]:
    until(lambda: all(each["state"] == "ready" for each in split_fleet.instances().values()), "all are ready")
    yield
    split_fleet.until_idle()
    until(lambda: statistics(split_fleet, "staged") == 0, "no KV stays staged")
    until(lambda: statistics(split_fleet, "running") + statistics(split_fleet, "waiting") == 0, "nothing is computed")
    loads = [each["load"] for each in split_fleet.instances().values() if each["load"]]
    assert [load["context_tokens"] + load["running_requests"] for load in loads] == [0] * len(loads)
    until(lambda: statistics(split_fleet, "expired") == 0, "no KV has expired")  # what died is back


def statistics(fleet: Fleet, name: str) -> int:
    ready = [each["id"] for each in fleet.instances().values() if each["state"] == "ready"]
    return sum(fleet.emulator(instance_id, "/emulator/statistics")[name] for instance_id in ready)


def prompt(number: int, words: int = 400) -> str:
    return f"{number:05d} " + "some words of a prompt " * (words // 4)


class Answer:
    def __init__(self, response: http.client.HTTPResponse, body: bytes) -> None:
        self.status, self.headers, self.body = response.status, response.headers, body

    @property
    def text(self) -> str:
        return str(json.loads(self.body)["choices"][0]["text"])

    @property
    def streamed(self) -> str:
        events = [line[6:] for line in self.body.decode().splitlines() if line.startswith("data: {")]
        return "".join(choice["text"] for event in events for choice in json.loads(event).get("choices", []))


def ask(fleet: Fleet, body: dict[str, Any], path: str = "/v1/completions", timeout_s: float = 60) -> Answer:
    at = urlsplit(fleet.endpoint)
    connection = http.client.HTTPConnection(at.hostname or "", at.port, timeout=timeout_s)
    try:
        connection.request(
            "POST", path, json.dumps({"model": fleet.model, **body}), {"content-type": "application/json"}
        )
        response = connection.getresponse()
        return Answer(response, response.read())
    finally:
        connection.close()


def metric(fleet: Fleet, name: str) -> float:
    with urllib.request.urlopen(f"{fleet.endpoint}/metrics", timeout=60) as answer:
        lines = answer.read().decode().splitlines()
    return sum(float(line.rpartition(" ")[2]) for line in lines if line.startswith((f"{name}{{", f"{name} ")))


@pytest.mark.parametrize("stream", [False, True])
def test_two_instances_serve_a_request_as_one_does(split_fleet: Fleet, stream: bool) -> None:
    body = {"prompt": prompt(1), "max_tokens": 12, "seed": 1}

    split = ask(split_fleet, {**body, "stream": stream})
    whole = ask(split_fleet, {**body, "kv_transfer_params": {"do_remote_prefill": False}})

    assert split.status == whole.status == 200
    assert (split.streamed if stream else split.text) == whole.text
    assert split.headers["x-dualmap-instance"] in DECODE
    assert split.headers["x-dualmap-prefill-instance"] in PREFILL
    assert whole.headers["x-dualmap-prefill-instance"] is None


def test_chats_are_split_too(split_fleet: Fleet) -> None:
    body = {"messages": [{"role": "user", "content": prompt(2)}], "max_completion_tokens": 8, "stream": True}

    answer = ask(split_fleet, {**body, "stream_options": {"include_usage": True}}, "/v1/chat/completions")

    assert answer.headers["x-dualmap-prefill-instance"] in PREFILL
    assert b'"completion_tokens":8' in answer.body
    assert answer.body.endswith(b"data: [DONE]\n\n")


def test_both_legs_are_explained(split_fleet: Fleet) -> None:
    answer = ask(split_fleet, {"prompt": prompt(3), "max_tokens": 4})

    told = split_fleet.get(f"/admin/explain/{answer.headers['x-request-id']}")

    assert told["leg"] == "prefill"
    assert told["instance_id"] == answer.headers["x-dualmap-prefill-instance"]
    assert told["decode"]["instance_id"] == answer.headers["x-dualmap-instance"]
    assert told["decode"]["transferred_tokens"] > 100


@pytest.mark.parametrize("change", [{"temperature": -1}, {"max_tokens": 5, "min_tokens": 9}])
def test_what_an_engine_refuses_reaches_the_client(split_fleet: Fleet, change: dict[str, Any]) -> None:
    answer = ask(split_fleet, {"prompt": prompt(4), "max_tokens": 4, **change})

    assert answer.status == 400
    assert json.loads(answer.body)["error"]["type"] == "BadRequestError"


def test_a_prefill_that_fails_is_tried_on_the_other_instance_and_then_whole(split_fleet: Fleet) -> None:
    for instance_id in PREFILL:
        split_fleet.emulator(instance_id, "/emulator/fail", {"count": 1, "status": 503})

    answer = ask(split_fleet, {"prompt": prompt(5), "max_tokens": 4})

    assert answer.status == 200
    assert answer.headers["x-dualmap-instance"] in DECODE
    assert answer.headers["x-dualmap-prefill-instance"] is None
    assert answer.headers["x-dualmap-attempts"] == "3"


@pytest.mark.parametrize("order", [{"status": 500}, {"answer": "empty"}])
@pytest.mark.parametrize("stream", [False, True])
def test_a_decoder_that_fails_is_replaced_with_the_same_kv(
    split_fleet: Fleet, order: dict[str, Any], stream: bool
) -> None:
    first = 600 + 50 * stream + 20 * ("answer" in order)
    prefilled, retried = statistics(split_fleet, "prefill_tokens"), metric(split_fleet, "dualmap_decode_retries_total")
    split_fleet.emulator(DECODE[stream], "/emulator/fail", {"count": 1, **order})

    answers = [
        ask(split_fleet, {"prompt": prompt(n), "max_tokens": 4, "stream": stream}) for n in range(first, first + 10)
    ]

    assert [answer.status for answer in answers] == [200] * 10
    assert metric(split_fleet, "dualmap_decode_retries_total") == retried + 1
    assert statistics(split_fleet, "prefill_tokens") - prefilled < 11 * 620


def test_a_request_that_its_decoder_gives_back_is_prefilled_again(split_fleet: Fleet) -> None:
    for instance_id in DECODE:
        split_fleet.emulator(instance_id, "/emulator/fail", {"count": 0})
    split_fleet.emulator(DECODE[0], "/emulator/fail", {"count": 1, "answer": "recomputed"})
    split_fleet.emulator(DECODE[1], "/emulator/fail", {"count": 1, "answer": "recomputed"})

    answer = ask(split_fleet, {"prompt": prompt(7), "max_tokens": 4}, timeout_s=20)

    assert answer.status == 200
    assert int(answer.headers["x-dualmap-attempts"]) > 1
    for instance_id in DECODE:
        split_fleet.emulator(instance_id, "/emulator/fail", {"count": 0})


def test_a_decoder_that_dies_during_the_transfer_is_replaced(split_fleet: Fleet) -> None:
    with ThreadPoolExecutor(1) as pool:
        asked = pool.submit(ask, split_fleet, {"prompt": prompt(8), "max_tokens": 4, "stream": True})
        busy = until(lambda: [name for name in DECODE if pulling(split_fleet, name)], "a transfer is under way")
        split_fleet.emulator(busy[0], "/emulator/die", {"abruptly": True, "revive_after_s": 0.5})

    answer = asked.result()
    assert answer.status == 200, answer.body
    assert answer.headers["x-dualmap-instance"] != busy[0]
    assert answer.body.endswith(b"data: [DONE]\n\n")


def pulling(fleet: Fleet, instance_id: str) -> bool:
    return bool(fleet.emulator(instance_id, "/emulator/statistics")["pulling"])


def test_a_prefill_instance_that_dies_during_the_transfer_costs_another_prefill(split_fleet: Fleet) -> None:
    with ThreadPoolExecutor(1) as pool:
        asked = pool.submit(ask, split_fleet, {"prompt": prompt(9), "max_tokens": 4})
        until(lambda: any(pulling(split_fleet, name) for name in DECODE), "a transfer is under way")
        staged = [name for name in PREFILL if split_fleet.emulator(name, "/emulator/statistics")["staged"]]
        split_fleet.emulator(staged[0], "/emulator/die", {"abruptly": True, "revive_after_s": 0.5})

    assert asked.result().status == 200


def test_a_stream_whose_decoder_dies_goes_on_from_another(split_fleet: Fleet) -> None:
    with ThreadPoolExecutor(1) as pool:
        asked = pool.submit(ask, split_fleet, {"prompt": prompt(10), "max_tokens": 3000, "stream": True})
        busy = until(lambda: [name for name in DECODE if decoding(split_fleet, name)], "an answer has begun")
        split_fleet.emulator(busy[0], "/emulator/die", {"revive_after_s": 0.5})

    body = asked.result().body
    assert b'"error"' not in body
    assert body.count(b'"finish_reason":"length"') == 1
    assert body.endswith(b"data: [DONE]\n\n")


def decoding(fleet: Fleet, instance_id: str) -> bool:
    told = fleet.emulator(instance_id, "/emulator/statistics")
    return told["running"] > 0 and told["pulling"] == 0


def leave(fleet: Fleet, number: int, *, stream: bool, after: str) -> None:
    """A client that leaves once this is seen in an instance."""
    at = urlsplit(fleet.endpoint)
    connection = http.client.HTTPConnection(at.hostname or "", at.port, timeout=10)
    body = {"model": fleet.model, "prompt": prompt(number, 24_000), "max_tokens": 2000, "stream": stream}
    connection.request("POST", "/v1/completions", json.dumps(body), {"content-type": "application/json"})
    try:
        until(lambda: any(seen(fleet, name, after) for name in (*PREFILL, *DECODE)), f"an instance is {after}")
    finally:
        connection.close()


def seen(fleet: Fleet, instance_id: str, what: str) -> bool:
    told = fleet.emulator(instance_id, "/emulator/statistics")
    return bool(told[what]) and (what != "running" or instance_id in PREFILL)


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("after", ["running", "staged", "pulling"])
def test_a_client_that_leaves_leaves_nothing_behind(split_fleet: Fleet, after: str, stream: bool) -> None:
    number = 100 + 10 * stream + len(after)  # another one each: what is cached is prefilled at once

    leave(split_fleet, number, stream=stream, after=after)

    # what must not be there is looked for after every test
    split_fleet.until_idle()


def test_the_kv_of_a_client_that_left_between_the_legs_is_taken_over(split_fleet: Fleet) -> None:
    freed = metric(split_fleet, "dualmap_freed_transfers_total")

    leave(split_fleet, 12, stream=True, after="pulling")

    until(lambda: metric(split_fleet, "dualmap_freed_transfers_total") == freed + 1, "the transfer went on")


def test_a_change_of_roles_moves_new_requests(split_fleet: Fleet) -> None:
    spec = split_fleet.instances()["decode-1"]
    split_fleet.dualmap("instances", "role", "decode-1", "prefill", "--url", split_fleet.endpoint)
    until(lambda: split_fleet.instances()["decode-1"]["role"] == "prefill", "the role has changed")
    try:
        where = {
            ask(split_fleet, {"prompt": prompt(n), "max_tokens": 2}).headers["x-dualmap-instance"]
            for n in range(900, 904)
        }
    finally:
        split_fleet.dualmap("instances", "role", "decode-1", spec["role"], "--url", split_fleet.endpoint)

    assert where == {"decode-2"}


@pytest.mark.parametrize("moment", ["prefilling", "pulling", "decoding"])
def test_a_request_whose_instances_change_their_roles_ends_whole_where_it_is(split_fleet: Fleet, moment: str) -> None:
    tokens = 2000 if moment == "decoding" else 12
    body = {"prompt": prompt(950, 24_000 if moment == "prefilling" else 400) + moment, "max_tokens": tokens}
    looked_for = {
        "prefilling": lambda: [name for name in PREFILL if seen(split_fleet, name, "running")],
        "pulling": lambda: [name for name in DECODE if pulling(split_fleet, name)],
        "decoding": lambda: [name for name in DECODE if decoding(split_fleet, name)],
    }[moment]

    with ThreadPoolExecutor(1) as pool:
        asked = pool.submit(ask, split_fleet, {**body, "stream": True, "stream_options": {"include_usage": True}})
        (at_work,) = until(looked_for, f"an instance is {moment}")
        change_role(split_fleet, at_work, "decode" if at_work in PREFILL else "prefill")
        finished_before = asked.done()
        answer = asked.result()
    change_role(split_fleet, at_work, "prefill" if at_work in PREFILL else "decode")

    assert not finished_before
    assert answer.status == 200, answer.body
    assert answer.headers["x-dualmap-instance" if at_work in DECODE else "x-dualmap-prefill-instance"] == at_work
    assert answer.headers["x-dualmap-attempts"] == "1"
    assert b'"completion_tokens":%d' % tokens in answer.body
    assert answer.body.endswith(b"data: [DONE]\n\n")


def change_role(fleet: Fleet, instance_id: str, role: str) -> None:
    told, url = json.dumps({"role": role}).encode(), f"{fleet.endpoint}/admin/instances/{instance_id}"
    change = urllib.request.Request(url, told, {"content-type": "application/json"}, method="PATCH")
    with urllib.request.urlopen(change, timeout=60) as answer:
        assert json.loads(answer.read())["role"] == role


@pytest.fixture(scope="module")
def layerwise_fleet(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Fleet]:
    options = (*QUICK, *SPLIT, "--connector", "mooncake-layerwise")
    with running_fleet(tmp_path_factory.mktemp("layerwise"), options) as fleet:
        yield fleet


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("path", ["/v1/completions", "/v1/chat/completions"])
def test_a_decoder_that_goes_first_is_sent_its_kv(layerwise_fleet: Fleet, path: str, stream: bool) -> None:
    text = prompt(1300 + stream)
    body = {"prompt": text} if path == "/v1/completions" else {"messages": [{"role": "user", "content": text}]}
    computed = decoded_prefill(layerwise_fleet)

    answer = ask(layerwise_fleet, {**body, "max_tokens": 6, "stream": stream}, path)

    assert answer.status == 200, answer.body
    assert answer.headers["x-dualmap-instance"] in DECODE
    assert answer.headers["x-dualmap-prefill-instance"] in PREFILL
    assert decoded_prefill(layerwise_fleet) - computed < 20
    layerwise_fleet.until_idle()


def decoded_prefill(fleet: Fleet) -> int:
    urls = [fleet.instances()[name]["url"] for name in DECODE]
    told = [json.loads(urllib.request.urlopen(f"{url}/emulator/statistics", timeout=60).read()) for url in urls]
    return sum(int(each["prefill_tokens"]) for each in told)


def test_a_prefill_leg_that_fails_ends_the_decode_leg_that_waits_for_it(layerwise_fleet: Fleet) -> None:
    for name in PREFILL:
        order = urllib.request.Request(
            f"{layerwise_fleet.instances()[name]['url']}/emulator/fail",
            json.dumps({"count": 1, "status": 500}).encode(),
        )
        urllib.request.urlopen(order, timeout=60).read()

    answer = ask(layerwise_fleet, {"prompt": prompt(1400), "max_tokens": 4})

    assert answer.status == 200, answer.body
    assert answer.headers["x-dualmap-prefill-instance"] is None
    layerwise_fleet.until_idle()
