"""Hostile requests of tenants over three replicas, with kills: what gets past limits, rights and charges.

    python -m benchmarks.hostile_tenants [--requests 2000] [--kill-every 150] [--seed 1] [--keep FOLDER] [--shapes]

Starts a fleet with three replicas in front of instances that read requests as vLLM's own server does (FastAPI on
uvicorn, ``tests/support/served_instance.py``), each a process that writes down what it computed. Clients of six tenants
send requests of every shape in ``SHAPES``: paths with escapes, bodies that two parsers read differently, answers that
look aborted, clients that leave. A replica, and then an instance, is killed at intervals and comes back.

The instances' own books are compared to the limits and rights of the tenants:

- ``counted`` has a quota of requests a day, ``drawn`` one of tokens a day that draws what a client asks for,
  ``expected`` the same that draws the expected tokens, ``walled`` may use one of two models, ``low`` has a class of its
  own, and ``innocent`` sends plain requests, each of which must be answered.
- A request that a killed process took with it is given back by design, and counts for no limit.
- ``expected`` is beyond its limit where a request was admitted after what had been computed for it reached the limit.

Prints one line of JSON a check, each shape that got past one, and exits with 1 if any did.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import json
import random
import re
import signal
import socket
import subprocess
import sys
import tempfile
import time
import urllib.request
from collections import Counter, defaultdict
from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Final

from fastapi import Response
from fastapi.responses import JSONResponse, StreamingResponse

from dualmap.research.chaos.fleet_process import FleetProcess
from tests.support.served_instance import ReadRequest, served_instance

ALLOWED, SECRET = "small", "secret"
ADMIN_KEY = "the-operator's-key"
MARK = "x-shape-mark"
"""Header field by which an instance knows a request of this run: routers pass it on."""
TOKENS_AN_EVENT = 10
EVENT_S = 0.02
SETTLE_S = 6.0
"""Longer than a lease and the releases behind it."""
STEERING: Final = (
    "kv_transfer_params", "ec_transfer_params", "x-prefiller-host-port", "x-kv-cache-source-host-port",
    "x-encoder-hosts-ports", "x-gateway-destination-endpoint", "x-prefiller-url", "x-data-parallel-host-port",
)  # fmt: skip

LIMITS: Final = {"counted": "requests_per_day", "drawn": "tokens_per_day", "expected": "tokens_per_day"}
"""The quota of each tenant that has one."""
TENANTS: Final[list[dict[str, Any]]] = [
    {"name": "counted"},
    {"name": "drawn", "draws": "asked"},
    {"name": "expected"},
    {"name": "walled", "models": [ALLOWED]},
    {"name": "low", "priority_class": "low"},
    {"name": "innocent"},
]
KEYS: Final = {each["name"]: f"the-key-of-{each['name']}" for each in TENANTS}
CLASSES: Final = [{"name": "high", "engine_priority": 0}, {"name": "low", "engine_priority": 9}]


# shapes ------------------------------------------------------------------------------------------------------------
@dataclass(frozen=True)
class Sent:
    """One hostile request. ``leave``: the client leaves then: ``at_once`` it has sent, at the ``first`` bytes of the
    answer, or at the ``last`` event; None: never."""

    shape: str
    target: str = "/v1/chat/completions"
    body: bytes = b""
    fields: Mapping[str, str] = field(default_factory=dict)
    method: str = "POST"
    leave: str | None = None


Shape = Callable[[random.Random], Sent]
SHAPES: Final[dict[str, Shape]] = {}


def shape(make: Shape) -> Shape:
    SHAPES[make.__name__] = make
    return make


def chat(rng: random.Random, model: str = ALLOWED, **more: Any) -> dict[str, Any]:
    words = " ".join(rng.choice(("alpha", "beta", "gamma", "delta")) for _ in range(rng.randrange(20, 200)))
    return {
        "model": model,
        "messages": [{"role": "user", "content": words}],
        "max_tokens": rng.randrange(5, 80),
        **more,
    }


def completion(rng: random.Random, model: str = ALLOWED, **more: Any) -> dict[str, Any]:
    ids = [rng.randrange(1000) for _ in range(rng.randrange(20, 300))]
    return {"model": model, "prompt": ids, "max_tokens": rng.randrange(5, 80), **more}


def dumped(body: Mapping[str, Any]) -> bytes:
    return json.dumps(body).encode()


PATHS: Final = (
    "/v1%2Fchat/completions", "/v1%2fchat%2fcompletions", "/v1/chat%2Fcompletions", "/v1/./chat/completions",
    "/v1/x/../chat/completions", "//v1/chat/completions", "/v1//chat//completions", "/v1/chat/completions/",
    "/%76%31/chat/completions", "/v1%5Cchat%5Ccompletions", "/v1%252Fchat/completions", "/v1/%2e/chat/completions",
    "/v1/x/%2e%2e/chat/completions", "/v1/chat/completions?model=secret", "/v1/chat/completions;x=y",
    "/v1/chat/completions%20", "/v1/chat/completions%00", "/v1/chat/completions%3Fx", "/V1/chat/completions",
    "http://127.0.0.1/v1%2Fchat/completions", "/v1/v1/../chat/completions", "/v1/chat/completions%2F",
)  # fmt: skip


@shape
def odd_paths(rng: random.Random) -> Sent:
    target = rng.choice(PATHS)
    return Sent(f"path {target}", target, dumped(chat(rng, rng.choice((ALLOWED, SECRET)), priority=-5)))


@shape
def odd_control_paths(rng: random.Random) -> Sent:
    target = rng.choice(
        ("/inference%2Fv1/abort_requests", "/inference/./v1/abort_requests", "/%73leep", "/sleep/", "//sleep",
         "/v1%2Fload_lora_adapter", "/x/../reset_prefix_cache", "/v1%2Fresponses/resp_1", "/pause%2F")
    )  # fmt: skip
    return Sent(f"path {target}", target, dumped({"request_ids": ["a"], "model": ALLOWED}))


@shape
def doubled_model(rng: random.Random) -> Sent:
    path, make = rng.choice((("/v1/chat/completions", chat), ("/v1/completions", completion), ("/invocations", chat)))
    body, second = dumped(make(rng)), rng.choice(('"model"', '"\\u006dodel"', '"mod\\u0065l"'))
    return Sent(f"doubled model {second} {path}", path, body[:-1] + f', {second}: "{SECRET}"}}'.encode())


@shape
def late_model(rng: random.Random) -> Sent:
    values = "[" + ",".join(["[]"] * 100_001) + "]"
    body = dumped(chat(rng))
    return Sent("model behind 100,000 values", body=body[:-1] + f', "x": {values}, "model": "{SECRET}"}}'.encode())


@shape
def only_late_model(rng: random.Random) -> Sent:
    body = chat(rng, SECRET)
    body["messages"][0]["content"] = "a" * 9_000_000 if rng.random() < 0.1 else "[]," * 30_000
    del body["model"]
    return Sent(
        "model behind a long text", body=dumped({**body, "x": ["y"] * rng.choice((10, 100_001)), "model": SECRET})
    )


@shape
def other_encodings(rng: random.Random) -> Sent:
    encoding = rng.choice(("utf-16", "utf-16-le", "utf-16-be", "utf-32", "utf-32-le", "utf-32-be", "utf-8-sig"))
    return Sent(f"encoding {encoding}", body=json.dumps(chat(rng, SECRET)).encode(encoding))


@shape
def content_encodings(rng: random.Random) -> Sent:
    name = rng.choice(("gzip", "br", "deflate", "zstd", "x", "identity, gzip"))
    return Sent(f"content-encoding {name}", body=dumped(chat(rng, SECRET)), fields={"content-encoding": name})


@shape
def content_types(rng: random.Random) -> Sent:
    name = rng.choice(("text/plain", "application/x-www-form-urlencoded", "multipart/form-data; boundary=b", ""))
    return Sent(f"content-type {name}", body=dumped(chat(rng, SECRET)), fields={"content-type": name})


@shape
def forms(rng: random.Random) -> Sent:
    kind = rng.choice(("twice", "middle", "blanks", "quoted", "upper"))
    name = {"blanks": 'name = "model"', "quoted": "name='model'", "upper": 'NAME="model"'}.get(kind, 'name="model"')

    def part(head: str, value: str) -> str:
        return f"--b\r\ncontent-disposition: form-data; {head}\r\n\r\n{value}\r\n"

    file = part('name="file"; filename="a.wav"', "x" * 10)
    filler = part('name="file2"; filename="b.wav"', "y" * 70_000)
    secret = part(name, SECRET)
    text = {
        "twice": part('name="model"', ALLOWED) + file + secret,
        "middle": filler + secret + file + filler,
    }.get(kind, part('name="model"', ALLOWED) + file + secret)
    return Sent(
        f"form {kind}", "/v1/audio/transcriptions", (text + "--b--\r\n").encode(),
        {"content-type": "multipart/form-data; boundary=b"},
    )  # fmt: skip


@shape
def looks_aborted(rng: random.Random) -> Sent:
    where = rng.choice(("tools", "text", "user", "metadata"))
    bait: Any = {"finish_reason": "abort", "stop_reason": "recomputed", "error": {"code": 500}, "type": "error"}
    places: dict[str, dict[str, Any]] = {
        "tools": {"tools": [{"type": "function", "name": "f", "parameters": bait}]},
        "text": {"text": {"format": {"type": "json_schema", "name": "x", "schema": bait}}},
        "user": {"user": 'x"finish_reason":"abort"'},
        "metadata": {"metadata": {"finish_reason": "abort"}},
    }
    body = {"model": ALLOWED, "input": "hello " * 30, "max_output_tokens": rng.randrange(5, 60), **places[where]}
    return Sent(f"looks aborted by {where}", "/v1/responses", dumped(body))


@shape
def hidden_usage(rng: random.Random) -> Sent:
    more = rng.choice(({"user": "usage"}, {"return_token_ids": True}, {"prompt_logprobs": 5}, {"user": '"usage":{}'}))
    path, make = rng.choice((("/v1/chat/completions", chat), ("/v1/completions", completion)))
    return Sent(f"hidden usage {next(iter(more))} {path}", path, dumped(make(rng, **more)))


@shape
def many_answers(rng: random.Random) -> Sent:
    path, make = rng.choice((("/v1/chat/completions", chat), ("/v1/completions", completion)))
    stream = rng.random() < 0.5
    return Sent(f"n=50 {path} stream={stream}", path, dumped(make(rng, n=50, max_tokens=6, stream=stream)))


@shape
def many_prompts(rng: random.Random) -> Sent:
    body = completion(rng, max_tokens=6)
    return Sent("50 prompts", "/v1/completions", dumped({**body, "prompt": [[1, 2, 3, 4, 5]] * 50}))


@shape
def leaves(rng: random.Random) -> Sent:
    leave, stream = rng.choice(("at_once", "first", "last")), rng.random() < 0.7
    more: dict[str, Any] = {"stream": stream, "max_tokens": rng.choice((20, 80, 300))}
    if stream and rng.random() < 0.4:
        more["stream_options"] = rng.choice(
            ({"include_usage": True}, {"include_usage": False}, {"include_usage": True, "continuous_usage_stats": True})
        )
    path, make = rng.choice((("/v1/chat/completions", chat), ("/v1/completions", completion)))
    return Sent(f"leaves {leave} stream={stream}", path, dumped(make(rng, **more)), leave=leave)


@shape
def passed_on(rng: random.Random) -> Sent:
    path = rng.choice(("/inference/v1/generate", "/v1/chat/completions/batch", "/invocations", "/generative_scoring"))
    leave = rng.choice((None, None, "at_once"))
    return Sent(f"passed on {path} leave={leave}", path, dumped(completion(rng, priority=-5)), leave=leave)


@shape
def messages(rng: random.Random) -> Sent:
    return Sent("messages with priority", "/v1/messages", dumped(chat(rng, priority=-9)))


@shape
def steers(rng: random.Random) -> Sent:
    path, make = rng.choice((("/v1/chat/completions", chat), ("/v1/completions", completion), ("/invocations", chat)))
    kinds: list[dict[str, Any]] = [
        {"kv_transfer_params": {"remote_host": "10.0.0.1", "do_remote_prefill": True}},
        {"ec_transfer_params": {"a": 1}},
        {"vllm_xargs": {"kv_cache_report_mode": "full"}},
    ]
    more = rng.choice(kinds)
    name = rng.choice(tuple(each for each in STEERING if each.startswith("x-")))
    return Sent(f"steers by {next(iter(more))} {name} {path}", path, dumped(make(rng, **more)), {name: "10.0.0.1:80"})


@shape
def foreign_salts(rng: random.Random) -> Sent:
    path = rng.choice(("/v1/chat/completions", "/invocations", "/v1/chat/completions/batch"))
    body = dumped(chat(rng, cache_salt="theirs"))
    second = rng.choice(("", ', "cache_salt": "theirs"', ', "cache\\u005fsalt": "theirs"'))
    return Sent(f"salt {second} {path}", path, body[:-1] + second.encode() + b"}")


@shape
def plain(rng: random.Random) -> Sent:
    stream = rng.random() < 0.5
    return Sent(f"plain stream={stream}", body=dumped(chat(rng, stream=stream)))


# instances ---------------------------------------------------------------------------------------------------------
def serve_instance(port: int, ledger: Path) -> None:
    """Serve one instance until it is killed; what it computes goes to the ledger, a line when a request arrives and one
    when its computing ends."""
    out = ledger.open("a", buffering=1)

    def note(**line: Any) -> None:
        out.write(json.dumps({**line, "at_s": time.time()}) + "\n")

    def answer(read: ReadRequest) -> Response:
        mark = read.headers.get(MARK)
        if read.method != "POST" or mark is None:
            return JSONResponse({})
        prompts, answers, each = _work_of(read)
        steered = [name for name in STEERING if name in read.headers or read.fields.get(name) is not None]
        steered += ["report mode"] if "kv_cache_report_mode" in (read.fields.get("vllm_xargs") or {}) else []
        note(
            mark=mark, path=read.path, model=read.model, prompt_tokens=sum(prompts), steered=steered,
            priority=read.fields.get("priority"), salt=read.fields.get("cache_salt"),
        )  # fmt: skip

        async def computed() -> AsyncIterator[bytes]:
            done = 0
            try:
                while done < each:
                    await asyncio.sleep(EVENT_S)
                    done = min(each, done + TOKENS_AN_EVENT)
                    if read.fields.get("stream"):
                        yield _chunk(read, done == each, answers)
                usage = {"prompt_tokens": sum(prompts), "completion_tokens": each * answers}
                usage["total_tokens"] = sum(usage.values())
                if not read.fields.get("stream"):
                    yield dumped(_whole(read, usage, answers, each))
                    return
                if (read.fields.get("stream_options") or {}).get("include_usage"):
                    yield b"data: " + dumped({"id": "x", "choices": [], "usage": usage}) + b"\n\n"
                yield b"data: [DONE]\n\n"
            finally:
                note(mark=mark, output_tokens=done * answers)

        kind = "text/event-stream" if read.fields.get("stream") else "application/json"
        return StreamingResponse(computed(), media_type=kind)

    with served_instance(ALLOWED, SECRET, answer=answer, port=port):
        signal.pause()


def _work_of(read: ReadRequest) -> tuple[list[int], int, int]:
    """The tokens of each prompt, the number of answers, and the tokens of each."""
    fields = read.fields
    prompt = fields.get("prompt", fields.get("messages", fields.get("input", "")))
    if isinstance(prompt, list) and prompt and isinstance(prompt[0], int):
        prompts = [len(prompt)]
    elif isinstance(prompt, list) and prompt and isinstance(prompt[0], list):
        prompts = [len(each) for each in prompt]
    else:
        prompts = [len(json.dumps(prompt)) // 4 + 1]
    for name in ("max_completion_tokens", "max_tokens", "max_output_tokens"):
        if isinstance(each := fields.get(name), int):
            break
    else:
        each = 16
    if read.path == "/generative_scoring":
        each = 1  # its items are scored, and nothing is generated
    n = fields.get("n")
    return prompts, len(prompts) * (n if isinstance(n, int) else 1), each


def _chunk(read: ReadRequest, last: bool, answers: int) -> bytes:
    reason = "length" if last else None
    text = "word " * TOKENS_AN_EVENT
    content = {"text": text} if "prompt" in read.fields else {"delta": {"content": text}}
    choices = [{"index": index, "finish_reason": reason, **content} for index in range(answers)]
    return b"data: " + dumped({"id": "x", "choices": choices}) + b"\n\n"


def _whole(read: ReadRequest, usage: Mapping[str, int], answers: int, each: int) -> dict[str, Any]:
    fields, text = read.fields, "word " * each
    if read.path == "/v1/responses":
        content = [{"type": "output_text", "text": text, "annotations": []}]
        counts = {"input_tokens": usage["prompt_tokens"], "output_tokens": usage["completion_tokens"]}
        echoed = {name: fields[name] for name in ("tools", "text", "user", "metadata") if name in fields}
        return {"id": "resp_x", "object": "response", "status": "completed", "model": read.model, "output": [
            {"type": "message", "id": "msg", "role": "assistant", "status": "completed", "content": content}],
            "usage": counts, **echoed}  # fmt: skip
    if read.path == "/v1/messages":
        counts = {"input_tokens": usage["prompt_tokens"], "output_tokens": usage["completion_tokens"]}
        return {"id": "msg_x", "type": "message", "role": "assistant", "model": read.model,
                "content": [{"type": "text", "text": text}], "stop_reason": "max_tokens", "usage": counts}  # fmt: skip
    content_of = {"text": text} if "prompt" in fields else {"message": {"role": "assistant", "content": text}}
    choices = [{"index": index, "finish_reason": "length", **content_of} for index in range(answers)]
    whole: dict[str, Any] = {
        "id": "x",
        "object": "chat.completion",
        "model": read.model,
        "choices": choices,
        "usage": usage,
    }
    if fields.get("prompt_logprobs"):
        whole["prompt_logprobs"] = [{"1": {"logprob": -1.0, "decoded_token": 'usage"'}}] * 400
    if fields.get("return_token_ids"):
        whole["prompt_token_ids"] = list(range(6000))
    return whole


# clients -----------------------------------------------------------------------------------------------------------
@dataclass
class Outcome:
    """How a request ended for its client: a status, or ``left``, or ``broken`` where the connection ended early."""

    tenant: str
    sent: Sent
    status: int = 0
    left: bool = False
    broken: bool = False
    text: bytes = b""


async def send(address: tuple[str, int], tenant: str, mark: str, sent: Sent) -> Outcome:
    outcome = Outcome(tenant, sent)
    fields = {
        "host": f"{address[0]}:{address[1]}", "authorization": f"Bearer {KEYS[tenant]}", MARK: mark,
        "x-request-id": mark,
        "content-type": "application/json", "content-length": str(len(sent.body)), "connection": "close", **sent.fields,
    }  # fmt: skip
    head = "".join(f"{name}: {value}\r\n" for name, value in fields.items() if value)
    writer = None
    try:
        async with asyncio.timeout(60.0):
            reader, writer = await asyncio.open_connection(*address)
            writer.write(f"{sent.method} {sent.target} HTTP/1.1\r\n{head}\r\n".encode() + sent.body)
            await writer.drain()
            if sent.leave == "at_once":
                await asyncio.sleep(random.uniform(0.0, 0.15))
                outcome.left = True
                return outcome
            text = b""
            while data := await reader.read(65536):
                text += data
                body = text.partition(b"\r\n\r\n")[2]
                if (sent.leave == "first" and body) or (sent.leave == "last" and b'"finish_reason": "length"' in body):
                    outcome.left = True
                    break
            outcome.text = text
            outcome.status = int(text.split(b" ", 2)[1]) if text else 0
            head_part, _, body = text.partition(b"\r\n\r\n")
            whole = (
                body.endswith(b"0\r\n\r\n")
                if b"chunked" in head_part.lower()
                else bool(body) or b"content-length: 0" in head_part
            )
            outcome.broken = not outcome.left and (not text or not whole)
    except (OSError, TimeoutError, ValueError):
        outcome.broken = True
    finally:
        if writer is not None:
            writer.close()
            with contextlib.suppress(OSError):
                await writer.wait_closed()
    return outcome


# the run -----------------------------------------------------------------------------------------------------------
class Instances:
    """The instances' processes, killed and started again on their ports."""

    def __init__(self, count: int, folder: Path) -> None:
        self.ports = [free_port() for _ in range(count)]
        self._folder = folder
        self._processes: list[subprocess.Popen[bytes] | None] = [None] * count

    def start(self, number: int) -> None:
        words = ("--instance", str(self.ports[number]), "--ledger", str(self._folder / f"ledger-{number}"))
        self._processes[number] = subprocess.Popen([sys.executable, "-m", "benchmarks.hostile_tenants", *words])

    def kill(self, number: int) -> None:
        process = self._processes[number]
        if process is not None:
            process.kill()
            process.wait()

    def lines(self) -> list[dict[str, Any]]:
        found = []
        for path in sorted(self._folder.glob("ledger-*")):
            found += [json.loads(line) | {"instance": path.name} for line in path.read_text().splitlines() if line]
        return found


