"""Figures of runs that were made before: a run is a pure function of its job and of the code it passes through.

The key covers both, so nothing stale is ever returned: the whole job, the bytes of a trace file, and every module
that takes part, other policies' own modules left out. A change to one policy therefore reruns that policy alone.
"""

from __future__ import annotations

import json
import os
import sys
from dataclasses import asdict, dataclass, fields
from functools import lru_cache
from hashlib import sha256
from pathlib import Path

from pydantic import BaseModel

from dualmap import api_bodies, scheduling, simulation, statestore
from dualmap.research import scalers, unshared
from dualmap.research.figures import Figures
from dualmap.scheduling.placing.policies import build_policy
from dualmap.scheduling.settings import POLICIES, PolicyName, SchedulingSettings
from dualmap.simulation.virtual_time.runs import RunJob

_APART = {
    "dualmap.api_bodies": frozenset[str](),
    "dualmap.scheduling": frozenset[str](),
    "dualmap.statestore": frozenset({"failover", "redis"}),
    "dualmap.simulation": frozenset({"calibrate", "capacity", "commands", "emulator", "replay"}),
    "dualmap.research.scalers": frozenset(),
    "dualmap.research.unshared": frozenset(),
}
"""Parts of each package that no run uses."""
_FRAMES = {"dualmap.scheduling.placing.policies.fleet", "dualmap.scheduling.placing.policies.pair"}
"""Never left out: policies use their functions without inheriting from their classes."""


@dataclass(frozen=True, slots=True)
class RunCache:
    """One file a run; safe for many processes, as a file appears whole or not at all."""

    folder: Path | None
    """None: nothing is kept."""

    def figures(self, job: RunJob) -> Figures:
        """The job's figures, from the cache or from a run here and now. Raises SimulationError."""
        if self.folder is None or job.scenario.scheduling.policy not in POLICIES:
            # The code of another package's policy is in no key.
            return Figures.of(job.run())
        path = self.folder / f"{run_key(job)}.json"
        kept = _read(path)
        if kept is not None:
            return kept
        figures = Figures.of(job.run())
        path.parent.mkdir(parents=True, exist_ok=True)
        partial = path.with_suffix(f".{os.getpid()}.partial")
        partial.write_text(json.dumps(asdict(figures)))
        partial.replace(path)
        return figures


def _read(path: Path) -> Figures | None:
    """None: the file is missing, or its figures are not those that this version knows."""
    try:
        kept = json.loads(path.read_text())
    except (OSError, ValueError):
        return None
    names = {field.name for field in fields(Figures)}
    return Figures(**kept) if isinstance(kept, dict) and kept.keys() == names else None


def run_key(job: RunJob) -> str:
    """A digest of everything that the run depends on."""
    scenario = asdict(job.scenario) | {"scheduling": job.scenario.scheduling.model_dump(mode="json")}
    files = [_file_digest(each) for each in job.source.sources]
    parts = (asdict(job.source), files[0] if len(files) == 1 else files, scenario, job.rate_per_s)
    code = code_digest(job.scenario.scheduling.policy)
    return sha256(json.dumps([*parts, code], sort_keys=True, default=_plain).encode()).hexdigest()[:32]


def _plain(settings: object) -> object:
    """Settings within the scenario as JSON has them, those of the autoscaler for example."""
    if isinstance(settings, BaseModel):
        return settings.model_dump(mode="json")
    raise TypeError(f"{type(settings).__name__} has no place in a run's key")


@lru_cache(maxsize=64)
def _file_digest(source: str) -> str | None:
    path = Path(source)
    return sha256(path.read_bytes()).hexdigest() if path.is_file() else None


@lru_cache(maxsize=len(POLICIES))
def code_digest(policy: PolicyName) -> str:
    """A digest of the modules that a run with this policy may pass through."""
    digest = sha256()
    others = _modules_of_others(policy)
    for package in (api_bodies, scheduling, statestore, simulation, scalers, unshared):
        folder = Path(str(package.__file__)).parent
        for path in sorted(folder.rglob("*.py")):
            apart = path.relative_to(folder).parts[0] in _APART[package.__name__]
            if not apart and path not in others:
                digest.update(str(path.relative_to(folder.parent)).encode() + b"\0" + path.read_bytes() + b"\0")
    return digest.hexdigest()


def _modules_of_others(policy: PolicyName) -> set[Path]:
    """Modules of the other policies' classes that this one does not build upon."""
    own = _modules(policy)
    return {path for other in POLICIES for path in _modules(other)} - own


def _modules(policy: PolicyName) -> set[Path]:
    """Modules of the policy's class and of those that it inherits from, except the bases."""
    classes = type(build_policy(SchedulingSettings(policy=policy))).__mro__
    names = {
        each.__module__ for each in classes if each.__module__.startswith("dualmap.scheduling.placing.policies.")
    } - _FRAMES
    return {Path(str(sys.modules[name].__file__)) for name in names}
