#!/bin/sh
# aiconfigurator-core 0.12.0 from PyPI (measured kernels of vLLM 0.24.0); Linux on x86-64.
#
# Guess: tensor parallelism makes a prefill faster, over PCIe less so than over NVLink.
# Seen: on L40S, Qwen3-8B prefills 8,192 tokens on two cards 1.1 times as fast as on one; on four it takes 3 times as
# long, on eight 6 times. On H100 it is 1.6, 2.5 and 3.5 times as fast. The sums over the cards do that (all-reduce),
# as they were measured for these tables. A decode step of one sequence gets faster with each doubling on both.
# For users: sizing and searches of configurations by these tables advise against tensor parallelism on L40S, on the
# word of one machine's PCIe. Measure the all-reduce of yours before (`all_reduce_perf` of nccl-tests). Engines of
# data sheets err to the other side (docs/operate/sizing.md).
set -eu
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
python3 -m venv "$folder/venv" && "$folder/venv/bin/pip" install -q --disable-pip-version-check \
  aiconfigurator-core==0.12.0 || exit 2
"$folder/venv/bin/python" - 2>"$folder/log" <<'PROGRAM' || { status=$?; cat "$folder/log" >&2; exit $status; }
from aiconfigurator_core.sdk.engine import EngineHandle

TOKENS, WIDTHS = 8192, (1, 2, 4, 8)
faster = {}
for card in ("h100_sxm", "l40s"):
    engines = [EngineHandle.compile("Qwen/Qwen3-8B", card, "vllm", tp_size=width) for width in WIDTHS]
    prefills = [engine.predict_prefill_latency(1, TOKENS, 0) for engine in engines]
    steps = [engine.decode_step_latency(gen_tokens=1, isl=4000, osl=1) for engine in engines]
    faster[card] = [prefills[0] / each for each in prefills]
    print(card, "prefill, ms:", [round(each) for each in prefills], "decode step, ms:", [round(each, 1) for each in steps])
h100, l40s = faster["h100_sxm"], faster["l40s"]
raise SystemExit(0 if h100 == sorted(h100) and h100[3] > 3 and 1 < l40s[1] < 1.3 and l40s[2] < 0.5 and l40s[3] < 0.25 else 1)
PROGRAM
