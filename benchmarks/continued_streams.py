"""Compares streams whose engine is ended in the middle, and which go on from another one, with the same answers uncut.

A fleet is started before engines that a command starts, one after another. Round by round it is asked new prompts,
greedy and streamed: first uncut, all at once; then again, while one engine gets the signal in the middle of what it
answers. It is started again before the next round. Rounds go on until as many streams were cut as are wanted.

    python benchmarks/continued_streams.py --emulated
    python benchmarks/continued_streams.py --signals KILL TERM --streams 200 --at-once 100 \\
        --engine-command 'vllm serve MODEL --host 127.0.0.1 --port {port}'

The command stays in the foreground and has no shell; ``env NAME=VALUE vllm serve …`` sets variables. KILL goes to all
of its processes, as where a machine or a container dies; TERM goes to its first one, as from Kubernetes.

Prints Markdown. A stream is *equal* if its text is, to the character. One that differs is shown with the token from
which on; *before the cut* means that the engine that was ended had already given another text than the first time.
Ends with 1 where less than 99 % of the cut streams are equal, or one broke off or differs before its cut.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import json
import os
import random
import re
import shlex
import signal
import statistics
import subprocess
import sys
import tempfile
import time
from collections import Counter
from collections.abc import AsyncIterator, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from enum import StrEnum
from pathlib import Path
from typing import Any

import httpx

from dualmap.cli.fleet_plan import free_ports
from dualmap.research.chaos.answers import Answer, Api, Choice, MalformedError, StreamReader
from dualmap.research.chaos.fleet_process import FleetProcess, unconfigured
from dualmap.research.provenance import Provenance
from dualmap.simulation.workload.prompts import WORDS

APIS = {"chat": Api.CHAT, "completions": Api.COMPLETIONS, "messages": Api.MESSAGES, "responses": Api.RESPONSES}
EMULATED = f"{sys.executable} -m dualmap emulate --instances 1 --port {{port}} --time-scale 4"
CUT_AT = (0.2, 0.8)
"""Part of the answers of an engine that has come when it is ended: drawn for each round between these."""
EQUAL_SHARE = 0.99
STOPS_WITHIN_S = 120.0
"""Time for an engine to end after its signal; then it is killed. Its streams have gone on long before."""
POLL_S = 0.2
_COMMENT = re.compile(rb"^: dualmap: goes on at (\S+) after (\d+) tokens, by (tokens|text)$")


class BenchmarkError(Exception):
    """The engines or the fleet are not as the comparison needs them; the message says why."""


# engines ---------------------------------------------------------------------------------------------------------
class Engine:
    """A server that the command starts, in a session of its own. Its port stays the same."""

    def __init__(self, command: str, port: int, log: Path) -> None:
        self.url = f"http://127.0.0.1:{port}"
        self._words = shlex.split(command.replace("{port}", str(port)))
        self._log = log
        self._process: subprocess.Popen[bytes] | None = None

    @property
    def runs(self) -> bool:
        return self._process is not None

    async def start(self, within_s: float) -> None:
        """Start it, and wait until it serves. Raises BenchmarkError."""
        with self._log.open("ab") as output:
            try:
                process = self._process = subprocess.Popen(  # noqa: ASYNC220 - as quick as any fork
                    self._words, stdin=subprocess.DEVNULL, stdout=output, stderr=subprocess.STDOUT,
                    env=unconfigured(), start_new_session=True,
                )  # fmt: skip
            except OSError as error:
                raise BenchmarkError(f"{self._words[0]} cannot be started: {error.strerror}") from error
        deadline_s = time.monotonic() + within_s
        async with httpx.AsyncClient(timeout=5) as client:
            while not await _is_healthy(client, self.url):
                if process.poll() is not None or time.monotonic() > deadline_s:
                    end = self._log.read_text(errors="replace")[-3000:]
                    raise BenchmarkError(f"{' '.join(self._words)} does not serve {self.url}:\n{end}")
                await asyncio.sleep(POLL_S)

    def end(self, number: signal.Signals) -> None:
        """Send the signal, if it runs."""
        if self._process is None:
            return
        with contextlib.suppress(ProcessLookupError):
            if number is signal.SIGKILL:
                os.killpg(self._process.pid, number)
            else:
                self._process.send_signal(number)

    async def ended(self, within_s: float) -> bool:
        """Wait until no process of it is left; after this time all of them are killed. Returns whether it ended by
        itself."""
        if self._process is None:
            return True
        in_time = True
        try:
            await asyncio.to_thread(self._process.wait, within_s)
        except subprocess.TimeoutExpired:
            in_time = False
        self.end(signal.SIGKILL)
        await asyncio.to_thread(self._process.wait)
        self._process = None
        return in_time


async def _is_healthy(client: httpx.AsyncClient, url: str) -> bool:
    with contextlib.suppress(httpx.HTTPError):
        return (await client.get(f"{url}/health")).status_code == 200
    return False


# one stream ------------------------------------------------------------------------------------------------------
@dataclass(frozen=True, slots=True)
class Cut:
    """A place in a stream from which on another engine gave it."""

    chars: int
    """Characters of the text before it."""
    tokens: int
    by: str
    """``tokens`` or ``text``."""
    gap_s: float | None
    """Time between the text before it and the text behind it, as the client saw it; None: no text is on one side."""


@dataclass(frozen=True, slots=True)
class Prompt:
    number: int
    api: Api
    body: Mapping[str, Any]


@dataclass
class Stream:
    """One streamed answer, as it comes."""

    prompt: Prompt
    instance: str = ""
    """The instance that began it."""
    text: str = ""
    cuts: list[Cut] = field(default_factory=list)
    problem: str = ""
    """Why it is no complete answer; empty where it is one."""
    finish_reason: str | None = None
    tokens: int | None = None
    """Tokens of the answer by its usage."""
    _received: bytearray = field(default_factory=bytearray)
    _read_bytes: int = 0
    _text_s: float | None = None
    """Time of the last text."""
    _open_cut: tuple[int, int, str] | None = None

    def take(self, data: bytes) -> None:
        """Take bytes as they came."""
        now_s = time.perf_counter()
        self._received += data
        while (end := self._received.find(b"\n\n", self._read_bytes)) >= 0:
            self._take_event(bytes(self._received[self._read_bytes : end]), now_s)
            self._read_bytes = end + 2

    def _take_event(self, event: bytes, now_s: float) -> None:
        if found := _COMMENT.match(event):
            self._note_cut(None)
            self._open_cut = len(self.text), int(found[2]), found[3].decode()
        elif text := _text_of(event):
            self._note_cut(None if self._text_s is None else now_s - self._text_s)
            self.text, self._text_s = self.text + text, now_s

    def _note_cut(self, gap_s: float | None) -> None:
        if self._open_cut is not None:
            self.cuts.append(Cut(*self._open_cut, gap_s))
            self._open_cut = None

    def end(self, status: int, broke: str = "") -> None:
        """No more bytes come."""
        self._note_cut(None)
        answer = Answer()
        try:
            if status == 200:
                answer = StreamReader(self.prompt.api).read(bytes(self._received), ended=not broke)
        except (MalformedError, KeyError, TypeError, AttributeError) as error:
            self.problem = f"not readable: {error!r}"
            return
        choice = answer.choices.get(0, Choice())
        self.finish_reason, self.tokens = choice.finish_reason, answer.completion_tokens
        if status != 200:
            self.problem = f"status {status}: {bytes(self._received[:300]).decode(errors='replace')}"
        elif answer.error or broke or not answer.complete:
            self.problem = answer.error or broke or "it has no end"
        elif choice.text != self.text:
            self.problem = "two readers found other texts in it"


def _text_of(event: bytes) -> str:
    """The text that an event of any of the APIs adds."""
    data = next((line[6:] for line in event.split(b"\n") if line.startswith(b"data: {")), None)
    if data is None:
        return ""
    try:
        said = json.loads(data)
        if said.get("type") == "content_block_delta":
            return str(said["delta"].get("text", ""))
        if said.get("type") == "response.output_text.delta":
            return str(said["delta"])
        return "".join(
            each.get("text") or each.get("delta", {}).get("content") or "" for each in said.get("choices") or ()
        )
    except (ValueError, KeyError, TypeError, AttributeError):
        return ""  # the whole stream is read at its end, and then found not to be readable


def prompts(apis: Sequence[Api], model: str, tokens: int, seed: int) -> Iterable[Prompt]:
    """Greedy requests without end, of each API in turn, each with a text of its own."""
    rng = random.Random(seed)
    number = 0
    while True:
        api = apis[number % len(apis)]
        text = f"{number} {b''.join(rng.choices(WORDS, k=rng.randint(8, 60))).decode()}"
        body: dict[str, Any] = {"model": model, "stream": True, "temperature": 0}
        if api is Api.RESPONSES:
            body |= {"input": text, "max_output_tokens": tokens}
        else:
            body["max_tokens"] = tokens
            body |= {"prompt": text} if api is Api.COMPLETIONS else {"messages": [{"role": "user", "content": text}]}
        if api in (Api.CHAT, Api.COMPLETIONS):
            body["stream_options"] = {"include_usage": True}
        yield Prompt(number, api, body)
        number += 1


# the comparison --------------------------------------------------------------------------------------------------
class Verdict(StrEnum):
    """The result of comparing a cut stream with the uncut answer."""

    EQUAL = "equal"
    AFTER = "differing from the cut on"
    BEFORE = "differing before the cut"
    BROKEN = "broken off"


@dataclass(frozen=True, slots=True)
class Compared:
    """One stream that was cut, beside the same answer uncut."""

    prompt: Prompt
    cut: Cut | None
    """None: it broke off without going on."""
    verdict: Verdict
    note: str
    """A line for people on what is not equal; empty where all is."""
    usage_differs: bool


def first_difference(one: str, other: str) -> int | None:
    """The place of the first character that is not the same in both; None: they are equal."""
    if one == other:
        return None
    pairs = enumerate(zip(one, other, strict=False))
    return next((at for at, (left, right) in pairs if left != right), min(len(one), len(other)))


def verdict_of(uncut: Stream, again: Stream) -> Verdict:
    """The verdict on a stream that was cut, once it is over."""
    if again.problem:
        return Verdict.BROKEN
    at = first_difference(uncut.text, again.text)
    if at is None:
        return Verdict.EQUAL if uncut.finish_reason == again.finish_reason else Verdict.AFTER
    return Verdict.AFTER if at >= again.cuts[0].chars else Verdict.BEFORE


class Fleet:
    """The fleet under test, and what it is asked."""

    def __init__(self, url: str, model: str, client: httpx.AsyncClient) -> None:
        self.model = model
        self._url = url
        self._client = client

    async def ask(self, stream: Stream) -> None:
        """Ask for an answer, and read it to its end."""
        prompt, status, broke = stream.prompt, 0, ""
        try:
            async with self._client.stream("POST", f"{self._url}{prompt.api}", json=prompt.body) as answer:
                stream.instance = answer.headers.get("x-dualmap-instance", "")
                status = answer.status_code
                async for data in answer.aiter_raw():
                    stream.take(data)
        except httpx.HTTPError as error:
            broke = f"the connection ended: {error!r}"
        stream.end(status or 200, broke)

    async def ask_all(self, prompts: Sequence[Prompt]) -> list[Stream]:
        """Ask for all of them at once."""
        streams = [Stream(prompt) for prompt in prompts]
        await asyncio.gather(*map(self.ask, streams))
        return streams

    async def tokens_of(self, text: str) -> int | None:
        """The number of tokens of a text by an engine; None where it does not say."""
        body = {"model": self.model, "prompt": text, "add_special_tokens": False}
        with contextlib.suppress(httpx.HTTPError, ValueError, KeyError):
            answer = await self._client.post(f"{self._url}/tokenize", json=body)
            return int(answer.json()["count"])
        return None

    async def instances(self) -> list[dict[str, Any]]:
        answer = await self._client.get(f"{self._url}/admin/instances")
        return list(answer.json()["instances"])

    async def until_all_ready(self, within_s: float) -> None:
        """Wait until the fleet uses every engine. Raises BenchmarkError."""
        deadline_s = time.monotonic() + within_s
        while True:
            states = {each["id"]: each["state"] for each in await self.instances()}
            if set(states.values()) == {"ready"}:
                return
            if time.monotonic() > deadline_s:
                raise BenchmarkError(f"not all instances are ready: {states}")
            await asyncio.sleep(POLL_S)

    async def compare(self, uncut: Stream, again: Stream) -> Compared:
        """Compare a stream that was cut with the uncut answer."""
        verdict, cut, prompt = verdict_of(uncut, again), next(iter(again.cuts), None), again.prompt
        usage_differs = verdict is Verdict.EQUAL and uncut.tokens != again.tokens
        note = f"request {prompt.number}, {prompt.api}, "
        note += f"cut after {cut.tokens} tokens, goes on by {cut.by}: " if cut is not None else "does not go on: "
        if verdict is Verdict.EQUAL:
            note = f"{note}equal, but {again.tokens} tokens by its usage, not {uncut.tokens}" if usage_differs else ""
        elif verdict is Verdict.BROKEN:
            note += again.problem
        else:
            note += await self._difference(uncut, again)
        return Compared(prompt, cut, verdict, note, usage_differs)

    async def _difference(self, uncut: Stream, again: Stream) -> str:
        at = first_difference(uncut.text, again.text)
        if at is None:
            return f"it ends by {again.finish_reason}, not by {uncut.finish_reason}"
        tokens = await self.tokens_of(uncut.text[:at])
        where = "?" if tokens is None else tokens + 1
        shown = f"{again.text[at : at + 30]!r} instead of {uncut.text[at : at + 30]!r}"
        return (
            f"differs from token {where} of {uncut.tokens} on ({at - again.cuts[0].chars} characters behind the cut; "
            f"{again.tokens} tokens in all): {shown}"
        )


@dataclass
class Results:
    """The results of the rounds in which engines ended by one signal."""

    number: signal.Signals
    streams: int = 0
    cut: list[Compared] = field(default_factory=list)
    uncut_again: Counter[bool] = field(default_factory=Counter)
    """Streams of the second time that were not cut, by whether they equal the first ones: the engine's own doing."""
    left_out: int = 0
    """Requests whose first answer was itself cut, or not whole: a machine with too much to do."""
    slow_ends: int = 0
    """Engines that had not ended after ``STOPS_WITHIN_S``."""
    rounds: int = 0


