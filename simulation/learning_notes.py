"""What the requests of a run tell the leader, as routers note it."""

from __future__ import annotations

import orjson

from dualmap.scheduling.estimates.learning import features_to_note, finished_note, transfer_note
from dualmap.scheduling.estimates.weights import Form
from dualmap.simulation.results import RequestOutcome


def first_token_note(features: Form | None) -> str:
    """Of a prefill that ended; None where its TTFT is not to be learned from."""
    return "{}" if features is None else orjson.dumps({"features": features_to_note(features)}).decode()


def end_note(outcome: RequestOutcome, answer_tokens: int, output_limit: int) -> str:
    """Of a whole answer."""
    assert outcome.first_token_s is not None
    assert outcome.finish_s is not None
    answer_ms = round((outcome.finish_s - outcome.first_token_s) * 1000)
    return finished_note(0, 0, answer_tokens, output_limit, answer_ms)


class TransferTimes:
    """Of decode legs without a first token."""

    def __init__(self) -> None:
        self._under_way: dict[str, tuple[float, int]] = {}

    def began(self, request_id: str, now_s: float, tokens: int) -> None:
        """The KV is staged, and so many tokens of it are to move."""
        self._under_way[request_id] = now_s, tokens

    def note(self, request_id: str, now_s: float) -> str:
        """At the first token of the decode leg: what to note of it."""
        staged_s, tokens = self._under_way.pop(request_id)
        return transfer_note(now_s - staged_s, tokens)
