"""Engines on one clock, and moves of KV between them, with times computed by hand."""

from __future__ import annotations

from dataclasses import replace

import pytest

from dualmap.simulation.engine.engine_types import EngineConfig, EngineRequest, Event, EventKind
from dualmap.simulation.engine.kv_transfer import KvTransfer
from dualmap.simulation.engine.step_time import StepCosts
from dualmap.simulation.virtual_time.cluster import Cluster, KvSource
from dualmap.simulation.virtual_time.event_queue import EventQueue

# 10 ms per step and 1 ms per token; a thousand tokens of KV take a second on a link, and every move 100 ms besides.
COSTS = StepCosts(
    overhead_s=0.010, weights_s=0.0, token_s=0.001, attention_pair_s=0.0, sequence_s=0.0, context_token_s=0.0
)
CONFIG = EngineConfig(COSTS, 1000, block_tokens=10, max_num_batched_tokens=100, max_num_seqs=4, staged_timeout_s=5.0)
TRANSFER = KvTransfer(bytes_per_token=1000, bytes_per_s=1e6, latency_s=0.1)


class Run:
    """A cluster that is driven until nothing is left to do, with what it told."""

    def __init__(self, config: EngineConfig = CONFIG) -> None:
        self.events = EventQueue()
        self.told: list[tuple[str, Event]] = []
        self.cluster = Cluster(self.events, lambda instance_id, event: self.told.append((instance_id, event)), TRANSFER)
        for instance_id in ("p1", "d1", "d2"):
            self.cluster.add(instance_id, config)

    def step(self) -> float:
        now_s, action = self.events.pop()
        action(now_s)
        return now_s

    def until_staged(self, prompts: int) -> None:
        while len(self.times(EventKind.STAGED)) < prompts:
            self.step()

    def until_idle(self) -> None:
        while len(self.events):
            self.step()

    def times(self, kind: EventKind) -> dict[str, float]:
        return {event.request_id: round(event.time_s, 6) for _, event in self.told if event.kind is kind}


def prefill(name: str) -> EngineRequest:
    return EngineRequest(name, 100, 1, stages_kv=True)


def decode(name: str) -> EngineRequest:
    return EngineRequest(f"{name}~decode", 100, 3, awaits_kv=True)


def test_a_split_request_is_prefilled_moved_and_decoded() -> None:
    # given a prompt of one step (110 ms) on the prefill instance
    run = Run()
    run.cluster.submit("p1", prefill("a"), 0.0)
    run.until_staged(1)
    # when its decode leg is sent as soon as it is staged
    run.cluster.submit("d1", decode("a"), 0.11, KvSource("p1", "a"))
    run.until_idle()
    # then the move takes 100 ms and 100 ms of bytes, and each token a step of 11 ms
    assert run.times(EventKind.STAGED) == {"a": 0.11}
    assert run.times(EventKind.FIRST_TOKEN)["a~decode"] == 0.321
    assert run.times(EventKind.FINISHED)["a~decode"] == 0.343
    assert run.cluster.moved_tokens == 100
    # and nothing is left on either side
    for engine in run.cluster.engines.values():
        statistics = engine.statistics()
        assert (statistics.used_blocks, statistics.staged, statistics.expired) == (0, 0, 0)


def test_two_moves_from_one_instance_share_its_link() -> None:
    run = Run()
    run.cluster.submit("p1", prefill("a"), 0.0)
    run.cluster.submit("p1", prefill("b"), 0.0)
    run.until_staged(2)
    run.cluster.submit("d1", decode("a"), 0.22, KvSource("p1", "a"))
    run.cluster.submit("d2", decode("b"), 0.22, KvSource("p1", "b"))
    run.until_idle()
    # the second waits for the first one's 100 ms on the link of p1
    assert run.times(EventKind.FIRST_TOKEN)["a~decode"] == pytest.approx(0.22 + 0.2 + 0.011)
    assert run.times(EventKind.FIRST_TOKEN)["b~decode"] == pytest.approx(0.22 + 0.3 + 0.011)


