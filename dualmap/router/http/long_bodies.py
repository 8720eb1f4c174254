"""Reading requests with long bodies: one at a time on a replica, in steps, with its memory counted.

One whose conversation begins like that of a former body is read from there on, at once where what is new is short: an
agent's turn costs what is new in it (``router.prompts.known_bodies``).
"""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Generator
from contextlib import suppress
from dataclasses import replace
from functools import partial
from typing import Final

from dualmap.api_bodies.json_body import UnreadableJsonError, read_json
from dualmap.api_bodies.listed_json import UnlistedError
from dualmap.router.http.admission import (
    MAX_PROMPT_PARTS,
    check_encoding,
    inference_request_of,
    json_object,
    unread_request,
)
from dualmap.router.http.body_budget import BodyBudget
from dualmap.router.http.listed_bodies import ListedBodies, Listing
from dualmap.router.http.long_json import LongJson, check_counts, scan_json
from dualmap.router.http.request_reader import ClientRequest
from dualmap.router.http.steering import may_steer
from dualmap.router.prompts.inference_request import SCHEDULED_PATHS, InferenceRequest, SentPrompt
from dualmap.router.prompts.known_bodies import KnownBodies, Mark
from dualmap.router.prompts.prompt import sent_prompt
from dualmap.router.steps import in_steps, without_pause

MAX_JSON_VALUES = 100_000
"""Objects, arrays and strings of a JSON body over 64 KB; ten numbers count as one. With the two bounds below, what one
body may take of the event loop in one piece."""
MAX_JSON_BYTES = 8 << 20
"""Largest JSON body, without its strings of 64 KB and more."""

MAX_KNOWN_BYTES: Final = 64 << 20
"""Most memory for what is known of former conversations: some 2,000 of 550 KB."""


class Turns:
    """One turn at a time, by tenants in rotation: however many bodies of a tenant wait, one of another tenant waits for
    one of each."""

    def __init__(self) -> None:
        self._is_taken = False
        self._waiting: dict[str, deque[asyncio.Future[None]]] = {}
        """By tenant, the next one first."""

    async def take(self, tenant: str) -> None:
        """Wait for a turn. The caller must call ``give`` when it is over, unless this raises."""
        if not self._is_taken:
            self._is_taken = True
            return
        turn = asyncio.get_running_loop().create_future()
        self._waiting.setdefault(tenant, deque()).append(turn)
        try:
            await turn
        except asyncio.CancelledError:
            if not turn.cancelled():  # the turn had come
                self.give()
            raise

    def give(self) -> None:
        """Give the turn to the next one that waits."""
        while self._waiting:
            tenant = next(iter(self._waiting))
            queue = self._waiting.pop(tenant)
            turn = queue.popleft()
            if queue:
                self._waiting[tenant] = queue  # behind all others
            if not turn.done():  # else it was cancelled
                turn.set_result(None)
                return
        self._is_taken = False


class LongBodies:
    """Long bodies take turns, so neither memory nor time grows with the number of clients."""

    def __init__(
        self, bodies: BodyBudget, *, max_json_values: int = MAX_JSON_VALUES, max_json_bytes: int = MAX_JSON_BYTES,
        max_prompt_parts: int = MAX_PROMPT_PARTS, trusts_transfers: bool = False,
        max_known_bytes: int = MAX_KNOWN_BYTES,
    ) -> None:  # fmt: skip
        self._bodies = bodies
        self._max_json_values = max_json_values
        self._max_json_bytes = max_json_bytes
        self._max_prompt_parts = max_prompt_parts
        self._trusts_transfers = trusts_transfers
        self._turns = Turns()
        self._listed = ListedBodies(
            KnownBodies(max_known_bytes),
            max_json_values=max_json_values,
            max_json_bytes=max_json_bytes,
            max_prompt_parts=max_prompt_parts,
            trusts_transfers=trusts_transfers,
        )

    async def read(self, request: ClientRequest, request_id: str) -> InferenceRequest:
        """The request of a client, read from its complete HTTP request; see ``read_inference_request``."""
        listing = self._listed.find(request)
        if listing is not None:
            for mark in filter(listing.is_short, listing.marks):
                with suppress(UnlistedError):
                    return without_pause(self._read_listed(request, request_id, listing, mark, at_once=True))
        await self._turns.take("" if request.caller is None else request.caller.tenant.name)
        try:
            return await in_steps(self._read_whole(request, request_id, listing))
        finally:
            self._turns.give()

    def _read_whole(
        self, request: ClientRequest, request_id: str, listing: Listing | None
    ) -> Generator[None, None, InferenceRequest]:
        """The request, by stretches where its body comes apart; most of it may be known."""
        if listing is not None:
            for mark in (*listing.marks, None):
                with suppress(UnlistedError):
                    return (yield from self._read_listed(request, request_id, listing, mark))
        return (yield from self._read(request, request_id))

    def _read_listed(
        self, request: ClientRequest, request_id: str, listing: Listing, start: Mark | None, *, at_once: bool = False
    ) -> Generator[None, None, InferenceRequest]:
        """The request, read from a mark on.

        Raises:
            UnlistedError: it does not go on from there.
        """
        reading, counted = self._listed.read(request, request_id, listing, start, at_once=at_once), 0
        try:
            while True:
                try:
                    took = next(reading)
                except StopIteration as end:
                    read: InferenceRequest = end.value
                    break
                self._bodies.count(took)
                counted += took
                yield
        finally:
            self._bodies.give_back(counted)
        if start is not None and read.prompt is not None:
            read.prompt.whole = partial(self._whole_prompt, request, listing, start)
        return read

    def _whole_prompt(self, request: ClientRequest, listing: Listing, start: Mark) -> SentPrompt:
        """The prompt of a request that was read from a mark on, which is of no use."""
        self._listed.forget(start)
        listing = replace(listing, marks=())
        whole = without_pause(self._read_whole(request, "", listing))
        assert whole.prompt is not None  # its parts were those of a prompt
        return whole.prompt

    def _read(self, request: ClientRequest, request_id: str) -> Generator[None, None, InferenceRequest]:
        counted = 0
        try:
            check_encoding(request)
            found = yield from scan_json(
                request.body, max_values=self._max_json_values, max_short_bytes=self._max_json_bytes
            )
            if found.excess:
                read = _beyond_bounds(request, request_id, found)
                read.may_steer = yield from may_steer(request.body, trusts_transfers=self._trusts_transfers)
                return read
            counted = found.memory_bytes
            self._bodies.count(counted)
            yield
            value = json_object(found.short)
            check_counts(value, found.long_texts)
            yield
            prompt = None
            if request.path in SCHEDULED_PATHS:
                prompt = sent_prompt(request.path, value, found.long_texts, max_parts=self._max_prompt_parts)
            read = inference_request_of(
                request, request_id, value, prompt, found.long_texts, trusts_transfers=self._trusts_transfers
            )
            read.model_span, read.doubled = found.model_span, found.doubled
            yield
            del value
            return read
        except UnreadableJsonError as error:
            read = unread_request(request, request_id, error.reason)
            read.may_steer = yield from may_steer(request.body, trusts_transfers=self._trusts_transfers)
            return read
        finally:
            self._bodies.give_back(counted)


def _beyond_bounds(request: ClientRequest, request_id: str, found: LongJson) -> InferenceRequest:
    """A request whose body was not read to its end, with its model if that came early."""
    span, model = found.model_span, ""
    if span is not None:
        with suppress(UnreadableJsonError):
            model = read_json(request.body[slice(*span)])
    read = unread_request(request, request_id, found.excess, model)
    read.model_span = span
    return read
