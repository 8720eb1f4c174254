"""LoRA adapters of random weights for a model, to try a real engine with.

    python -m benchmarks.random_adapters MODEL OUT [--count 4] [--rank 8]

MODEL is the folder of a model of the Llama or Qwen2 kind, of which its ``config.json`` is read. Writes
``OUT/adapter-0`` and so on in the form of PEFT, and prints their paths with colons between them. Needs no package.
"""

from __future__ import annotations

import json
from argparse import ArgumentParser
from array import array
from pathlib import Path
from random import Random
from struct import pack
from typing import Any

ALPHA = 16
SCALE = 0.01


def make_adapters(folder: Path, model: Path, count: int, rank: int, seed: int = 1) -> list[Path]:
    """The folders of adapters of random weights."""
    config = json.loads((model / "config.json").read_text())
    shapes = shapes_of(config, rank)
    about = {
        "peft_type": "LORA",
        "task_type": "CAUSAL_LM",
        "r": rank,
        "lora_alpha": ALPHA,
        "target_modules": sorted({name.split(".")[-3] for name in shapes}),
        "bias": "none",
    }
    made = []
    for number in range(count):
        place = folder / name_of(number)
        place.mkdir(parents=True, exist_ok=True)
        write_safetensors(place / "adapter_model.safetensors", shapes, Random(f"{seed} {number}"))
        (place / "adapter_config.json").write_text(json.dumps(about))
        made.append(place)
    return made


def name_of(number: int) -> str:
    return f"adapter-{number}"


def shapes_of(config: dict[str, Any], rank: int) -> dict[str, tuple[int, int]]:
    """The shapes of the weights for attention, by name."""
    hidden, heads = config["hidden_size"], config["num_attention_heads"]
    head = config.get("head_dim") or hidden // heads
    values = config["num_key_value_heads"] * head
    sizes = {"q_proj": (hidden, heads * head), "k_proj": (hidden, values), "v_proj": (hidden, values)}
    sizes["o_proj"] = (heads * head, hidden)
    shapes = {}
    for layer in range(config["num_hidden_layers"]):
        for name, (width, out) in sizes.items():
            begins = f"base_model.model.model.layers.{layer}.self_attn.{name}"
            shapes[f"{begins}.lora_A.weight"] = (rank, width)
            shapes[f"{begins}.lora_B.weight"] = (out, rank)
    return shapes


def write_safetensors(path: Path, shapes: dict[str, tuple[int, int]], rng: Random) -> None:
    """Random tensors of 32 bits: the length of a head in JSON, the head, and their bytes one after the other."""
    head, data = dict[str, Any](), bytearray()
    for name, (rows, columns) in shapes.items():
        begins = len(data)
        data += array("f", [rng.gauss(0.0, SCALE) for _ in range(rows * columns)]).tobytes()
        head[name] = {"dtype": "F32", "shape": [rows, columns], "data_offsets": [begins, len(data)]}
    text = json.dumps(head).encode()
    text += b" " * (-len(text) % 8)
    path.write_bytes(pack("<Q", len(text)) + text + data)


def main() -> None:
    parser = ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("model", type=Path)
    parser.add_argument("out", type=Path)
    parser.add_argument("--count", type=int, default=4)
    parser.add_argument("--rank", type=int, default=8)
    arguments = parser.parse_args()
    made = make_adapters(arguments.out.resolve(), arguments.model, arguments.count, arguments.rank)
    print(":".join(map(str, made)))


if __name__ == "__main__":
    main()
