import json

from dualmap.simulation.replay_bodies import Endpoint, RequestBodies
from dualmap.simulation.traces import Trace, TraceRequest


def test_a_request_that_was_answered_with_nothing_asks_for_a_token() -> None:
    trace = Trace("t", 512, (TraceRequest(0.0, 600, 0, (0, 1)), TraceRequest(1.0, 600, 7, (0, 2))))
    bodies = RequestBodies(trace, "m", Endpoint.CHAT, salt="")

    assert [json.loads(bodies.take())["max_tokens"] for _ in trace.requests] == [1, 7]
