"""Rates and shares by instance, of the requests that ended a moment ago: to see who served a load before its figures
are believed."""

from __future__ import annotations

import time
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, field, fields
from typing import Annotated, Any

from fastapi import APIRouter, Query, Request

from dualmap.router.admin.explanations import LocalOnly, query_peers
from dualmap.router.admin.scope import RuntimeParam
from dualmap.router.requests.explain import KEPT_EXPLANATIONS, Explanation
from dualmap.scheduling.request.outcome import Outcome

routes = APIRouter(prefix="/admin", tags=["explanations"])

_ANSWERED = frozenset({Outcome.COMPLETED.value, Outcome.ENDED.value})


@dataclass(slots=True)
class Served:
    """Sums over the requests that ended on one instance, or in no instance's hands."""

    requests: int = 0
    answered: int = 0
    on_time: int = 0
    """Answered streams whose first token came within the TTFT SLO."""
    streamed: int = 0
    """Answers whose first token was seen."""
    prompt_tokens: int = 0
    cached_tokens: int = 0
    """Prompt tokens that were cached, as instances reported them, or else as they were expected."""
    output_tokens: int = 0

    def add(self, one: Explanation) -> None:
        self.requests += 1
        if one.answer.outcome not in _ANSWERED:
            return
        self.answered += 1
        if one.course.first_token_s is not None:
            self.streamed += 1
            self.on_time += one.course.first_token_s <= one.course.slo_s
        self.prompt_tokens += one.prompt_tokens
        self.cached_tokens += one.cached_tokens
        self.output_tokens += one.answer.usage.output_tokens or 0


_SUMS = tuple(each.name for each in fields(Served))


@dataclass(slots=True)
class Remembered:
    """One replica's sums over its last ``seconds``."""

    seconds: float
    """Shorter than requested where its memory does not reach so far back."""
    instances: dict[str, Served] = field(default_factory=dict)


def remembered(ended: Sequence[Explanation], now_unix_s: float, seconds: float, kept: int) -> Remembered:
    """The sums over what ended in the last ``seconds``.

    ``ended`` has the one that ended last first; a memory of ``kept`` that is full begins with its oldest entry.
    """
    found, age_s = Remembered(seconds), 0.0
    for one in ended:
        age_s = now_unix_s - one.course.received_unix_s - (one.course.done_s or 0.0)
        if age_s > seconds:
            break
        found.instances.setdefault(one.answer.instance_id or "", Served()).add(one)
    else:
        if len(ended) >= kept:
            found.seconds = max(1e-3, age_s)
    return found


def shares_of(replicas: Iterable[Mapping[str, Any]]) -> dict[str, Any]:
    """The rates of all replicas together, by instance; ``replicas`` are ``Remembered`` as JSON."""
    rates: dict[str, dict[str, float]] = {}
    totals: dict[str, Served] = {}
    shortest_s: float | None = None
    for replica in replicas:
        seconds = replica["seconds"]
        shortest_s = seconds if shortest_s is None else min(shortest_s, seconds)
        for instance_id, sums in replica["instances"].items():
            total, rate = totals.setdefault(instance_id, Served()), rates.setdefault(instance_id, {})
            # A replica of another version may have more fields, or fewer.
            for name in _SUMS:
                value = sums.get(name, 0)
                setattr(total, name, getattr(total, name) + value)
                rate[name] = rate.get(name, 0.0) + value / seconds
    all_per_s = sum(rate["requests"] for rate in rates.values())
    return {
        "seconds": shortest_s or 0.0,
        "requests_per_s": all_per_s,
        "output_tokens_per_s": sum(rate["output_tokens"] for rate in rates.values()),
        "instances": {
            instance_id or "none": {
                **asdict(totals[instance_id]),
                "requests_per_s": rates[instance_id]["requests"],
                "output_tokens_per_s": rates[instance_id]["output_tokens"],
                "share": rates[instance_id]["requests"] / all_per_s,
                "hit_rate": totals[instance_id].cached_tokens / max(1, totals[instance_id].prompt_tokens),
            }
            for instance_id in sorted(rates)
        },
    }


@routes.get("/shares")
async def shares(
    request: Request,
    runtime: RuntimeParam,
    seconds: Annotated[float, Query(gt=0, le=3600, description="requests that ended in so many seconds")] = 60.0,
    local: LocalOnly = False,
) -> dict[str, Any]:
    """Requests and tokens a second, hits and shares by instance, over what ended a moment ago, of all replicas.

    To check who served a load before its figures are believed. Each replica remembers the last 2,048 requests that
    ended: `seconds` is shorter where that is less. `not_asked` names replicas that did not answer.
    """
    ended = runtime.context.decisions.recent(KEPT_EXPLANATIONS)
    own = asdict(remembered(ended, time.time(), seconds, KEPT_EXPLANATIONS))
    if local:
        return own
    answers, gaps = await query_peers(request, runtime, f"/admin/shares?seconds={seconds}&local=true")
    peers = [answer for answer in answers if isinstance(answer, dict) and "instances" in answer]
    return {"replicas": 1 + len(peers), "not_asked": gaps, **shares_of([own, *peers])}
