"""A placement as weighted sums: what a policy gives instead of naming an instance.

The policy gives weights, once for a request. The store weighs the instances that the caller names, takes the least
weighted sum over its *current* counts, and reserves there in the same step. So a decision is never stale, and the store
knows no policy. All instances share the weights, since features are in seconds of the instance's own prefill rate.

A feature is declared here alone: as a field of ``Form``, and by its name in ``features_at``, of which the scripts have
a translation.
"""

from __future__ import annotations

from operator import mul
from typing import Annotated, Final, NamedTuple, get_type_hints

from dualmap.scheduling.estimates.adapters import PRIOR_ANSWER_S
from dualmap.scheduling.estimates.ttft import ahead_s, compute_s, counted_stall_s
from dualmap.scheduling.prompts.chain import Chain
from dualmap.scheduling.state.instance import InstanceLoad, kv_demand


class Form(NamedTuple):
    """Weights of one sum, by feature of an instance and a request. Each is annotated with the part of a cost that
    people are shown it in. Features from ``load_s`` on are 0 where nothing is loaded: the scripts leave them out
    then."""

    constant: Annotated[float, "work ahead"] = 0.0
    ahead_s: Annotated[float, "work ahead"] = 0.0
    """Cost of a second of prefill that the request has to wait for: pending less overtaken tokens."""
    overtaken_s: Annotated[float, "work it overtakes"] = 0.0
    """Cost of a second of prefill that the request overtakes."""
    kv_demand: Annotated[float, "KV memory in use"] = 0.0
    """Cost of running contexts that fill the KV memory once."""
    compute_s: Annotated[float, "own prefill, weighed"] = 0.0
    """Cost of a second of the request's own prefill."""
    uncached_tokens: Annotated[float, "own prefill, weighed"] = 0.0
    """Cost of a token of the request's own prefill, however fast the instance is."""
    attention_pairs: Annotated[float, "own prefill, weighed"] = 0.0
    """Cost of a pair of an uncached token and a token before it."""
    crowded_compute_s: Annotated[float, "own prefill, weighed by KV memory in use"] = 0.0
    """Cost of a second of own prefill, times running contexts in multiples of the KV memory."""
    stall_s: Annotated[float, "work ahead"] = 0.0
    """Cost of a second of a decode stall (``stall_from_s``)."""
    progress_s: Annotated[float, "work ahead"] = 0.0
    """Cost of a second for which the prefill under way has run. Pending tokens are released when a prefill ends, so in
    its middle they overstate the wait. Once the prefill is overdue by a decode stall, the feature falls with each
    further second and becomes negative: what a hung engine was sent is no progress."""
    running_share: Annotated[float, "other running requests"] = 0.0
    """Cost of a running request, as a share of the most that may run."""
    decoding_compute_s: Annotated[float, "own prefill, weighed by running requests"] = 0.0
    """Cost of a second of own prefill, times running requests: the time that all answers together would wait for it."""
    prompt_tokens: Annotated[float, "own prefill, weighed"] = 0.0
    """Cost of a token of the prompt, cached or not."""
    hot_compute_s: Annotated[float, "own prefill, weighed"] = 0.0
    """Cost of a second of the request's own prefill that belongs to its hot prefix."""
    load_s: Annotated[float, "loads from tiers"] = 0.0
    """Cost of a second that the request's loads from tiers take, with those booked before them."""
    link_s: Annotated[float, "loads from tiers, weighed"] = 0.0
    """Cost of a second for which the request's own loads keep a link, which later loads wait for, and their blocks of
    the device's memory: so times one more than running contexts in multiples of the KV memory."""
    adapter_host_s: Annotated[float, "loads of adapters"] = 0.0
    """Cost of a second for which the request's adapter is loaded from host memory, and the engine computes nothing, by
    the instance's description."""
    adapter_disk_s: Annotated[float, "loads of adapters"] = 0.0
    """Cost of a second for which it is loaded into host memory, likewise."""
    slot_turns: Annotated[float, "waits for adapter slots"] = 0.0
    """Cost of the time of an answer, for which the request alone waits until its adapter has a slot on the device."""

    def of(self, features: Form) -> float:
        """The weighted sum."""
        total: float = sum(map(mul, self, features))
        return total


PARTS: Final = {name: hint.__metadata__[0] for name, hint in get_type_hints(Form, include_extras=True).items()}
"""The part of a cost, in words, that each feature belongs to."""


class Weights(NamedTuple):
    """Cost of a placement on an instance: ``cost``, plus ``missed`` where ``ttft`` is above the SLO."""

    cost: Form
    ttft: Form
    """The expected TTFT, in seconds."""
    missed: Form = Form()

    def cost_of(self, features: Form, slo_s: float) -> float:
        cost = self.cost.of(features)
        return cost + self.missed.of(features) if self.ttft.of(features) > slo_s else cost


