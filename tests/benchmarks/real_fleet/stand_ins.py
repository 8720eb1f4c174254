"""Programs in place of those that a machine with cards has, for the time of a test."""

from __future__ import annotations

import os
import sys
from pathlib import Path

NVIDIA_SMI = "#!/bin/sh\nprintf '0, NVIDIA Made-up 80GB, 81559, 580.1\\n'\n"
MPS_CONTROL = """#!/bin/sh
[ "$1" = -d ] && { echo "$CUDA_MPS_PIPE_DIRECTORY" > STARTED; exit 0; }
read -r word
[ "$word" = quit ]
"""
VLLM = """#!{python}
import json, os, sys
words = sys.argv[1:]
with open({calls!r}, "a") as file:
    named = ("CUDA_", "PYTHONHASHSEED")
    file.write(json.dumps([words, {{k: v for k, v in os.environ.items() if k.startswith(named)}}]) + "\\n")
if words[0] != "serve":
    sys.exit("only serve is known")
value = lambda name: words[words.index(name) + 1]
os.execv(sys.executable, [sys.executable, "-m", "dualmap", "emulate", "--port", value("--port"), "--emulator.model",
    value("--served-model-name"), "--emulator.kv_events_port_offset", "10000", "--time-scale", "20"])
"""
PEER = '''
import argparse, asyncio
parser = argparse.ArgumentParser()
parser.add_argument("--port", type=int)
parser.add_argument("--worker-urls", nargs="+")
options, further = parser.parse_known_args()
print(further, flush=True)

async def copy(reader, writer):
    while data := await reader.read(1 << 16):
        writer.write(data)
    writer.close()

async def serve(reader, writer):
    """Every connection to the first instance."""
    there = await asyncio.open_connection("127.0.0.1", int(options.worker_urls[0].rpartition(":")[2]))
    await asyncio.gather(copy(reader, there[1]), copy(there[0], writer))

async def main():
    await (await asyncio.start_server(serve, "127.0.0.1", options.port)).serve_forever()

asyncio.run(main())
'''


def programs(folder: Path) -> tuple[Path, Path]:
    """A PATH's folder with a card, MPS and ``vllm``, and the file that gets a line for each call of the latter."""
    folder.mkdir()
    calls = folder / "calls.jsonl"
    scripts = {
        "nvidia-smi": NVIDIA_SMI,
        "nvidia-cuda-mps-control": MPS_CONTROL.replace("STARTED", str(folder / "mps-started")),
        "vllm": VLLM.format(python=sys.executable, calls=str(calls)),
    }
    for name, text in scripts.items():
        (folder / name).write_text(text)
        (folder / name).chmod(0o755)
    return folder, calls


def peer_wheel(folder: Path) -> Path:
    """A folder in which a router is installed that sends all to the first instance."""
    package = folder / "vllm_router"
    package.mkdir(parents=True)
    (package / "__init__.py").touch()
    (package / "launch_router.py").write_text(PEER)
    return folder


def environment(path: Path | None) -> dict[str, str]:
    """This process's, with ``path`` before its PATH; None: with a PATH of the system's alone."""
    before = os.environ["PATH"] if path is not None else "/bin"
    return {**os.environ, "PATH": before if path is None else f"{path}:{before}"}