async def run_round(
    fleet: Fleet, prompts: Sequence[Prompt], victim: str, engine: Engine, number: signal.Signals, part: float
) -> tuple[list[Stream], list[Stream]]:
    """Ask all prompts uncut, and again while an engine is ended. Returns the answers of both times."""
    uncut = await fleet.ask_all(prompts)
    again = [Stream(prompt) for prompt in prompts]
    ending = asyncio.create_task(_end_in_the_middle(uncut, again, victim, engine, number, part))
    try:
        await asyncio.gather(*map(fleet.ask, again))
    finally:
        ending.cancel()
        await asyncio.wait([ending])
    if not ending.cancelled():
        ending.result()
    return uncut, again


async def _end_in_the_middle(
    uncut: Sequence[Stream], again: Sequence[Stream], victim: str, engine: Engine, number: signal.Signals, part: float
) -> None:
    """End the engine once this part of what it answers has come, and every stream has begun."""
    while True:
        here = [
            (len(first.text), len(one.text)) for first, one in zip(uncut, again, strict=True) if one.instance == victim
        ]
        if all(one.instance for one in again) and sum(has for _, has in here) >= part * sum(whole for whole, _ in here):
            engine.end(number)
            return
        await asyncio.sleep(0.005)


async def rounds(
    fleet: Fleet, engines: Mapping[str, Engine], numbers: Sequence[signal.Signals], options: argparse.Namespace
) -> AsyncIterator[Results]:
    """The results of each signal: of rounds until as many streams were cut as are wanted. Raises BenchmarkError."""
    rng = random.Random(options.seed)
    source = iter(prompts([APIS[name] for name in options.apis], fleet.model, options.tokens, options.seed))
    most = 3 * -(-options.streams * len(engines) // options.at_once)
    for number in numbers:
        results = Results(number)
        while len(results.cut) < options.streams:
            if results.rounds >= most:
                raise BenchmarkError(
                    f"{len(results.cut)} streams were cut in {most} rounds: let answers be longer (--tokens)"
                )
            await _until_all_run(fleet, engines, options.start_within_s)
            victim = sorted(engines)[results.rounds % len(engines)]
            together = [next(source) for _ in range(options.at_once)]
            uncut, again = await run_round(fleet, together, victim, engines[victim], number, rng.uniform(*CUT_AT))
            results.rounds += 1
            engines[victim].end(number)  # where its answers were over before their part had come
            results.slow_ends += not await engines[victim].ended(STOPS_WITHIN_S)
            await _take(results, fleet, uncut, again)
            _say(f"round {results.rounds}, {victim} ended by {number.name}: {len(results.cut)} streams cut so far")
        yield results


async def _until_all_run(fleet: Fleet, engines: Mapping[str, Engine], within_s: float) -> None:
    """Start the engines that were ended."""
    for engine in engines.values():
        if not engine.runs:
            await engine.start(within_s)
    await fleet.until_all_ready(within_s)


async def _take(results: Results, fleet: Fleet, uncut: Sequence[Stream], again: Sequence[Stream]) -> None:
    for first, second in zip(uncut, again, strict=True):
        results.streams += 1
        if first.problem or first.cuts:
            results.left_out += 1
            _say(f"request {first.prompt.number} is left out, uncut it was not whole: {first.problem or first.cuts}")
        elif second.cuts or second.problem:
            compared = await fleet.compare(first, second)
            results.cut.append(compared)
            if compared.note:
                _say(compared.note)
        else:
            results.uncut_again[first.text == second.text] += 1


# the report ------------------------------------------------------------------------------------------------------
COLUMNS = (
    "signal, API", "cut", "by tokens", "by text", *map(str, Verdict), "gap s P50", "P99", "max",
)  # fmt: skip


def head() -> str:
    return f"| {' | '.join(COLUMNS)} |\n| --- |{' ---: |' * (len(COLUMNS) - 1)}"


def rows(results: Results) -> str:
    """The cut streams, of each API and of all."""
    of_apis = {name: [each for each in results.cut if each.prompt.api is api] for name, api in APIS.items()}
    lines = [
        f"| {results.number.name}, {name} | {' | '.join(_cells(cut))} |"
        for name, cut in {**of_apis, "all": results.cut}.items()
        if cut
    ]
    return "\n".join(lines)


def _cells(compared: Sequence[Compared]) -> list[str]:
    cuts, verdicts = [each.cut for each in compared if each.cut is not None], Counter(each.verdict for each in compared)
    by, gaps_s = Counter(cut.by for cut in cuts), sorted(cut.gap_s for cut in cuts if cut.gap_s is not None)
    equal, *others = (verdicts[each] for each in Verdict)
    cells = [f"{len(compared)}", f"{by['tokens']}", f"{by['text']}", f"{equal} ({equal / len(compared):.1%})"]
    gaps = ["–"] * 3
    if gaps_s:
        p99_s = gaps_s[min(len(gaps_s) - 1, int(0.99 * len(gaps_s)))]
        gaps = [f"{gap_s:.2f}" for gap_s in (statistics.median(gaps_s), p99_s, gaps_s[-1])]
    return [*cells, *map(str, others), *gaps]


def sentences(results: Results, options: argparse.Namespace) -> str:
    """Sentences with the facts that the table leaves out."""
    sentences = [
        f"{results.number.name}: {results.streams} streams of up to {options.tokens} tokens, {options.at_once} at once,"
        f" on {options.engines} engines, of which one was ended {results.rounds} times."
    ]
    same, other = results.uncut_again[True], results.uncut_again[False]
    sentences.append(f"Of the {same + other} that were not cut the second time, {same} were equal to the first.")
    if results.left_out:
        sentences.append(
            f"{results.left_out} requests are left out, whose first answer was not whole or was cut itself."
        )
    if usages := sum(each.usage_differs for each in results.cut):
        sentences.append(f"{usages} of the equal ones count other tokens.")
    if results.slow_ends:
        sentences.append(f"{results.slow_ends} engines were killed, as they had not ended after {STOPS_WITHIN_S:g} s.")
    by = {each.cut.by for each in results.cut if each.verdict is Verdict.AFTER and each.cut is not None}
    if "tokens" in by:
        sentences.append(
            "A rest by tokens has the same tokens before it, so that the likely reason of another one is rounding: "
            "batches of other sizes add the same numbers up in other orders."
        )
    if "text" in by:
        sentences.append("A rest by text may besides begin behind other tokens, into which the same text is cut.")
    return "\n".join([" ".join(sentences), *(f"- {each.note}" for each in results.cut if each.note)])


def is_as_wanted(results: Results) -> bool:
    """Whether the target is met."""
    verdicts = Counter(each.verdict for each in results.cut)
    equal = verdicts[Verdict.EQUAL] >= EQUAL_SHARE * len(results.cut)
    return equal and not verdicts[Verdict.BROKEN] and not verdicts[Verdict.BEFORE]


@contextlib.asynccontextmanager
async def local_fleet(options: argparse.Namespace, folder: Path) -> AsyncIterator[tuple[Fleet, dict[str, Engine]]]:
    """Engines by their ids in the fleet, and the fleet before them. Raises BenchmarkError."""
    command = EMULATED if options.emulated else options.engine_command
    engines = [
        Engine(command, port, folder / f"engine-{number}.log")
        for number, port in enumerate(free_ports(options.engines), 1)
    ]
    up: FleetProcess | None = None
    try:
        for engine in engines:  # several at once would have each other's time for it
            _say(f"starting an engine on {engine.url}")
            await engine.start(options.start_within_s)
        urls = [word for engine in engines for word in ("--instance-url", engine.url)]
        up = FleetProcess.start(
            folder,
            ("--port", "0", "--replicas", str(options.replicas), "--workers", "1", "--status-interval-s", "60",
             "--router.tell_continuations", "true", *urls),
        )  # fmt: skip
        await _until_ready(up, options.start_within_s)
        async with httpx.AsyncClient(timeout=httpx.Timeout(options.answer_within_s), limits=httpx.Limits()) as client:
            fleet = Fleet(up.endpoint, up.model, client)
            await fleet.until_all_ready(options.start_within_s)
            by_url = {each["url"]: each["id"] for each in await fleet.instances()}
            yield fleet, {by_url[engine.url]: engine for engine in engines}
    finally:
        for engine in engines:  # first, and at once: one is large, and what follows may take a while or fail
            engine.end(signal.SIGKILL)
        if up is not None:
            with contextlib.suppress(subprocess.TimeoutExpired):  # it was killed then
                await asyncio.to_thread(up.stop)
        for engine in engines:
            await engine.ended(10.0)


async def _until_ready(up: FleetProcess, within_s: float) -> None:
    deadline_s = time.monotonic() + within_s
    try:
        while not up.is_ready:
            if time.monotonic() > deadline_s:
                raise BenchmarkError(f"the fleet is not ready:\n{up.output}")
            await asyncio.sleep(POLL_S)
    except AssertionError as error:
        raise BenchmarkError(str(error)) from error


async def measure(options: argparse.Namespace, folder: Path) -> int:
    made, numbers = Provenance.here(()), [signal.Signals[f"SIG{name}"] for name in options.signals]
    results = []
    async with local_fleet(options, folder) as (fleet, engines):
        print(head(), flush=True)
        async for each in rounds(fleet, engines, numbers, options):
            results.append(each)
            print(rows(each), flush=True)
    for each in results:
        print(f"\n{sentences(each, options)}")
    print(f"\nCommit {made.commit}, {made.date}: `python benchmarks/continued_streams.py {shlex.join(sys.argv[1:])}`")
    return 0 if all(map(is_as_wanted, results)) else 1


def _say(text: str) -> None:
    print(text, file=sys.stderr, flush=True)


def _options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    which = parser.add_mutually_exclusive_group(required=True)
    which.add_argument("--engine-command", metavar="WORDS", help="starts one engine; {port} stands for its port")
    which.add_argument("--emulated", action="store_true", help="emulated engines: shows that the command works")
    parser.add_argument("--engines", type=int, default=2, metavar="N")
    parser.add_argument("--replicas", type=int, default=1, metavar="N", help="router replicas")
    parser.add_argument("--signals", nargs="+", choices=("KILL", "TERM"), default=["KILL"], help="by which engines end")
    parser.add_argument("--streams", type=int, default=20, metavar="N", help="cut so many by each signal")
    parser.add_argument("--at-once", type=int, default=20, metavar="N", help="streams at once, over all engines")
    parser.add_argument("--tokens", type=int, default=200, metavar="N", help="the longest answer")
    parser.add_argument(
        "--apis", type=lambda text: text.split(","), default=["chat", "completions", "messages"], metavar="A,B",
        help=f"of {', '.join(APIS)}",
    )  # fmt: skip
    parser.add_argument("--start-within-s", type=float, default=600.0, metavar="S", help="time for an engine to start")
    parser.add_argument("--answer-within-s", type=float, default=300.0, metavar="S", help="silence that a client bears")
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--keep", type=Path, metavar="DIR", help="keep the logs there")
    options = parser.parse_args()
    if options.engines < 2 or not set(options.apis) <= set(APIS):
        parser.error(f"--engines needs 2 or more, and --apis some of {', '.join(APIS)}")
    return options


def main() -> int:
    options = _options()
    signal.signal(signal.SIGTERM, signal.default_int_handler)  # engines end with this command, however it ends
    with tempfile.TemporaryDirectory(prefix="dualmap-") as made:
        folder = options.keep or Path(made)
        folder.mkdir(parents=True, exist_ok=True)
        try:
            return asyncio.run(measure(options, folder))
        except BenchmarkError as error:
            _say(f"continued_streams: {error}")
            return 2


if __name__ == "__main__":
    sys.exit(main())
