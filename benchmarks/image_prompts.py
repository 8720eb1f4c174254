"""How exactly the fleet counts prompts with images, and knows what of them its instances hold, request by request.

Chats grow turn by turn; some turns show an image, of a set that all chats draw from. Expected are the counts by which
the fleet placed a request (``/admin/explain``), reported those of the instance's ``usage``
(vLLM: ``--enable-prompt-tokens-details``). Requests go one at a time unless ``--concurrency`` says otherwise.

    python benchmarks/image_prompts.py http://127.0.0.1:8000 --model tinyvl
"""

from __future__ import annotations

import argparse
import asyncio
import json
import random
import struct
import zlib
from base64 import b64encode
from collections import Counter
from dataclasses import dataclass
from typing import Any

import httpx

WORDS = ("red", "boat", "under", "bridge", "seven", "people", "walking", "toward", "harbour", "clouds", "over", "tower")


@dataclass(frozen=True)
class Seen:
    """One answered request."""

    expected_tokens: int
    reported_tokens: int
    expected_cached: int
    reported_cached: int
    images: int
    estimated: str
    """Why its images were estimated; empty: they were rendered."""


def png_url(width: int, height: int, shade: int) -> str:
    def chunk(name: bytes, data: bytes) -> bytes:
        return struct.pack(">I", len(data)) + name + data + struct.pack(">I", zlib.crc32(name + data))

    signature = b"\x89PNG\r\n\x1a\n"
    header = chunk(b"IHDR", struct.pack(">IIBBBBB", width, height, 8, 2, 0, 0, 0))
    rows = chunk(b"IDAT", zlib.compress((b"\0" + bytes([shade]) * (3 * width)) * height))
    return f"data:image/png;base64,{b64encode(signature + header + rows + chunk(b'IEND', b'')).decode()}"


def images_of(rng: random.Random, options: argparse.Namespace) -> list[str]:
    sizes = [(rng.randint(56, options.max_pixels), rng.randint(56, options.max_pixels)) for _ in range(options.images)]
    return [png_url(width, height, shade % 256) for shade, (width, height) in enumerate(sizes)]


def text(rng: random.Random, words: int) -> str:
    return " ".join(rng.choice(WORDS) for _ in range(words))


async def ask(client: httpx.AsyncClient, model: str, messages: list[dict[str, Any]]) -> tuple[Seen, str]:
    body = {"model": model, "messages": messages, "max_tokens": 16, "temperature": 0}
    answer = await client.post("/v1/chat/completions", json=body)
    answer.raise_for_status()
    said, request_id = answer.json(), answer.headers["x-request-id"]
    explained = (await client.get(f"/admin/explain/{request_id}")).raise_for_status().json()
    usage = said["usage"]
    seen = Seen(
        explained["prompt_tokens"],
        usage["prompt_tokens"],
        int(answer.headers.get("x-dualmap-cached-tokens", 0)),
        (usage.get("prompt_tokens_details") or {}).get("cached_tokens") or 0,
        explained["images"],
        explained["media_estimated"],
    )
    return seen, said["choices"][0]["message"]["content"] or ""


async def run(options: argparse.Namespace) -> list[Seen]:
    rng = random.Random(options.seed)
    images, system = images_of(rng, options), text(rng, options.system_words)
    weights = [1 / (place + 1) for place in range(len(images))]
    room, found = asyncio.Semaphore(options.concurrency), []

    async with httpx.AsyncClient(base_url=options.url, timeout=600.0) as client:

        async def live(number: int) -> None:
            own = random.Random(f"{options.seed}/{number}")
            messages: list[dict[str, Any]] = [{"role": "system", "content": system}]
            for turn in range(options.turns):
                parts: list[dict[str, Any]] = [{"type": "text", "text": text(own, own.randint(10, 120))}]
                if not turn or own.random() < options.image_share:
                    (image,) = own.choices(images, weights)
                    parts.insert(own.randint(0, 1), {"type": "image_url", "image_url": {"url": image}})
                messages.append({"role": "user", "content": parts})
                async with room:
                    await asyncio.sleep(options.pause_ms / 1000)
                    seen, answer = await ask(client, options.model, messages)
                found.append(seen)
                messages.append({"role": "assistant", "content": answer})

        await asyncio.gather(*(live(number) for number in range(options.chats)))
    return found


def report(found: list[Seen]) -> dict[str, Any]:
    errors = [abs(each.expected_tokens - each.reported_tokens) / each.reported_tokens for each in found]
    cached = sum(each.reported_cached for each in found)
    return {
        "requests": len(found),
        "rendered": sum(not each.estimated for each in found) / len(found),
        "estimated": dict(Counter(each.estimated for each in found if each.estimated)),
        "images_a_request": sum(each.images for each in found) / len(found),
        "prompt_tokens_mean": sum(each.reported_tokens for each in found) / len(found),
        "prompt_tokens_error_mean": sum(errors) / len(found),
        "prompt_tokens_error_max": max(errors),
        "within_1_percent": sum(error <= 0.01 for error in errors) / len(found),
        "hit_rate": cached / sum(each.reported_tokens for each in found),
        "cached_equal": sum(each.expected_cached == each.reported_cached for each in found) / len(found),
        "cached_too_many": sum(each.expected_cached > each.reported_cached for each in found) / len(found),
        "cached_too_few": sum(each.expected_cached < each.reported_cached for each in found) / len(found),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("url", help="base URL of the fleet")
    parser.add_argument("--model", default="qwen2.5-7b")
    parser.add_argument("--chats", type=int, default=40)
    parser.add_argument("--turns", type=int, default=5)
    parser.add_argument("--concurrency", type=int, default=1, help="requests at a time")
    parser.add_argument("--pause-ms", type=float, default=0.0, help="before each request")
    parser.add_argument("--images", type=int, default=30, help="images that all chats draw from")
    parser.add_argument("--image-share", type=float, default=0.5, help="later turns that show one")
    parser.add_argument("--max-pixels", type=int, default=800, help="largest width and height")
    parser.add_argument("--system-words", type=int, default=150)
    parser.add_argument("--seed", default="1")
    options = parser.parse_args()
    figures = report(asyncio.run(run(options)))
    shown = {name: round(figure, 4) if isinstance(figure, float) else figure for name, figure in figures.items()}
    print(json.dumps(shown, indent=1))


if __name__ == "__main__":
    main()
