"""Times of kernels that were measured on a card, from the package ``aiconfigurator-core``.

``measured_kernels`` is the one place that imports it; another package that has such times can take its place. What its
calls mean is not always what their names say:

* a prefill of ``isl`` tokens computes ``isl - prefix`` of them;
* a mixed step is right where ``ctx_tokens`` and ``isl`` are both cached and new tokens together, and its attention of
  decoding is for that length, too: it is replaced by that of the sequences' own context;
* a mixed step counts the states of its decoding sequences (Mamba, gated delta nets) as those of prefilled tokens: they
  are replaced, too;
* a decode step's context is ``isl + osl // 2``.
"""

from __future__ import annotations

import logging
from collections import Counter
from dataclasses import dataclass
from functools import lru_cache
from importlib import import_module, metadata
from pathlib import Path
from typing import Any

from dualmap.simulation.engine.derived_costs import MEMORY_SHARE
from dualmap.simulation.engine.engine_types import EngineConfig
from dualmap.simulation.engine.silicon_fit import KernelStep

PACKAGE = "aiconfigurator-core"
_OWN = ("generation_attention", "_mla_block", "_conv1d", "_scan", "_ssm", "_recurrence", "_fused_decode")
"""Endings of the names of kernels that each decoding sequence has for itself: attention, and what reads or writes the
states of Mamba and of gated delta nets."""


class NoKernelsError(ValueError):
    """The package lacks this model, card or kernel, or is not there; the message says which."""


@dataclass(frozen=True, slots=True)
class KernelFacts:
    """What the database says of a model on some cards besides times."""

    model: str
    card: str
    cards: int
    source: str
    """The package and the engine whose kernels it has, with their versions."""
    kv_capacity_tokens: int
    kv_bytes_per_token: int
    """KV of a token on all cards together."""


def package_version() -> str | None:
    """The installed version; None: it is not installed."""
    try:
        return metadata.version(PACKAGE)
    except metadata.PackageNotFoundError:
        return None


class MeasuredKernels:
    """The kernels of one model on some cards. Made by ``measured_kernels``."""

    def __init__(self, handle: Any, facts: KernelFacts) -> None:
        self._handle = handle
        self.facts = facts

    def linear_s(self, tokens: int) -> float:
        linear, _ = self._mixed(tokens, 0, 0)
        return sum(float(time_ms) for name, time_ms, _, _ in linear if not _is_own(name)) / 1000

    def step_s(self, step: KernelStep) -> float:
        return sum(self.sources_s(step).values())

    def sources_s(self, step: KernelStep) -> Counter[str]:
        """The time of a step by where it comes from: ``silicon`` is measured, ``mixed`` interpolated with a formula's
        help, everything else by a formula."""
        found: Counter[str] = Counter()
        if not step.prefill_tokens:
            self._count(found, self._decode(step))
            return found
        total = step.cached_tokens + step.prefill_tokens
        linear, attention = self._mixed(total, step.sequences, step.cached_tokens)
        self._count(found, [*linear, *attention])
        if step.sequences:
            self._count(found, [each for each in self._decode(step) if _is_own(each[0])])
            alone, _ = self._mixed(total, 0, step.cached_tokens)
            self._count(found, [each for each in linear if _is_own(each[0])], -1)
            self._count(found, [each for each in alone if _is_own(each[0])])
        return found

    def _mixed(self, tokens: int, sequences: int, cached: int) -> tuple[list[Any], list[Any]]:
        linear, attention, _ = self._handle.mixed_step_breakdown_per_op(tokens, sequences, tokens, 1, cached)
        return linear, attention

    def _decode(self, step: KernelStep) -> list[Any]:
        kernels: list[Any] = self._handle.decode_step_per_op(step.sequences, step.context_tokens, 1)
        return kernels

    @staticmethod
    def _count(found: Counter[str], kernels: list[Any], sign: int = 1) -> None:
        for _, time_ms, _, source in kernels:
            found[source] += sign * time_ms / 1000