def free_port() -> int:
    with socket.socket() as found:
        found.bind(("127.0.0.1", 0))
        return int(found.getsockname()[1])


async def campaign(fleet: FleetProcess, instances: Instances, options: argparse.Namespace) -> dict[str, Outcome]:
    host, _, port = fleet.endpoint.removeprefix("http://").partition(":")
    address, rng = (host, int(port)), random.Random(options.seed)
    names, outcomes = list(SHAPES), dict[str, Outcome]()
    turn, kills = asyncio.Semaphore(options.clients), 0

    async def one(number: int, tenant: str, sent: Sent) -> None:
        mark = f"{tenant}-{number}"
        try:
            outcomes[mark] = await send(address, tenant, mark, sent)
        finally:
            turn.release()

    async with asyncio.TaskGroup() as tasks:
        for number in range(options.requests):
            tenant = rng.choice(("counted", "drawn", "expected", "walled", "low"))
            await turn.acquire()
            tasks.create_task(one(number, tenant, SHAPES[names[number % len(names)]](rng)))
            if number % 20 == 0:
                await turn.acquire()
                tasks.create_task(one(options.requests + number, "innocent", plain(rng)))
            if options.kill_every and number % options.kill_every == options.kill_every - 1:
                kills += 1
                if kills % 3 == 0:
                    instances.kill(0)
                    instances.start(0)
                else:
                    with suppress(ProcessLookupError):  # the one that was killed last is still being started again
                        fleet.kill(f"router-{kills % 3 + 1}")
    await asyncio.sleep(SETTLE_S)
    return outcomes


