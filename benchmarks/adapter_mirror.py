"""Whether the order of adapters that the fleet keeps is that of a real vLLM.

    python -m benchmarks.random_adapters MODEL ADAPTERS --count 24
    PYTHONPATH=. VLLM_PYTHON benchmarks/adapter_mirror.py MODEL ADAPTERS [--requests 200]

The second runs in an environment with vLLM. MODEL is the folder of a small model of the Llama or Qwen2 kind; its
weights are random, as those of its 24 adapters of rank 8 are. vLLM runs in this process (``max_loras`` 4,
``max_cpu_loras`` 8), so that the two lists of its worker can be read: no interface shows them. Before each request they
are compared with ``AdapterSlots``, the engine model that ``tests/statestore/test_contract_adapters.py`` holds the books
of the store against. First one request at a time, then up to three at once.
"""

from __future__ import annotations

import os
from argparse import ArgumentParser
from pathlib import Path
from random import Random
from typing import Any

from dualmap.simulation.engine.adapter_slots import AdapterMemory, AdapterSlots

ADAPTERS, RANK, SLOTS, HOST_SLOTS, AT_ONCE = 24, 8, 4, 8, 3
ENVIRONMENT = {"VLLM_ENABLE_V1_MULTIPROCESSING": "0", "VLLM_CPU_KVCACHE_SPACE": "1", "VLLM_NO_USAGE_STATS": "1"}
PROMPT = "Which adapter is this?"


def name_of(number: int) -> str:
    return f"adapter-{number}"


class Comparison:
    """The engine beside its model."""

    def __init__(self, manager: Any) -> None:
        self._manager = manager
        self.slots = AdapterSlots(AdapterMemory(SLOTS, HOST_SLOTS))
        self.compared = self.wrong_device = self.wrong_host = 0

    def compare(self, adapter: str) -> None:
        """Whether both have the adapter of the next request, on the device and in host memory."""
        device, host = (
            {name_of(each - 1) for each in kept.cache}
            for kept in (self._manager._active_adapters, self._manager._registered_adapters)
        )
        self.compared += 1
        self.wrong_device += (adapter in device) != (adapter in self.slots.on_device)
        self.wrong_host += (adapter in host) != (adapter in self.slots.in_host)


def run(engine: Any, comparison: Comparison, adapters: Path, requests: int, at_once: int) -> None:
    from vllm import SamplingParams  # type: ignore[import-not-found,unused-ignore]
    from vllm.lora.request import LoRARequest  # type: ignore[import-not-found,unused-ignore]

    rng, live, sent = Random(at_once), dict[str, str](), 0
    weights = [1 / (rank + 1) for rank in range(ADAPTERS)]

    def step() -> None:
        for output in engine.step():
            if output.finished:
                comparison.slots.leave(live.pop(output.request_id))

    while sent < requests or live:
        if sent < requests and len(live) < at_once:
            number = rng.choices(range(ADAPTERS), weights)[0]
            adapter, request_id = name_of(number), f"{at_once}-{sent}"
            comparison.compare(adapter)
            sampling = SamplingParams(max_tokens=rng.randrange(2, 12), temperature=0, ignore_eos=True)
            lora = LoRARequest(adapter, number + 1, str(adapters / adapter))
            engine.add_request(request_id, PROMPT, sampling, lora_request=lora)
            live[request_id], sent = adapter, sent + 1
            comparison.slots.enter(adapter)
        step()


def main() -> None:
    parser = ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("model", type=Path)
    parser.add_argument("adapters", type=Path, help="the folder of the adapters")
    parser.add_argument("--requests", type=int, default=200, help="of each way (%(default)s)")
    arguments = parser.parse_args()
    os.environ.update(ENVIRONMENT)
    from vllm import LLM  # type: ignore[import-not-found,unused-ignore]

    options = {"load_format": "dummy", "enforce_eager": True, "max_model_len": 512, "num_gpu_blocks_override": 400}
    room = {"max_loras": SLOTS, "max_cpu_loras": HOST_SLOTS, "max_lora_rank": RANK}
    engine = LLM(str(arguments.model), enable_lora=True, **room, **options).llm_engine
    worker = engine.engine_core.engine_core.model_executor.driver_worker.worker
    comparison = Comparison(worker.model_runner.lora_manager._adapter_manager)
    for at_once in (1, AT_ONCE):
        before = comparison.compared, comparison.wrong_device, comparison.wrong_host
        run(engine, comparison, arguments.adapters, arguments.requests, at_once)
        now = comparison.compared, comparison.wrong_device, comparison.wrong_host
        compared, device, host = (after - former for after, former in zip(now, before, strict=True))
        print(f"{at_once} at once: {compared} requests, on the device or not {device} wrong, in host memory {host}")


if __name__ == "__main__":
    main()
