"""The leader's job that describes the tiers behind instances' devices: sizes by the settings, prices as measured."""

from __future__ import annotations

import asyncio
import logging
import re
from collections.abc import Mapping
from typing import Final

from dualmap.scheduling.estimates.kv_tiers import InstanceTier, InstanceTiers, Tier
from dualmap.scheduling.estimates.load_prices import LoadReading, MeasuredPrice
from dualmap.scheduling.state.instance import InstanceSpec, InstanceState
from dualmap.workers.context import LeaderContext
from dualmap.workers.probe import NotSentError, Prober

log = logging.getLogger(__name__)

LIMITS_FROM: Final = (0, 32)
"""The first version of vLLM whose offloading loads no more than ``max_load_tokens`` says."""
PUBLISHED_SHARE: Final = 0.05
"""A smaller change of a price is not published."""
TYPICAL_TOKENS: Final = 8192
"""Length of a load by which prices are compared."""
CONCURRENCY: Final = 16


class TierKeeper:
    """Measures what loads from tiers cost on each instance, by the counters of its ``/metrics``, and describes its
    tiers to placements. An instance that reports none keeps the priors."""

    name = "tiers"
    interval_s = 10.0

    def __init__(self, context: LeaderContext, prober: Prober) -> None:
        self._context = context
        self._prober = prober
        self._sizes = context.settings.kv_tiers.sizes
        self._prices: dict[str, dict[Tier, MeasuredPrice]] = {}
        self._limits: dict[str, bool] = {}
        """Whether the engine of each instance takes limits, by its version."""

    async def tick(self) -> None:
        """Read and describe once. Raises StoreUnavailableError, LeaseLostError."""
        instances = (await self._context.reader.membership()).instances
        self._prices = {name: kept for name, kept in self._prices.items() if name in instances}
        self._limits = {name: kept for name, kept in self._limits.items() if name in instances}
        ready = [spec for spec in instances.values() if spec.state is InstanceState.READY]
        slots = asyncio.Semaphore(CONCURRENCY)
        await asyncio.gather(*(self._read(spec, slots) for spec in ready))
        described = await self._context.pool.tiers.described()
        for spec in ready:
            tiers = self._tiers_of(spec.instance_id)
            self._report(spec.instance_id, tiers)
            if _differs(described.get(spec.instance_id), tiers):
                await self._context.pool.tiers.describe(spec.instance_id, tiers, fence=self._context.fence)

    async def _read(self, spec: InstanceSpec, slots: asyncio.Semaphore) -> None:
        async with slots:
            try:
                if spec.instance_id not in self._limits:
                    version = await self._prober.version(spec.url)
                    if version is not None:
                        self._limits[spec.instance_id] = takes_limits(version)
                readings = await self._prober.loads(spec.url, spec.data_parallel_rank)
            except NotSentError:
                return  # a shortage of this worker's
        self._learn(spec.instance_id, readings or {})

    def _learn(self, instance_id: str, readings: Mapping[Tier, LoadReading]) -> None:
        prices = self._prices.setdefault(instance_id, {tier: MeasuredPrice(tier) for tier in self._sizes})
        for tier, price in prices.items():
            if tier not in readings:
                continue
            former = price.reason
            price.read(readings[tier])
            if price.reason and not former:
                log.warning(
                    "loads are priced by default pool=%s instance=%s tier=%s reason=%s",
                    self._context.pool.name,
                    instance_id,
                    tier,
                    price.reason,
                )

    def _report(self, instance_id: str, tiers: InstanceTiers) -> None:
        for each in tiers.tiers:
            for part, seconds in (("start", each.price.start_s), ("token", each.price.token_s)):
                labels = (self._context.pool.name, instance_id, each.tier.value, part)
                self._context.metrics.tier_price_seconds.labels(*labels).set(seconds)

    def _tiers_of(self, instance_id: str) -> InstanceTiers:
        prices = self._prices.get(instance_id, {})
        known = [(tier, tokens, prices.get(tier, MeasuredPrice(tier))) for tier, tokens in self._sizes.items()]
        tiers = [InstanceTier(tier, tokens, each.price, each.why_prior) for tier, tokens, each in known]
        return InstanceTiers(tuple(tiers), self._limits.get(instance_id, False))


def takes_limits(version: str) -> bool:
    """Whether an engine of this version loads no more than a request allows. One whose version cannot be read is taken
    to load whatever it has."""
    found = re.match(r"v?(\d+)\.(\d+)", version)
    return found is not None and tuple(map(int, found.groups())) >= LIMITS_FROM


def _differs(former: InstanceTiers | None, now: InstanceTiers) -> bool:
    """Whether placements are to know the newer description."""
    if former is None or former.takes_limits != now.takes_limits:
        return True
    sizes = [[(each.tier, each.tokens, each.reason) for each in tiers.tiers] for tiers in (former, now)]
    if sizes[0] != sizes[1]:
        return True
    before, after = ([each.price.load_s(TYPICAL_TOKENS) for each in tiers.tiers] for tiers in (former, now))
    return any(abs(new - old) > PUBLISHED_SHARE * old for old, new in zip(before, after, strict=True))
