"""Times of a real engine, from outside: prompts alone, and batches that decode.

Prompts are random token ids, so no prefix cache helps, and a given number of tokens is generated, whatever the model
says. The engine should have nothing else to do meanwhile.
"""

from __future__ import annotations

import asyncio
import random
import re
import statistics
import time
from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TypeVar

import orjson

from dualmap.runtime.trust import InstanceTrust
from dualmap.simulation.calibrate.fit import DecodeTime, PrefillTime
from dualmap.simulation.http_client import HttpClient, HttpClientError
from dualmap.simulation.replay.answer_stream import EVENT_END

_MAX_ANSWER_TOKENS = 1024
_LEAST_DECODE_S = 0.4
"""A batch decodes at least so long: a server that is late for a moment sends what it has at once, and what came between
the first and the last piece of a short answer says nothing then."""
_TOKEN_IDS = re.compile(rb'"token_ids":\s*\[([0-9, ]*)\]')
_FIRST_ID, _LAST_ID = 300, 3000
"""Ids of ordinary tokens in every vocabulary."""
_ATTEMPTS = 3
"""Attempts at one measurement. A length or batch that fails as often is not measured in later rounds."""
_PAUSE_S = 1.0
"""Pause before the next attempt: what disturbed the last one may be over then."""

_Measured = TypeVar("_Measured")
_Cell = TypeVar("_Cell", int, tuple[int, int])
"""Length of a prompt alone; sequences of a batch, and the length of their prompts."""


class CalibrationError(Exception):
    """The instance cannot be measured; the message says why."""


class DisturbedError(CalibrationError):
    """One measurement failed, and another attempt may not."""


@dataclass(frozen=True, slots=True)
class Plan:
    """The measurements to make."""

    prompt_lengths: tuple[int, ...]
    batches: tuple[tuple[int, int], ...]
    """Sequences, and tokens in the prompt of each."""
    max_model_len: int
    kv_capacity_tokens: int
    repetitions: int = 5
    decode_tokens: int = 48

    def holds(self, sequences: int, prompt_tokens: int, answer_tokens: int) -> bool:
        """Whether ``sequences`` answers fit, each into the context and all into KV memory."""
        each = prompt_tokens + answer_tokens
        return each <= self.max_model_len and sequences * each <= self.kv_capacity_tokens


def plan_for(max_model_len: int, max_num_seqs: int, kv_capacity_tokens: int, *, repetitions: int = 5) -> Plan:
    """Lengths from 32 tokens on, each twice the last; batches of few and of many, with short and with long prompts, as
    far as KV memory holds them."""
    longest = min(max_model_len - 8, 32_768)
    lengths = [length for power in range(5, 16) if (length := 1 << power) <= longest]
    if longest > 1.3 * lengths[-1]:
        lengths.append(longest)
    decode_tokens = 48
    sizes = [size for size in (1, 2, 4, 8, 16, 32) if size <= max_num_seqs]
    batches = [
        (size, prompt)
        for size in sizes
        for prompt in (32, min(longest - decode_tokens, 2048))
        if size * (prompt + decode_tokens) <= kv_capacity_tokens
    ]
    return Plan(tuple(lengths), tuple(batches), max_model_len, kv_capacity_tokens, repetitions, decode_tokens)


@dataclass(slots=True)
class _Stream:
    """When the chunks of one answer came, and of how many tokens each is: a busy server puts some together."""

    times_s: list[float] = field(default_factory=list)
    tokens: list[int] = field(default_factory=list)
    error: bytes = b""
    _rest: bytes = b""

    def feed(self, data: bytes) -> None:
        now_s = time.perf_counter()
        events = EVENT_END.split(self._rest + data)
        self._rest = events.pop()
        for event in map(bytes.strip, events):
            if event.startswith(b'data: {"error"'):
                self.error = event
            elif event.startswith(b"data: {"):
                ids = _TOKEN_IDS.search(event)
                self.times_s.append(now_s)
                self.tokens.append(ids[1].count(b",") + 1 if ids and ids[1] else 1)

    def tokens_between(self, start_s: float, end_s: float) -> int:
        """Tokens that came after ``start_s``, up to ``end_s``."""
        came = zip(self.times_s, self.tokens, strict=True)
        return sum(count for at_s, count in came if start_s < at_s <= end_s)


