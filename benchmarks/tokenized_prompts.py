"""Router CPU of a conversation's next turn, with a tokenizer and with blocks of bytes.

An embedded Valkey, two replicas in one process: one with a tokenizer (trained here, on the standard library) and a
chat template, one without. Each is given the same conversations of about 32 KB. What is measured is their next turn,
from the body's bytes to the request's end, without the HTTP front, which costs both the same: CPU of this process.
The two take turns batch by batch, and the median over the batches counts.

With ``--whole``, each replica is a router process of its own, with its HTTP front, and mock instances answer at once:
CPU of the router's process, all threads.

    python benchmarks/tokenized_prompts.py [--whole] [--conversations 400] [--prompt-bytes 32768] [--block-tokens 16]
"""

from __future__ import annotations

import argparse
import asyncio
import json
import multiprocessing
import random
import statistics
import sysconfig
import tempfile
import time
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import orjson
import tokenizers
import uvloop
from router_overhead import MockInstance, Router, connect

from dualmap.router.http.admission import mint_request_id
from dualmap.router.prompts.inference_request import InferenceRequest
from dualmap.router.prompts.prompt import sent_prompt
from dualmap.router.replica.runtime import Runtime
from dualmap.router.serving.serve import serve
from dualmap.router.settings import RouterSettings
from dualmap.runtime.pool_settings import PoolSettings
from dualmap.scheduling.request.outcome import Outcome
from dualmap.scheduling.settings import SchedulingSettings
from dualmap.scheduling.state.instance import InstanceSpec, InstanceState
from dualmap.statestore.connect import Store, open_store
from dualmap.statestore.embedded import EmbeddedValkey
from dualmap.statestore.settings import StoreSettings

