"""One request that Envoy asks about: the messages of its stream are the events of the request's machine.

    head, body ── placed ──▶ destination told ── head of the answer ──▶ passing ── end of the stream ──▶ released
                    │ held in the fleet               │ another of the choices served it: moved there
                    └ refused: answered by Envoy      └ an error: broken off

Nothing is decided here. A request is placed, held, granted and released by the machine that the HTTP data plane drives
as well, through ``LiveRequest``; the tries of a request are Envoy's, which says afterwards where it was served.

The first message is answered once the request is placed: until then Envoy can ask another picker, should this one die.
A body that Envoy buffers is the exception, as it comes after that answer alone.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import math
import time
from collections.abc import Awaitable, Callable, Iterable, Iterator, Mapping
from dataclasses import KW_ONLY, dataclass, field
from typing import Any, Final, Protocol
from urllib.parse import unquote

import orjson

from dualmap.router.answers.checks import retry_after_s
from dualmap.router.answers.machine import (
    Abort,
    AnswerEffect,
    AnswerEffects,
    AnswerEvent,
    AnswerMachine,
    AnswerSpec,
    BreakOff,
    CloseConnection,
    ConnectionFailed,
    Finish,
    FirstTokenCame,
    GatewayDone,
    Head,
    Settle,
    Use,
    Write,
    WriteHead,
    WriteLast,
)
from dualmap.router.answers.result import AnswerResult
from dualmap.router.errors import (
    NO_INSTANCE_RETRY_S,
    BodyTooLargeError,
    ForbiddenPathError,
    NoInstanceError,
    RequestTimeoutError,
    RouterError,
    error_body,
    error_headers,
    from_exception,
)
from dualmap.router.http.admission import find_caller, mint_request_id, read_request_id, wait_for_caller
from dualmap.router.http.body_rules import apply_body_rules
from dualmap.router.http.forward import body_for, fleet_fields
from dualmap.router.http.paths import ABORT_PATH, ENGINE_CONTROL_PATHS, forbidden_path_finder, methods_of
from dualmap.router.http.plain_heads import Header
from dualmap.router.http.plane import DataPlane
from dualmap.router.http.request_reader import ClientRequest, HeadCheck
from dualmap.router.picker import messages
from dualmap.router.picker.addresses import Addresses, UnknownAddressError, literal
from dualmap.router.picker.first_tokens import FirstTokens
from dualmap.router.picker.grpc_server import LeftError
from dualmap.router.picker.messages import BodyMode, CodeDetails
from dualmap.router.prompts.inference_request import InferenceRequest
from dualmap.router.requests.live_request import LiveRequest
from dualmap.router.requests.refusals import outcome_of
from dualmap.router.telemetry import trace_context
from dualmap.router.tenants.directory import TenantDirectory, usable_model, usable_models
from dualmap.runtime.open_files import ShortageLog
from dualmap.scheduling.request.charge import Counted
from dualmap.scheduling.request.machine import Failed
from dualmap.scheduling.request.outcome import FailureKind, InstanceFailure, Outcome, Usage
from dualmap.scheduling.state.instance import InstanceSpec
from dualmap.scheduling.state.legs import Leg
from dualmap.scheduling.tenants.budgets import Measure
from dualmap.scheduling.tenants.tenant import Caller

log = logging.getLogger(__name__)

_MODELS: Final = "/v1/models/"
_CREDENTIALS: Final = (("authorization", b"authorization"), ("x-api-key", b"x-api-key"))
_DROPPED: Final = {
    (trusts, keeps): (
        *(messages.OWN_HEADERS if trusts else messages.ROUTING_HEADERS),
        *(() if keeps else _CREDENTIALS),
    )
    for trusts in (False, True)
    for keeps in (False, True)
}
"""Request headers that no instance gets, by whether transfers are trusted, and whether it gets credentials."""
VIA_UPSTREAM: Final = "via_upstream"
UNANSWERED: Final = 8
"""So many bodies that were asked for, or reports that were announced, and none came, show that none ever does."""
UNCOUNTED: Final = (
    "the gateway sends no bodies of answers (response_body_mode: NONE), so their tokens cannot be counted: requests of"
    " tenants with limits of tokens keep what they draw, which is their max_tokens, or the expected length where they"
    " name none, which their answers may exceed. Set response_body_mode to STREAMED for exact limits"
)
MOVED: Final = InstanceFailure(FailureKind.MOVED, "the gateway sent it to another of its choices")


class Stream(Protocol):
    """The stream of one request."""

    async def read(self) -> Any | None:
        """The next message; None at the end of the stream."""

    async def write(self, reply: bytes) -> None:
        """Send a reply.

        Raises:
            LeftError: the gateway has ended the stream.
        """


@dataclass(slots=True)
class Awaited:
    """Something that the gateway sends of some streams. One may be left by its client before; but where nothing ever
    comes, no more is awaited: those requests would seem to have no first token until they end."""

    missing: float = 0
    """Times that it did not come, until it comes once."""

    @property
    def never_comes(self) -> bool:
        return self.missing >= UNANSWERED

    def came(self) -> None:
        self.missing = -math.inf

    def did_not_come(self) -> bool:
        """Returns whether this shows that it never does."""
        self.missing += 1
        return self.missing == UNANSWERED


@dataclass(slots=True)
class Picker:
    """The parts that all requests of a picker share."""

    plane: DataPlane
    check_head: HeadCheck
    addresses: Addresses
    model_cards: Callable[[], Awaitable[Mapping[str, Any]]]
    """Makes the answer of ``GET /v1/models``."""
    _: KW_ONLY
    choices: int = 2
    """Addresses that the gateway is given at most."""
    observed_share: float = 0.0
    """Share of the streams whose body is asked for, where it does not come by itself."""
    test_headers: bool = False
    is_gateway: Callable[[str], bool] = lambda peer: False
    """Whether a stream from there is the gateway's that names tenants."""
    first_tokens: FirstTokens = field(default_factory=FirstTokens)
    cuts_off: bool = False
    """The time for requests in flight is over: what is cancelled now is cut off, and was not left by its client."""
    warn: Callable[[str], None] = log.warning
    """Reports something about this picker that an operator has to know, once."""
    _counts_all: bool = True
    _observations_due: float = 0.0
    _bodies: Awaited = field(default_factory=Awaited)
    _reports: Awaited = field(default_factory=Awaited)
    _overflow_log: ShortageLog = field(default_factory=ShortageLog)

    def cannot_count(self, caller: Caller) -> None:
        """The answer of a request of this tenant does not pass here."""
        if not self._counts_all or all(limit.measure is Measure.REQUESTS for limit in caller.tenant.limits):
            return
        self._counts_all = False
        self.warn(UNCOUNTED)

    def awaits_report(self, request: ClientRequest) -> bool:
        """Whether the gateway will report the first token of a stream."""
        if not self.first_tokens.listens or self._reports.never_comes:
            return False
        return request.get(messages.REPORTS_FIRST_TOKEN) is not None

    def note_first_token_report(self, *, arrived: bool) -> None:
        """Whether the report of a first token came."""
        if arrived:
            self._reports.came()
        elif self._reports.did_not_come():
            log.warning(
                "the gateway says that it reports first tokens, and none is reported: does it reach"
                " picker.first_token_port? The bodies of some streams are asked for instead (picker.observed_share)"
            )

    def overflowed(self, details: CodeDetails) -> None:
        """A circuit breaker of the gateway kept a request, or its retry, from an instance."""
        if self._overflow_log.due(time.monotonic()):
            limits = "max_connections, max_pending_requests and max_requests"
            which = limits if details.reason == "overflow" else "max_retries"
            log.warning(
                "the gateway is at a limit of its own and does not send requests to instances that have room: raise"
                " %s in the circuit_breakers of its cluster of instances (examples/envoy/envoy.yaml)",
                which,
            )

    def observes(self, modes: tuple[BodyMode, BodyMode]) -> bool:
        """Whether the next stream is one whose body is asked for. Envoy ignores that beside a full-duplex body."""
        if modes[1] is not BodyMode.NONE or modes[0] is BodyMode.FULL_DUPLEX_STREAMED or self._bodies.never_comes:
            return False
        self._observations_due += self.observed_share
        if self._observations_due < 1.0:
            return False
        self._observations_due -= 1.0
        return True

    def observed(self, *, came: bool) -> None:
        """Whether a body came that was asked for."""
        if came:
            self._bodies.came()
        elif self._bodies.did_not_come():
            log.warning(
                "the gateway sends no bodies of answers, though it was asked for some: prefill rates cannot be learned"
                " from its streams. Set allow_mode_override in its filter, or picker.observed_share to 0"
            )