def test_staged_kv_stays_until_the_move_has_ended() -> None:
    run = Run()
    run.cluster.submit("p1", prefill("a"), 0.0)
    run.until_staged(1)
    run.cluster.submit("d1", decode("a"), 0.11, KvSource("p1", "a"))
    held = []
    while len(run.events):
        held.append((run.step(), run.cluster.engines["p1"].has_staged("a")))
    assert next(now_s for now_s, staged in held if not staged) == pytest.approx(0.31)


def test_kv_that_timed_out_is_computed_again_by_the_decode_instance() -> None:
    # given staged KV that times out after 1 s
    run = Run(replace(CONFIG, staged_timeout_s=1.0))
    run.cluster.submit("p1", prefill("a"), 0.0)
    run.until_idle()
    assert run.times(EventKind.EXPIRED) == {"a": 1.11}
    # when the decode leg comes too late
    run.cluster.submit("d1", decode("a"), 2.0, KvSource("p1", "a"))
    run.until_idle()
    # then its prompt takes the 110 ms again, and the leak is counted
    assert run.times(EventKind.FIRST_TOKEN)["a~decode"] == 2.11
    assert run.cluster.engines["p1"].statistics().expired == 1


def test_kv_that_nobody_will_pull_is_released() -> None:
    run = Run()
    run.cluster.submit("p1", prefill("a"), 0.0)
    run.until_staged(1)
    run.cluster.release_staged(KvSource("p1", "a"), 0.2)
    run.until_idle()
    assert run.times(EventKind.EXPIRED) == {}
    assert run.cluster.engines["p1"].statistics().used_blocks == 0


PROMPT = tuple(range(10))


def has_prompt(run: Run, instance_id: str) -> None:
    """The instance has computed the prompt, and is idle."""
    run.cluster.submit(instance_id, EngineRequest(f"before {instance_id}", 101, 1, PROMPT), 0.0)
    run.until_idle()


def pull(run: Run, name: str, target_id: str, at_s: float, peer_id: str = "p1") -> None:
    run.cluster.submit(target_id, EngineRequest(name, 101, 1, PROMPT, pulls=True), at_s, peer_id=peer_id)


def test_a_request_pulls_what_its_peer_has_over_the_links_of_both() -> None:
    # given a prompt of 100 tokens on one instance, and two requests elsewhere that pull it: 0.1 s on each link
    run = Run()
    has_prompt(run, "p1")
    pull(run, "a", "d1", 1.0)
    pull(run, "b", "d2", 1.0)
    run.until_idle()
    # then the second waits until the source's link is free, and both compute one token
    assert run.times(EventKind.SCHEDULED) | {"before p1": 0.0} == {"before p1": 0.0, "a": 1.2, "b": 1.3}
    assert run.times(EventKind.FIRST_TOKEN)["b"] == 1.311
    assert run.cluster.moved_tokens == 200
    assert run.cluster.engines["d2"].statistics().pulls.busy_s == pytest.approx(0.2)


def test_a_peer_that_has_nothing_costs_a_latency() -> None:
    run = Run()
    pull(run, "a", "d1", 1.0)
    run.until_idle()

    assert run.times(EventKind.SCHEDULED) == {"a": 1.1}
    assert run.cluster.moved_tokens == 0


def test_what_a_peer_that_died_was_to_send_is_computed() -> None:
    run = Run()
    has_prompt(run, "p1")
    pull(run, "a", "d1", 1.0)
    assert run.step() == 1.0
    run.cluster.add("p1", CONFIG)
    run.until_idle()

    assert run.times(EventKind.FIRST_TOKEN)["a"] == 1.321  # two steps for 101 tokens
    assert run.cluster.engines["d1"].statistics().pulls.loads == 0


def test_an_aborted_pull_ends_nothing_later() -> None:
    run = Run()
    has_prompt(run, "p1")
    pull(run, "a", "d1", 1.0)
    assert run.step() == 1.0
    assert run.cluster.abort("d1", "a", 1.05)
    run.until_idle()

    assert "a" not in run.times(EventKind.SCHEDULED)
    assert run.cluster.engines["d1"].kv_used_tokens == 0
