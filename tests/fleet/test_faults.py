"""Processes die while traffic flows; nothing is lost, stuck or left over."""

from __future__ import annotations

import contextlib
import os
import signal
import urllib.request
from collections.abc import Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path

import pytest
from openai import APIConnectionError, OpenAI

from dualmap.research.chaos.fleet_process import alive
from tests.fleet.fleet_process import Fleet, emulated, until
from tests.support.fork_servers import ForkedCommand

LONG_PROMPT = "every request starts with words of its own, and goes on for a while like this " * 40


def traffic(
    client: OpenAI, fleet: Fleet, pool: ThreadPoolExecutor, count: int, *, first: int = 0, prompt: str = LONG_PROMPT
) -> list[Future[str]]:
    """Plain (not streaming) completions, each with a prefix of its own, sent all at once.

    Numbered from ``first``: what other tests have sent is in the instances' caches and draws requests there.
    """

    def ask(number: int) -> str:
        answer = client.completions.create(
            model=fleet.model, prompt=f"{number:04d} {prompt}", max_tokens=200, timeout=40
        )
        return answer.choices[0].text

    return [pool.submit(ask, number) for number in range(first, first + count)]


@contextlib.contextmanager
def paused(fleet: Fleet) -> Iterator[None]:
    """No instance makes progress in this context: what was sent is still there, however slow this machine is."""
    urls = [each["url"] for each in fleet.instances().values()]
    try:
        for url in urls:
            urllib.request.urlopen(f"{url}/emulator/pause", b"", timeout=60).close()
        yield
    finally:
        for url in urls:
            with contextlib.suppress(OSError):  # it was killed
                urllib.request.urlopen(f"{url}/emulator/resume", b"", timeout=60).close()


@pytest.fixture
def senders() -> Iterator[ThreadPoolExecutor]:
    with ThreadPoolExecutor(48) as pool:
        yield pool


@pytest.fixture
def extra_instance(fleet: Fleet, tmp_path: Path) -> Iterator[ForkedCommand]:
    """A fifth instance in a process of its own, a member of the fleet and ready."""
    with emulated(tmp_path / "emulator.log") as ((url,), process):
        # Said to be fast, so that it gets its share whatever the others' learned rates are by now.
        rate = str(4 * fleet.instances()["instance-1"]["prefill_tokens_per_s"])
        fleet.dualmap("instances", "add", "extra", url, "--prefill-tokens-per-s", rate, "--url", fleet.endpoint)
        until(lambda: fleet.instances()["extra"]["state"] == "ready", "the new instance is ready")
        yield process
    if "extra" in fleet.instances():
        fleet.dualmap("instances", "remove", "extra", "--url", fleet.endpoint)


def leader_of(fleet: Fleet) -> str:
    """The leading worker's id; its process is called by that without the last part."""
    text = fleet.dualmap("inspect", "overview", "--store.url", fleet.store_url)
    return text.partition("leader: ")[2].split()[0]


def test_a_killed_replica_is_replaced_and_its_requests_are_released(
    fleet: Fleet, client: OpenAI, senders: ThreadPoolExecutor
) -> None:
    with paused(fleet):
        requests = traffic(client, fleet, senders, 40)
        until(fleet.live_requests, "requests are under way")

        dead = fleet.kill("router-1")

    failures = [request.exception() for request in requests]
    lost = [failure for failure in failures if failure is not None]
    # Only connections that ended at the dead replica break, and they break at once: clients try again elsewhere.
    assert all(isinstance(failure, APIConnectionError) for failure in lost)
    assert len(lost) < len(requests)
    until(lambda: fleet.pid("router-1") != dead, "a new replica runs in its place")
    fleet.until_idle()
    assert client.with_options(max_retries=5).completions.create(model=fleet.model, prompt="x", max_tokens=1)


def test_a_replica_that_hangs_is_replaced_and_the_shared_port_is_free_of_it(fleet: Fleet, client: OpenAI) -> None:
    hung = fleet.pid("router-2")

    os.kill(hung, signal.SIGSTOP)

    until(lambda: not alive(hung) and fleet.pid("router-2") != hung, "a new replica runs in its place")
    assert "router-2 has not answered" in fleet.output
    for number in range(20):  # each over a connection of its own: one in three would meet a replica that hangs
        assert fleet.placement(f"{number} after a hang")
    fleet.until_idle()


def test_the_lead_passes_on_when_the_leader_is_killed(fleet: Fleet, client: OpenAI) -> None:
    before = until(lambda: leader_of(fleet), "a worker leads")
    fleet.kill(before.rpartition("-")[0])

    after = until(lambda: (now := leader_of(fleet)) not in ("none", before) and now, "another worker leads")

    assert after
    assert client.completions.create(model=fleet.model, prompt="x", max_tokens=1)