class PickedRequest:
    """One stream. ``run`` returns when it is to be closed."""

    def __init__(self, stream: Stream, picker: Picker, peer: str = "") -> None:
        """``peer`` is where the stream comes from, as gRPC writes it: ``ipv4:10.0.0.1:4711``."""
        self._stream = stream
        self._peer = peer
        self._picker = picker
        self._limit: asyncio.Timeout | None = None
        """The time for the request to come, then for the whole of it."""
        self._has_come = False
        self._modes = (BodyMode.NONE, BodyMode.NONE)
        self._choices: dict[str, InstanceSpec] = {}
        """The choices that Envoy was given, by address."""
        self._body_bytes = 0
        """Bytes of the body that are counted in the replica's budget."""
        self._pays: str | None = None
        """The tenant in whose part of the budget these are counted."""
        self._observes = False
        """The body of its answer is to be asked for."""
        self._awaits_report = False
        """The first token is to be reported."""
        self._answered = "request_headers"
        """The phase whose reply has the choice."""
        self._gives_back = False
        """Envoy waits for the body in pieces."""
        self._trailers = False
        """The request has trailers, which end its body."""

    async def run(self) -> None:
        settings, request_id, path = self._picker.plane.settings, "", ""
        try:
            async with asyncio.timeout(settings.client_timeout_s) as self._limit:
                first = await self._stream.read()
                if first is None or messages.kind_of(first) != "request_headers":
                    return None
                request = messages.client_request(first.request_headers)
                request.from_gateway, path = self._picker.is_gateway(self._peer), request.path
                self._modes = messages.body_modes(first)
                try:
                    if request.method == "OPTIONS":
                        return await self._answer_options(request)
                    if request.method in ("GET", "HEAD") and (path == "/v1/models" or path.startswith(_MODELS)):
                        return await self._answer_models(request)
                    request_id = read_request_id((request.get(b"x-request-id") or b"").decode("latin-1"))
                    live = await self._pick(first, request, request_id)
                finally:
                    self._drop_body(request)
                await self._follow(live, path)
        except LeftError:
            return None
        except TimeoutError:
            if self._has_come:
                log.warning("request %s was not over within router.total_timeout_s: its stream is closed", request_id)
                return None
            late = f"the request did not come within {settings.client_timeout_s:g} s; send it faster"
            await self._refuse(RequestTimeoutError(late), request_id or mint_request_id(), path)
        except RouterError as refusal:
            await self._refuse(refusal, refusal.request_id or request_id or mint_request_id(), path)

    # the request -------------------------------------------------------------------------------------------------
    async def _pick(self, first: Any, request: ClientRequest, request_id: str) -> LiveRequest:
        """Place the request, and tell Envoy where it goes.

        Raises:
            RouterError: it is refused, and Envoy knows of no choice.
        """
        plane, live = self._picker.plane, None
        try:
            await self._read_body(first, request)
            self._comes_whole()
            read = plane.short_bodies.read(request, request_id) or await plane.long_bodies.read(request, request_id)
            read.hides_first_token = not self._shows_first_token(request, read)
            read.caller = request.caller
            read.hides_usage = self._modes[1] is BodyMode.NONE and not self._observes
            if read.hides_usage and request.caller is not None:
                self._picker.cannot_count(request.caller)
            apply_body_rules(plane, request, read)
            if plane.traces is not None:
                read.trace = plane.traces.begin(request.get(trace_context.FIELD))
            named = await self._restrict(first, request, read)
            live = await plane.intake.place(read)
            fields, removed = await self._destination(live, request, read)
            addresses = ",".join(dict.fromkeys((*self._choices, *named)))
            for reply in self._replies(addresses, fields, removed, live, request, read):
                await self._stream.write(reply)
            live.sent()
            return live
        except BaseException as error:
            if live is not None:
                live.finish(Outcome.CLIENT_GONE if isinstance(error, LeftError) else outcome_of(error))
            if not isinstance(error, Exception) or isinstance(error, LeftError):
                raise
            refusal = from_exception(error)
            if live is not None:
                refusal.request_id = live.request_id
            if refusal.status == 500:
                log.error("request %s failed inside the picker", refusal.request_id or request_id, exc_info=error)
            raise refusal from error

    def _shows_first_token(self, request: ClientRequest, read: InferenceRequest) -> bool:
        if self._modes[1] in (BodyMode.STREAMED, BodyMode.FULL_DUPLEX_STREAMED):
            return True
        self._awaits_report = read.stream and self._picker.awaits_report(request)
        self._observes = read.stream and not self._awaits_report and self._picker.observes(self._modes)
        return self._awaits_report or self._observes

    async def _read_body(self, first: Any, request: ClientRequest) -> None:
        """Read the body, where it comes before the choice."""
        mode = self._modes[0]
        limit_bytes = await self._check_head(request)
        self._pays = request.pays
        announced = request.get(b"content-length") or b""
        if announced.isdigit() and int(announced) > limit_bytes:
            raise too_large(limit_bytes)
        if first.request_headers.end_of_stream:
            return
        if mode in (BodyMode.NONE, BodyMode.STREAMED):
            request.hides_body = True
            return
        full_duplex = self._gives_back = mode is BodyMode.FULL_DUPLEX_STREAMED
        if not full_duplex:
            self._answered = "request_body"
            await self._stream.write(messages.GO_ON["request_headers"])
        pieces: list[bytes] = []
        while await self._read_piece(pieces, limit_bytes) and full_duplex:
            pass
        request.body = pieces[0] if len(pieces) == 1 else b"".join(pieces)

    async def _check_head(self, request: ClientRequest) -> int:
        limit_bytes = self._picker.check_head(request)
        if request.caller_known is not None:
            await wait_for_caller(request, self._picker.plane.tenants)
        return limit_bytes

    def _comes_whole(self) -> None:
        """The request has come: from now on it is the whole of it that may take no longer than a time."""
        self._has_come = True
        if self._limit is not None:
            total_s = self._picker.plane.settings.total_timeout_s
            self._limit.reschedule(asyncio.get_running_loop().time() + total_s)

    async def _read_piece(self, pieces: list[bytes], limit_bytes: int) -> bool:
        """Read a piece of the body; returns whether another one follows."""
        message = await self._stream.read()
        if message is None:
            raise LeftError
        if messages.kind_of(message) == "request_trailers":
            self._trailers = True
            return False
        piece = message.request_body.body
        if piece:
            self._picker.plane.bodies.take(len(piece), self._pays)
            self._body_bytes += len(piece)
            pieces.append(piece)
        if self._body_bytes > limit_bytes:
            raise too_large(limit_bytes)
        return not message.request_body.end_of_stream

    def _drop_body(self, request: ClientRequest) -> None:
        self._picker.plane.bodies.give_back(self._body_bytes, self._pays)
        self._body_bytes, request.body = 0, b""

    async def _restrict(self, first: Any, request: ClientRequest, read: InferenceRequest) -> list[str]:
        """Restrict the request to the instances that the gateway allows. Returns the addresses that a conformance test
        wants to be named."""
        addresses, subset = self._picker.addresses, messages.subset_of(first)
        selection = request.get(messages.TEST_SELECTION) if self._picker.test_headers else None
        if selection is not None:
            subset = messages.split_addresses(selection.decode("latin-1").split(","))
        if subset is None:
            return []
        pool = (await self._picker.plane.intake.find_route(read)).pool
        members = pool.view.view.instances
        found = await addresses.having(members, subset)
        allowed = [instance_id for each in found.values() for instance_id in each]
        read.only = frozenset(allowed)
        if not read.only:
            raise NoInstanceError(
                f"the gateway allows {', '.join(subset) or 'no address'} alone, and pool {pool.settings.name!r} has no"
                " instance there; see /admin/instances",
                retry_after_s=NO_INSTANCE_RETRY_S,
            )
        return [] if selection is None else [await addresses.of(members[each]) for each in allowed]

    async def _destination(
        self, live: LiveRequest, request: ClientRequest, read: InferenceRequest
    ) -> tuple[list[Header], list[str]]:
        """Find the addresses of the choices. Returns the headers that the instance needs, and the names of those that
        it must not get.

        Raises:
            RouterError: no instance with an address took the request.
        """
        plane, of, machine = self._picker.plane, self._picker.addresses.of, live.machine
        fields: list[Header] = []
        while not self._choices:
            split = machine.to_send is Leg.PREFILL
            target, second = machine.instance_for(Leg.DECODE if split else Leg.WHOLE), None
            if not split and self._picker.choices > 1:
                second = machine.second_choice()
                adapter, loads = machine.spec.adapter, live.pool.adapter_loads
                if second is not None and adapter and loads.lacks(second.instance_id, adapter):
                    second = None  # the gateway would send it there before it is loaded
            try:
                if split:
                    fields.append((messages.PREFILLER.encode(), (await of(machine.instance_for(Leg.PREFILL))).encode()))
                self._choices[literal(target.url) or await of(target)] = target
            except UnknownAddressError as error:
                fields = []
                await live.failed(Failed(InstanceFailure(FailureKind.CONNECT, str(error))))
                continue
            if second is not None and second.data_parallel_rank == target.data_parallel_rank:
                with contextlib.suppress(UnknownAddressError):
                    self._choices.setdefault(literal(second.url) or await of(second), second)
            if target.data_parallel_rank is not None:
                fields.append((b"x-data-parallel-rank", b"%d" % target.data_parallel_rank))
        if request.get(b"x-request-id") != live.request_id.encode():
            fields.append((b"x-request-id", live.request_id.encode()))
        if request.was_rewritten:  # the path that was judged is the one that is sent on
            query = b"?" + request.query if request.query else b""
            fields.append((b":path", request.path.encode("latin-1") + query))
        if read.trace is not None:
            fields.append((trace_context.FIELD, read.trace.to_header()))
        if machine.spec.run.run:  # vLLM's own field, in place of the client's name
            fields.append((b"x-session-id", machine.spec.run.run.encode()))
        if plane.upstream_authorization is not None:
            fields.append((b"authorization", plane.upstream_authorization))
        keeps_credentials = plane.upstream_authorization is None and not plane.tenants.is_closed
        dropped = _DROPPED[plane.settings.trust_transfers, keeps_credentials]
        written = {name for name, _ in fields}
        return fields, [text for text, name in dropped if request.get(name) and name not in written]

    def _replies(
        self,
        addresses: str,
        fields: list[Header],
        removed: list[str],
        live: LiveRequest,
        request: ClientRequest,
        read: InferenceRequest,
    ) -> Iterator[bytes]:
        """The choice, and the body where Envoy waits for it, or the instance needs another one."""
        parts = body_for(read, request.body, live.machine)
        if self._answered == "request_body" and len(parts) > 1:
            body = b"".join(parts)
            length = (b"content-length", b"%d" % len(body))
            yield messages.destination_reply("request_body", addresses, [*fields, length], removed, body)
            return
        yield messages.destination_reply(self._answered, addresses, fields, removed)
        if self._gives_back:
            yield from self._body_back(b"".join(parts))

    def _body_back(self, body: bytes) -> Iterator[bytes]:
        yield from messages.body_replies("request_body", body, end_of_stream=not self._trailers)
        if self._trailers:
            yield messages.GO_ON["request_trailers"]

    # the answer --------------------------------------------------------------------------------------------------
    async def _follow(self, live: LiveRequest, path: str) -> None:
        """Follow the answer to its end, and release what the request holds."""
        answer = _Answer(
            self._stream,
            self._picker,
            live,
            path,
            mode=self._modes[1],
            choices=self._choices,
            observes=self._observes,
            awaits_report=self._awaits_report,
        )
        try:
            await answer.pass_on()
        except (asyncio.CancelledError, LeftError):  # so a stream ends whose last reply the gateway did not wait for
            live.finish(*self._ended(answer), answer.counted)
            raise
        except BaseException:
            live.finish(Outcome.INTERNAL_ERROR)
            raise
        finally:
            answer.close()
        live.finish(*self._ended(answer), answer.counted)

    def _ended(self, answer: _Answer) -> tuple[Outcome, Usage | None]:
        if self._limit is not None and self._limit.expired():
            return Outcome.TIMED_OUT, answer.usage_so_far()
        if self._picker.cuts_off and not answer.shows_end:
            return Outcome.CUT_OFF, answer.usage_so_far()
        return answer.ended()

    async def _answer_options(self, request: ClientRequest) -> None:
        """Answer what a browser sends ahead. It has no key, so nothing of it may reach an instance with the fleet's."""
        self._picker.check_head(request)
        cors = self._picker.plane.cors
        fields = [(b"allow", methods_of(request.path).encode()), *(cors.fields(request) if cors is not None else ())]
        await self._stream.write(messages.immediate_reply(204, fields, b"", "options"))

    async def _answer_models(self, request: ClientRequest) -> None:
        await self._check_head(request)
        cards, model = await self._picker.model_cards(), unquote(request.path[len(_MODELS) :])
        found = usable_model(request.caller, cards, model) if model else usable_models(request.caller, cards)
        body = orjson.dumps(found)
        fields = [(b"content-type", b"application/json")]
        await self._stream.write(messages.immediate_reply(200, fields, body, "models"))

    async def _refuse(self, error: RouterError, request_id: str, path: str) -> None:
        fields: list[Header] = [(b"content-type", b"application/json"), (b"x-request-id", request_id.encode())]
        fields += [(name.encode(), value.encode()) for name, value in error_headers(error).items()]
        if (reason := messages.dropped_reason(error)) is not None:
            fields.append((messages.DROPPED_REASON.encode(), reason.encode()))
        body = orjson.dumps(error_body(error, path))
        with contextlib.suppress(LeftError):
            await self._stream.write(messages.immediate_reply(error.status, fields, body, error.code))


