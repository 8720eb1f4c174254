"""The CPU of an agent's turn: a conversation that grows by an answer and a tool's result, sent whole every time.

The routers run at the same time, pinned to one core, in front of the same mock; only one is loaded at a time, and each
turn of the measurement gives all of them the same conversations. ``first`` is the first request of each conversation,
``later`` is each one after it. A ratio compares with the first mode, within the same turn; the table has the medians.

    python benchmarks/agent_turns.py --modes full@/tmp/older,full,relay [--kilobytes 220,550] [--text code] [--turns 6]

``full@/tmp/older`` is the router of another version, checked out there. ``code`` is text as tools give it, with line
ends and quotes, which JSON escapes; ``plain`` has no character that is escaped.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import statistics
from collections.abc import Iterator
from contextlib import AsyncExitStack
from typing import Any, Final

import uvloop
from router_overhead import Router, closed_loop, running

CODE, PLAIN = "code", "plain"
_WORDS: Final = (
    "the", "file", "returns", "error", "value", "import", "def", "self", "class", "return", "if", "not", "None", "path",
    "open", "read", "line", "test", "result", "function", "call", "index", "data", "list", "request", "timeout",
)  # fmt: skip
_TOOLS_BYTES, _SYSTEM_BYTES, _ANSWER_BYTES, _RESULT_BYTES = 800, 12_000, 300, 3_500
_TOOLS: Final = 12
LATER_TURNS: Final = 6
"""Turns of a conversation after its first request here."""


def text(rng: random.Random, size: int, kind: str) -> str:
    """Words of about so many bytes."""
    words, left = [], size
    while left > 0:
        word, chance = rng.choice(_WORDS), rng.random() if kind == CODE else 1.0
        word += "\n    " if chance < 0.08 else " "
        words.append(f'"{word}"' if 0.08 <= chance < 0.12 else word)
        left -= len(words[-1])
    return "".join(words)


def tools(rng: random.Random, kind: str) -> list[dict[str, Any]]:
    """Tools with descriptions and parameters."""
    names = ("path", "old", "new")
    return [
        {
            "type": "function",
            "function": {
                "name": f"tool_{number}",
                "description": text(rng, _TOOLS_BYTES, kind),
                "parameters": {
                    "type": "object",
                    "properties": {name: {"type": "string", "description": text(rng, 60, kind)} for name in names},
                    "required": ["path"],
                },
            },
        }
        for number in range(_TOOLS)
    ]


def turns(seed: int, size: int, kind: str = CODE, *, later: int = LATER_TURNS) -> Iterator[bytes]:
    """The bodies of a conversation: the first one has about ``size`` bytes, and each of the others a step more."""
    shared, rng = random.Random(1), random.Random(seed)  # agents of one program share tools and system prompt
    fields = {"model": "default", "tools": tools(shared, kind), "stream": False, "max_tokens": 4096}
    messages: list[dict[str, Any]] = [
        {"role": "system", "content": text(shared, _SYSTEM_BYTES, kind)},
        {"role": "user", "content": f"{seed}: {text(rng, 2000, kind)}"},
    ]
    written = len(_body(messages, fields))
    while True:
        if written >= size:
            yield _body(messages, fields)
            later -= 1
            if later < 0:
                return
        step = _step(rng, kind, f"call_{seed}_{len(messages)}")
        messages += step
        written += len(_dumps(step))


def _step(rng: random.Random, kind: str, call_id: str) -> list[dict[str, Any]]:
    arguments = {"path": "src/a.py", "old": text(rng, 150, kind)}
    call = {"id": call_id, "type": "function", "function": {"name": "tool_3", "arguments": json.dumps(arguments)}}
    result_bytes = 50 + int(rng.expovariate(1 / _RESULT_BYTES))
    return [
        {"role": "assistant", "content": text(rng, _ANSWER_BYTES, kind), "tool_calls": [call]},
        {"role": "tool", "tool_call_id": call_id, "content": text(rng, result_bytes, kind)},
    ]


def _body(messages: list[dict[str, Any]], fields: dict[str, Any]) -> bytes:
    return _dumps({"messages": messages, **fields})  # in the order of OpenAI's client


def _dumps(value: Any) -> bytes:
    return json.dumps(value, ensure_ascii=False, separators=(",", ":")).encode()


def as_response(body: bytes) -> bytes:
    """Return the conversation as Codex sends it over the responses API: a developer's message before the question, and
    reasoning before each answer."""
    chat = json.loads(body)
    system, *messages = chat.pop("messages")
    items: list[dict[str, Any]] = [_said("developer", "input_text", "Ask before you write outside of the workspace.")]
    for message in messages:
        if message["role"] == "tool":
            call_id = message["tool_call_id"]
            items.append({"type": "function_call_output", "call_id": call_id, "output": message["content"]})
        elif message["role"] == "user":
            items.append(_said("user", "input_text", message["content"]))
        else:
            thought = {"type": "reasoning_text", "text": message["content"][:200]}
            items.append({"type": "reasoning", "summary": [], "content": [thought], "encrypted_content": None})
            items.append(_said("assistant", "output_text", message["content"]))
            for call in message["tool_calls"]:
                items.append({"type": "function_call", "call_id": call["id"], **call["function"]})
    tools = [{"type": "function", **tool["function"]} for tool in chat.pop("tools")]
    output_tokens = chat.pop("max_tokens")
    fields = {"instructions": system["content"], "input": items, "tools": tools, "max_output_tokens": output_tokens}
    return _dumps({**fields, **chat})


def _said(role: str, kind: str, text: str) -> dict[str, Any]:
    return {"type": "message", "role": role, "content": [{"type": kind, "text": text}]}


def wire(body: bytes, path: str = "/v1/chat/completions") -> bytes:
    """The request with this body."""
    head = f"POST {path} HTTP/1.1\r\nhost: h\r\ncontent-type: application/json\r\n"
    return f"{head}content-length: {len(body)}\r\n\r\n".encode() + body


async def measure(options: argparse.Namespace, core: int) -> None:
    modes, sizes = options.modes.split(","), [1000 * int(each) for each in options.kilobytes.split(",")]
    async with AsyncExitStack() as stack:
        routers = [(await stack.enter_async_context(running(mode, core, options.instances)))[0] for mode in modes]
        for router in routers:
            await closed_loop(router.port, [wire(next(turns(10**6 + n, 100_000))) for n in range(20)], 4)
        for size in sizes:
            found: list[dict[str, list[float]]] = [{"first": [], "later": []} for _ in modes]
            for turn in range(options.turns):
                bodies = [[*turns(1000 * turn + n, size, options.text)] for n in range(options.conversations)]
                order = [*range(turn % len(modes), len(modes)), *range(turn % len(modes))]
                for number in order:
                    figures = await one_turn(routers[number], bodies)
                    for name, value in figures.items():
                        found[number][name].append(value)
            for number, mode in enumerate(modes):
                row: dict[str, object] = {"mode": mode, "KB": size // 1000, "text": options.text}
                for name, values in found[number].items():
                    ratios = [each / base for each, base in zip(values, found[0][name], strict=True)]
                    row[f"us {name}"] = round(statistics.median(values))
                    row[f"{name}: of {modes[0]}"] = round(statistics.median(ratios), 3)
                row["RSS MB"] = round(routers[number].rss_mb())
                print(json.dumps(row), flush=True)


async def one_turn(router: Router, bodies: list[list[bytes]]) -> dict[str, float]:
    """CPU a request in us, of the first ones and of those after them; conversations take turns."""
    first = [wire(each[0]) for each in bodies]
    later = [wire(each[place]) for place in range(1, len(bodies[0])) for each in bodies]
    first_s = await router.cpu_of(closed_loop(router.port, first, 4))
    later_s = await router.cpu_of(closed_loop(router.port, later, 4))
    return {"first": first_s / len(first) * 1e6, "later": later_s / len(later) * 1e6}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--modes", default="full,relay", help="of router_overhead.py; the first is the base")
    parser.add_argument("--kilobytes", default="220,550", help="sizes of the first requests")
    parser.add_argument("--text", default=CODE, choices=(CODE, PLAIN))
    parser.add_argument("--turns", type=int, default=6)
    parser.add_argument("--conversations", type=int, default=12, help="of each size, turn and router")
    parser.add_argument("--instances", type=int, default=8, help="all of them the one mock")
    options = parser.parse_args()
    cores = os.sched_getaffinity(0)
    core = max(cores)
    os.sched_setaffinity(0, cores - {core} or cores)
    uvloop.run(measure(options, core))


if __name__ == "__main__":
    main()
