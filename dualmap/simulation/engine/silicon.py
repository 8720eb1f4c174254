"""Engines of measured kernels: ``silicon:MODEL@CARD``, on one card, or ``silicon:MODEL@CARD-tp4``, on so many of one
node; with ``:fp8`` behind it the weights are per-tensor FP8. ``silicon:FILE.json`` is one that was kept in a file.

What the kernels cost is fitted once (``silicon_fit``) and kept, in ``~/.cache/dualmap/silicon`` or where
``XDG_CACHE_HOME`` says, in a file of the model, the card, the width and the version of the package that has the
kernels. A kept file needs no package: made on one machine, it is used on another. Besides its kernels an engine costs
what ``cards`` says of the host of a GPU; its memory is the package's estimate, its links are those of any GPU there.
"""

from __future__ import annotations

import os
import re
from contextlib import suppress
from dataclasses import asdict, dataclass, replace
from functools import lru_cache
from pathlib import Path
from typing import Annotated, Final

from pydantic import BaseModel, ConfigDict, Field, ValidationError, field_validator

from dualmap.scheduling.estimates.kv_tiers import Tier
from dualmap.simulation.engine.cards import GPU
from dualmap.simulation.engine.derived_costs import CARDS_OF_ONE_NODE, DISK_BYTES_PER_S, DISK_START_S
from dualmap.simulation.engine.engine_types import EngineConfig
from dualmap.simulation.engine.kernel_times import PACKAGE, MeasuredKernels, NoKernelsError, measured_kernels
from dualmap.simulation.engine.kernel_times import package_version as version_of_package
from dualmap.simulation.engine.kv_tiers import KvTier
from dualmap.simulation.engine.kv_transfer import KvTransfer
from dualmap.simulation.engine.silicon_fit import FitError, fit_error, fit_kernels, random_steps
from dualmap.simulation.engine.step_time import TabledCosts, knots_of, table_of

PREFIX: Final = "silicon:"
SILICON_IN_WORDS: Final = "silicon:MODEL@CARD[-tpN][:fp8]"
HOW_TO_INSTALL: Final = (
    f"pip install -e '.[silicon]' brings it to Linux on x86-64 with Python 3.11 to 3.13; elsewhere take"
    f" {PREFIX}FILE.json, a file that dualmap calibrate {SILICON_IN_WORDS} --out FILE.json wrote there, or a preset by"
    " data sheets"
)
_NAME = re.compile(r"(?P<model>.+)@(?P<card>[A-Za-z0-9_]+?)(?:-tp(?P<cards>[0-9]+))?")
_NETWORK_BYTES_PER_S: Final = 50e9
_HOST_BYTES_PER_S: Final = 25e9
_SAME: Final = 1e-9
"""Rounding errors of a table that is linear between its knots."""
_CLOSE: Final = 0.04
"""An error at P90 above which a fit is said to be rough."""


class SiliconError(ValueError):
    """There is no such engine; the message says why, and what to do."""


@dataclass(frozen=True, slots=True)
class SiliconName:
    """What a name asks for."""

    model: str
    card: str
    cards: int
    fp8: bool

    @property
    def file_stem(self) -> str:
        """The beginning of the names of its files."""
        return f"{self.model.replace('/', '--')}@{self.card}-tp{self.cards}{'-fp8' if self.fp8 else ''}"


