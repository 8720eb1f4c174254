"""Requests of all kinds at a steady rate, whatever becomes of them, and the count of what did."""

from __future__ import annotations

import asyncio
import json
import random
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

from dualmap.research.chaos.answers import Api
from dualmap.research.chaos.checker import Outcome, Question, RightAnswers, Verdict, judge
from dualmap.simulation.http_client import HttpClient, HttpClientError
from dualmap.simulation.workload.prompts import WORDS

_SHARES = {Api.CHAT: 40, Api.COMPLETIONS: 30, Api.MESSAGES: 20, Api.RESPONSES: 10}
_STREAMED = 0.7
_LEAVES = 0.03
"""Share of requests whose client goes away within a second."""
_FAMILIES = 12
"""Prompts of one family have a beginning in common."""
_TOOL_SCHEMA = {
    "type": "object",
    "properties": {"city": {"type": "string"}, "days": {"type": "array", "items": {"type": "string"}, "minItems": 4}},
    "required": ["city", "days"],
}
_WHYS_KEPT = 20


@dataclass(frozen=True, slots=True)
class TrafficPlan:
    """The amount of traffic."""

    rate_per_s: float = 10.0
    answer_tokens: tuple[int, int] = (20, 160)
    """Shortest and longest answer."""
    client_waits_s: float = 60.0
    """A request without an end by then is stuck."""


@dataclass(slots=True)
class Tally:
    """The outcomes of the requests of a time."""

    outcomes: Counter[Outcome] = field(default_factory=Counter)
    whys: list[tuple[Outcome, str]] = field(default_factory=list)
    """About answers that were not right, the first of each outcome."""
    longest_gap_s: float = 0.0
    """Longest silence within a stream that came to a right end."""

    @property
    def requests(self) -> int:
        return self.outcomes.total()

    def add(self, other: Tally) -> None:
        """Count another time's requests here too."""
        self.outcomes += other.outcomes
        self.whys += other.whys
        self.longest_gap_s = max(self.longest_gap_s, other.longest_gap_s)

    def take(self, question: Question, verdict: Verdict, gap_s: float) -> None:
        self.outcomes[verdict.outcome] += 1
        if verdict.outcome is Outcome.RIGHT:
            self.longest_gap_s = max(self.longest_gap_s, gap_s)
        elif verdict.outcome is not Outcome.LEFT and self.outcomes[verdict.outcome] <= _WHYS_KEPT:
            form = "stream" if question.streams else "whole"
            about = f"request {question.number}, {question.api}, {form}: {verdict.why}"
            self.whys.append((verdict.outcome, about))


