"""Pulls: what an instance has not of a prompt can come from the cache of another one, its *source*.

A pull occupies the link of both instances. Its time is that of the bytes over the target's link, behind what is booked
on either: loads and pulls of requests that wait for their first token on the target, and pulls from the source. What
the source computes at the moment can be pulled once it is there.

A pull is taken where the first token comes sooner with it than on the instance that would be taken without any pull,
and where the placement costs less by the weights of its policy than computing the prompt there.

A pull makes a copy, which takes the place of other blocks where the target's memory is full. Computing the prompt there
would take the same place, so that decides nothing between the two. But between the target and an instance that has the
prompt already, the copy costs what computing the others again takes; none where the source leaves, or the prefix is
hot: more instances are to have that.

Both ends are booked by the placement that decides. On the target the pull is booked as a load is, and released with it.
On the source it is a stretch of time on the source's link, which is over when that time has passed; what is left of
it when the request ends before its first token is given back.
"""

from __future__ import annotations

from dualmap.scheduling.state.instance import InstanceLoad


def copy_s(target: InstanceLoad, tokens: int, block_tokens: int) -> float:
    """The time that computing again takes of what a copy of so many tokens takes the place of. The scripts run the same
    rule."""
    free_tokens = max(0, target.kv_capacity_tokens - target.cached_blocks * block_tokens)
    return max(0, tokens - free_tokens) / target.prefill_tokens_per_s


def pull_ends_s(own_s: float, target_queued_s: float, source_queued_s: float, computing_s: float) -> float:
    """The time until a pull is through that takes ``own_s`` on idle links, behind what is booked on both, and behind
    what the source is computing. The scripts run the same rule."""
    return own_s + max(target_queued_s, source_queued_s, computing_s)


def pull_pays(cost: float, unpulled_cost: float, ttft_s: float, best_ttft_s: float) -> bool:
    """Whether an instance pulls: its placement costs less so than computing the prompt there, and the first token comes
    sooner than on the best instance without any pull. The scripts run the same rule."""
    return cost < unpulled_cost and ttft_s < best_ttft_s