class _Answer:
    """The answer of a request, as the messages of its stream show it."""

    def __init__(
        self,
        stream: Stream,
        picker: Picker,
        live: LiveRequest,
        path: str,
        *,
        mode: BodyMode,
        choices: Mapping[str, InstanceSpec],
        observes: bool,
        awaits_report: bool,
    ) -> None:
        self._observes = observes
        self._awaits_report = awaits_report
        self._report_to = ""
        """The address to which its first token is to be reported, until it is."""
        self._stream = stream
        self._picker = picker
        self._live = live
        self._mode = mode
        self._choices = choices
        self._machine = AnswerMachine(AnswerSpec(path, Use.OBSERVED), 0.0)
        self._result: AnswerResult | None = None
        self._own = False
        """Envoy made the answer itself, for no fault of an instance."""
        self._status = 0
        self._is_seen = False
        """The body passes here."""
        self.whole = False
        """The answer has come to its end."""

    async def pass_on(self) -> None:
        """Pass every message on unchanged, up to the end of the answer or of the stream."""
        while not self.whole and (message := await self._stream.read()) is not None:
            match messages.kind_of(message):
                case "response_headers":
                    fields = await self._begin(message)
                    self.whole = message.response_headers.end_of_stream
                    begins = self._machine.is_events and self._status < 300 and not self.whole
                    self._observes = self._observes and begins
                    if self._awaits_report and begins:
                        self._report_to = self._picker.first_tokens.expect(self._first_token_reported)
                    await self._stream.write(
                        messages.headers_reply(fields, wants_body=self._observes, report_to=self._report_to)
                    )
                case "response_body":
                    part = message.response_body
                    self.whole = part.end_of_stream
                    if self._observes:
                        self._observes = False
                        self._picker.observed(came=True)
                    if self._is_seen:
                        self._pass(part.body)
                    await self._give_back(part)
                case "response_trailers":
                    self.whole = True
                    await self._stream.write(messages.GO_ON["response_trailers"])

    def _first_token_reported(self) -> None:
        self._report_to = ""
        self._picker.note_first_token_report(arrived=True)
        self._live.first_token()

    def close(self) -> None:
        """Await no report any more."""
        if self._report_to:
            self._picker.first_tokens.forget(self._report_to)
            self._report_to = ""
            self._picker.note_first_token_report(arrived=False)

    async def _give_back(self, part: Any) -> None:
        if self._mode is not BodyMode.FULL_DUPLEX_STREAMED:
            await self._stream.write(messages.GO_ON["response_body"])
            return
        for reply in messages.body_replies("response_body", part.body, end_of_stream=part.end_of_stream):
            await self._stream.write(reply)

    async def _begin(self, message: Any) -> list[Header]:
        """Take in the head of the answer; returns the fields that it gets."""
        live, head = self._live, messages.answer_head(message.response_headers)
        served, details = messages.served_by(message)
        if served and live.machine.to_send is Leg.WHOLE:
            target = self._choices.get(served)
            if target is None or target.instance_id != live.machine.answering_id:
                await self._book(served, target)
        if messages.is_overflow(message, details):
            self._picker.overflowed(details)
        self._status = head.status
        if details.name not in ("", VIA_UPSTREAM):
            failure = failure_of(details)
            self._own = failure is None
            if failure is not None:
                self._report(ConnectionFailed(failure))
        elif head.status:
            self._report(Head(head, pause_s=retry_after_s(head.index.get(b"retry-after"), time.time())))
            self._is_seen = self._mode is not BodyMode.NONE or (self._observes and self._machine.is_events)
        fields = fleet_fields(live)
        if self._picker.test_headers:
            fields.append((messages.TEST_SERVED, served.encode()))
        return fields

    async def _book(self, served: str, target: InstanceSpec | None) -> None:
        """Book that another instance than the first choice answered; ``target`` is the one at that address, if it was
        among the choices."""
        live = self._live
        target = target or await self._member_at(served)
        if target is None or target.instance_id == live.machine.answering_id:
            return
        try:
            await live.moved(MOVED, target)
        except RouterError as error:
            log.warning("request %s: its move to %s could not be booked: %s", live.request_id, served, error)

    async def _member_at(self, address: str) -> InstanceSpec | None:
        members = self._live.pool.view.view.instances
        found = (await self._picker.addresses.having(members, [address]))[address]
        return members[found[0]] if found else None

    def _pass(self, piece: bytes, *, complete: bool = False) -> None:
        if self._machine.take(piece, [piece], complete) is None:
            self._carry_out(self._machine.effects)

    def _report(self, event: AnswerEvent) -> None:
        self._carry_out(self._machine.on(event, 0.0))

    def _carry_out(self, effects: AnswerEffects) -> None:
        for effect in effects:
            _EFFECTS[type(effect)](self, effect)

    def _first_token(self, _: FirstTokenCame) -> None:
        self._live.first_token()

    def _finish(self, effect: Finish | Settle) -> None:
        self._result = effect.result
        if (fault := effect.result.fault) is not None:
            self._live.broke_off(fault)

    def _pass_over(self, _: AnswerEffect) -> None:
        """Leave it to the gateway, which passes the answer on."""

    @property
    def shows_end(self) -> bool:
        """All of the answer is known to have passed."""
        return self.whole or self._machine.shows_end

    def ended(self) -> tuple[Outcome, Usage | None]:
        """How the request ended, as far as the stream shows that, and its usage."""
        if self._own:
            return (Outcome.REFUSED if self._status >= 400 else Outcome.COMPLETED), None
        awaits_body = self._observes
        if awaits_body:  # nothing of it has come: its client left before the first token, or it never does
            self._picker.observed(came=False)
        if self._is_seen and self.whole and not awaits_body:
            self._pass(b"", complete=True)
        self._report(GatewayDone(is_seen=self._is_seen and not awaits_body, is_whole=self.whole))
        result = self._result
        assert result is not None
        failed = result.failure is not None or result.ending.error_status is not None
        return result.outcome, None if failed else result.usage

    @property
    def counted(self) -> Counted | None:
        """The answer as far as it was seen; None where it does not pass here."""
        return self._machine.counted() if self._is_seen and not self._observes else None

    def usage_so_far(self) -> Usage | None:
        """The usage in what has come of the answer."""
        return self._machine.so_far().usage


