"""Whether a request that must not be served late is turned away at once."""

from __future__ import annotations


def refuses(expected_ttft_s: float, prior_ttft_s: float, slo_s: float, *, idle: bool) -> bool:
    """Whether the request is refused: it is expected to miss its SLO.

    Never by an idle instance that would serve it in time by its prior. Nothing is learned from a refused request, so a
    wrong estimate would refuse such requests forever; one that is served late corrects the estimate.

    Args:
        prior_ttft_s: what the prior of the same instance expects (``Latency.prior``).
        idle: whether the instance has nothing to prefill.
    """
    return expected_ttft_s > slo_s and not (idle and prior_ttft_s <= slo_s)
