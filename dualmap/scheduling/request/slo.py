"""The TTFT SLO of a request: its own, that of its class, or one that grows with the length of its prompt.

One SLO for prompts of 300 and of 100,000 tokens makes the long ones late: their own prefill takes most of it, and a
queue by deadline passes them over first. The length counts, not the part of it that has to be computed: that part
differs from instance to instance, and a client could not know its own SLO. It would also reward lost caches.
"""

from __future__ import annotations

from dualmap.scheduling.settings import SchedulingSettings


def slo_s(settings: SchedulingSettings, prompt_tokens: int, requested_s: float | None = None, rank: int = 0) -> float:
    """Seconds from its arrival to the deadline of a request's first token. ``requested_s`` is its own SLO, if it has
    one, and ``rank`` the place of its class, where there are classes. A request that gets none from either has
    ``slo_ttft_s`` plus ``slo_ttft_s_per_1k_tokens`` for each 1,000 tokens of the prompt; what the length adds ends at
    ``slo_ttft_max_s``."""
    if requested_s is None and settings.classes:
        requested_s = settings.classes[rank].slo_ttft_s
    if requested_s is not None:
        return requested_s
    base_s = settings.slo_ttft_s
    if not settings.slo_ttft_s_per_1k_tokens:
        return base_s
    by_length_s = base_s + settings.slo_ttft_s_per_1k_tokens * prompt_tokens / 1000
    return min(by_length_s, max(base_s, settings.slo_ttft_max_s))