CHAT = "/v1/chat/completions"
BATCH = 20
MESSAGES = 8
TURN_BYTES = 600
TEMPLATE = (
    "{% for message in messages %}<|im_start|>{{ message.role }}\n{{ message.content }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)


def library_text() -> str:
    root = Path(sysconfig.get_paths()["stdlib"])
    return "".join(path.read_text(encoding="utf-8", errors="replace") for path in sorted(root.glob("*.py"))[:60])


def write_model(folder: Path, text: str) -> None:
    made = tokenizers.Tokenizer(tokenizers.models.BPE())
    made.pre_tokenizer = tokenizers.pre_tokenizers.ByteLevel(add_prefix_space=False)
    trainer = tokenizers.trainers.BpeTrainer(
        vocab_size=8192,
        special_tokens=["<|endoftext|>", "<|im_start|>", "<|im_end|>"],
        show_progress=False,
        initial_alphabet=tokenizers.pre_tokenizers.ByteLevel.alphabet(),
    )
    made.train_from_iterator(text.splitlines(), trainer)
    made.save(str(folder / "tokenizer.json"))
    (folder / "tokenizer_config.json").write_text(json.dumps({"chat_template": TEMPLATE}))


def conversation(chance: random.Random, text: str, prompt_bytes: int, *, stream: bool = True) -> tuple[bytes, bytes]:
    """Two bodies: a conversation, and its next turn."""

    def words(count: int) -> str:
        start = chance.randrange(len(text) - count)
        return text[start : start + count]

    roles = ["system", *("user", "assistant") * MESSAGES]
    messages = [{"role": role, "content": words(prompt_bytes // MESSAGES)} for role in roles[:MESSAGES]]
    first = {"model": "default", "stream": stream, "messages": messages}
    more = [{"role": "assistant", "content": words(TURN_BYTES)}, {"role": "user", "content": words(TURN_BYTES)}]
    return orjson.dumps(first), orjson.dumps({**first, "messages": [*messages, *more]})


async def serve_one(runtime: Runtime, body: bytes) -> int:
    """One request from its body to its end; the number of its prompt tokens."""
    prompt = sent_prompt(CHAT, orjson.loads(body))
    request = InferenceRequest(mint_request_id(), "default", CHAT, prompt, None, stream=True)
    placed: Any = await runtime.intake.place(request)
    placed.first_token()
    placed.finish(Outcome.COMPLETED)
    for pool in runtime.pools.pools.values():
        await pool.outbox.flush()
    return int(placed.chain.prompt_tokens)


async def measure(conversations: int, prompt_bytes: int, block_tokens: int) -> dict[str, float]:
    text, scheduling = library_text(), SchedulingSettings()
    folder = Path(tempfile.mkdtemp(prefix="dualmap-"))
    write_model(folder, text)
    store: Store = await open_store(StoreSettings(url=f"embedded://{folder / 'valkey.sock'}"), scheduling=scheduling)
    replicas: dict[str, Runtime] = {}
    for name, tokenizer in (("bytes", None), ("tokens", folder)):
        pool = PoolSettings(name=name, tokenizer=tokenizer)
        for number in range(8):
            spec = InstanceSpec(f"i{number}", f"http://127.0.0.1:{20000 + number}", state=InstanceState.READY)
            await store.pool(name).members.put_instance(
                InstanceSpec(spec.instance_id, spec.url, state=spec.state, block_tokens=block_tokens)
            )
        replicas[name] = Runtime(RouterSettings(tokenize_timeout_s=10.0), scheduling, store, [pool])
        await replicas[name].start()
    chance = random.Random(1)
    cpu_us: dict[str, list[float]] = {name: [] for name in replicas}
    first_us: dict[str, list[float]] = {name: [] for name in replicas}
    tokens = 0
    for batch in range(conversations // BATCH + 1):
        bodies = [conversation(chance, text, prompt_bytes) for _ in range(BATCH)]
        for name, runtime in replicas.items():
            for turn, kept in ((0, first_us), (1, cpu_us)):
                before_s = time.process_time()
                for body in bodies:
                    tokens = await serve_one(runtime, body[turn])
                if batch:
                    kept[name].append((time.process_time() - before_s) / BATCH * 1e6)
    for runtime in replicas.values():
        await runtime.stop()
    await store.close()
    found = {f"{name}_next_turn_us": statistics.median(values) for name, values in cpu_us.items()}
    found |= {f"{name}_first_turn_us": statistics.median(values) for name, values in first_us.items()}
    found["next_turn_ratio"] = found["tokens_next_turn_us"] / found["bytes_next_turn_us"]
    return {name: round(value, 2) for name, value in found.items()} | {"prompt_tokens": tokens}


# the whole router ------------------------------------------------------------------------------------------------
def run_router(name: str, tokenizer: Path | None, store_url: str, ready: Connection) -> None:
    """The child process: one replica, until SIGTERM."""
    pool = PoolSettings(name=name, tokenizer=tokenizer)
    settings = RouterSettings(port=0, settle_s=0.0, tokenize_timeout_s=10.0)
    served = serve(
        settings, SchedulingSettings(), StoreSettings(url=store_url), [pool], on_ready=lambda port, _: ready.send(port)
    )
    uvloop.run(served)


async def measure_whole(conversations: int, prompt_bytes: int, block_tokens: int) -> dict[str, float]:
    text, loop = library_text(), asyncio.get_running_loop()
    folder = Path(tempfile.mkdtemp(prefix="dualmap-"))
    write_model(folder, text)
    mock = await loop.create_server(MockInstance, "127.0.0.1", 0)
    url = f"http://127.0.0.1:{mock.sockets[0].getsockname()[1]}"
    server = EmbeddedValkey(unix_socket=folder / "valkey.sock")
    await asyncio.to_thread(server.start)
    store = await open_store(StoreSettings(url=server.url), scheduling=SchedulingSettings())
    context, routers, clients = multiprocessing.get_context("spawn"), {}, {}
    for name, tokenizer in (("bytes", None), ("tokens", folder)):
        for number in range(8):
            spec = InstanceSpec(
                f"i{number}", url, state=InstanceState.READY, block_tokens=block_tokens, prefill_tokens_per_s=1e7
            )
            await store.pool(name).members.put_instance(spec)
        parent, child = context.Pipe()
        process = context.Process(target=run_router, args=(name, tokenizer, server.url, child))
        process.start()
        if not await asyncio.to_thread(parent.poll, 30):
            raise TimeoutError("the router did not start")
        routers[name] = Router(process.pid or 0, parent.recv(), process)
        clients[name] = (await connect(routers[name].port, 1))[0]
    chance = random.Random(1)
    cpu_us: dict[str, list[float]] = {}

    async def ask(name: str, bodies: list[bytes]) -> None:
        for body in bodies:
            await clients[name].ask(b"POST %b HTTP/1.1\r\nhost: h\r\n" % CHAT.encode() + _sized(body))

    for batch in range(conversations // BATCH + 1):
        pairs = [conversation(chance, text, prompt_bytes, stream=False) for _ in range(BATCH)]
        for name, router in routers.items():
            for turn, bodies in zip(("first", "next"), zip(*pairs, strict=True), strict=True):
                spent_s = await router.cpu_of(ask(name, list(bodies)))
                if batch:
                    cpu_us.setdefault(f"{name}_{turn}_turn_us", []).append(spent_s / BATCH * 1e6)
    for name, router in routers.items():
        clients[name].close()
        router.process.terminate()
        await asyncio.to_thread(router.process.join, 20)
    await store.close()
    await asyncio.to_thread(server.stop)
    mock.close()
    found = {name: round(statistics.median(values), 2) for name, values in cpu_us.items()}
    return found | {"next_turn_ratio": round(found["tokens_next_turn_us"] / found["bytes_next_turn_us"], 2)}


def _sized(body: bytes) -> bytes:
    return b"content-type: application/json\r\ncontent-length: %d\r\n\r\n" % len(body) + body


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--conversations", type=int, default=400)
    parser.add_argument("--prompt-bytes", type=int, default=32 << 10)
    parser.add_argument("--block-tokens", type=int, default=16)
    parser.add_argument("--whole", action="store_true", help="router processes, with their HTTP front")
    options = parser.parse_args()
    measured = measure_whole if options.whole else measure
    found = uvloop.run(measured(options.conversations, options.prompt_bytes, options.block_tokens))
    print(json.dumps(found))


if __name__ == "__main__":
    main()