def judge(
    outcomes: Mapping[str, Outcome],
    lines: Sequence[dict[str, Any]],
    records: Mapping[str, Mapping[str, Any]],
    options: argparse.Namespace,
) -> bool:
    """Print each check; whether all hold."""
    most_requests, most_tokens = options.quota_requests, options.quota_tokens
    arrived: dict[str, dict[str, Any]] = {}
    ended: dict[str, dict[str, Any]] = {}
    arrivals = Counter[str]()
    for line in sorted(lines, key=lambda each: each["at_s"]):
        if "output_tokens" in line:
            ended[line["mark"]] = line
        else:
            arrived[line["mark"]] = line
            arrivals[line["mark"]] += 1
    lost = {mark for mark, record in records.items() if record["outcome"] == "lost"}
    kept = {
        mark
        for mark in ended
        if mark in arrived and mark not in lost and not outcomes[mark].broken and outcomes[mark].status < 500
    }
    past = defaultdict[str, list[str]](list)

    def tokens(mark: str) -> int:
        return int(arrived[mark]["prompt_tokens"] + ended[mark]["output_tokens"])

    def of(tenant: str, among: Any = kept) -> list[str]:
        return sorted((mark for mark in among if mark.startswith(f"{tenant}-")), key=lambda mark: arrived[mark]["at_s"])

    counted = of("counted")
    past["requests beyond the quota"] = counted[most_requests:]
    # The tokens of a form with a file are not known before: docs/operate/tenants.md excepts them.
    drawn = sum(tokens(mark) for mark in of("drawn") if not arrived[mark]["path"].startswith("/v1/audio/"))
    past["tokens beyond the quota that draws what is asked for"] = of("drawn") if drawn > most_tokens else []
    late = []
    for mark in of("expected"):
        before = sum(tokens(each) for each in of("expected") if ended[each]["at_s"] < arrived[mark]["at_s"] - 1.0)
        late += [mark] if before > most_tokens else []
    past["admitted after the quota was computed"] = late
    past["a model that the tenant may not use"] = [
        mark for mark in of("walled", arrived) if arrived[mark]["model"] not in (None, ALLOWED)
    ]
    past["a priority above the class"] = [
        mark for mark in of("low", arrived) if (arrived[mark]["priority"] or 0) not in (0, 9)
    ]
    past["another salt than the tenant's"] = [mark for mark, line in arrived.items() if line["salt"] == "theirs"]
    past["an engine steered"] = [mark for mark, line in arrived.items() if line["steered"]]
    innocent = {mark: each for mark, each in outcomes.items() if each.tenant == "innocent"}
    past["an innocent request not answered"] = [
        mark for mark, each in innocent.items() if not each.broken and each.status != 200
    ]
    refused = Counter(each.tenant for each in outcomes.values() if each.status == 429)
    for name in ("drawn", "expected"):
        computed = sum(map(tokens, of(name)))
        metered = {mark: tokens_of(record) for mark, record in records.items() if mark.startswith(f"{name}-")}
        below = {mark: lack for mark in of(name) if (lack := tokens(mark) - metered.get(mark, 0)) > 0}
        shapes = Counter[str]()
        for mark, lack in below.items():
            shapes[outcomes[mark].sent.shape] += lack
        print(json.dumps({"tenant": name, "quota": most_tokens, "computed": computed, "metered": sum(metered.values()),
                          "computed beyond what was metered": dict(shapes.most_common(6)),
                          "refused": refused[name]}))  # fmt: skip
    print(json.dumps({"tenant": "counted", "quota": most_requests, "computed": len(counted),
                      "refused": refused["counted"]}))  # fmt: skip
    for what, marks in past.items():
        shapes = Counter(outcomes[mark].sent.shape for mark in marks)
        print(json.dumps({"check": what, "past": len(marks), "shapes": dict(shapes.most_common(12))}))
    statuses = Counter(each.status for each in outcomes.values())
    tries = Counter(arrivals.values())
    print(json.dumps({"requests": len(outcomes), "statuses": dict(sorted(statuses.items())),
                      "left": sum(each.left for each in outcomes.values()),
                      "given back, as a killed replica had them": len(lost),
                      "broken by kills": sum(each.broken for each in outcomes.values()),
                      "tries a request": dict(sorted(tries.items()))}))  # fmt: skip
    words = Counter(
        (each.tenant, each.status, message_of(each.text)) for each in outcomes.values() if each.status >= 500
    )
    for (tenant, status, message), count in words.most_common(8):
        print(json.dumps({"tenant": tenant, "status": status, "message": message, "times": count}))
    return not any(past.values())


