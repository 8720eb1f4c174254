"""The machine of an answer, driven by hand: what it holds, sends, and makes of every way in which an answer ends."""

from __future__ import annotations

import random
from collections.abc import Callable
from typing import Any

import orjson
import pytest

from dualmap.router.answers.checks import TRUNCATED
from dualmap.router.answers.failures import GIVEN_BACK, AnswerTimes
from dualmap.router.answers.head import AnswerHead, Framing
from dualmap.router.answers.kept_stream import KeptBudget, KeptStream
from dualmap.router.answers.machine import (
    BEGUN,
    ENDS,
    ERROR_BODY_S,
    GOES_ON_AFTER_S,
    HOLDING,
    MAX_HELD_BYTES,
    PASSES,
    SILENT_S,
    TRANSITIONS,
    Abort,
    AnswerEffect,
    AnswerEffects,
    AnswerEvent,
    AnswerInput,
    AnswerMachine,
    AnswerPhase,
    AnswerSpec,
    BreakOff,
    CheckCanContinue,
    CloseConnection,
    ConnectionFailed,
    CutOff,
    DownAndSilent,
    Finish,
    FirstTokenCame,
    GivenUpByFleet,
    Head,
    Lent,
    MayLeave,
    MustLeave,
    Relayed,
    Settle,
    Silent,
    TakeBack,
    Use,
    Write,
    WriteHead,
)
from dualmap.router.answers.result import AnswerResult
from dualmap.router.errors import ShuttingDownError
from dualmap.scheduling.errors import TransitionError
from dualmap.scheduling.request.charge import Counted
from dualmap.scheduling.request.outcome import FailureKind, InstanceFailure, Outcome, Usage

CHAT = "/v1/chat/completions"
STREAM, JSON = b"text/event-stream", b"application/json"
TIMES = AnswerTimes(first_byte_s=10.0, chunk_s=20.0, deadline_s=1000.0)
BROKE = InstanceFailure(FailureKind.CLOSED, "the connection broke")
DONE = b"data: [DONE]\n\n"
WHOLE = orjson.dumps({"choices": [{"text": "a", "finish_reason": "stop"}], "usage": {"prompt_tokens": 3}})


def event(text: str = "", **fields: Any) -> bytes:
    choice = {"index": 0, "delta": {"content": text} if text else {"role": "assistant"}, "finish_reason": None}
    return b"data: %b\n\n" % orjson.dumps({"choices": [choice | fields]})


class Life:
    """One answer, and what its machine has had its driver do."""

    def __init__(self, **spec: Any) -> None:
        self.machine = AnswerMachine(AnswerSpec(**{"path": CHAT, **spec}), 0.0)
        self.effects: list[AnswerEffect] = []
        self.now_s = 0.0

    def on(self, event: AnswerEvent) -> AnswerEffects:
        effects = self.machine.on(event, self.now_s)
        self.effects += effects
        return effects

    def head(self, status: int = 200, kind: bytes = STREAM, framing: Framing = Framing.CHUNKED) -> Life:
        fields = [(b"content-type", kind)]
        self.on(Head(AnswerHead(status, fields, framing, dict(fields)), framing is Framing.UNTIL_CLOSE))
        return self

    def body(self, *pieces: bytes) -> Life:
        """Hand on the next bytes, as a driver does."""
        for data in pieces:
            self._take(data)
        return self

    def end(self, data: bytes = b"") -> Life:
        self._take(data, complete=True)
        return self

    def _take(self, data: bytes, *, complete: bool = False) -> None:
        passed = self.machine.take(data, [data] if data else [], complete)
        self.effects += self.machine.effects if passed is None else [Write(passed)] if passed else []

    @property
    def phase(self) -> AnswerPhase:
        return self.machine.phase

    @property
    def sent(self) -> bytes:
        """The part of the body that the client has."""
        return b"".join(each.data for each in self.effects if isinstance(each, WriteHead | Write))

    @property
    def result(self) -> AnswerResult:
        (result,) = [each.result for each in self.effects if isinstance(each, Settle | Finish)]
        return result

    def has(self, kind: type[Any]) -> bool:
        return any(isinstance(each, kind) for each in self.effects)


def kept() -> KeptStream:
    return KeptStream(CHAT, KeptBudget(1 << 20), 0, hides_ids=False)


def passing(**spec: Any) -> Life:
    return Life(**spec).head().body(event(), event("a"))


