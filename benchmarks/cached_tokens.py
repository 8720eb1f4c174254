"""How exactly the fleet knows what its instances hold: expected against reported cached tokens, request by request.

Agent sessions send prompts as token ids through a running fleet; each turn continues the one before with the answer
and new tokens. The expected count is the answer's ``x-dualmap-cached-tokens``, the reported one its ``usage``. The
instances have to report it (vLLM: ``--enable-prompt-tokens-details``), and return token ids.

    python benchmarks/cached_tokens.py http://127.0.0.1:8000 --model tiny --concurrency 4
"""

from __future__ import annotations

import argparse
import asyncio
import json
import random
import statistics
import time
from dataclasses import asdict, dataclass
from pathlib import Path

import httpx


@dataclass(frozen=True)
class Turn:
    session: int
    turn: int
    prompt_tokens: int
    expected: int
    reported: int
    ttft_s: float
    instance: str
    at_s: float


@dataclass
class Session:
    """One agent: a prompt that grows."""

    number: int
    rng: random.Random
    ids: list[int]
    vocabulary: int

    def grow(self, least: int, most: int) -> None:
        self.ids += [self.rng.randrange(10, self.vocabulary) for _ in range(self.rng.randint(least, most))]


async def ask(client: httpx.AsyncClient, model: str, session: Session, turn: int, started_s: float) -> Turn:
    body = {
        "model": model,
        "prompt": session.ids,
        "max_tokens": session.rng.randint(16, 96),
        "ignore_eos": True,
        "temperature": 0,
        "stream": True,
        "stream_options": {"include_usage": True},
        "return_token_ids": True,
    }
    sent_s, first_s, usage = time.monotonic(), 0.0, None
    answer: list[int] = []
    async with client.stream("POST", "/v1/completions", json=body) as response:
        response.raise_for_status()
        async for line in response.aiter_lines():
            if not line.startswith("data: {"):
                continue
            event = json.loads(line[6:])
            for choice in event.get("choices", ()):
                first_s = first_s or time.monotonic()
                answer += choice.get("token_ids") or ()
            usage = event.get("usage") or usage
    if usage is None:
        raise SystemExit("the answer has no usage: the instances must report it")
    details = usage.get("prompt_tokens_details") or {}
    seen = Turn(
        session.number,
        turn,
        usage["prompt_tokens"],
        int(response.headers.get("x-dualmap-cached-tokens", 0)),
        details.get("cached_tokens") or 0,
        first_s - sent_s,
        response.headers.get("x-dualmap-instance", ""),
        time.monotonic() - started_s,
    )
    session.ids += answer
    return seen


async def run(options: argparse.Namespace) -> list[Turn]:
    rng = random.Random(options.seed)
    system = [rng.randrange(10, options.vocabulary) for _ in range(options.system_tokens)]
    sessions = [
        Session(number, random.Random(f"{options.seed}/{number}"), list(system), options.vocabulary)
        for number in range(options.sessions)
    ]
    room, turns, started_s = asyncio.Semaphore(options.concurrency), [], time.monotonic()
    per_turn = (options.max_prompt_tokens - options.system_tokens) // options.turns - 60

    async with httpx.AsyncClient(base_url=options.url, timeout=600.0) as client:

        async def live(session: Session) -> None:
            async with room:
                for turn in range(options.turns):
                    await asyncio.sleep(options.think_ms / 1000)
                    session.grow(per_turn // 2, per_turn * 3 // 2)
                    session.ids = session.ids[: options.max_prompt_tokens]
                    turns.append(await ask(client, options.model, session, turn, started_s))

        await asyncio.gather(*(live(session) for session in sessions))
    return turns


def report(turns: list[Turn], step_tokens: int) -> dict[str, float]:
    errors = [abs(turn.expected - turn.reported) for turn in turns]
    prompt_tokens = sum(turn.prompt_tokens for turn in turns)
    return {
        "requests": len(turns),
        "hit_rate": sum(turn.reported for turn in turns) / prompt_tokens,
        "expected_hit_rate": sum(turn.expected for turn in turns) / prompt_tokens,
        "mean_error": statistics.mean(errors),
        "equal": sum(error == 0 for error in errors) / len(errors),
        "within_step": sum(error <= step_tokens for error in errors) / len(errors),
        "within_128": sum(error <= 128 for error in errors) / len(errors),
        "too_many": sum(turn.expected > turn.reported for turn in turns) / len(errors),
        "too_few": sum(turn.expected < turn.reported for turn in turns) / len(errors),
        "ttft_p50_s": statistics.median(turn.ttft_s for turn in turns),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("url", help="base URL of the fleet")
    parser.add_argument("--model", default="tiny")
    parser.add_argument("--sessions", type=int, default=10)
    parser.add_argument("--turns", type=int, default=8)
    parser.add_argument("--concurrency", type=int, default=4, help="sessions at a time")
    parser.add_argument("--think-ms", type=float, default=0.0, help="from an answer to the next turn")
    parser.add_argument("--system-tokens", type=int, default=400)
    parser.add_argument("--max-prompt-tokens", type=int, default=5000)
    parser.add_argument("--vocabulary", type=int, default=4000)
    parser.add_argument("--step-tokens", type=int, default=16, help="hits of the model end at multiples of it")
    parser.add_argument("--seed", default="1")
    parser.add_argument("--out", type=Path, help="file for every request, one JSON object a line")
    options = parser.parse_args()
    turns = asyncio.run(run(options))
    if options.out is not None:
        options.out.write_text("".join(json.dumps(asdict(turn)) + "\n" for turn in turns))
    print(json.dumps({name: round(figure, 4) for name, figure in report(turns, options.step_tokens).items()}, indent=1))


if __name__ == "__main__":
    main()
