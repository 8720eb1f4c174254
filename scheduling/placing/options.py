"""The ways to serve one request: as which leg, by which candidates. In a pool without roles there is one."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from operator import itemgetter

from dualmap.scheduling.errors import NoInstanceError
from dualmap.scheduling.estimates.weights import Form, Weights, features_of
from dualmap.scheduling.placing.decision import Decision, Policy, Reason, RouteQuery
from dualmap.scheduling.state.instance import InstanceLoad, Role
from dualmap.scheduling.state.legs import Leg
from dualmap.scheduling.values import value

SCHEDULED = (Role.MIXED, Role.PREFILL)


@value
class SecondOption:
    """Another way to serve a request, as the store is asked for it: which leg, where, and what it costs there."""

    leg: Leg
    instances: tuple[str, ...]
    weights: Weights
    decider: Form
    beyond_from_s: float | None = None
    roles: tuple[Role, ...] = SCHEDULED


@value
class Option:
    """One of them, and what it costs there."""

    leg: Leg
    query: RouteQuery
    instances: tuple[str, ...]
    weights: Weights
    decider: Form
    """The way of the lowest is taken, see ``scheduling.placing.split``."""
    roles: tuple[Role, ...]
    transfer_s: float = 0.0
    """What its TTFT has beyond the prefill."""

    def as_second(self, beyond_from_s: float | None) -> SecondOption:
        return SecondOption(self.leg, self.instances, self.weights, self.decider, beyond_from_s, self.roles)


def named_in(options: Sequence[Option]) -> tuple[str, ...]:
    """The candidates of all ways."""
    if len(options) == 1:
        return options[0].instances
    return tuple(dict.fromkeys(name for option in options for name in option.instances))


def judge(
    policy: Policy,
    option: Option,
    chosen: str,
    alternative_id: str | None,
    hits: Mapping[str, int],
    loads: Mapping[str, InstanceLoad],
    ttft_s: float,
) -> Decision:
    """What the store chose of the instances of this way, as a decision. ``hits`` are those of the loads, ``ttft_s`` is
    what the weights expect on the chosen one."""
    chain = option.query.chain
    return Decision(
        chosen,
        hits[chosen],
        chain.uncached_tokens(hits[chosen]),
        max(0.0, ttft_s) + option.transfer_s,
        Reason.ONLY_ONE if alternative_id is None else policy.reason(option.query, hits, loads, chosen, alternative_id),
        alternative_id,
        0 if alternative_id is None else chain.uncached_tokens(hits[alternative_id]),
    )


def judge_transfer(
    policy: Policy,
    option: Option,
    chosen: str,
    alternative_id: str | None,
    hits: Mapping[str, int],
    loads: Mapping[str, InstanceLoad],
    uncached_tokens: int,
) -> Decision:
    """The same of a decode leg, whose first token waits for what is transferred: no load is looked at for it."""
    chain, transfer = option.query.chain, option.weights.ttft
    return Decision(
        chosen,
        (chain.prompt_tokens - uncached_tokens) // chain.block_tokens,
        uncached_tokens,
        transfer.constant + transfer.uncached_tokens * uncached_tokens,
        Reason.ONLY_ONE if alternative_id is None else policy.reason(option.query, hits, loads, chosen, alternative_id),
        alternative_id,
    )


def choose_option(
    policy: Policy, options: Sequence[Option], sequence: int, loads: Mapping[str, InstanceLoad], stall_from_s: float
) -> tuple[Option, Decision]:
    """The choice of a policy that does not weigh: its own for each way, then between them. The way names the chosen
    instance alone.

    Raises:
        NoInstanceError: no way has a ready instance.
    """
    choices: list[tuple[float, Option, Decision]] = []
    for option in options:
        query = replace(option.query, sequence=sequence)
        seen = {name: loads[name] for name in option.instances if name in loads}
        try:
            decision = policy.choose(query, seen)
        except NoInstanceError:
            if option is options[-1] and not choices:
                raise
            continue
        features = features_of(seen[decision.instance_id], query.chain, stall_from_s)
        if option.transfer_s:
            decision = replace(decision, expected_ttft_s=decision.expected_ttft_s + option.transfer_s)
        chosen = replace(option, instances=(decision.instance_id,))
        choices.append((option.decider.of(features), chosen, decision))
    _, option, decision = min(choices, key=itemgetter(0))
    return option, decision