def lent(**spec: Any) -> Life:
    life = passing(**spec)
    life.on(Lent())
    return life


REACHED: dict[AnswerPhase, Callable[[], Life]] = {
    AnswerPhase.AWAITING_HEAD: Life,
    AnswerPhase.HOLDING_ERROR: lambda: Life().head(503),
    AnswerPhase.HOLDING_EVENTS: lambda: Life().head(),
    AnswerPhase.HOLDING_WHOLE: lambda: Life().head(kind=JSON).body(b'{"choices"'),
    AnswerPhase.AWAITING_BODY: lambda: Life().head(kind=b"audio/mpeg"),
    AnswerPhase.COLLECTING: lambda: Life(use=Use.PREFILL).head(),
    AnswerPhase.WATCHING: lambda: Life().head().body(event()),
    AnswerPhase.PASSING: passing,
    AnswerPhase.LENT: lent,
    AnswerPhase.UNREAD: lambda: Life().head(kind=b"audio/mpeg").body(b"x"),
}
"""An answer in each phase that is not its end."""


# the table -------------------------------------------------------------------------------------------------------
def test_every_phase_is_reached_and_every_end_is_one() -> None:
    assert {phase: reach().phase for phase, reach in REACHED.items()} == {phase: phase for phase in REACHED}
    assert set(AnswerPhase) - set(REACHED) == ENDS
    assert {phase for phase, _ in TRANSITIONS} == set(REACHED)
    assert {given for _, given in TRANSITIONS} == set(AnswerInput)
    assert HOLDING.isdisjoint(BEGUN) and PASSES < BEGUN


@pytest.mark.parametrize("phase", REACHED)
def test_whatever_comes_an_answer_ends_once_and_never_illegally(phase: AnswerPhase) -> None:
    """A driver takes a lent answer back first, and reports nothing about a head that has not come."""
    said: list[AnswerEvent] = [
        ConnectionFailed(BROKE),
        GivenUpByFleet("gone"),
        DownAndSilent("down", SILENT_S + 1),
        MustLeave("drains", FailureKind.DRAINED),
        MayLeave("drains", FailureKind.DRAINED),
        Silent(100.0, TIMES, True),
        Silent(0.0, TIMES, False),
    ]
    for first in said:
        life = REACHED[phase]()
        for each in (first, *said):
            life.on(each)
            while isinstance(life.effects[-1] if life.effects else None, TakeBack):
                life.effects.pop()
                life.on(Relayed(b"", b"", 0))
                life.on(each)
        assert life.phase in ENDS
        assert life.result.failure is not None
        assert (life.phase is AnswerPhase.FAILED) is (phase not in BEGUN)


def test_an_input_that_the_table_lacks_changes_nothing() -> None:
    life = Life().head()

    with pytest.raises(TransitionError):
        life.on(Lent())
    assert life.phase is AnswerPhase.HOLDING_EVENTS


@pytest.mark.parametrize("end", [lambda: passing().end(DONE), lambda: Life().head(kind=JSON).end(WHOLE)])
def test_what_comes_behind_the_end_changes_nothing(end: Callable[[], Life]) -> None:
    life = end()

    assert life.phase is AnswerPhase.DONE and life.result.failure is None
    assert [*life.on(ConnectionFailed(BROKE)), *life.on(CutOff(ShuttingDownError("ends")))] == []


# what is sent ----------------------------------------------------------------------------------------------------
@pytest.mark.parametrize("seed", range(20))
@pytest.mark.parametrize("spec", [{}, {"keep": kept}, {"use": Use.DECODED}, {"use": Use.DECODED, "keep": kept}])
def test_a_stream_passes_whole_however_it_is_cut(seed: int, spec: dict[str, Any]) -> None:
    rng = random.Random(seed)
    wire = b"".join([event(), *(event(f"w{n}") for n in range(9)), event(finish_reason="stop"), DONE])
    cuts = sorted(rng.sample(range(1, len(wire)), rng.randrange(1, 40)))
    life = Life(**spec).head().body(*(wire[a:b] for a, b in zip([0, *cuts], [*cuts, len(wire)], strict=True)))
    life.end()

    assert life.sent == wire
    assert sum(isinstance(each, FirstTokenCame) for each in life.effects) == 1
    assert sum(isinstance(each, WriteHead) and each.begins for each in life.effects) == 1
    assert 0 < life.machine.counted().output_tokens <= 9, "a mark in more than two pieces is not seen"
    assert life.result == AnswerResult(200, began=True) and life.result.outcome is Outcome.COMPLETED


