"""Short requests go where least waits, long ones to where their cache is: the store takes the least weighted sum."""

from dataclasses import dataclass

from dualmap.scheduling.estimates.learned import Learned
from dualmap.scheduling.estimates.weights import PLAIN_TTFT, Form, Weights
from dualmap.scheduling.placing.decision import Reason, RouteQuery
from dualmap.scheduling.placing.policies.pair import PairPolicy
from dualmap.scheduling.settings import SchedulingSettings
from dualmap.scheduling.state.instance import InstanceLoad

SHORT_TOKENS = 2000


@dataclass(frozen=True)
class ShortFirst(PairPolicy):
    def weights(self, query: RouteQuery, learned: Learned) -> Weights:
        if query.chain.prompt_tokens < SHORT_TOKENS:
            return Weights(Form(ahead_s=3.0, compute_s=1.0), learned.ttft)
        return self._weights()

    def _weights(self) -> Weights:
        return Weights(Form(ahead_s=1.0, compute_s=3.0), PLAIN_TTFT)

    def _reason(self, query: RouteQuery, chosen: InstanceLoad, other: InstanceLoad) -> Reason:
        return Reason.CACHE if chosen.hit_blocks > other.hit_blocks else Reason.BALANCE


def build(name: str, settings: SchedulingSettings) -> ShortFirst:
    return ShortFirst(name, settings.max_key_blocks, settings.decode_stall_s)
