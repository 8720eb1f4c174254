"""Tenants as they are written on a command line, and their traffic."""

from __future__ import annotations

import math
import re
from collections.abc import Sequence
from dataclasses import replace

from dualmap.scheduling.tenants.tenant import Tenant
from dualmap.simulation.capacity.bounds import sustainable_rate
from dualmap.simulation.engine.engine_types import EngineConfig
from dualmap.simulation.errors import TraceError
from dualmap.simulation.workload.generators import DEFAULT_SEED, GeneratorSpec
from dualmap.simulation.workload.sources import TraceSource
from dualmap.simulation.workload.tenant_mix import TenantMix, TenantTraffic

MEASURED_REQUESTS = 2000
"""Requests of a tenant's trace by which its rate is found where it is given in multiples of the fleet."""
_TEXT = re.compile(r"(?P<name>[A-Za-z0-9][\w.-]*)=(?P<trace>[^@]+)@(?P<rate>[0-9.]+)(?P<times>x?)(?:@(?P<options>.+))?")


def tenant_mix(
    texts: Sequence[str], seconds: float, engine: EngineConfig, instances: int, seed: int = DEFAULT_SEED
) -> TenantMix:
    """The mix that is written as ``NAME=TRACE@RATE[x][@weight=W,class=C]`` for each tenant. A rate with an ``x`` is a
    multiple of the rate of that trace which the fleet sustains.

    Raises:
        TraceError: one cannot be read; the message says how it is written.
    """
    mix = TenantMix(
        tuple(_traffic(text, seconds, engine, instances, seed + i) for i, text in enumerate(texts)), seconds
    )
    names = [tenant.name for tenant in mix.tenants]
    if len(set(names)) < len(names):
        raise TraceError("tenants", None, f"two have one name: {', '.join(names)}")
    return mix


def _traffic(text: str, seconds: float, engine: EngineConfig, instances: int, seed: int) -> TenantTraffic:
    found = _TEXT.fullmatch(text)
    if found is None:
        raise TraceError(text, None, "a tenant is written NAME=TRACE@RATE, NAME=TRACE@1.5x or NAME=TRACE@RATE@weight=2")
    rate, weight, priority = float(found["rate"]), 1.0, ""
    for option in filter(None, (found["options"] or "").split(",")):
        key, _, value = option.partition("=")
        if key == "weight" and re.fullmatch(r"[0-9.]+", value) and float(value) > 0:
            weight = float(value)
        elif key == "class" and value:
            priority = value
        else:
            raise TraceError(text, None, f"{option!r} is no option of a tenant: weight=W and class=C are")
    source = TraceSource(found["trace"], seed=seed)
    if found["times"]:
        is_made = GeneratorSpec.parse(found["trace"]) is not None
        measured = replace(source, requests=MEASURED_REQUESTS) if is_made else source
        rate *= sustainable_rate(measured.load(), engine, instances, share=1.0)
    if not rate * seconds >= 1:
        raise TraceError(text, None, f"sends no request in {seconds:g} s")
    if GeneratorSpec.parse(found["trace"]) is not None:
        source = replace(source, requests=math.ceil(rate * seconds) + 1)
    return TenantTraffic(Tenant(found["name"], weight=weight), source, rate, priority)