_EFFECTS: Final[Mapping[type[Any], Callable[[_Answer, Any], None]]] = {
    FirstTokenCame: _Answer._first_token,
    Finish: _Answer._finish,
    Settle: _Answer._finish,
    **dict.fromkeys((WriteHead, Write, WriteLast, BreakOff, Abort, CloseConnection), _Answer._pass_over),
}
"""What is done for each effect of the answer's machine. It is never lent to the native relay, and never goes on
elsewhere, so the effects of these are missing."""

_RESET: Final = frozenset({"upstream_reset_before_response_started", "upstream_reset_after_response_started"})
_NEVER_SENT: Final = frozenset(
    {"overflow", "local_connection_failure", "local_refused_stream_reset", "overload_manager_reset"}
)
"""Reasons of a reset by which nothing of the request reached an instance, for causes that are Envoy's own: a circuit
breaker, no local port, its limit of streams, its overload manager."""
_NOT_REACHED: Final = frozenset(
    {"remote_connection_failure", "connection_failure", "connection_timeout", "remote_refused_stream_reset"}
)
_TIMEOUTS: Final = frozenset(
    {
        "response_timeout",
        "upstream_response_timeout",
        "upstream_per_try_timeout",
        "upstream_per_try_idle_timeout",
        "upstream_max_stream_duration_reached",
        "stream_idle_timeout",
    }
)
"""Timeouts that ran while the instance was to answer. Others begin with the client's connection or request, and show
nothing of an instance."""


