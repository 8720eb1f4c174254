"""The way from a question to a decision without a wait: candidates, a look, perhaps a second one, a choice.

Routers go the same way over a store that they wait for (``router.placement``).
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import replace

from scheduling.decision import Decision, Horizon, Policy, RouteQuery
from scheduling.instance import InstanceLoad
from scheduling.view import ClusterView

Look = Callable[[Iterable[str], bool], tuple[Mapping[str, InstanceLoad], Horizon | None]]
"""Loads of instances with the hits of the question's chain, and the horizon if it is asked for."""


def choose(policy: Policy, query: RouteQuery, view: ClusterView, look: Look) -> Decision:
    """Raises NoInstanceError."""
    candidates = pair = policy.candidates(query, view)
    if query.excluded:
        pair = policy.candidates(replace(query, excluded=frozenset()), view)
    query = replace(query, pair=pair)
    loads, horizon = look(candidates, policy.looks_beyond)
    if horizon is None:
        return policy.choose(query, loads)
    answer = policy.choose_or_look(query, loads, horizon)
    if isinstance(answer, Decision):
        return answer
    further, _ = look(answer.instance_ids, False)
    return policy.choose(query, {**loads, **further})
