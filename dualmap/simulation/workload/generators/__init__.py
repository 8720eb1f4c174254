"""Trace generators: seeded, so that the same name, options and seed give the same trace everywhere.

A generator is named as ``NAME`` or ``NAME:requests=4000,seed=1,skew=1.2``; what is left out has a default.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from types import MappingProxyType

from dualmap.simulation.errors import TraceError
from dualmap.simulation.workload.generators.adapters import adapters
from dualmap.simulation.workload.generators.agents import agents
from dualmap.simulation.workload.generators.coding import coding
from dualmap.simulation.workload.generators.contexts import contexts, newdocument
from dualmap.simulation.workload.generators.conversation import conversation, thinking, toolagent
from dualmap.simulation.workload.generators.documents import documents, hotset
from dualmap.simulation.workload.generators.elastic import diurnal, flashcrowd, surge
from dualmap.simulation.workload.generators.forks import forks
from dualmap.simulation.workload.generators.prefixes import (
    bursts,
    fewshot,
    heavytail,
    hotspot,
    moving,
    onoff,
    reasoning,
    shared,
    uncached,
    uniform,
    zipf,
)
from dualmap.simulation.workload.generators.tasks import tasks
from dualmap.simulation.workload.traces import Trace

__all__ = [
    "DEFAULT_SEED", "GENERATORS", "GeneratorSpec", "adapters", "agents", "bursts", "coding", "contexts", "conversation",
    "diurnal", "documents", "fewshot", "flashcrowd", "forks", "heavytail", "hotset", "hotspot", "moving", "newdocument",
    "onoff", "reasoning", "shared", "surge", "tasks", "thinking", "toolagent", "uncached", "uniform", "zipf",
]  # fmt: skip

DEFAULT_SEED = 1
DEFAULT_REQUESTS = 4000

GENERATORS: Mapping[str, Callable[..., Trace]] = MappingProxyType(
    {
        "conversation": conversation,
        "toolagent": toolagent,
        "coding": coding,
        "agents": agents,
        "tasks": tasks,
        "forks": forks,
        "uniform": uniform,
        "uncached": uncached,
        "zipf": zipf,
        "hotspot": hotspot,
        "moving": moving,
        "shared": shared,
        "bursts": bursts,
        "onoff": onoff,
        "heavytail": heavytail,
        "reasoning": reasoning,
        "fewshot": fewshot,
        "diurnal": diurnal,
        "flashcrowd": flashcrowd,
        "surge": surge,
        "thinking": thinking,
        "documents": documents,
        "hotset": hotset,
        "contexts": contexts,
        "newdocument": newdocument,
        "adapters": adapters,
    }
)


@dataclass(frozen=True, slots=True)
class GeneratorSpec:
    """A generator with its options, as written on a command line."""

    name: str
    options: Mapping[str, float]

    @classmethod
    def parse(cls, text: str) -> GeneratorSpec | None:
        """The generator that ``text`` names; None if it names none (it may be a file then).

        Raises:
            TraceError: a known generator with an unknown or broken option.
        """
        name, _, rest = text.partition(":")
        if name not in GENERATORS:
            return None
        options: dict[str, float] = {}
        for item in filter(None, rest.split(",")):
            option, _, value = item.partition("=")
            known = inspect.signature(GENERATORS[name]).parameters
            if option not in known:
                raise TraceError(text, None, f"unknown option {option!r}; {name} knows {', '.join(known)}")
            try:
                options[option] = float(value) if option == "skew" else int(value)
            except ValueError:
                raise TraceError(text, None, f"option {option} needs a number, found {value!r}") from None
        if options.get("requests", 1) < 1:
            raise TraceError(text, None, "requests must be at least 1")
        return cls(name, MappingProxyType(options))

    def generate(self, requests: int = DEFAULT_REQUESTS, seed: int = DEFAULT_SEED) -> Trace:
        """The trace; the spec's own options win over the arguments."""
        return GENERATORS[self.name](**{"requests": requests, "seed": seed, **self.options})