class KeptEngine(BaseModel):
    """An engine of measured kernels, as it is kept in a file: times in microseconds, without what the host costs."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    silicon: Annotated[int, Field(ge=1, le=1)] = 1
    """Version of the format."""
    model: str
    card: str
    cards: int = Field(ge=1)
    fp8: bool
    source: str
    kv_capacity_tokens: int = Field(ge=1)
    kv_bytes_per_token: int = Field(ge=1)
    linear_us: tuple[tuple[int, float], ...]
    """Knots of the linear layers' cost: tokens of a step, microseconds."""
    token_us: float = Field(ge=0)
    attention_pair_us: float = Field(ge=0)
    chunk_us: float = Field(ge=0)
    sequence_us: float
    context_token_us: float = Field(ge=0)
    decode_us: float = Field(ge=0)
    error: FitError
    measured: float
    """Share of the time of random steps that comes from measured kernels."""
    interpolated: float
    """Share of which a part was measured, and a part follows from a formula; the rest follows from formulas."""

    @field_validator("linear_us")
    @classmethod
    def _is_a_table(cls, knots: tuple[tuple[int, float], ...]) -> tuple[tuple[int, float], ...]:
        table_of(knots)
        return knots

    @property
    def costs(self) -> TabledCosts:
        """The step costs, what the host costs included."""
        linear_s = table_of([(tokens, 1e-6 * cost_us) for tokens, cost_us in self.linear_us])
        return TabledCosts(
            overhead_s=GPU.step_overhead_s,
            weights_s=linear_s[1],
            token_s=1e-6 * self.token_us,
            attention_pair_s=1e-6 * self.attention_pair_us,
            sequence_s=GPU.sequence_s + 1e-6 * self.sequence_us,
            context_token_s=1e-6 * self.context_token_us,
            prompt_s=GPU.prompt_s,
            linear_s=linear_s,
            chunk_s=1e-6 * self.chunk_us,
            decode_s=1e-6 * self.decode_us,
        )

    @property
    def engine(self) -> EngineConfig:
        transfer = KvTransfer(self.kv_bytes_per_token, self.cards * _NETWORK_BYTES_PER_S * GPU.link, GPU.transfer_s)
        return EngineConfig(
            self.costs,
            self.kv_capacity_tokens,
            tiers=(
                KvTier(Tier.HOST, bytes_per_s=self.cards * _HOST_BYTES_PER_S),
                KvTier(Tier.DISK, bytes_per_s=DISK_BYTES_PER_S, start_s=DISK_START_S),
                KvTier(Tier.POOL, bytes_per_s=transfer.bytes_per_s, start_s=transfer.latency_s),
            ),
            transfer=transfer,
        )

    @property
    def note(self) -> str:
        """How good its figures are, in a sentence."""
        error, formula = self.error, 1 - self.measured - self.interpolated
        kinds = f"{error.prefill_p90:.1%} prefill, {error.mixed_p90:.1%} mixed, {error.decode_p90:.1%} decode"
        rough = "; a rough fit: its attention is not as this form has it" if error.p90 > _CLOSE else ""
        return (
            f"{self.model} on {self.cards} × {self.card}{', FP8 weights' if self.fp8 else ''}: {self.source}; off from"
            f" them by {error.p90:.1%} at P90 of random steps ({kinds}; {error.worst:.0%} at most){rough}. Of the time"
            f" {self.measured:.0%} was measured, {self.interpolated:.0%} interpolated in part, {formula:.0%} follows"
            " from formulas. The host's cost is that measured with vLLM 0.24 on an H200"
        )


def parse_silicon(name: str) -> tuple[SiliconName | Path, str]:
    """What a name with its prefix asks for, or the file that it names, and the changes behind it.

    Raises:
        SiliconError
    """
    text, _, changes = name.removeprefix(PREFIX).partition(":")
    if text.endswith(".json"):
        return Path(text), changes
    found = _NAME.fullmatch(text)
    if found is None:
        raise SiliconError(f"{name!r}: an engine of measured kernels is {SILICON_IN_WORDS}, or {PREFIX}FILE.json")
    cards = int(found["cards"] or 1)
    if cards not in CARDS_OF_ONE_NODE:
        raise SiliconError(f"{name!r}: an instance has {', '.join(map(str, CARDS_OF_ONE_NODE))} cards")
    quantized, _, rest = changes.partition(":")
    fp8 = quantized == "fp8"
    return SiliconName(found["model"], found["card"], cards, fp8), rest if fp8 else changes