def test_comments_pass_and_another_instance_may_still_answer() -> None:
    life = Life().head(framing=Framing.UNTIL_CLOSE).body(b": busy\n\n")
    assert life.effects == [WriteHead(b": busy\n\n")]

    life.on(ConnectionFailed(BROKE))

    assert life.phase is AnswerPhase.FAILED
    assert life.result.stream_goes_on and not life.result.began


@pytest.mark.parametrize("status", [400, 503])
def test_what_an_instance_refuses_is_the_clients_only_where_it_is_the_clients_fault(status: int) -> None:
    life = Life().head(status, JSON).end(b'{"error":{}}')

    assert life.has(WriteHead) is (status == 400)
    if status == 503:
        assert life.result.error_answer is not None and life.result.error_answer.body == b'{"error":{}}'
        assert life.phase is AnswerPhase.FAILED and life.has(CloseConnection)
    else:
        assert life.result.outcome is Outcome.CLIENT_ERROR


def test_an_answer_that_is_none_is_not_sent() -> None:
    life = Life().head(kind=JSON).end(b'{"error":{"code":500}}')

    assert not life.has(WriteHead)
    assert life.result.failure is not None and life.result.failure.status == 500


def test_what_is_too_long_to_be_held_passes_unread() -> None:
    life = Life().head(kind=JSON).body(b'{"choices":["', b"x" * MAX_HELD_BYTES)
    assert life.phase is AnswerPhase.UNREAD

    life.body(b"y").end(b'"],"usage":{"prompt_tokens":3}}')

    assert life.result.usage == Usage(3)
    assert life.machine.counted() == Counted(0, len(life.sent))


def test_a_stream_under_another_type_is_one() -> None:
    assert Life().head(kind=JSON).body(event("a")).phase is AnswerPhase.PASSING


def test_nobody_gets_what_a_prefill_leg_answers() -> None:
    life = Life(use=Use.PREFILL).head(kind=JSON).body(WHOLE[:9]).end(WHOLE[9:])

    assert life.effects == [Finish(AnswerResult(200, body=WHOLE))]
    assert life.machine.counted() == Counted()


def test_the_usage_event_is_hidden_from_a_client_that_has_not_asked_for_it() -> None:
    usage = b'data: {"choices":[],"usage":{"prompt_tokens":3,"completion_tokens":1}}\n\n'
    life = Life(hides_usage=True).head().body(event("a"), usage).end(DONE)

    assert life.machine.is_bare and life.sent == event("a") + DONE
    assert life.result.usage == Usage(3, None, 1)


# how it fails ----------------------------------------------------------------------------------------------------
def test_a_decoder_may_give_it_back_up_to_its_end() -> None:
    life = passing(use=Use.DECODED).body(event("b", finish_reason="stop", stop_reason="recomputed"))

    assert life.phase is AnswerPhase.BROKEN_OFF and life.result.failure is GIVEN_BACK
    assert life.has(Abort) and b"recomputed" not in life.sent


def test_the_clients_own_stop_string_gives_nothing_back() -> None:
    life = (
        passing(use=Use.DECODED, stops_at_mark=True)
        .body(event("b", finish_reason="stop", stop_reason="recomputed"))
        .end(DONE)
    )

    assert life.phase is AnswerPhase.DONE


def test_a_kept_stream_that_is_given_back_is_read_to_its_end() -> None:
    life = passing(keep=kept).body(event("b", finish_reason="stop", stop_reason="recomputed"))
    assert life.phase is AnswerPhase.PASSING

    life.end(DONE)

    assert life.phase is AnswerPhase.GOES_ON
    assert life.result.failure is GIVEN_BACK and life.result.kept is life.machine.kept
    assert life.sent == event() + event("a")


@pytest.mark.parametrize("spec", [{}, {"keep": kept}])
def test_a_stream_that_ends_before_its_answer_is_not_whole(spec: dict[str, Any]) -> None:
    life = passing(**spec).end()

    assert life.result.failure is TRUNCATED
    assert life.phase is (AnswerPhase.GOES_ON if spec else AnswerPhase.BROKEN_OFF)
    assert life.has(BreakOff) is not bool(spec)


