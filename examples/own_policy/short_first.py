"""Short requests go where least waits, long ones to where their cache is: the store takes the least weighted sum."""

from dataclasses import dataclass

from dualmap.policies import (
    PLAIN_TTFT,
    Form,
    InstanceLoad,
    Learned,
    PairPolicy,
    Reason,
    RouteQuery,
    SchedulingSettings,
    Weights,
)


@dataclass(frozen=True)
class ShortFirst(PairPolicy):
    short_tokens: int = 2000

    def weights(self, query: RouteQuery, learned: Learned) -> Weights:
        if query.chain.prompt_tokens < self.short_tokens:
            return Weights(Form(ahead_s=3.0, compute_s=1.0), learned.ttft)
        return Weights(Form(ahead_s=1.0, compute_s=3.0), PLAIN_TTFT)

    def reason_in_pair(self, query: RouteQuery, chosen: InstanceLoad, other: InstanceLoad) -> Reason:
        return Reason.CACHE if chosen.hit_blocks > other.hit_blocks else Reason.BALANCE


def build(name: str, settings: SchedulingSettings, *, short_tokens: int = 2000) -> ShortFirst:
    return ShortFirst(name, settings.decode_stall_s, short_tokens=int(short_tokens))
