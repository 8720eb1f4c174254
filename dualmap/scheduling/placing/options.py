"""The options of serving one request: as which leg, by which candidates. A pool without roles has one option."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from operator import itemgetter

from dualmap.scheduling.errors import NoInstanceError
from dualmap.scheduling.estimates.weights import Form, Weights, features_of
from dualmap.scheduling.placing.decision import Decision, Policy, RouteQuery
from dualmap.scheduling.state.instance import InstanceLoad, Role
from dualmap.scheduling.state.legs import Leg
from dualmap.scheduling.values import value

SCHEDULED = (Role.MIXED, Role.PREFILL)


@value
class Weighing:
    """One option of serving a request, as the store weighs it: as which leg, where, and the cost there."""

    leg: Leg
    instances: tuple[str, ...]
    weights: Weights
    decider: Form = Form()
    """Form by which the instance of least cost is compared with that of the other option: the lowest is taken, see
    ``scheduling.placing.split``. Features as in weights."""
    beyond_from_s: float | None = None
    """The instance that holds the prefix, and the least loaded, are weighed too where they could cost so much less than
    those named; None: they are not."""
    roles: tuple[Role, ...] = SCHEDULED
    """Roles whose least loaded instances are weighed beyond the candidates."""


@value
class Option:
    """One option of serving a request."""

    query: RouteQuery
    weighing: Weighing
    transfer_s: float = 0.0
    """Time that the TTFT of this option takes beyond the prefill."""


def named_in(options: Sequence[Option]) -> tuple[str, ...]:
    """The candidates of all options."""
    if len(options) == 1:
        return options[0].weighing.instances
    return tuple(dict.fromkeys(name for option in options for name in option.weighing.instances))


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
        seen = {name: loads[name] for name in option.weighing.instances if name in loads}
        try:
            decision = policy.choose(query, seen)
        except NoInstanceError:
            if option is options[-1] and not choices:
                raise
            continue
        features = features_of(seen[decision.instance_id], query.chain, stall_from_s)
        if option.transfer_s:
            decision = replace(decision, expected_ttft_s=decision.expected_ttft_s + option.transfer_s)
        chosen = replace(option, weighing=replace(option.weighing, instances=(decision.instance_id,)))
        choices.append((option.weighing.decider.of(features), chosen, decision))
    _, option, decision = min(choices, key=itemgetter(0))
    return option, decision
