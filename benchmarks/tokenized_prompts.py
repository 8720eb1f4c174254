"""Router CPU of a conversation's next turn, with a tokenizer and with blocks of bytes.

An embedded Valkey, two replicas in one process: one with a tokenizer (trained here, on the standard library) and a
chat template, one without. Each is given the same conversations of about 32 KB. What is measured is their next turn,
from the body's bytes to the request's end, without the HTTP front, which costs both the same: CPU of this process.
The two take turns batch by batch, and the median over the batches counts.

    python benchmarks/tokenized_prompts.py [--conversations 400] [--prompt-bytes 32768] [--block-tokens 16]
"""

from __future__ import annotations

import argparse
import json
import random
import statistics
import sysconfig
import tempfile
import time
from pathlib import Path
from typing import Any

import orjson
import tokenizers
import uvloop

from router.inference_request import InferenceRequest, mint_request_id
from router.outcome import Outcome
from router.prompt import sent_prompt
from router.runtime import Runtime
from router.settings import RouterSettings
from scheduling.instance import InstanceSpec, InstanceState
from scheduling.settings import SchedulingSettings
from statestore.base import Store
from statestore.connect import open_store
from statestore.settings import PoolSettings, StoreSettings

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


def conversation(chance: random.Random, text: str, prompt_bytes: int) -> tuple[bytes, bytes]:
    """Two bodies: a conversation, and its next turn."""

    def words(count: int) -> str:
        start = chance.randrange(len(text) - count)
        return text[start : start + count]

    roles = ["system", *("user", "assistant") * MESSAGES]
    messages = [{"role": role, "content": words(prompt_bytes // MESSAGES)} for role in roles[:MESSAGES]]
    first = {"model": "default", "stream": True, "messages": messages}
    more = [{"role": "assistant", "content": words(TURN_BYTES)}, {"role": "user", "content": words(TURN_BYTES)}]
    return orjson.dumps(first), orjson.dumps({**first, "messages": [*messages, *more]})


async def serve(runtime: Runtime, body: bytes) -> int:
    """One request from its body to its end; the number of its prompt tokens."""
    prompt = sent_prompt(CHAT, orjson.loads(body))
    request = InferenceRequest(mint_request_id(), "default", CHAT, prompt, None, stream=True)
    placed: Any = await runtime.lifecycle.place(request)
    placed.first_token()
    placed.finish(Outcome.COMPLETED)
    await runtime.context.outbox.flush(5.0)
    return int(placed.chain.prompt_tokens)


async def measure(conversations: int, prompt_bytes: int, block_tokens: int) -> dict[str, float]:
    text, scheduling = library_text(), SchedulingSettings()
    folder = Path(tempfile.mkdtemp(prefix="dualmap-"))
    write_model(folder, text)
    store: Store = await open_store(
        StoreSettings(url=f"embedded://{folder / 'valkey.sock'}"), scheduling=scheduling, batched=True
    )
    replicas: dict[str, Runtime] = {}
    for name, tokenizer in (("bytes", None), ("tokens", folder)):
        pool = PoolSettings(name=name, tokenizer=tokenizer)
        for number in range(8):
            spec = InstanceSpec(f"i{number}", f"http://127.0.0.1:{20000 + number}", state=InstanceState.READY)
            await store.pool(name).put_instance(
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
                    tokens = await serve(runtime, body[turn])
                if batch:
                    kept[name].append((time.process_time() - before_s) / BATCH * 1e6)
    for runtime in replicas.values():
        await runtime.stop()
    await store.close()
    found = {f"{name}_next_turn_us": statistics.median(values) for name, values in cpu_us.items()}
    found |= {f"{name}_first_turn_us": statistics.median(values) for name, values in first_us.items()}
    found["next_turn_ratio"] = found["tokens_next_turn_us"] / found["bytes_next_turn_us"]
    return {name: round(value, 2) for name, value in found.items()} | {"prompt_tokens": tokens}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--conversations", type=int, default=400)
    parser.add_argument("--prompt-bytes", type=int, default=32 << 10)
    parser.add_argument("--block-tokens", type=int, default=16)
    options = parser.parse_args()
    found = uvloop.run(measure(options.conversations, options.prompt_bytes, options.block_tokens))
    print(json.dumps(found))


if __name__ == "__main__":
    main()
