"""Replicas that share no store know a part of the load that others cause."""

from __future__ import annotations

from dataclasses import replace

import pytest

from dualmap.research.unshared.load_view import LoadReadings, LoadView, SentLoad
from dualmap.statestore.records import InstanceRecord

IDLE = InstanceRecord("ready", "mixed", 1000, 4096, 256, 1000, 8000.0)


class Replica:
    """The load that one replica has sent to the instance "a"."""

    def __init__(self) -> None:
        self.load = SentLoad(IDLE, 0, 0.0)

    def sends(self, tokens: int, at_ms: int) -> None:
        record = self.load.record
        counts = {"pending_tokens": record.pending_tokens + tokens, "running_requests": record.running_requests + 1}
        self.load = SentLoad(
            replace(record, **counts, work_since_ms=at_ms),
            self.load.waiting_requests + 1,
            record.pending_tokens + tokens,
        )

    def sent(self) -> dict[str, SentLoad]:
        return {"a": self.load}


@pytest.mark.parametrize(
    ("view", "pending_tokens", "waiting", "kv_used_tokens"),
    [
        (LoadView.EXACT, 111_111, 4, 77),
        (LoadView.LATE, 1_111, 3, 5),
        (LoadView.GAUGES, 101, 2, 5),
        (LoadView.OWN, 1_011, 2, None),
    ],
)
def test_each_view_adds_to_the_own_load_what_it_knows_of_others(
    view: LoadView, pending_tokens: int, waiting: int, kv_used_tokens: int | None
) -> None:
    # given two replicas that have each sent a request before the reading and one after it
    own, other, gauge = Replica(), Replica(), {"a": 5}
    readings = LoadReadings(view, [own.sent, other.sent], lambda: dict(gauge))
    own.sends(1, 10)
    other.sends(100, 20)
    readings.read()
    own.sends(1010, 30)
    other.sends(110_000, 40)
    gauge["a"] = 77

    known = readings.known_to(0)["a"]

    own_tokens = own.load.record.pending_tokens
    assert own_tokens + known.growth.get("pending_tokens", 0) == pending_tokens
    assert own.load.record.running_requests + known.growth.get("running_requests", 0) == waiting
    assert known.waiting_requests == waiting
    assert known.window_tokens == pending_tokens
    assert known.kv_used_tokens == kv_used_tokens
    assert known.stamps == ({"work_since_ms": 40} if view is LoadView.EXACT else {})


def test_before_the_first_reading_gauges_show_no_load() -> None:
    own = Replica()
    readings = LoadReadings(LoadView.GAUGES, [own.sent], dict)
    own.sends(500, 10)

    known = readings.known_to(0)["a"]

    assert known.growth == {"pending_tokens": -500, "running_requests": -1}
    assert (known.waiting_requests, known.window_tokens, known.kv_used_tokens) == (0, 0.0, None)
