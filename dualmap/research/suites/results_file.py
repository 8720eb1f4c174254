"""results.json: all that a suite found, so that its report can be made again from it alone.

Means, intervals and rankings follow from the figures of the seeds and are left out. Each figure of a variant stands
once, with its value for every seed. It has all digits: the mean of shares can lie in the middle between two of a table.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, fields
from pathlib import Path
from typing import Any, TypeVar

import orjson
from pydantic import BaseModel, PositiveFloat, ValidationError, field_validator

from dualmap.research.figures import Figures
from dualmap.research.provenance import Provenance
from dualmap.research.suites.results import GoodputResult, Rate, RateResult, SuiteResult
from dualmap.research.suites.suite import Suite
from dualmap.research.targets import targets_of
from dualmap.research.variant import described, described_variant, first_reason
from dualmap.research.workload import Traffic, Workload
from dualmap.simulation.capacity.bounds import Bounds
from dualmap.simulation.errors import SimulationError

RESULTS = "results.json"
_AGAIN = "damaged, or another version wrote it: run the suite again with --out (--cache spares what it still can)"

Own = TypeVar("Own")


class ResultsError(SimulationError):
    """A file of results cannot be used; the message names it, the reason, and what to do."""


def render_json(outcome: SuiteResult) -> str:
    """Every figure of every seed."""
    document = {
        "made": None if outcome.made is None else asdict(outcome.made),
        "suite": _suite_json(outcome.suite),
        "variants": {variant.name: dict(described(variant)) for variant in outcome.variants},
        "goodput": [_goodput_json(result, outcome) for result in outcome.goodputs],
        "rates": [_rate_json(result, outcome) for result in outcome.rates],
    }
    return orjson.dumps(document, option=orjson.OPT_APPEND_NEWLINE).decode()


def _suite_json(suite: Suite) -> dict[str, object]:
    """The variants are left out: what they say in full stands beside."""
    described = asdict(suite)
    del described["variants"]
    return described | {"workloads": described.pop("traffic")}


def _fleet_json(workload: Workload) -> dict[str, object]:
    return {
        "workload": asdict(workload.traffic),
        "preset": workload.preset,
        "instances": workload.instances,
        "requests": workload.requests,
    }


def _goodput_json(result: GoodputResult, outcome: SuiteResult) -> dict[str, object]:
    return {
        "fleet": _fleet_json(result.workload),
        "seeds": outcome.seeds[result.workload],
        "goodput_per_s": result.goodput_per_s,
        "further": result.further,
        "saturation_per_s": result.saturation_per_s,
        "bounds": [asdict(one) for one in result.bounds],
    }


def _rate_json(result: RateResult, outcome: SuiteResult) -> dict[str, object]:
    return {
        "fleet": _fleet_json(result.workload),
        "seeds": outcome.seeds[result.workload],
        "rate": result.rate.label,
        "rates_per_s": result.rates_per_s,
        "figures": {name: _columns(own) for name, own in result.figures.items()},
    }


def _columns(seeds: tuple[Figures, ...]) -> dict[str, list[object]]:
    """Each figure that is not the default for every seed."""
    columns = {one: [getattr(seed, one.name) for seed in seeds] for one in fields(Figures)}
    return {one.name: column for one, column in columns.items() if set(column) != {one.default}}


class _Fleet(BaseModel):
    workload: Traffic
    preset: str
    instances: int
    requests: int


class _Result(BaseModel):
    fleet: _Fleet
    seeds: tuple[int, ...]

    @property
    def workload(self) -> Workload:
        fleet = self.fleet
        return Workload(fleet.workload, fleet.preset, fleet.instances, fleet.requests)


class _Goodput(_Result):
    goodput_per_s: dict[str, tuple[float, ...]]
    further: dict[str, dict[str, tuple[float, ...]]] = {}
    saturation_per_s: tuple[float, ...]
    bounds: tuple[Bounds, ...]

    @field_validator("bounds", mode="before")
    @classmethod
    def _null_is_infinite(cls, bounds: Any) -> Any:
        """JSON has no infinity, which the ideal goodput of a very short trace is."""
        if not isinstance(bounds, list) or not all(isinstance(one, dict) for one in bounds):
            return bounds
        return [{name: float("inf") if rate is None else rate for name, rate in one.items()} for one in bounds]

    def result(self, variants: Mapping[str, object]) -> GoodputResult:
        """Raises ValueError: figures of other variants or numbers of seeds."""
        own = _in_order(self.goodput_per_s, variants)
        further = {name: _in_order(values, variants) for name, values in self.further.items()}
        targets_of(tuple(further))
        others = (values for one in further.values() for values in one.values())
        _same_length(self.seeds, self.saturation_per_s, self.bounds, *own.values(), *others)
        return GoodputResult(self.workload, own, self.saturation_per_s, self.bounds, further)


class _Rate(_Result):
    rate: str
    rates_per_s: tuple[PositiveFloat, ...]
    figures: dict[str, tuple[Figures, ...]]

    @field_validator("figures", mode="before")
    @classmethod
    def _by_seed(cls, variants: Any) -> Any:
        """The inverse of ``_columns``."""
        if not isinstance(variants, dict) or not all(isinstance(one, dict) for one in variants.values()):
            raise ValueError("has no figures by name")
        return {name: _rows(columns) for name, columns in variants.items()}

    def result(self, variants: Mapping[str, object], rates: Mapping[str, Rate]) -> RateResult:
        """Raises ValueError: a rate that the suite has not, figures of other variants or numbers of seeds."""
        if self.rate not in rates:
            raise ValueError(f"rate {self.rate!r} is none of the suite's, {', '.join(rates)}")
        own = _in_order(self.figures, variants)
        _same_length(self.rates_per_s, *own.values())
        return RateResult(self.workload, rates[self.rate], self.rates_per_s, own)


class _Document(BaseModel):
    made: Provenance | None = None
    suite: Suite
    variants: dict[str, dict[str, Any]]
    goodput: tuple[_Goodput, ...]
    rates: tuple[_Rate, ...]

    @field_validator("suite", mode="before")
    @classmethod
    def _as_written(cls, suite: Any) -> Any:
        """The inverse of ``_suite_json``."""
        if not isinstance(suite, dict) or "workloads" not in suite:
            raise ValueError("names no workloads")
        described = {name: value for name, value in suite.items() if name != "workloads"}
        return described | {"traffic": suite["workloads"], "variants": ()}

    def outcome(self) -> SuiteResult:
        """Raises ValueError, VariantError: what the file says does not go together."""
        rates = {rate.label: rate for rate in map(Rate.parse, self.suite.rates)}
        results: tuple[_Result, ...] = (*self.goodput, *self.rates)
        return SuiteResult(
            self.suite,
            tuple(described_variant(name, description) for name, description in self.variants.items()),
            {one.workload: one.seeds for one in results},
            tuple(one.result(self.variants) for one in self.goodput),
            tuple(one.result(self.variants, rates) for one in self.rates),
            self.made,
        )


def read_outcome(folder: Path) -> SuiteResult:
    """The outcome that ``render_json`` wrote.

    Raises:
        ResultsError: no file, or one that another version wrote.
    """
    path = folder / RESULTS
    try:
        return _Document.model_validate_json(path.read_bytes()).outcome()
    except OSError as error:
        reason = f"cannot be read: {error.strerror or error}; name the folder that --out of a former run named"
    except ValidationError as error:
        reason = f"{first_reason(error)}; {_AGAIN}"
    except (ValueError, SimulationError) as error:
        reason = f"{error}; {_AGAIN}"
    raise ResultsError(f"{path}: {reason}")


def _rows(columns: Mapping[str, Any]) -> list[dict[str, Any]]:
    """Raises ValueError: columns of different lengths."""
    if not all(isinstance(column, list) for column in columns.values()):
        raise ValueError("a figure has no list of values")
    _same_length(*map(tuple, columns.values()))
    return [dict(zip(columns, values, strict=True)) for values in zip(*columns.values(), strict=True)]


def _in_order(figures: Mapping[str, Own], variants: Mapping[str, object]) -> dict[str, Own]:
    if figures.keys() != variants.keys():
        raise ValueError(f"figures of {', '.join(figures)}, but the variants are {', '.join(variants)}")
    return {name: figures[name] for name in variants}


def _same_length(*sequences: tuple[object, ...]) -> None:
    lengths = {len(one) for one in sequences}
    if len(lengths) != 1 or 0 in lengths:
        raise ValueError("figures of different numbers of seeds")
