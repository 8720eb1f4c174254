#!/bin/sh
# aiconfigurator-core 0.12.0 from PyPI (measured kernels of vLLM 0.24.0); Linux on x86-64.
#
# Guess: a step that prefills 2,048 tokens behind 30,720 cached ones and decodes 8 sequences takes longer than a step
# that only prefills these; `mixed_step_latency(ctx_tokens=2048, gen_tokens=8, isl=32768, osl=1, prefix=30720)` is its
# time, as `predict_prefill_latency(1, 32768, 30720)` is that of the prefill alone.
# Seen: the mixed step takes 58 ms, the prefill alone 100 ms. The attention of the chunk is divided by
# ceil(isl / ctx_tokens), 16 here, as if each of so many steps attended to a part of the prompt, though `prefix` says
# what was computed before. Only with ctx_tokens = isl is it the whole; the tokens of `prefix` are not computed then,
# either.
# For users: a chunk behind a long cached prefix, which is what routing by prefix makes common, looks up to 64 times
# cheaper in attention than it is. Engines of measured kernels here pass ctx_tokens = isl, and put the decoding
# sequences' own attention in (docs/reference/emulator.md#engines-of-measured-kernels).
set -eu
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
python3 -m venv "$folder/venv" && "$folder/venv/bin/pip" install -q --disable-pip-version-check \
  aiconfigurator-core==0.12.0 || exit 2
"$folder/venv/bin/python" - 2>"$folder/log" <<'PROGRAM' || { status=$?; cat "$folder/log" >&2; exit $status; }
from aiconfigurator_core.sdk.engine import EngineHandle

NEW, CACHED, SEQUENCES = 2048, 30_720, 8
engine = EngineHandle.compile("Qwen/Qwen3-8B", "h100_sxm", "vllm", tp_size=1)
alone = engine.predict_prefill_latency(1, CACHED + NEW, CACHED)
mixed = engine.mixed_step_latency(NEW, SEQUENCES, CACHED + NEW, 1, CACHED)
whole, linear, attention, decoding = engine.mixed_step_breakdown(CACHED + NEW, SEQUENCES, CACHED + NEW, 1, CACHED)
_, same_linear, part, _ = engine.mixed_step_breakdown(NEW, SEQUENCES, CACHED + NEW, 1, CACHED)
print(f"prefill alone {alone:.1f} ms; with {SEQUENCES} sequences decoding {mixed:.1f} ms")
print(f"with ctx_tokens = isl {whole:.1f} ms; attention of the chunk {attention:.1f} ms, before {part:.1f} ms")
divided = abs(attention / part - (CACHED + NEW) / NEW) < 0.01 and linear == same_linear
raise SystemExit(0 if mixed < alone < whole and divided else 1)
PROGRAM
