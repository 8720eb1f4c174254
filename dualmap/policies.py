"""The public surface for authors of scheduling policies: everything that a policy of another package may use.

A policy is a frozen dataclass that subclasses ``PairPolicy`` or ``FleetPolicy``, or that has the methods of ``Policy``.
An entry point of the group ``dualmap.policies`` names its builder, which is called with the policy's name and the
``SchedulingSettings``, and with the entries of the setting ``policy_options`` as keyword arguments: parameters of its
own, which it checks. ``examples/own_policy`` is one. Names that are not listed here may change with any version.
"""

from dualmap.scheduling.errors import NoInstanceError
from dualmap.scheduling.estimates.learned import Learned
from dualmap.scheduling.estimates.ttft import expected_ttft_s
from dualmap.scheduling.estimates.weights import PLAIN_TTFT, Form, Weights, features_of
from dualmap.scheduling.placing.decision import Decision, Policy, Reason, RouteQuery
from dualmap.scheduling.placing.policies.choice import Cost, in_flight
from dualmap.scheduling.placing.policies.fleet import FleetPolicy
from dualmap.scheduling.placing.policies.pair import CACHE_FIRST, LOAD, NEVER, PairPolicy
from dualmap.scheduling.prompts.chain import Chain
from dualmap.scheduling.settings import Order, SchedulingSettings
from dualmap.scheduling.state.instance import InstanceLoad
from dualmap.scheduling.state.view import ClusterView

__all__ = [
    "CACHE_FIRST",
    "LOAD",
    "NEVER",
    "PLAIN_TTFT",
    "Chain",
    "ClusterView",
    "Cost",
    "Decision",
    "FleetPolicy",
    "Form",
    "InstanceLoad",
    "Learned",
    "NoInstanceError",
    "Order",
    "PairPolicy",
    "Policy",
    "Reason",
    "RouteQuery",
    "SchedulingSettings",
    "Weights",
    "expected_ttft_s",
    "features_of",
    "in_flight",
]
