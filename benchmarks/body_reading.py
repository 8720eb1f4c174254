"""CPU of reading a body and hashing its prompt, in a loop: what of a request's time its body takes.

Chats of one text, and those of an agent (``agent_turns.py``), whose messages have tool calls: as short bodies, as the
first turn of a long conversation, and as later ones, which begin like the turn before. The least of several repetitions
counts.

    python benchmarks/body_reading.py [--without-native]
"""

from __future__ import annotations

import argparse
import asyncio
import statistics
import sys
import time
from collections.abc import Sequence

NATIVE_PARTS = ("dualmap.api_bodies._plain_list", "dualmap.scheduling.prompts._hashes")
SHORT = (2048, 32768)
AGENTS_SHORT = (30_000, 58_000)
AGENTS_LONG = (220_000, 550_000)
BODIES = 8
REPETITIONS = 15


async def measure() -> None:
    # Imported here, behind the choice of what is native.
    import agent_turns
    import router_overhead

    from dualmap.router.http.body_budget import BodyBudget
    from dualmap.router.http.long_bodies import LongBodies
    from dualmap.router.http.request_reader import ClientRequest
    from dualmap.router.http.short_bodies import ShortBodies
    from dualmap.router.prompts.prompt import read_prompt
    from dualmap.scheduling.estimates.learned import Learned
    from dualmap.scheduling.prompts.blocks import BlockRule

    short, rule, learned = ShortBodies(trusts_transfers=False), BlockRule(), Learned()

    def request(body: bytes) -> ClientRequest:
        fields = [(b"host", b"h"), (b"content-type", b"application/json")]
        return ClientRequest("POST", "/v1/chat/completions", b"", fields, http_10=False, keep_alive=True, body=body)

    async def cpu_us(long: LongBodies, asked: ClientRequest) -> float:
        began_s = time.process_time()
        read = short.read(asked, "id") or await long.read(asked, "id")
        assert read.prompt is not None
        await read_prompt(read.prompt, model="m", lora=None, rule=rule, learned=learned)
        return 1e6 * (time.process_time() - began_s)

    def show(name: str, body: bytes, found_us: Sequence[float]) -> None:
        print(f"{name:<24} {len(body) / 1000:6.1f} KB {statistics.median(found_us):8.1f} us", flush=True)

    unknown = LongBodies(BodyBudget(1 << 30))
    bodies = {
        ("a text", size): [router_overhead.request(size, n).partition(b"\r\n\r\n")[2] for n in range(BODIES)]
        for size in SHORT
    }
    for size in AGENTS_SHORT:
        bodies["an agent's", size] = [next(agent_turns.turns(n, size)) for n in range(BODIES)]
    for (name, _), each in bodies.items():
        requests = [request(body) for body in each]
        runs = [[await cpu_us(unknown, asked) for asked in requests] for _ in range(REPETITIONS)]
        show(name, each[0], [min(found) for found in zip(*runs, strict=True)])
    for size in AGENTS_LONG:
        turns = [[request(body) for body in agent_turns.turns(n, size)] for n in range(BODIES)]
        first, later = [], []
        for _ in range(REPETITIONS // 3):
            known = LongBodies(BodyBudget(1 << 30))
            runs = [[await cpu_us(known, asked) for asked in turn] for turn in zip(*turns, strict=True)]
            first.append(min(runs[0]))
            later.append(min(map(statistics.median, runs[1:])))
        show("an agent's, first turn", turns[0][0].body, [min(first)])
        show("an agent's, later turn", turns[0][-1].body, [min(later)])


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--without-native", action="store_true", help="Python reads and hashes, as where no C is built")
    if parser.parse_args().without_native:
        for name in NATIVE_PARTS:
            sys.modules[name] = None  # type: ignore[assignment]  # its import fails
    asyncio.run(measure())


if __name__ == "__main__":
    main()