def find_silicon(name: str) -> tuple[KeptEngine, str]:
    """The engine of a name, kept or fitted now and kept from now on, and the changes behind the name.

    Raises:
        SiliconError
    """
    asked, changes = parse_silicon(name)
    if isinstance(asked, Path):
        return read_kept(asked), changes
    folder, version = cache_folder(), version_of_package()
    if (path := _kept_file(asked, folder, version)) is not None:
        return read_kept(path), changes
    if version is None:
        raise SiliconError(f"{name!r}: {PACKAGE} is not installed. {HOW_TO_INSTALL}")
    try:
        kept = _fitted(asked)
    except NoKernelsError as error:
        raise SiliconError(f"{name!r}: {error}") from error
    stem = replace(asked, model=kept.model, card=kept.card).file_stem
    # Where nothing can be kept, each process fits the engine once.
    with suppress(SiliconError):
        write_kept(kept, folder / f"{stem}.{version}.json")
    return kept, changes


@lru_cache(maxsize=8)
def _fitted(asked: SiliconName) -> KeptEngine:
    return keep_kernels(measured_kernels(asked.model, asked.card, asked.cards, fp8=asked.fp8), fp8=asked.fp8)


def keep_kernels(kernels: MeasuredKernels, *, fp8: bool) -> KeptEngine:
    """The engine of these kernels, fitted. Raises NoKernelsError."""
    facts = kernels.facts
    costs = fit_kernels(kernels, facts.kv_capacity_tokens)
    times_s = [kernels.sources_s(step) for step in random_steps(2, facts.kv_capacity_tokens)]
    total_s = sum(sum(each.values()) for each in times_s)
    return KeptEngine(
        **asdict(facts),
        fp8=fp8,
        linear_us=tuple((tokens, _digits(1e6 * cost_s)) for tokens, cost_s in knots_of(costs.linear_s, _SAME)),
        token_us=_digits(1e6 * costs.token_s),
        attention_pair_us=_digits(1e6 * costs.attention_pair_s),
        chunk_us=_digits(1e6 * costs.chunk_s),
        sequence_us=_digits(1e6 * costs.sequence_s),
        context_token_us=_digits(1e6 * costs.context_token_s),
        decode_us=_digits(1e6 * costs.decode_s),
        error=fit_error(costs, kernels, facts.kv_capacity_tokens),
        measured=_digits(sum(each["silicon"] for each in times_s) / total_s),
        interpolated=_digits(sum(each["mixed"] for each in times_s) / total_s),
    )


def write_kept(kept: KeptEngine, path: Path) -> None:
    """Keep an engine in a file, whole or not at all. Raises SiliconError."""
    part = path.with_suffix(f".{os.getpid()}.part")
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        part.write_text(kept.model_dump_json() + "\n", encoding="utf-8")
        part.replace(path)
    except OSError as error:
        raise SiliconError(f"{path}: cannot be written: {error.strerror or error}") from error


def read_kept(path: Path) -> KeptEngine:
    """The engine of a file. Raises SiliconError."""
    try:
        return _read(path, path.stat().st_mtime_ns)
    except OSError as error:
        raise SiliconError(f"{path}: cannot be read: {error.strerror or error}") from error
    except ValueError as error:
        why = error.errors()[0]["msg"] if isinstance(error, ValidationError) else error
        raise SiliconError(f"{path}: no engine of measured kernels: {why}") from error


@lru_cache(maxsize=32)
def _read(path: Path, changed_ns: int) -> KeptEngine:
    return KeptEngine.model_validate_json(path.read_bytes())


def cache_folder() -> Path:
    """Where engines are kept."""
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "dualmap" / "silicon"


def _kept_file(asked: SiliconName, folder: Path, version: str | None) -> Path | None:
    """The file of an engine: by this version of the package, or by the newest without one."""
    found: list[tuple[list[int], Path]] = []
    for path in folder.glob("*@*.json"):
        stem, _, made_by = path.name.removesuffix(".json").partition(f"-tp{asked.cards}{'-fp8' if asked.fp8 else ''}.")
        model, _, card = stem.lower().rpartition("@")
        models = (model, model.rpartition("--")[2])
        cards = (card, card.removesuffix("_sxm"), card.removesuffix("_server"))
        if asked.model.lower().replace("/", "--") in models and asked.card.lower() in cards:
            found.append(([int(part) for part in re.findall(r"[0-9]+", made_by)], path))
            if made_by == version:
                return path
    return max(found)[1] if found and version is None else None


def _digits(figure: float) -> float:
    return float(f"{figure:.6g}")
