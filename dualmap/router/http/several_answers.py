"""A stream of several answers (``n``, or several prompts) whose instance failed: each answer that is not over goes on
by a request of its own, all of them on one instance at once, as the first one had them.

Their events go into the client's stream as they come, under the indices of their choices. Answers that are over are not
asked for again. Those that fail are placed together once more: an instance that fails several of them at once counts as
one failure, against one budget.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Coroutine, Iterable, Mapping, Sequence
from functools import partial
from typing import TYPE_CHECKING, Any, Final, TypeVar

from dualmap.router.answers.continued_answer import ContinuedAnswer, comment_on, ending_choice, ending_events
from dualmap.router.answers.kept_stream import KeptStream
from dualmap.router.answers.machine import AnswerSpec
from dualmap.router.answers.rest import (
    CannotContinueError,
    Measured,
    Over,
    Rest,
    begin_rest,
    requests_of,
    rest_of,
    wants_usage,
)
from dualmap.router.answers.result import AnswerResult
from dualmap.router.answers.so_far import AnswerSoFar
from dualmap.router.answers.sse import Ending
from dualmap.router.answers.whole_usage import usage_of
from dualmap.router.errors import UpstreamError
from dualmap.router.http.answer_driver import Receiver
from dualmap.router.http.parts import LaterPart, SharedPart, SharedStream
from dualmap.router.http.reading import read_so_far
from dualmap.router.http.sending import Sending
from dualmap.router.requests.live_request import LiveRequest
from dualmap.scheduling.request.charge import NOTHING_COUNTED
from dualmap.scheduling.request.machine import Failed
from dualmap.scheduling.request.outcome import InstanceFailure, Usage
from dualmap.scheduling.state.legs import Leg

if TYPE_CHECKING:
    from dualmap.router.http.forward import Forwarding

T = TypeVar("T")

_AS_KNOWN: Final = Measured(context_tokens=1)
"""For whether there is a rest: its limit is not exact."""


class _BrokenOffError(Exception):
    """The client's stream was ended by an error, or by this replica's end."""

    def __init__(self, result: AnswerResult, last_words: bytes) -> None:
        super().__init__()
        self.result = result
        self.last_words = last_words


class SeveralAnswers:
    """The answers of one stream. The caller must call ``release``."""

    def __init__(
        self,
        forwarding: Forwarding,
        placed: LiveRequest,
        path: str,
        asked: Mapping[str, Any],
        so_far: AnswerSoFar,
        *,
        stops_at_mark: bool,
    ) -> None:
        """``path``, ``asked`` and ``stops_at_mark``: the client's request; ``so_far``: what it has of the answers."""
        self.failure: InstanceFailure | None = None
        """The last failure."""
        self._forwarding = forwarding
        self._placed = placed
        self._path = path
        self._so_far = so_far
        self._stops_at_mark = stops_at_mark
        self._shows_usage = wants_usage(asked)
        self._shows_ids = asked.get("return_token_ids") is True
        self._answers, self._requests = so_far.answers(), requests_of(asked, len(so_far.answers()))
        self._kept: dict[int, KeptStream] = {}
        self._stream: SharedStream | None = None

    async def go_on(self, failure: InstanceFailure, *, overdue: bool = False) -> AnswerResult:
        """The result that the client saw.

        Raises:
            CannotContinueError: an answer does not go on elsewhere.
            RouterError: no instance takes them, or one has shown that an answer does not go on.
        """
        client = LaterPart(self._forwarding.part.client)
        while True:
            self.failure = failure
            missing = self._missing(client)
            if not missing:
                self._placed.broke_off(failure)
                break
            tokens = sum(answer.tokens for answer in self._answers)
            self._forwarding.sender.counted = NOTHING_COUNTED  # they are among the tokens that were sent
            await self._placed.failed(Failed(failure, sent_tokens=tokens, overdue=overdue))
            rests = await self._rests(missing)
            if self._forwarding.plane.settings.tell_continuations:
                client.comment(comment_on(self._placed.machine.answering_id, tokens, rests.values()))
            try:
                results = await self._send(rests)
            except _BrokenOffError as broken:
                client.break_off(broken.last_words, between_chunks=True)
                return broken.result
            failed = [result for result in results if result.failure is not None]
            if not failed:
                break
            assert failed[0].failure is not None
            failure, overdue = failed[0].failure, any(result.overdue for result in failed)
        if self._stream is not None:
            client.release()
        usage = self._usage()
        client.close_stream(ending_events(self._path, self._so_far, None, shows_usage=self._shows_usage, usage=usage))
        if usage is None:
            return AnswerResult(200)
        return AnswerResult(200, Ending(Usage(usage["prompt_tokens"], None, usage["completion_tokens"])))

    def release(self) -> None:
        """Keep nothing any more."""
        for kept in self._kept.values():
            kept.release()

    def _missing(self, client: LaterPart) -> list[int]:
        """The answers of which a part is missing that an instance has to give. An end that is all that is missing is
        sent at once. Raises CannotContinueError."""
        missing = []
        for index, rest in enumerate(map(self._rest, range(len(self._answers)))):
            if isinstance(rest, Rest):
                missing.append(index)
            elif rest.finish_reason is not None:
                self._answers[index].finished = True
                client.write(ending_choice(self._path, self._so_far, index, rest.finish_reason))
        return missing

    def _rest(self, index: int, measured: Measured = _AS_KNOWN) -> Rest | Over:
        return rest_of(
            self._path,
            self._requests[index],
            self._answers[index],
            context_tokens=measured.context_tokens,
            text_tokens=measured.text_tokens,
            trims=measured.trims,
        )

    async def _rests(self, missing: Sequence[int]) -> dict[int, Rest]:
        """The request for the rest of each of them, for which an instance is found. It is asked about all of them at
        once, so that they wait no longer than one, and for the longest context once. Raises RouterError."""
        known = {index: self._rest(index) for index in missing}
        by_text = [index for index, rest in known.items() if isinstance(rest, Rest) and not rest.by_tokens]
        for_all = [index for index in missing if index not in by_text][:1]
        asked = [*by_text, *for_all]
        measured = dict(zip(asked, await _at_once(self._measure(index, known[index]) for index in asked), strict=True))
        context_tokens = next((each.context_tokens for each in measured.values() if each.context_tokens), None)
        context = Measured(context_tokens=context_tokens)
        rests = {}
        for index in missing:
            try:
                rest = self._rest(index, measured[index] if index in by_text else context)
            except CannotContinueError as why:
                raise _not_elsewhere(index, why) from why
            if isinstance(rest, Over):
                raise UpstreamError(f"the stream broke off; choice {index} was found to have all of its tokens")
            rests[index] = rest
        return rests

    async def _measure(self, index: int, rest: Rest | Over) -> Measured:
        if isinstance(rest, Over):
            return Measured()
        try:
            return await self._forwarding.measure_rest(self._path, self._requests[index], self._answers[index], rest)
        except CannotContinueError as why:
            raise _not_elsewhere(index, why) from why

    async def _send(self, rests: Mapping[int, Rest]) -> list[AnswerResult]:
        """The results of all of them, which are sent at once."""
        sent, first_token = _once(self._placed.sent), _once(self._placed.first_token)
        if self._stream is None:
            self._stream = SharedStream(self._forwarding.part.client)
        shared = self._stream
        return await _at_once(self._send_one(shared, index, rest, sent, first_token) for index, rest in rests.items())

    async def _send_one(
        self,
        shared: SharedStream,
        index: int,
        rest: Rest,
        sent: Callable[[], None],
        first_token: Callable[[], None],
    ) -> AnswerResult:
        so_far, forwarding = self._answers[index], self._forwarding
        answer = ContinuedAnswer(
            self._path,
            so_far,
            rest,
            overlap=begin_rest(so_far, rest),
            shows_usage=False,
            shows_ids=self._shows_ids,
            index=index,
        )
        part = SharedPart(shared, answer)
        spec = AnswerSpec(rest.path, stops_at_mark=self._stops_at_mark, keep=partial(self._keep, index, rest))
        sending = Sending(
            self._placed.machine.instance_for(Leg.WHOLE),
            partial(forwarding.body_of, rest.body),
            spec,
            Receiver(part, forwarding.fleet_fields, first_token=first_token, may_leave=self._may_leave),
            sent,
        )
        result = await forwarding.sender.send(sending)
        if result.ended_as is not None or shared.is_broken_off:
            ended = result if part.failed is None else AnswerResult(200, failure=self.failure, began=True)
            raise _BrokenOffError(ended, shared.last_words or b"")
        if result.kept is not None:
            await read_so_far(result.kept)
        elif result.failure is None:
            part.finish()
            so_far.end(*answer.counted)
        return result

    def _keep(self, index: int, rest: Rest) -> KeptStream:
        """Keep the stream of one answer."""
        if index in self._kept:
            self._kept[index].release()
        kept = self._kept[index] = KeptStream(
            rest.path,
            self._forwarding.plane.kept,
            len(rest.body),
            hides_ids=rest.by_tokens and not self._shows_ids,
            so_far=self._answers[index],
        )
        return kept

    async def _may_leave(self) -> bool:
        """Whether another instance could go on with all of them as they are now."""
        for index, kept in self._kept.items():
            if not self._answers[index].finished:
                if kept.lost:
                    return False
                await read_so_far(kept)
        return await self._forwarding.could_leave(self._path, self._requests, self._answers)

    def _usage(self) -> dict[str, int] | None:
        """The usage of all answers; None where the tokens of a prompt are not known."""
        prompt_tokens = self._so_far.tokens_of_prompts()
        if prompt_tokens is None:
            return None
        return usage_of(prompt_tokens, sum(answer.tokens for answer in self._answers))


def _not_elsewhere(index: int, why: CannotContinueError) -> UpstreamError:
    """The error of the stream: the failure is counted already, and the next instance is not to blame."""
    return UpstreamError(f"the stream broke off; choice {index} does not go on elsewhere: {why}")


async def _at_once(calls: Iterable[Coroutine[Any, Any, T]]) -> list[T]:
    """The results of calls that run at once. All of them have ended when it returns or raises."""
    tasks = [asyncio.ensure_future(call) for call in calls]
    try:
        return await asyncio.gather(*tasks)
    finally:
        for task in tasks:
            task.cancel()
        if tasks:
            await asyncio.wait(tasks)


def _once(call: Callable[[], None]) -> Callable[[], None]:
    """The call, of which repetitions do nothing."""
    calls = [call]

    def first() -> None:
        if calls:
            calls.pop()()

    return first
