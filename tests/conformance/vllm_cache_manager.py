"""vLLM's own KV cache manager without an engine: requests, one after the other, its events, and the hits that it finds.

Run by an interpreter that has vLLM (0.32), with the cache groups, the number of blocks and a seed:

    python tests/conformance/vllm_cache_manager.py window:32:96,full:64 400 1

A group is ``full:TOKENS`` or ``window:TOKENS:WINDOW``, or ``eagle:TOKENS`` for full attention with a draft layer;
states need the scheduler too, which ends chunks where one is kept. Each line that it writes is JSON: a batch of events,
or a prompt with the tokens that were found of it.
"""

from __future__ import annotations

import json
import math
import random
import sys
from collections.abc import Iterator
from typing import Any

CHUNK_TOKENS = 512
ANSWER_TOKENS = 40
MOST_TOKENS = 1500
REQUESTS = 300


def spec_of(group: str) -> Any:
    import torch  # type: ignore[import-not-found]
    from vllm.v1 import kv_cache_interface as kinds  # type: ignore[import-not-found]

    kind, *sizes = group.split(":")
    attention = {"block_size": int(sizes[0]), "num_kv_heads": 1, "head_size": 1, "dtype": torch.float32}
    if kind in ("full", "eagle"):
        return kinds.FullAttentionSpec(**attention)
    return kinds.SlidingWindowSpec(**attention, sliding_window=int(sizes[1]))


def prompts(rng: random.Random) -> Iterator[list[int]]:
    """Prompts that share beginnings. The answer is to be added to each."""
    known: list[list[int]] = [[]]
    for _ in range(REQUESTS):
        ids = rng.choice(known[-6:])
        if rng.random() < 0.3:
            ids = ids[: rng.randrange(len(ids) + 1)]
        prompt = [*ids[:MOST_TOKENS], *(rng.randrange(300, 3000) for _ in range(rng.randrange(30, 300)))]
        known.append(prompt)
        yield prompt


def main(groups: str, blocks: int, seed: int) -> None:
    import msgspec
    from vllm.sampling_params import SamplingParams  # type: ignore[import-not-found]
    from vllm.utils.hashing import sha256  # type: ignore[import-not-found]
    from vllm.v1.core.kv_cache_manager import KVCacheManager  # type: ignore[import-not-found]
    from vllm.v1.core.kv_cache_utils import (  # type: ignore[import-not-found]
        get_request_block_hasher,
        init_none_hash,
    )
    from vllm.v1.kv_cache_interface import KVCacheConfig, KVCacheGroupSpec  # type: ignore[import-not-found]
    from vllm.v1.request import Request  # type: ignore[import-not-found]

    specs = [spec_of(each) for each in groups.split(",")]
    sizes = [spec.block_size for spec in specs]
    unit = math.gcd(*sizes)
    kinds = [each.split(":")[0] for each in groups.split(",")]
    named = [
        KVCacheGroupSpec([f"layer {number}"], spec, is_eagle_group=kind == "eagle")
        for number, (kind, spec) in enumerate(zip(kinds, specs, strict=True))
    ]
    init_none_hash(sha256)
    manager = KVCacheManager(
        kv_cache_config=KVCacheConfig(
            num_blocks=blocks, kv_cache_tensors=[], kv_cache_groups=named, prefix_cache_retention_interval=0
        ),
        max_model_len=8192,
        scheduler_block_size=math.lcm(*sizes),
        hash_block_size=unit,
        max_in_flight_tokens=CHUNK_TOKENS,
        enable_kv_cache_events=True,
        use_eagle="eagle" in kinds,
    )
    hasher, encoder, rng = get_request_block_hasher(unit, sha256), msgspec.msgpack.Encoder(), random.Random(seed)

    def publish() -> None:
        if events := manager.take_events():
            print(json.dumps({"batch": encoder.encode([1.0, events, 0]).hex()}))

    for number, prompt in enumerate(prompts(rng)):
        request = Request(
            request_id=str(number),
            prompt_token_ids=list(prompt),
            sampling_params=SamplingParams(max_tokens=ANSWER_TOKENS),
            pooling_params=None,
            block_hasher=hasher,
        )
        found, cached = manager.get_computed_blocks(request)[:2]
        print(json.dumps({"prompt": prompt, "cached": cached}))
        computed: int = cached
        first: tuple[Any, ...] = (cached, found)
        while computed < len(prompt):
            tokens = min(CHUNK_TOKENS, len(prompt) - computed)
            assert manager.allocate_slots(request, tokens, *first) is not None
            first = ()
            computed += tokens
            request.num_computed_tokens = computed
            publish()
        for _ in range(ANSWER_TOKENS):
            request.append_output_token_ids(rng.randrange(300, 3000))
            prompt.append(request.all_token_ids[-1])
            assert manager.allocate_slots(request, 1) is not None
            request.num_computed_tokens += 1
            publish()
        manager.free(request)
        publish()


if __name__ == "__main__":
    main(sys.argv[1], int(sys.argv[2]), int(sys.argv[3]))