class Traffic:
    """An open loop of requests to one endpoint. Every request's prompt is its own, and so is its answer's text.

    Args:
        client: of the endpoint; it is closed with the traffic.
        model: the name that requests carry.
    """

    def __init__(self, client: HttpClient, model: str, right: RightAnswers, plan: TrafficPlan, seed: int) -> None:
        self.tally = Tally()
        """Counts the requests that ended since it was last exchanged; see ``counted``."""
        self._client = client
        self._model = model
        self._right = right
        self._plan = plan
        self._rng = random.Random(seed)
        self._next_number = 0
        self._asking: set[asyncio.Task[None]] = set()
        self._salt = seed

    @contextmanager
    def counted(self) -> Iterator[Tally]:
        """A tally of its own for what ends within the context."""
        self.tally = tally = Tally()
        try:
            yield tally
        finally:
            self.tally = Tally()

    async def run(self, stopping: asyncio.Event) -> None:
        """Ask until ``stopping`` is set, then wait for the end of every request: the longest that a client waits."""
        loop = asyncio.get_running_loop()
        next_s = loop.time()
        while not stopping.is_set():
            next_s = max(next_s + self._rng.expovariate(self._plan.rate_per_s), loop.time() - 1)
            try:
                async with asyncio.timeout_at(next_s):
                    await stopping.wait()
            except TimeoutError:
                self._begin()
        while self._asking:
            await asyncio.wait(self._asking)

    async def ask_once(self) -> Verdict:
        """One more request, outside of the rate; it counts like the others."""
        return await self._ask(self._question())

    def close(self) -> None:
        """Drop what is under way, and every connection."""
        for task in self._asking:
            task.cancel()
        self._client.close()

    def _begin(self) -> None:
        task = asyncio.create_task(self._ask_or_leave(self._question()))
        self._asking.add(task)
        task.add_done_callback(self._asking.discard)

    async def _ask_or_leave(self, question: Question) -> None:
        if self._rng.random() >= _LEAVES:
            await self._ask(question)
            return
        with_s = self._rng.uniform(0.0, 1.0)
        try:
            async with asyncio.timeout(with_s):
                await self._ask(question)
        except TimeoutError:
            self.tally.take(question, Verdict(Outcome.LEFT), 0.0)

    async def _ask(self, question: Question) -> Verdict:
        loop = asyncio.get_running_loop()
        body, last_s, gap_s = bytearray(), 0.0, 0.0

        def take(data: bytes) -> None:
            nonlocal last_s, gap_s
            body.extend(data)
            gap_s = max(gap_s, loop.time() - last_s) if last_s else 0.0
            last_s = loop.time()

        status = None
        limit = asyncio.timeout(self._plan.client_waits_s)
        try:
            async with limit:
                response = await self._client.request(
                    "POST", question.api, json.dumps(question.body).encode(), on_body=take
                )
                status = response.status
        except TimeoutError:
            if not limit.expired():
                raise  # its own client's
            verdict = Verdict(Outcome.STUCK, f"no end within {self._plan.client_waits_s:g} s, {len(body)} bytes came")
        except HttpClientError:
            verdict = judge(question, None, bytes(body))
        else:
            verdict = judge(question, status, bytes(body))
        self.tally.take(question, verdict, gap_s)
        return verdict

    def _question(self) -> Question:
        number, rng = self._next_number, self._rng
        self._next_number += 1
        api = rng.choices(list(_SHARES), list(_SHARES.values()))[0]
        stream = rng.random() < _STREAMED
        family = rng.randrange(_FAMILIES)
        common = _words(random.Random(f"{self._salt}/{family}"), 40 * (1 + family))
        prompt = f"{common}{self._salt}-{number} {_words(rng, rng.randrange(4, 80))}"
        tokens = rng.randint(*self._plan.answer_tokens)
        body: dict[str, Any] = {"model": self._model, "stream": stream}
        special = rng.random()
        if api is Api.COMPLETIONS:
            body |= {"prompt": prompt, "max_tokens": tokens}
            if special < 0.1:
                body["logprobs"] = 1
        elif api is Api.RESPONSES:
            body |= {"input": prompt, "max_output_tokens": tokens}
        else:
            body |= {"messages": [{"role": "user", "content": prompt}], "max_tokens": tokens}
        if api is Api.CHAT:
            body |= _special_chat(special)
        elif api is Api.MESSAGES and special < 0.15:
            tool = {"name": "forecast", "strict": True, "input_schema": _TOOL_SCHEMA}
            body |= {"tools": [tool], "tool_choice": {"type": "any"}, "max_tokens": 400}
        elif api is Api.COMPLETIONS and special > 0.8:
            body["stop"] = [_words(rng, 1)]
        elif api is Api.MESSAGES and special > 0.8 and not stream:
            # A streamed one would not go on: its text ends within a token where an engine looks for stop strings.
            body["stop_sequences"] = [_words(rng, 1)]
        elif api is Api.COMPLETIONS and special > 0.7:
            body["n"] = 2
        if stream and api in (Api.CHAT, Api.COMPLETIONS) and rng.random() < 0.5:
            body["stream_options"] = {"include_usage": True}
        return self._right.question(number, api, body)


def _special_chat(special: float) -> dict[str, Any]:
    if special < 0.1:
        function = {"name": "forecast", "strict": True, "parameters": _TOOL_SCHEMA}
        choice = {"type": "function", "function": {"name": "forecast"}}
        return {"tools": [{"type": "function", "function": function}], "tool_choice": choice, "max_tokens": 400}
    if special < 0.2:
        return {"logprobs": True}
    if special < 0.3:
        return {"n": 2}
    if special < 0.35:
        return {"response_format": {"type": "json_object"}, "max_tokens": 400}
    return {}


def _words(rng: random.Random, count: int) -> str:
    return b"".join(rng.choices(WORDS, k=count)).decode("ascii")
