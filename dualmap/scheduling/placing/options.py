"""The options of serving one request: as which leg, by which candidates. A pool without roles has one option."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from operator import itemgetter
from typing import Final

from dualmap.scheduling.errors import NoInstanceError
from dualmap.scheduling.estimates.weights import Form, Weights, features_of
from dualmap.scheduling.placing.decision import Decision, Policy, Reason, RouteQuery
from dualmap.scheduling.state.instance import InstanceLoad, Role
from dualmap.scheduling.state.legs import Leg
from dualmap.scheduling.values import value

_ONLY_ONE: Final = Reason.ONLY_ONE

SCHEDULED = (Role.MIXED, Role.PREFILL)


@value
class SecondOption:
    """The second option of a request, as the store weighs it: which leg, where, and the cost there."""

    leg: Leg
    instances: tuple[str, ...]
    weights: Weights
    decider: Form
    beyond_from_s: float | None = None
    roles: tuple[Role, ...] = SCHEDULED


@value
class Option:
    """One option of serving a request, and its cost there."""

    leg: Leg
    query: RouteQuery
    instances: tuple[str, ...]
    weights: Weights
    decider: Form
    """The option with the lowest decider is taken, see ``scheduling.placing.split``."""
    roles: tuple[Role, ...]
    transfer_s: float = 0.0
    """Time that the TTFT of this option takes beyond the prefill."""

    def as_second(self, beyond_from_s: float | None) -> SecondOption:
        return SecondOption(self.leg, self.instances, self.weights, self.decider, beyond_from_s, self.roles)


def named_in(options: Sequence[Option]) -> tuple[str, ...]:
    """The candidates of all options."""
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
    """The store's choice among the instances of an option, as a decision. ``hits`` are those of the loads; ``ttft_s``
    is the TTFT that the weights expect on the chosen instance."""
    chain = option.query.chain
    return Decision(
        chosen,
        hits[chosen],
        chain.uncached_tokens(hits[chosen]),
        (ttft_s if ttft_s > 0.0 else 0.0) + option.transfer_s,
        _ONLY_ONE if alternative_id is None else policy.reason(option.query, hits, loads, chosen, alternative_id),
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
    """The store's choice for a decode leg, as a decision. Its first token waits for the transfer, so no load is read
    for it."""
    chain, transfer = option.query.chain, option.weights.ttft
    return Decision(
        chosen,
        (chain.prompt_tokens - uncached_tokens) // chain.block_tokens,
        uncached_tokens,
        transfer.constant + transfer.uncached_tokens * uncached_tokens,
        _ONLY_ONE if alternative_id is None else policy.reason(option.query, hits, loads, chosen, alternative_id),
        alternative_id,
    )


def choose_option(
    policy: Policy, options: Sequence[Option], sequence: int, loads: Mapping[str, InstanceLoad], stall_from_s: float
) -> tuple[Option, Decision]:
    """The choice of a policy that does not weigh: its own within each option, then between the options. The returned
    option names the chosen instance alone.

    Raises:
        NoInstanceError: no option has a ready instance.
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
