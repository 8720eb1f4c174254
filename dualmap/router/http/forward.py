"""The path of every inference request: read, place, try instances until one answers, finish."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any, Final

import orjson

from dualmap.api_bodies.json_body import UnreadableJsonError, read_json
from dualmap.router.answers.checks import ABORTED
from dualmap.router.answers.continued_answer import ContinuedAnswer, comment_on, ending_events
from dualmap.router.answers.continued_response import ContinuedResponse
from dualmap.router.answers.head import ErrorAnswer
from dualmap.router.answers.kept_stream import KeptStream, without_ids
from dualmap.router.answers.machine import AnswerSpec, Use
from dualmap.router.answers.rest import (
    CONTINUED_PATHS,
    CannotContinueError,
    Measured,
    Over,
    Rest,
    begin_rest,
    can_go_on,
    requests_of,
    rest_of,
    wants_usage,
)
from dualmap.router.answers.result import AnswerResult, Refusals
from dualmap.router.answers.so_far import AnswerSoFar
from dualmap.router.answers.sse import Ending, event_object
from dualmap.router.errors import RequestAbortedError, RouterError, UpstreamError, from_exception
from dualmap.router.http.admission import mint_request_id, read_request_id
from dualmap.router.http.answer_driver import AnswerDriver, Receiver, nothing
from dualmap.router.http.body_edits import (
    IDS_FIELD,
    USAGE_FIELD,
    BodyPart,
    Edit,
    added_fields,
    edited,
    field_edit,
    form_edits,
    id_field,
    json_model_span,
)
from dualmap.router.http.body_rules import apply_body_rules
from dualmap.router.http.continued_chat import measure_rest
from dualmap.router.http.downstream import Downstream
from dualmap.router.http.layerwise_forward import LayerwiseLegs
from dualmap.router.http.parts import FirstPart, LaterPart, Part
from dualmap.router.http.paths import ABORT_PATH
from dualmap.router.http.plain_heads import Header
from dualmap.router.http.plane import DataPlane
from dualmap.router.http.reading import read_so_far
from dualmap.router.http.request_reader import ClientRequest
from dualmap.router.http.sending import Abandoned, Sender, Sending
from dualmap.router.http.several_answers import SeveralAnswers
from dualmap.router.http.split_forward import SplitLegs
from dualmap.router.http.usage_requests import AS_SENT
from dualmap.router.prompts.inference_request import COMPLETIONS_PATHS, RESPONSES_PATH, InferenceRequest, response_id
from dualmap.router.requests.live_request import LiveRequest
from dualmap.router.requests.refusals import outcome_of
from dualmap.router.telemetry import trace_context
from dualmap.scheduling.request.charge import NOTHING_COUNTED
from dualmap.scheduling.request.machine import Failed, RequestMachine
from dualmap.scheduling.request.outcome import FailureKind, InstanceFailure, Outcome, Usage
from dualmap.scheduling.state.instance import InstanceSpec
from dualmap.scheduling.state.legs import Leg

_WHOLE: Final = Leg.WHOLE
_INTERNAL_ERROR: Final = Outcome.INTERNAL_ERROR
_COMPLETED: Final = Outcome.COMPLETED

MEASURED_WITHIN_S: Final = 10.0
"""Time for an instance to count the tokens of a text. Without the count an answer may become longer than its limit, as
a busy engine puts several tokens into an event: it is worth a wait."""

_log = logging.getLogger(__name__)


async def serve_inference(request: ClientRequest, downstream: Downstream, plane: DataPlane) -> None:
    """Answer an inference request, by an instance's answer or by an error. Raises only ``CancelledError``."""
    sent_id = request.get(b"x-request-id")
    request_id = mint_request_id() if sent_id is None else read_request_id(sent_id.decode("latin-1"))
    placed: LiveRequest | None = None
    forwarding: Forwarding | None = None
    try:
        caller = request.caller
        inference_request = plane.short_bodies.read(request, request_id)
        if inference_request is None:
            inference_request = await plane.long_bodies.read(request, request_id)
        request_id = inference_request.request_id
        inference_request.client, inference_request.only = request.client, request.only
        inference_request.may_pull = inference_request.leaves_load_open
        if caller is not None:
            inference_request.caller, inference_request.cut_off = caller, downstream.cut_off
        apply_body_rules(plane, request, inference_request)
        if plane.traces is not None:
            inference_request.trace = plane.traces.begin(request.get(trace_context.FIELD))
        placed = await plane.intake.place(inference_request)
        forwarding = Forwarding(request, inference_request, placed, downstream, plane)
        await forwarding.run()
    except Exception as error:
        refusal = from_exception(error)
        # The id in the fleet: the client's own may be another live request's.
        request_id = placed.request_id if placed is not None else refusal.request_id or request_id
        if refusal.status == 500:
            _log.error("request %s failed inside the router", request_id, exc_info=error)
        part = FirstPart(downstream) if forwarding is None else forwarding.part
        part.refuse(refusal, [(b"x-request-id", request_id.encode())])