def test_words_of_an_error_stand_between_events_alone() -> None:
    words = []
    for cut in (event("b"), event("b")[:9]):
        life = passing().body(cut)
        life.on(ConnectionFailed(BROKE))
        words += [each.words for each in life.effects if isinstance(each, BreakOff)]

    assert b"the stream broke off" in words[0] and words[1] == b""


def test_a_stream_leaves_its_instance_if_another_one_can_go_on_with_it() -> None:
    plain, life = passing(), passing(keep=kept)
    assert plain.on(MustLeave("drains", FailureKind.DRAINED)) == []

    assert life.on(MustLeave("drains", FailureKind.DRAINED)) == [CheckCanContinue("drains", FailureKind.DRAINED)]
    life.on(MayLeave("drains", FailureKind.DRAINED))

    assert life.phase is AnswerPhase.GOES_ON and life.result.failure == InstanceFailure(FailureKind.DRAINED, "drains")


@pytest.mark.parametrize(("spec", "patience_s"), [({}, SILENT_S), ({"keep": kept}, GOES_ON_AFTER_S)])
def test_an_answer_that_has_begun_may_finish_for_a_time(spec: dict[str, Any], patience_s: float) -> None:
    life = passing(**spec)

    assert not life.machine.doubts(patience_s) and life.machine.doubts(patience_s + 0.1)
    assert life.on(Silent(patience_s, TIMES, True)) == []
    assert life.on(DownAndSilent("down", patience_s)) == []
    life.on(Silent(patience_s + 0.1, TIMES, True))
    assert life.result.failure is not None and life.result.failure.kind is FailureKind.DOWN


def test_the_rest_of_an_error_is_waited_for_a_moment() -> None:
    life = Life().head(503)

    life.now_s = ERROR_BODY_S
    assert life.on(Silent(0.0, TIMES, False)) == []
    life.now_s += 0.1
    life.on(Silent(0.0, TIMES, False))
    assert life.phase is AnswerPhase.FAILED and life.result.error_answer is None


def test_a_client_that_reads_slowly_is_not_its_instances_silence() -> None:
    machine = passing().machine

    assert machine.measure_silence_s(5.0) == 0.0, "bytes have come"
    assert machine.measure_silence_s(7.0) == 2.0
    assert machine.measure_silence_s(9.0, paused=True) == 0.0
    assert machine.measure_silence_s(11.0, relayed=True) == 0.0


def test_the_time_for_the_whole_request_ends_it_for_good() -> None:
    life = passing(keep=kept)
    life.now_s = TIMES.deadline_s + 1

    life.on(Silent(0.0, TIMES, False))

    assert life.phase is AnswerPhase.BROKEN_OFF
    assert life.result.overdue and life.result.outcome is Outcome.TIMED_OUT


# the native relay ------------------------------------------------------------------------------------------------
def test_a_lent_answer_is_taken_back_before_it_fails() -> None:
    life = lent(keep=kept)
    lost = ConnectionFailed(BROKE)

    assert life.on(lost) == [TakeBack(lost)] and life.phase is AnswerPhase.LENT
    life.on(Relayed(event("b"), b"", 1))
    assert life.phase is AnswerPhase.PASSING
    life.on(lost)
    assert life.phase is AnswerPhase.GOES_ON and life.machine.counted() == Counted(2)


def test_only_a_stream_that_needs_no_decision_is_lent() -> None:
    assert Life().head().machine.relay_terms(10) is None
    assert passing().machine.relay_terms(10) is None, "what came last is no whole chunk"
    assert passing(keep=kept).machine.relay_terms(10) is not None
    assert passing(use=Use.DECODED).effects[-1] == FirstTokenCame(may_lend=False)


# one that a gateway passes on --------------------------------------------------------------------------------------
def test_what_a_gateway_passes_on_is_never_held() -> None:
    life = Life(use=Use.OBSERVED).head()
    assert life.phase is AnswerPhase.WATCHING

    life.body(event(), event("a"), event("b")).end(DONE)

    assert life.has(FirstTokenCame) and life.machine.counted() == Counted(2)
    assert life.result.outcome is Outcome.COMPLETED


def test_the_head_of_an_answer_that_a_gateway_passes_on_is_its_first_byte_or_its_failure() -> None:
    whole, failed = Life(use=Use.OBSERVED).head(kind=JSON), Life(use=Use.OBSERVED).head(503, JSON)

    assert whole.effects == [FirstTokenCame()]
    assert failed.phase is AnswerPhase.FAILED and failed.result.failure is not None
    assert failed.result.failure.status == 503