def _is_own(kernel: str) -> bool:
    return kernel.endswith(_OWN)


@lru_cache(maxsize=8)
def measured_kernels(model: str, card: str, cards: int = 1, *, fp8: bool = False) -> MeasuredKernels:
    """The kernels of a model (by name, in upper or lower case, with or without its publisher; or a folder with a
    ``config.json``) on so many cards of one node (``h100`` is ``h100_sxm``). With ``fp8`` its weights are per-tensor
    FP8.

    Raises:
        NoKernelsError
    """
    version = package_version()
    if version is None:
        raise NoKernelsError(f"the package {PACKAGE} is not installed")
    logging.getLogger(PACKAGE.replace("-", "_")).setLevel(logging.CRITICAL)
    try:
        engine, memory, databases = (
            import_module(f"aiconfigurator_core.sdk.{name}") for name in ("engine", "memory", "perf_database")
        )
        folder = Path(str(import_module("aiconfigurator_core").__file__)).parent
    except ImportError as error:
        raise NoKernelsError(f"{PACKAGE} {version} cannot be imported: {error}") from error
    model = _model(model, folder)
    card = _card(card, folder)
    of = {"tp_size": cards, "moe_tp_size": cards}
    quantized = {"gemm_quant_mode": "fp8", "moe_quant_mode": "fp8"} if fp8 else {}
    limits = EngineConfig.__dataclass_fields__
    try:
        backend_version = databases.resolve_query_version(card, "vllm", "current")
        handle = engine.EngineHandle.compile(model, card, "vllm", **of, **quantized)
        handle.mixed_step_latency(128, 1, 128, 1, 0)
        handle.decode_step_latency(1, 128, 1)
        kv = memory.estimate_kv_cache(
            model, card, "vllm", "current", **of, **quantized,
            max_num_tokens=limits["max_num_batched_tokens"].default, max_batch_size=limits["max_num_seqs"].default,
            memory_fraction_kind="of_total", memory_fraction_value=MEMORY_SHARE,
        )  # fmt: skip
    except Exception as error:  # it raises what it likes: each of them says that something is not there
        why = " ".join(str(error).split())
        if "no KV budget" in why:
            why = "the weights leave no memory for KV; take more cards, as -tp2"
        raise NoKernelsError(f"{model} on {cards} × {card}: {why[:300]}") from error
    facts = KernelFacts(
        model=model,
        card=card,
        cards=cards,
        source=f"{PACKAGE} {version}, kernels of vLLM {backend_version}",
        kv_capacity_tokens=int(kv["total_kv_size_tokens"]),
        # Its own figure counts the states and windows of hybrid models for each token.
        kv_bytes_per_token=cards * int(kv["total_kv_size_bytes"]) // int(kv["total_kv_size_tokens"]),
    )
    return MeasuredKernels(handle, facts)


def _model(asked: str, folder: Path) -> str:
    if (Path(asked) / "config.json").is_file():
        return asked
    names = [path.name.removesuffix("_config.json").replace("--", "/", 1) for path in folder.glob("model_configs/*")]
    names = [name for name in names if not name.endswith(("_hf_quant", ".json"))]
    found = [name for name in names if asked.lower() in (name.lower(), name.lower().rpartition("/")[2])]
    if len(found) == 1:
        return found[0]
    word = asked.lower().rpartition("/")[2].partition("-")[0]
    near = [name for name in sorted(names) if word in name.lower()] or sorted(names)
    raise NoKernelsError(
        f"it has no model {asked!r}: take one of {', '.join(near)}, or the folder of a model's config.json"
    )


def _card(asked: str, folder: Path) -> str:
    names = sorted(
        path.stem for path in folder.glob("systems/*.yaml") if (folder / "systems/data" / path.stem).is_dir()
    )
    for ending in ("", "_sxm", "_server"):
        if asked.lower() + ending in names:
            return asked.lower() + ending
    raise NoKernelsError(f"it has no card {asked!r}: take one of {', '.join(names)}")