def body_for(inference_request: InferenceRequest, body: bytes, machine: RequestMachine, *more: bytes) -> list[BodyPart]:
    """The client's own bytes, with those that its instance needs: another name of the model, the fleet's values of
    fields, an id of the response by which it is found again, and ``more`` fields as JSON.

    Fields stand at the end, where they count in place of those of the same name before, as for any reader. They are
    for JSON objects alone: of a body that was not read nothing is edited but a name of the model that was found.
    """
    edits: list[Edit] = []
    model, at_instance = inference_request.model, machine.spec.model
    if model and at_instance != model:
        if inference_request.form:
            assert inference_request.model_span is not None
            edits.append((inference_request.model_span, at_instance.encode()))
        else:
            edits.append((inference_request.model_span or json_model_span(body), orjson.dumps(at_instance)))
    if inference_request.form:
        edits += form_edits(inference_request)
        return edited(body, sorted(edits))
    if inference_request.unread:
        return edited(body, edits)
    fields = [*added_fields(inference_request)]
    if inference_request.leaves_load_open and (transfer := _transfer_field(machine)):
        fields.append(transfer)
    fields += more
    if inference_request.leaves_id_open:
        fields.append(id_field(response_id(machine.request_id, machine.instance_id, inference_request.tenant)))
    if fields:
        edits.append(field_edit(body, *fields))
    return edited(body, edits)


def _transfer_field(machine: RequestMachine) -> bytes:
    """The fields about loads from tiers and pulls for the instance; empty where it may do as it likes."""
    most, source = machine.max_load_tokens, machine.source
    if source is not None:
        place = {
            "kv_request_id": f"{machine.request_id}-{machine.attempt}",
            "remote_host": source.host,
            "remote_port": source.port,
        }
        return b'"kv_transfer_params":%b' % orjson.dumps({"remote_kv_source": place})
    return b"" if most is None else b'"kv_transfer_params":{"max_load_tokens":%d}' % most


def fleet_fields(placed: LiveRequest) -> list[Header]:
    """The fields of an answer about the fleet."""
    machine = placed.machine
    answering_id = machine.answering_id
    fields: list[Header] = [
        (b"x-request-id", placed.request_id.encode()),
        (b"x-dualmap-instance", answering_id.encode()),
        (b"x-dualmap-cached-tokens", b"%d" % placed.expected_cached_tokens),
        (b"x-dualmap-attempts", b"%d" % machine.tries),
    ]
    if answering_id != (instance_id := machine.instance_id):
        fields.append((b"x-dualmap-prefill-instance", instance_id.encode()))
    expected_s = machine.expected_ttft_s
    if expected_s is not None:
        fields.append((b"x-dualmap-expected-ttft-ms", b"%.1f" % (1000.0 * expected_s)))
    fields += placed.limit_fields()
    return fields


def _not_elsewhere(failure: InstanceFailure, why: CannotContinueError) -> str:
    return f"the stream broke off: {failure.detail}; it does not go on elsewhere: {why}"