def failure_of(details: CodeDetails) -> InstanceFailure | None:
    """The failure of an instance that an answer of Envoy's own shows: it could not reach the instance, lost it, or
    waited for too long. ``details`` say how Envoy came to it."""
    if details.name in _TIMEOUTS:
        return InstanceFailure(FailureKind.TIMEOUT, details.text)
    if details.name not in _RESET or details.reason in _NEVER_SENT:
        return None
    if details.reason in _NOT_REACHED:
        return InstanceFailure(FailureKind.CONNECT, details.text)
    # No word of a death: a connection that broke is no proof, and the prompt would be suspected of it.
    return InstanceFailure(FailureKind.PROTOCOL, details.text)


def make_head_check(tenants: TenantDirectory, *, max_body_bytes: int, forbidden_paths: Iterable[str]) -> HeadCheck:
    """The rule for heads: who may send what to an instance, and how long a body may follow. Every path goes to one
    instance here, whatever it is for."""
    is_forbidden = forbidden_path_finder(forbidden_paths)
    everywhere = {*ENGINE_CONTROL_PATHS, ABORT_PATH}

    def check_head(request: ClientRequest) -> int:
        if tenants.is_closed and request.method != "OPTIONS":  # a browser sends no key with it
            find_caller(request, tenants)
        if is_forbidden(request.path) or request.path in everywhere:
            raise ForbiddenPathError(f"{request.path} is not passed on; send it to a router, or to the instance itself")
        return max_body_bytes

    return check_head


def too_large(limit_bytes: int) -> BodyTooLargeError:
    return BodyTooLargeError(
        f"the body has over {limit_bytes} bytes; send a shorter one, or raise router.max_body_bytes"
    )
