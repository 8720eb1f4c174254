import json

from dualmap.simulation.replay.replay_bodies import Endpoint, RequestBodies
from dualmap.simulation.workload.traces import Trace, TraceRequest


def test_a_request_that_was_answered_with_nothing_asks_for_a_token() -> None:
    trace = Trace("t", 512, (TraceRequest(0.0, 600, 0, (0, 1)), TraceRequest(1.0, 600, 7, (0, 2))))
    bodies = RequestBodies(trace, "m", Endpoint.CHAT, salt="")

    assert [json.loads(bodies.take(place))["max_tokens"] for place in range(2)] == [1, 7]


def test_a_body_written_ahead_is_the_one_that_is_taken() -> None:
    trace = Trace("t", 512, (TraceRequest(0.0, 600, 1, (0, 1)), TraceRequest(1.0, 600, 7, (0, 2))))
    bodies = RequestBodies(trace, "m", Endpoint.CHAT, salt="")

    bodies.write_ahead(1)

    assert bodies.ready == 1
    assert [json.loads(bodies.take(place))["max_tokens"] for place in (1, 0)] == [7, 1]
    assert bodies.ready == 0