class Forwarding:
    """One placed request and its tries. In every case the request is finished once and no connection stays open."""

    _split: SplitLegs | None = None
    """Legs of the split request, once a prefill leg of it was sent."""
    _kept: KeptStream | None = None
    """The kept stream of the present try, once its answer is a stream."""
    _original = b""
    """The client's body, once a request for the rest of its answer has taken its place."""
    _so_far: AnswerSoFar | None = None
    _several: SeveralAnswers | None = None
    """The answers of its stream, once they go on by requests of their own."""
    _asks_ids = False
    _hides_ids = False

    def __init__(
        self,
        request: ClientRequest,
        inference_request: InferenceRequest,
        placed: LiveRequest,
        downstream: Downstream,
        plane: DataPlane,
    ) -> None:
        self.request = request
        self._inference_request = inference_request
        self._placed = placed
        self._machine = placed.machine
        self._client = downstream
        self.part: Part = FirstPart(downstream)
        """The part of the client's answer that comes from the instance which has the request now."""
        self.plane = plane
        self._deadline_s = downstream.received_s + plane.settings.total_timeout_s
        how = plane.settings.continue_streams
        self._not_continued = inference_request.not_continued
        """Why a stream that breaks off does not go on elsewhere; empty where it may."""
        if how == "off" and not self._may_be_given_back:
            self._not_continued = "router.continue_streams is off"
        if not self._not_continued:
            self._asks_ids = self._hides_ids = how == "tokens" and inference_request.leaves_ids_open
            if inference_request.answers > 1:
                self._so_far = AnswerSoFar(inference_request.answers, inference_request.prompts)
            if placed.machine.is_evictable:
                placed.on_evict = self._evict
        self.sender = Sender(
            request,
            inference_request,
            placed.request_id,
            plane,
            placed.pool.loss_notifier,
            self._deadline_s,
            run=placed.machine.spec.run.run,
        )

    async def run(self) -> None:
        """Raises RouterError when no instance answered and nothing was sent."""
        outcome, usage = _INTERNAL_ERROR, None
        try:
            result = await self._try_until_sent()
            if result.kept is not None:
                self._client.between_events = True
                result = await (
                    self._go_on_each(result) if self._inference_request.answers > 1 else self._go_on(result)
                )
            elif result.failure is None:
                self.part.finish()
            outcome = self._outcome(result)
            if result.failure is None:
                usage = self._usage_of(result.usage)
        except asyncio.CancelledError:
            outcome = Outcome.CLIENT_GONE if self._client.gone else Outcome.CUT_OFF
            usage = self._usage_of(self.sender.left.usage)
            raise
        except RouterError as error:
            outcome = outcome_of(error)
            raise
        finally:
            kept = self._kept
            if kept is not None and not (self._machine.spec.shadowed and outcome is _COMPLETED):
                kept.release()
                kept = None
            if self._several is not None:
                self._several.release()
            self._placed.finish(outcome, usage, self.sender.counted)
            self._split = None  # its legs refer to this
            if kept is not None:
                request, body = self._inference_request, self._original or self.request.body
                self.plane.shadows.offer(
                    self._placed.pool, self._machine, request.path, body, kept, fields=added_fields(request)
                )

    async def _go_on(self, result: AnswerResult) -> AnswerResult:
        """The result that the client saw of a stream that failed after it had begun: it goes on as another answer's."""
        while result.kept is not None and result.failure is not None:
            if self._is_ended_by_client(result):
                return await self._end_aborted(result.kept)
            failure = result.failure
            so_far = await read_so_far(result.kept)
            try:
                ended = await self._place_rest(so_far, failure)
                if ended is not None:
                    return ended
                result = await self._try_until_sent()
            except CannotContinueError as why:
                self._placed.broke_off(failure)
                self._end_failed(result.kept, so_far, UpstreamError(_not_elsewhere(failure, why)))
                return AnswerResult(200, failure=failure)
            except RouterError as error:
                self._end_failed(result.kept, so_far, error)
                return AnswerResult(200, failure=failure)
            if result.failure is None:
                self.part.finish()
        return result

    def _is_ended_by_client(self, result: AnswerResult) -> bool:
        """Whether the instance aborted the answer because its client asked for that: it has not failed."""
        return self._placed.abort_requested and result.is_aborted

    async def _end_aborted(self, kept: KeptStream) -> AnswerResult:
        """End a stream as its instance does, whose client asked for that."""
        so_far = await read_so_far(kept)
        own = kept.failed_by if self.part.is_first else b""
        own = without_ids(own) if kept.hides_ids else own
        LaterPart(self._client).close_stream(
            own + ending_events(self._inference_request.path, so_far, None, shows_usage=False)
        )
        return AnswerResult(200, failure=ABORTED)

    def _end_failed(self, kept: KeptStream | None, so_far: AnswerSoFar, error: RouterError) -> None:
        """End a stream that goes on nowhere. A response that its engine has failed ends by the engine's own event."""
        last = LaterPart(self._client, so_far=so_far)
        own = b"" if kept is None or self._inference_request.path != RESPONSES_PATH else kept.failed_by
        found = event_object(own) or {}
        if found.get("error") or found.get("type") == "response.failed":  # not where it says that it was aborted
            last.break_off(own, between_chunks=True)
        else:
            last.refuse(error)

    async def _go_on_each(self, result: AnswerResult) -> AnswerResult:
        """The result that the client saw of a stream of several answers that failed after it had begun."""
        assert result.kept is not None
        assert result.failure is not None
        if self._is_ended_by_client(result):
            return await self._end_aborted(result.kept)
        so_far, failure, client_body = await read_so_far(result.kept), result.failure, read_json(self.request.body)
        self._inference_request.model_span = None
        several = self._several = SeveralAnswers(
            self,
            self._placed,
            self._inference_request.path,
            client_body,
            so_far,
            stops_at_mark=self._inference_request.stops_at_mark,
        )
        try:
            if self._not_continued or so_far.unfit:
                raise CannotContinueError(self._not_continued or so_far.unfit)
            return await several.go_on(failure)
        except CannotContinueError as why:
            failure = several.failure or failure
            self._placed.broke_off(failure)
            LaterPart(self._client).refuse(UpstreamError(_not_elsewhere(failure, why)))
        except RouterError as error:
            failure = several.failure or failure
            LaterPart(self._client).refuse(error)
        return AnswerResult(200, failure=failure)

    async def _place_rest(self, so_far: AnswerSoFar, failure: InstanceFailure) -> AnswerResult | None:
        """Place the request for what is missing of an answer. Returns the result where that was its end alone, which
        the client has got.

        Raises:
            CannotContinueError: it does not go on elsewhere.
            RouterError: no instance takes it, or the one that does has shown that it does not go on.
        """
        if self._not_continued:
            raise CannotContinueError(self._not_continued)
        (client_body,) = requests_of(read_json(self._original or self.request.body), 1)
        rest = await self._rest(client_body, so_far, failure)
        if isinstance(rest, Over):
            return self._end_whole(client_body, so_far, rest)
        self._send_rest_next(rest, client_body, so_far)
        return None

    async def _rest(self, client_body: Mapping[str, Any], so_far: AnswerSoFar, failure: InstanceFailure) -> Rest | Over:
        """The missing part of the answer to the client's body, for which an instance is found. Raises as
        ``_place_rest``."""
        path = self._inference_request.path
        rest = rest_of(path, client_body, so_far, context_tokens=1, text_tokens=None)
        if isinstance(rest, Over):
            self._placed.broke_off(failure)
            return rest
        self.sender.counted = NOTHING_COUNTED  # they are among the tokens that were sent
        await self._placed.failed(Failed(failure, sent_tokens=so_far.tokens))
        try:
            measured = await self.measure_rest(path, client_body, so_far, rest)
            return rest_of(
                path,
                client_body,
                so_far,
                context_tokens=measured.context_tokens,
                text_tokens=measured.text_tokens,
                trims=measured.trims,
            )
        except CannotContinueError as why:  # the failure is counted, and the next instance is not to blame
            raise UpstreamError(_not_elsewhere(failure, why)) from why

    async def measure_rest(
        self, path: str, client_body: Mapping[str, Any], so_far: AnswerSoFar, rest: Rest
    ) -> Measured:
        """See ``continued_chat.measure_rest``. The instance is the one that the request is placed on."""
        return await measure_rest(self._query_instance, self._machine.spec.model, path, client_body, so_far, rest)

    async def _query_instance(self, path: str, body: bytes) -> bytes | None:
        return await self.sender.ask(self._machine.instance_for(_WHOLE), path, body, MEASURED_WITHIN_S)

    def _send_rest_next(self, rest: Rest, client_body: Mapping[str, Any], so_far: AnswerSoFar) -> None:
        """Make the request that is sent the one for the rest of the answer."""
        request, inference_request = self.request, self._inference_request
        self._original = self._original or request.body
        request.path, request.body = rest.path, rest.body
        inference_request.model_span = None
        inference_request.leaves_usage_open = inference_request.refuses_usage = self._asks_ids = False
        shows_ids = client_body.get("return_token_ids") is True
        self._hides_ids = rest.by_tokens and not shows_ids
        overlap = begin_rest(so_far, rest)
        answer: ContinuedAnswer | ContinuedResponse
        if rest.path == RESPONSES_PATH:
            answer = ContinuedResponse(so_far, rest, overlap=overlap)
        else:
            answer = ContinuedAnswer(
                inference_request.path,
                so_far,
                rest,
                overlap=overlap,
                shows_usage=wants_usage(client_body),
                shows_ids=shows_ids,
            )
        self._so_far = so_far
        self.part = part = LaterPart(self._client, answer)
        if self.plane.settings.tell_continuations:
            part.comment(comment_on(self._machine.answering_id, so_far.tokens, (rest,)))

    def _end_whole(self, client_body: Mapping[str, Any], so_far: AnswerSoFar, over: Over) -> AnswerResult:
        """End a stream of which nothing else is missing."""
        ended = self.part.unsent_end() or ending_events(
            self._inference_request.path, so_far, over.finish_reason, shows_usage=wants_usage(client_body)
        )
        self.part = part = LaterPart(self._client)
        part.close_stream(ended)
        return AnswerResult(200, Ending(Usage(so_far.prompt_tokens, None, so_far.tokens)), began=True)

    async def _try_until_sent(self) -> AnswerResult:
        """The result that the client saw; tries go on as long as nothing was sent and the request has another."""
        refusals: Refusals | None = None
        while True:
            if self._machine.to_send is _WHOLE:
                result, leg = await self.sender.send(self._to_placed()), None
            else:
                result, leg = await self._try_legs()
            failure = result.failure
            if result.stream_goes_on:
                self._client.between_events = True
                self.part = self.part.again()
            if failure is None or self.part.has_begun:
                if result.kept is None and (fault := result.fault) is not None and not self._is_ended_by_client(result):
                    self._placed.broke_off(fault)
                return result
            if self._is_ended_by_client(result):
                if result.error_answer is None:
                    raise RequestAbortedError(f"request {self._placed.request_id} was ended by {ABORT_PATH}")
                self.pass_on(result.error_answer)
                return result
            refusals = refusals or Refusals()
            refusal = refusals.take(result)
            keeps_kv = self._split is not None and self._split.keeps_kv
            try:
                await self._placed.failed(Failed(failure, overdue=result.overdue, leg=leg, keeps_kv=keeps_kv))
            except RouterError:
                # An instance's own words say more than the router's.
                if refusal is None:
                    raise
                self.pass_on(refusal)
                return result

    def _to_placed(self) -> Sending:
        """The whole request, to the instance that it was placed on."""
        placed = self._placed
        use = Use.DECODED if self._is_decoded else Use.CLIENT
        return self.to_client(
            self._machine.instance_for(_WHOLE), (), placed.first_token, use, placed.sent,
            kv_within_s=self._machine.pulled_within_s,
        )  # fmt: skip

    async def _try_legs(self) -> tuple[AnswerResult, Leg | None]:
        """Try the two instances of a split request. Returns the result, and which leg failed where both run at once."""
        placed, machine = self._placed, self._machine
        while machine.to_send is not _WHOLE:
            if machine.rules.decode_first:
                legs = LayerwiseLegs(placed, self)
                return self._refused_by_prefill(await legs.run(), legs.failed_leg), legs.failed_leg
            if machine.to_send is Leg.DECODE and self._split is not None:
                return await self._split.decode(), None
            self._split = SplitLegs(placed, self)
            result = await self._split.prefill()
            if result.failure is not None or result.status >= 400:
                return self._refused_by_prefill(result, Leg.PREFILL), None
            await placed.prefill_ended()
        return await self.sender.send(self._to_placed()), None

    def _refused_by_prefill(self, result: AnswerResult, leg: Leg | None) -> AnswerResult:
        """Pass on what a prefill leg was refused with."""
        if leg is Leg.PREFILL and result.failure is None:
            self.pass_on(result.as_error())
        return result

    def to_client(
        self,
        target: InstanceSpec,
        more: Sequence[bytes],
        on_first_token: Callable[[], None],
        use: Use,
        on_sent: Callable[[], None] = nothing,
        abandoned: Abandoned = AnswerDriver.abort,
        kv_within_s: float | None = None,
    ) -> Sending:
        """The client's request, with these fields, to an instance whose answer it gets; see ``Sending``."""
        request, usage = self._inference_request, AS_SENT
        if request.stream and self._may_ask_usage:
            usage = self.plane.usage_requests.next(target.url, is_charged=self._is_charged)
        as_it_came = not (more or usage.requests)
        part, keep = self.part, None if self._not_continued and not self._is_watched else self._keep
        return Sending(
            target,
            self.body if as_it_came else partial(self.body, *more, requests_usage=usage.requests),
            AnswerSpec(part.path, use, usage.hides, request.stops_at_mark, keep),
            Receiver(part, self.fleet_fields, self._begin_answer, on_first_token, self._may_leave),
            on_sent,
            abandoned=abandoned,
            kv_within_s=kv_within_s,
            leaves_usage_open=request.leaves_usage_open,
            requests_usage=usage.requests,
        )

    @property
    def _is_charged(self) -> bool:
        """Whether the tokens of its answer count for a limit."""
        caller = self._inference_request.caller
        return caller is not None and caller.tenant.limits_tokens

    @property
    def _may_ask_usage(self) -> bool:
        """Whether its instance may be asked for a usage that its client has not asked for: a client that is charged
        cannot say that it wants none."""
        request = self._inference_request
        if not (request.leaves_usage_open or (request.refuses_usage and self._is_charged)):
            return False
        return self.plane.settings.ask_usage

    # what goes to the instance -------------------------------------------------------------------------------
    @property
    def other_fields(self) -> bytes:
        """The fields whose values at the instances are others than the client's, as JSON with a comma behind each: the
        name of the model, the salt of the tenant, the priority of the class."""
        model, request = self._machine.spec.model, self._inference_request
        fields = added_fields(request)
        if request.model and model != request.model:
            fields.append(b'"model":%b' % orjson.dumps(model))
        return b"".join([b"%b," % field for field in fields])

    @property
    def _is_decoded(self) -> bool:
        """Whether its answer is a decoder's, which may fail it late or give it back, and say so."""
        # On no other path is a stop_reason passed on.
        return self._inference_request.path in COMPLETIONS_PATHS and self._machine.is_decoded

    @property
    def _may_be_given_back(self) -> bool:
        """Whether its decoder may give it back in the middle: those of vLLM-Ascend's connectors do that."""
        return self.streams and self._is_decoded and self._placed.pool.settings.connector != "nixl"

    def _evict(self, why: str) -> None:
        """Leave the instance for a request of a higher class."""
        if self._several is None and (driver := self.sender.driver) is not None:
            driver.leave(why, FailureKind.EVICTED)

    async def _may_leave(self) -> bool:
        """Whether another instance could go on with the stream as it is now."""
        if self._kept is None or self._kept.holds_end:
            return False
        so_far = await read_so_far(self._kept)
        try:
            client_body = read_json(self._original or self.request.body)
        except UnreadableJsonError:  # it was dropped meanwhile
            return False
        answers = so_far.answers()
        return await self.could_leave(self._inference_request.path, requests_of(client_body, len(answers)), answers)

    async def could_leave(
        self, path: str, requests: Sequence[Mapping[str, Any]], answers: Sequence[AnswerSoFar]
    ) -> bool:
        """Whether another instance like the present one, which is asked, could go on with all answers, each to its
        request."""
        if not can_go_on(path, requests, answers):
            return False
        try:
            for client_body, so_far in zip(requests, answers, strict=True):
                rest = rest_of(path, client_body, so_far, context_tokens=1, text_tokens=None)
                if isinstance(rest, Rest):
                    await self.measure_rest(path, client_body, so_far, rest)
        except CannotContinueError:
            return False
        return True

    @property
    def _is_watched(self) -> bool:
        """Whether a stream that goes on nowhere is watched for its instance's abort. A response in the background has
        a call by which its client ends it, which looks the same."""
        request = self._inference_request
        return request.stream and request.path in CONTINUED_PATHS and not request.in_background

    def _keep(self) -> KeptStream:
        """Keep the stream of a new try, or watch it."""
        if self._kept is not None:
            self._kept.release()
        body_bytes, placed = len(self.request.body) + len(self._original), self._placed
        kept = self._kept = KeptStream(
            self.request.path, self.plane.kept, body_bytes, hides_ids=self._hides_ids, so_far=self._so_far,
            is_ended_by_client=lambda: placed.abort_requested,
        )  # fmt: skip
        kept.lost = bool(self._not_continued)
        return kept

    def _drop_bodies(self) -> None:
        """Drop the client's body and that of a rest: no other instance is asked."""
        self.request.drop_body()
        self._original = b""

    @property
    def streams(self) -> bool:
        return self._inference_request.stream

    def body(self, *more: bytes, requests_usage: bool = False) -> list[BodyPart]:
        """The client's own bytes, unless it uses another name of the model than the instance, the fleet sets fields
        of it, or the router asks for usage, for ids of tokens or for the response's id."""
        body = self.request.body
        if self._asks_ids:
            more = (IDS_FIELD, *more)
        if requests_usage:
            more = (*more, USAGE_FIELD)
        return body_for(self._inference_request, body, self._machine, *more)

    # what goes to the client ---------------------------------------------------------------------------------
    def _begin_answer(self) -> None:
        """Drop the body: there is no other try from here on. That of a stream that is kept counts as a part of it."""
        kept, request = self._kept, self.request
        if kept is None or kept.lost:
            self._drop_bodies()
            return
        kept.on_loss = self._drop_bodies
        if request.bodies is not None:
            request.bodies.give_back(len(request.body), request.counted_for)
            request.bodies = None

    def body_of(self, body: bytes) -> list[BodyPart]:
        """Another body than the client's, for the instance that the request is placed on."""
        return body_for(self._inference_request, body, self._machine)

    def fleet_fields(self) -> list[Header]:
        return [*fleet_fields(self._placed), *self._client.page_fields]

    def pass_on(self, answer: ErrorAnswer) -> None:
        """No instance took the request: the last one's own error says more than the router's would."""
        self.part.pass_on(answer, self.fleet_fields)

    # what is counted -----------------------------------------------------------------------------------------
    def _outcome(self, result: AnswerResult) -> Outcome:
        if self._placed.abort_requested and self._is_ended_by_client(result):
            return Outcome.CLIENT_GONE
        return Outcome.UPSTREAM_FAILED if self.part.failed is not None else result.outcome

    def _usage_of(self, usage: Usage | None) -> Usage | None:
        """The usage of the whole answer, from that of its last part; None where its instance has reported none."""
        return None if usage is None else self.part.count(usage)