class Engine:
    """One instance, at ``url``, that serves ``model``.

    Args:
        seed: of the prompts. Without one they are new in each run: an instance caches those of a former calibration.
    """

    def __init__(
        self,
        url: str,
        model: str,
        *,
        api_key: str | None = None,
        seed: int | None = None,
        trust: InstanceTrust | None = None,
    ) -> None:
        self._client = HttpClient(url, trust=trust)
        self._headers = {"authorization": f"Bearer {api_key}"} if api_key else {}
        self._model = model
        self._chance = random.Random(seed)

    def close(self) -> None:
        self._client.close()

    async def measure(
        self, plan: Plan, say: Callable[[str], None] = lambda line: None
    ) -> tuple[list[PrefillTime], list[DecodeTime]]:
        """All of the plan, in rounds, so that what disturbs the machine for a while disturbs no length or batch more
        than others; then the medians. What fails is tried again, and left out if it goes on failing. ``say`` is called
        with a line for each round, result and failure.

        Raises:
            CalibrationError: the instance does not answer at the start, or refuses a request.
        """
        for _ in range(3):
            await self._answer(64, 4)  # connections, lazy imports, first steps
        ttfts_s: dict[int, list[float]] = {length: [] for length in plan.prompt_lengths}
        steps: dict[tuple[int, int], list[DecodeTime]] = {batch: [] for batch in plan.batches}
        lengths, batches = list(ttfts_s), list(steps)
        for repetition in range(plan.repetitions):
            lengths = await _round(lengths, self._ttft_s, ttfts_s, say)
            if repetition % 2 == 0:
                batches = await _round(batches, lambda batch: self._step(*batch, plan), steps, say)
            say(f"round {repetition + 1} of {plan.repetitions} is done")
        return medians_of(ttfts_s, steps, say)

    async def _ttft_s(self, prompt_tokens: int) -> float:
        started_s = time.perf_counter()
        return (await self._answer(prompt_tokens, 1)).times_s[0] - started_s

    async def _step(self, sequences: int, prompt_tokens: int, plan: Plan) -> DecodeTime:
        """Measure a step while all sequences decode: from the last one's first token to the first one's last. Sequences
        that start early must not be done when the last one starts, so answers grow until they overlap, and long enough.
        """
        tokens = plan.decode_tokens
        while True:
            answers = await _all_of([self._answer(prompt_tokens, tokens) for _ in range(sequences)])
            start_s, end_s = max(each.times_s[0] for each in answers), min(each.times_s[-1] for each in answers)
            steps = statistics.median(each.tokens_between(start_s, end_s) for each in answers)
            longest = tokens >= _MAX_ANSWER_TOKENS or not plan.holds(sequences, prompt_tokens, 2 * tokens)
            overlap = steps >= plan.decode_tokens / 2
            if overlap and (longest or end_s - start_s >= _LEAST_DECODE_S):
                context = sequences * (prompt_tokens + round(tokens - steps / 2))
                return DecodeTime(sequences, context, (end_s - start_s) / steps)
            if longest:
                raise DisturbedError(f"{sequences} answers did not overlap: is the instance busy?")
            tokens *= 2

    async def _answer(self, prompt_tokens: int, output_tokens: int) -> _Stream:
        prompt: Sequence[int] = self._chance.choices(range(_FIRST_ID, _LAST_ID), k=prompt_tokens)
        body = {
            "model": self._model, "prompt": prompt, "max_tokens": output_tokens, "min_tokens": output_tokens,
            "ignore_eos": True, "temperature": 0, "stream": True, "return_token_ids": True,
        }  # fmt: skip
        stream = _Stream()
        raw: list[bytes] = []

        def take(data: bytes) -> None:
            stream.feed(data)
            if not stream.times_s:
                raw.append(data[:500])

        try:
            response = await self._client.request("POST", "/v1/completions", orjson.dumps(body), self._headers, take)
        except HttpClientError as error:
            raise DisturbedError(str(error)) from error
        if response.status != 200 or stream.error or not stream.times_s:
            said = stream.error or b"".join(raw)
            text = said[:300].decode(errors="replace")
            refused = 400 <= response.status < 500 and response.status not in (408, 429)
            kind = CalibrationError if refused else DisturbedError
            raise kind(f"a prompt of {prompt_tokens} tokens is answered with {response.status}: {text}")
        return stream


async def _round(
    cells: Sequence[_Cell],
    measure: Callable[[_Cell], Awaitable[_Measured]],
    found: Mapping[_Cell, list[_Measured]],
    say: Callable[[str], None],
) -> list[_Cell]:
    """Measure each once; returns those to go on with. Raises CalibrationError where another attempt is of no use."""
    kept = []
    for cell in cells:
        for attempt in range(1, _ATTEMPTS + 1):
            try:
                found[cell].append(await measure(cell))
            except DisturbedError as error:
                if attempt == _ATTEMPTS:
                    say(f"{_named(cell)}: measured no more after {_ATTEMPTS} failures: {error}")
                else:
                    await asyncio.sleep(_PAUSE_S)
            else:
                kept.append(cell)
                break
    return kept


def _named(cell: int | tuple[int, int]) -> str:
    return f"prompt of {cell} tokens" if isinstance(cell, int) else f"batch of {cell[0]}, prompts of {cell[1]} tokens"


async def _all_of(answers: Sequence[Awaitable[_Stream]]) -> list[_Stream]:
    """When all are done, so that none disturbs the next measurement. Raises what the first failed one did."""
    done = await asyncio.gather(*answers, return_exceptions=True)
    streams = []
    for each in done:
        if isinstance(each, BaseException):
            raise each
        streams.append(each)
    return streams


def medians_of(
    ttfts_s: Mapping[int, Sequence[float]],
    steps: Mapping[tuple[int, int], Sequence[DecodeTime]],
    say: Callable[[str], None],
) -> tuple[list[PrefillTime], list[DecodeTime]]:
    """The medians of the times, without measurements that failed."""
    prefills = [PrefillTime(length, statistics.median(times_s)) for length, times_s in ttfts_s.items() if times_s]
    decodes = [sorted(found, key=lambda each: each.step_s)[len(found) // 2] for found in steps.values() if found]
    for prefill in prefills:
        say(f"prompt of {prefill.prompt_tokens} tokens: first token after {1000 * prefill.ttft_s:.1f} ms")
    for step in decodes:
        about = f"batch of {step.sequences}, {step.context_tokens} tokens of context"
        say(f"{about}: {1000 * step.step_s:.2f} ms a step")
    return prefills, decodes