def features_of(load: InstanceLoad, chain: Chain, stall_from_s: float, hot_tokens: int = 0) -> Form:
    """The features of an instance and a request that is to be placed there, whose hot prefix has ``hot_tokens``."""
    uncached_tokens = chain.uncached_tokens(load.hit_blocks)
    overtaken_tokens, stalled_s = load.overtaken_tokens, load.stalled_s
    return features_at(
        load,
        overtaken_tokens,
        stalled_s,
        stall_from_s,
        uncached_tokens,
        chain.prompt_tokens,
        hot_tokens,
        load.tiers.load_s,
        load.tiers.link_s,
        *load.adapter,
    )


def features_at(
    instance: InstanceLoad,
    overtaken_tokens: int,
    stalled_s: float,
    stall_from_s: float,
    uncached_tokens: int,
    prompt_tokens: int,
    hot_tokens: int,
    load_s: float,
    link_s: float,
    adapter_host_s: float,
    adapter_disk_s: float,
    slot_turns: float,
) -> Form:
    """The features of an instance, with what depends on the request or on the time. The scripts run the same rule
    (``statestore.pool.rules``) on the instance's record."""
    rate, demand = instance.prefill_tokens_per_s, kv_demand(instance.context_tokens, instance.kv_capacity_tokens)
    own_s, dispatched_s = compute_s(instance, uncached_tokens), instance.dispatched_tokens / rate
    return Form(
        constant=1.0,
        ahead_s=ahead_s(instance, overtaken_tokens),
        overtaken_s=overtaken_tokens / rate,
        kv_demand=demand,
        compute_s=own_s,
        uncached_tokens=uncached_tokens,
        attention_pairs=attention_pairs(uncached_tokens, prompt_tokens),
        crowded_compute_s=own_s * demand,
        stall_s=counted_stall_s(stalled_s, stall_from_s),
        progress_s=min(stalled_s, dispatched_s, 2 * dispatched_s + stall_from_s - stalled_s),
        running_share=instance.running_requests / instance.max_running_requests,
        decoding_compute_s=own_s * instance.running_requests,
        prompt_tokens=prompt_tokens,
        hot_compute_s=hot_uncached_tokens(hot_tokens, prompt_tokens, uncached_tokens) / rate,
        load_s=load_s,
        link_s=link_s * (1.0 + demand),
        adapter_host_s=adapter_host_s,
        adapter_disk_s=adapter_disk_s,
        slot_turns=slot_turns,
    )


def idle_features(
    prefill_tokens_per_s: float,
    uncached_tokens: int,
    prompt_tokens: int,
    hot_tokens: int,
    adapter_host_s: float,
    adapter_disk_s: float,
) -> Form:
    """The features of an instance of this rate that has nothing to do and loads no more than the request's adapter.
    The scripts run the same rule."""
    return Form(
        constant=1.0,
        compute_s=uncached_tokens / prefill_tokens_per_s,
        uncached_tokens=uncached_tokens,
        attention_pairs=attention_pairs(uncached_tokens, prompt_tokens),
        prompt_tokens=prompt_tokens,
        hot_compute_s=hot_uncached_tokens(hot_tokens, prompt_tokens, uncached_tokens) / prefill_tokens_per_s,
        adapter_host_s=adapter_host_s,
        adapter_disk_s=adapter_disk_s,
    )


def hot_uncached_tokens(hot_tokens: int, prompt_tokens: int, uncached_tokens: int) -> int:
    """Tokens of the hot prefix that are left to compute."""
    return max(0, hot_tokens - prompt_tokens + uncached_tokens)


def rank_s(instance: InstanceLoad, overtaken_tokens: int, kv_weight_s: float) -> float:
    """The rank of an instance among the least loaded: its work on time, and its KV memory in use at the price that the
    default policy puts on it. The scripts run the same rule."""
    demand = kv_demand(instance.context_tokens, instance.kv_capacity_tokens)
    return ahead_s(instance, overtaken_tokens) + kv_weight_s * demand


def attention_pairs(uncached_tokens: int, prompt_tokens: int) -> float:
    """Pairs of tokens that the attention of a prefill looks at."""
    return uncached_tokens * (prompt_tokens - uncached_tokens / 2)


PLAIN_TTFT = Form(
    ahead_s=1.0, compute_s=1.0, stall_s=1.0, load_s=1.0,
    adapter_host_s=1.0, adapter_disk_s=1.0, slot_turns=PRIOR_ANSWER_S,
)  # fmt: skip
"""TTFT(r, i) = Tq(r, i) + Tc(r, i). Source: DualMap (ICLR 2026); its decode-bottleneck correction included, and loads
from tiers (``scheduling.estimates.kv_tiers``) and of adapters (``scheduling.estimates.adapters``)."""