def tokens_of(record: Mapping[str, Any]) -> int:
    return int(record["prompt_tokens"] + record["output_tokens"])


def message_of(answer: bytes) -> str:
    """The words of an error, without what differs from one request to the next."""
    body = answer.partition(b"\r\n\r\n")[2]
    with contextlib.suppress(ValueError, AttributeError):
        return re.sub(r"\d+", "N", str(json.loads(body)["error"]["message"]))[:160]
    return body[:160].decode("utf-8", "replace")


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--requests", type=int, default=2000)
    parser.add_argument("--clients", type=int, default=24, help="requests in flight")
    parser.add_argument("--kill-every", type=int, default=150, help="requests between two kills; 0: none")
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--quota-requests", type=int, default=60, help="of tenant counted, a day")
    parser.add_argument("--quota-tokens", type=int, default=15_000, help="of tenants drawn and expected, a day")
    parser.add_argument("--keep", type=Path, metavar="FOLDER", help="keep logs and ledgers there")
    parser.add_argument("--without-draws", action="store_true", help="leave the setting of what is drawn out")
    parser.add_argument("--shapes", action="store_true", help="list the shapes, and end")
    parser.add_argument("--instance", type=int, help=argparse.SUPPRESS)
    parser.add_argument("--ledger", type=Path, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.instance:
        serve_instance(options.instance, options.ledger)
    if options.shapes:
        print("\n".join(SHAPES))
        return 0
    with contextlib.ExitStack() as stack:
        folder = options.keep or Path(stack.enter_context(tempfile.TemporaryDirectory()))
        folder.mkdir(parents=True, exist_ok=True)
        instances = Instances(4, folder)
        for number in range(4):
            instances.start(number)
        config = folder / "fleet.yaml"
        config.write_text(json.dumps(settings_of(instances, options)))  # JSON is YAML
        fleet = FleetProcess.start(
            folder, ("--port", "0", "--replicas", "3", "--workers", "1", "--config", str(config))
        )
        try:
            end_s = time.monotonic() + 90.0
            while not fleet.is_ready:
                assert time.monotonic() < end_s, fleet.output
                time.sleep(0.1)
            outcomes = asyncio.run(campaign(fleet, instances, options))
            records = records_of(fleet)
            holds = judge(outcomes, instances.lines(), records, options)
            (fleet.kill_all if options.keep else fleet.stop)()
        finally:
            fleet.kill_all()
            for number in range(4):
                instances.kill(number)
    return 0 if holds else 1


def tenants_of(options: argparse.Namespace) -> list[dict[str, Any]]:
    """The tenants with their keys and quotas."""
    made = []
    for each in TENANTS:
        name = each["name"]
        tenant = {**each, "keys": [{"name": "k", "key": KEYS[name]}]}
        if name in LIMITS:
            tenant["limits"] = {LIMITS[name]: options.quota_requests if name == "counted" else options.quota_tokens}
        if options.without_draws:
            tenant.pop("draws", None)
        made.append(tenant)
    return made


def settings_of(instances: Instances, options: argparse.Namespace) -> dict[str, Any]:
    """The settings of the fleet."""
    return {
        "tenants": tenants_of(options),
        "router": {"admin_key": ADMIN_KEY, "tenant_cache_secret": "a-secret-of-the-fleet", "replica_lease_s": 1.5},
        "worker": {"lease_s": 0.8},
        "scheduling": {"classes": CLASSES, "engine_priorities": True},
        "pools": [
            {
                "model": ALLOWED,
                "loras": [SECRET],
                "instances": [
                    {"id": f"engine-{number}", "url": f"http://127.0.0.1:{port}"}
                    for number, port in enumerate(instances.ports)
                ],
            }
        ],
    }


def _read(fleet: FleetProcess, path: str) -> Any:
    request = urllib.request.Request(f"{fleet.endpoint}{path}", headers={"authorization": f"Bearer {ADMIN_KEY}"})
    with urllib.request.urlopen(request, timeout=30) as answer:
        return json.loads(answer.read())


def records_of(fleet: FleetProcess) -> dict[str, dict[str, Any]]:
    """The records by which requests were metered, by their marks."""
    found, after = dict[str, dict[str, Any]](), "0"
    while page := _read(fleet, f"/admin/usage/records?limit=10000&after={after}"):
        if not page["records"]:
            break
        found |= {each["request_id"]: each for each in page["records"]}
        after = page["next"]
    return found


if __name__ == "__main__":
    sys.exit(main())
