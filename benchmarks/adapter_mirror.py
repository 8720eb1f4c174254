"""Whether the order of adapters that the fleet keeps is that of a real vLLM.

    PYTHONPATH=. VLLM_PYTHON benchmarks/adapter_mirror.py MODEL [--requests 200]

runs in an environment with vLLM and PyTorch. MODEL is the folder of a small model of the Llama or Qwen2 kind; its
weights are random, and 24 adapters of rank 8 are made for it. vLLM runs in this process (``max_loras`` 4,
``max_cpu_loras`` 8), so that the two lists of its worker can be read: no interface shows them. Before each request they
are compared with ``AdapterSlots``, the engine model that ``tests/statestore/test_contract_adapters.py`` holds the books
of the store against. First one request at a time, then up to three at once.
"""

from __future__ import annotations

import json
import os
import tempfile
from argparse import ArgumentParser
from pathlib import Path
from random import Random
from typing import Any

from dualmap.simulation.engine.adapter_slots import AdapterMemory, AdapterSlots

ADAPTERS, RANK, SLOTS, HOST_SLOTS, AT_ONCE = 24, 8, 4, 8, 3
ENVIRONMENT = {"VLLM_ENABLE_V1_MULTIPROCESSING": "0", "VLLM_CPU_KVCACHE_SPACE": "1", "VLLM_NO_USAGE_STATS": "1"}
PROMPT = "Which adapter is this?"


def make_adapters(folder: Path, model: Path) -> None:
    """Adapters of random weights, in the form of PEFT."""
    import torch  # type: ignore[import-not-found,unused-ignore]
    from safetensors.torch import save_file  # type: ignore[import-not-found,unused-ignore]

    config = json.loads((model / "config.json").read_text())
    hidden, heads = config["hidden_size"], config["num_attention_heads"]
    head = config.get("head_dim") or hidden // heads
    values = config["num_key_value_heads"] * head
    sizes = {"q_proj": (hidden, heads * head), "k_proj": (hidden, values), "v_proj": (hidden, values)}
    sizes["o_proj"] = (heads * head, hidden)
    about = {"peft_type": "LORA", "r": RANK, "lora_alpha": 16, "target_modules": [*sizes], "bias": "none"}
    for number in range(ADAPTERS):
        weights = {}
        for layer in range(config["num_hidden_layers"]):
            for name, (width, out) in sizes.items():
                begins = f"base_model.model.model.layers.{layer}.self_attn.{name}"
                weights[f"{begins}.lora_A.weight"] = torch.randn(RANK, width) * 0.01
                weights[f"{begins}.lora_B.weight"] = torch.randn(out, RANK) * 0.01
        place = folder / name_of(number)
        place.mkdir()
        save_file(weights, place / "adapter_model.safetensors")
        (place / "adapter_config.json").write_text(json.dumps(about | {"task_type": "CAUSAL_LM"}))


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
    parser.add_argument("--requests", type=int, default=200, help="of each way (%(default)s)")
    arguments = parser.parse_args()
    os.environ.update(ENVIRONMENT)
    from vllm import LLM  # type: ignore[import-not-found,unused-ignore]

    with tempfile.TemporaryDirectory(prefix="adapters-") as folder:
        make_adapters(Path(folder), arguments.model)
        options = {"load_format": "dummy", "enforce_eager": True, "max_model_len": 512, "num_gpu_blocks_override": 400}
        room = {"max_loras": SLOTS, "max_cpu_loras": HOST_SLOTS, "max_lora_rank": RANK}
        engine = LLM(str(arguments.model), enable_lora=True, **room, **options).llm_engine
        worker = engine.engine_core.engine_core.model_executor.driver_worker.worker
        comparison = Comparison(worker.model_runner.lora_manager._adapter_manager)
        for at_once in (1, AT_ONCE):
            before = comparison.compared, comparison.wrong_device, comparison.wrong_host
            run(engine, comparison, Path(folder), arguments.requests, at_once)
            now = comparison.compared, comparison.wrong_device, comparison.wrong_host
            compared, device, host = (after - former for after, former in zip(now, before, strict=True))
            print(f"{at_once} at once: {compared} requests, on the device or not {device} wrong, in host memory {host}")


if __name__ == "__main__":
    main()