def test_a_replica_and_the_leader_that_die_under_overload_leave_every_count_exact(fleet: Fleet, client: OpenAI) -> None:
    leader = leader_of(fleet).rpartition("-")[0]
    many = ThreadPoolExecutor(150)
    with paused(fleet):
        requests = traffic(client, fleet, many, 300, first=5000, prompt=8 * LONG_PROMPT)
        until(lambda: sum(request["state"] == "held" for request in fleet.live_requests()) > 10, "requests are held")

        dead = {name: fleet.kill(name) for name in ("router-2", leader)}

    answered = [request for request in requests if request.exception() is None]
    many.shutdown()
    assert answered
    for name, pid in dead.items():
        until(lambda name=name, pid=pid: fleet.pid(name) != pid, f"a new {name} runs in its place")
    fleet.until_idle(30.0)
    counts = ("pending_tokens", "dispatched_tokens", "deferred_tokens", "context_tokens", "queued_requests",
              "running_requests")  # fmt: skip
    for each in fleet.instances().values():
        assert {name: each["load"][name] for name in counts} == dict.fromkeys(counts, 0)
    logs = "".join(log.read_text() for log in fleet.directory.glob("worker-*.log"))
    assert "elected" in logs and "sums had drifted" not in logs, "no repair had to make them so"


def test_an_instance_that_dies_before_the_first_byte_costs_the_client_nothing(
    fleet: Fleet, client: OpenAI, senders: ThreadPoolExecutor, extra_instance: ForkedCommand
) -> None:
    with paused(fleet):
        requests = traffic(client, fleet, senders, 48, first=2000)
        until(lambda: fleet.instances()["extra"]["load"]["running_requests"] > 0, "the instance got some of them")

        extra_instance.kill()

    assert [request.exception() for request in requests] == [None] * len(requests)
    assert all(request.result() for request in requests)
    until(lambda: fleet.instances()["extra"]["state"] == "down", "the fleet knows that it is gone")
    fleet.until_idle()


def test_an_instance_that_stands_still_before_the_first_byte_is_left_when_it_is_taken_down(
    fleet: Fleet, client: OpenAI, extra_instance: ForkedCommand
) -> None:
    os.kill(extra_instance.pid, signal.SIGSTOP)
    try:
        until(lambda: fleet.instances()["extra"]["state"] == "down", "its health checks fail")
        assert client.completions.create(model=fleet.model, prompt="x", max_tokens=1)
    finally:
        os.kill(extra_instance.pid, signal.SIGCONT)
    until(lambda: fleet.instances()["extra"]["state"] == "ready", "it is back")
    fleet.until_idle()


def test_requests_on_an_instance_that_hangs_are_answered_by_others(
    fleet: Fleet, client: OpenAI, senders: ThreadPoolExecutor, extra_instance: ForkedCommand
) -> None:
    requests = traffic(client, fleet, senders, 48, first=1000)
    until(lambda: fleet.instances()["extra"]["load"]["running_requests"] > 0, "the instance got some of them")

    os.kill(extra_instance.pid, signal.SIGSTOP)  # no connection breaks: only the leader's checks find it out

    assert [request.exception() for request in requests] == [None] * len(requests)
    os.kill(extra_instance.pid, signal.SIGCONT)
    until(lambda: fleet.instances()["extra"]["state"] == "ready", "it is back")
    fleet.until_idle()


def test_all_instances_may_die_and_come_back(fleet: Fleet, client: OpenAI) -> None:
    dead = {name: fleet.kill(name) for name in fleet.instances()}
    for name, pid in dead.items():
        until(lambda name=name, pid=pid: not alive(pid) and fleet.pid(name) != pid, f"{name} runs again")
    until(lambda: all(each["state"] == "ready" for each in fleet.instances().values()), "all are ready")
    assert client.with_options(max_retries=3).completions.create(model=fleet.model, prompt="x", max_tokens=1)
    fleet.until_idle()


def test_the_store_may_die_and_come_back_empty(fleet: Fleet, client: OpenAI, senders: ThreadPoolExecutor) -> None:
    requests = traffic(client, fleet, senders, 24)
    until(fleet.live_requests, "requests are under way")

    dead = fleet.kill("store")

    assert [request.exception() for request in requests] == [None] * len(requests)
    until(lambda: fleet.pid("store") != dead, "a new store runs")
    until(lambda: len(fleet.instances()) == 4, "members are entered again")
    until(lambda: all(each["state"] == "ready" for each in fleet.instances().values()), "all are ready")
    assert client.completions.create(model=fleet.model, prompt="x", max_tokens=1)
    fleet.until_idle()
