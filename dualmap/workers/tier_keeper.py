"""The leader's job that describes the tiers behind instances' devices, and their part in pulls: sizes by the settings,
prices as measured."""

from __future__ import annotations

import asyncio
import logging
import re
from collections.abc import Mapping
from typing import Final

from dualmap.scheduling.estimates.kv_tiers import InstanceTier, InstanceTiers, LoadPrice, PullEnd, Tier
from dualmap.scheduling.estimates.load_prices import LoadReading, MeasuredPrice
from dualmap.scheduling.state.instance import InstanceSpec, InstanceState
from dualmap.workers.context import LeaderContext
from dualmap.workers.probe import NotSentError, Prober
from dualmap.workers.pull_ends import PullPlace, pull_place_of

log = logging.getLogger(__name__)

LIMITS_FROM: Final = (0, 32)
"""The first version of vLLM whose offloading loads no more than ``max_load_tokens`` says."""
PUBLISHED_SHARE: Final = 0.05
"""A smaller change of a price is not published."""
UNKNOWN_PLACE: Final = "neither /server_info nor pools.pulls say where it serves pulls and what a failure does"
TYPICAL_TOKENS: Final = 8192
"""Length of a load by which prices are compared."""
CONCURRENCY: Final = 16


class TierKeeper:
    """Measures what loads from tiers, and pulls, cost on each instance, by the counters of its ``/metrics``, and
    describes its tiers, and where others pull from it, to placements. An instance that reports none keeps the priors.
    """

    name = "tiers"
    interval_s = 10.0

    def __init__(self, context: LeaderContext, prober: Prober) -> None:
        self._context = context
        self._prober = prober
        self._sizes = context.settings.kv_tiers.sizes
        self._prices: dict[str, dict[Tier, MeasuredPrice]] = {}
        self._limits: dict[str, bool] = {}
        """Whether the engine of each instance takes limits, by its version."""
        self._natives: dict[str, bool] = {}
        """Whether its tiers are those of vLLM's own offloading: others know no limits."""
        self._places: dict[str, PullPlace | None] = {}
        """Where others pull from each instance that was asked; None: nowhere, as something is unknown. It is asked at
        every reading: it may be started again with other flags."""
        self._pulls: dict[str, MeasuredPrice] = {}

    async def tick(self) -> None:
        """Read and describe once. Raises StoreUnavailableError, LeaseLostError."""
        instances = (await self._context.reader.membership()).instances
        self._prices = {name: kept for name, kept in self._prices.items() if name in instances}
        self._limits = {name: kept for name, kept in self._limits.items() if name in instances}
        self._natives = {name: kept for name, kept in self._natives.items() if name in instances}
        self._places = {name: kept for name, kept in self._places.items() if name in instances}
        self._pulls = {name: kept for name, kept in self._pulls.items() if name in instances}
        ready = [spec for spec in instances.values() if spec.state is InstanceState.READY]
        slots = asyncio.Semaphore(CONCURRENCY)
        await asyncio.gather(*(self._read(spec, slots) for spec in ready))
        described = await self._context.pool.tiers.described()
        for spec in ready:
            former = described.get(spec.instance_id)
            tiers = self._tiers_of(spec.instance_id, former or InstanceTiers())
            self._report(spec.instance_id, tiers)
            if _differs(former, tiers):
                await self._context.pool.tiers.describe(spec.instance_id, tiers, fence=self._context.fence)

    async def _read(self, spec: InstanceSpec, slots: asyncio.Semaphore) -> None:
        async with slots:
            try:
                version = await self._prober.version(spec.url)
                if version is not None:
                    self._limits[spec.instance_id] = takes_limits(version)
                report = await self._prober.loads(spec.url, spec.data_parallel_rank) if self._sizes else None
                if self._context.settings.pulls.enabled:
                    await self._read_pulls(spec)
            except NotSentError:
                return  # a shortage of this worker's
        if report is not None:
            self._natives[spec.instance_id] = report.is_native
        self._learn(spec.instance_id, {} if report is None else report.by_tier)

    async def _read_pulls(self, spec: InstanceSpec) -> None:
        """Raises NotSentError."""
        name = spec.instance_id
        info = await self._prober.server_info(spec.url)
        former, place = self._places.get(name), pull_place_of(info, spec, self._context.settings.pulls)
        if info is None and place is None and former is not None:
            place = former  # it has answered before, and does not at present
        if name not in self._places or place != former:
            self._places[name] = place
            self._warn_of(name, place)
        reading = await self._prober.pulls(spec.url, spec.data_parallel_rank)
        if reading is not None:
            self._pulls.setdefault(name, MeasuredPrice(None)).read(reading)

    def _warn_of(self, name: str, place: PullPlace | None) -> None:
        """Log what keeps an instance from pulls, or what a lost pull costs there."""
        if place is None:
            log.warning(
                "nothing is pulled to or from this instance pool=%s instance=%s reason=%s",
                self._context.pool.name,
                name,
                UNKNOWN_PLACE,
            )
        elif place.fails_requests:
            log.warning(
                "the engine fails a request whose pull is lost, and the router sends it once more: start it with"
                " kv_load_failure_policy recompute pool=%s instance=%s",
                self._context.pool.name,
                name,
            )

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

    def _tiers_of(self, instance_id: str, former: InstanceTiers) -> InstanceTiers:
        """The tiers of an instance that was described so. Where this leader has measured no price yet, that of the one
        before it stays."""
        prices = self._prices.get(instance_id, {})
        measured = {each.tier: each.price for each in former.tiers if not each.reason}
        tiers = []
        for tier, tokens in self._sizes.items():
            price, reason = _known_price(prices.get(tier, MeasuredPrice(tier)), measured.get(tier))
            tiers.append(InstanceTier(tier, tokens, price, reason))
        limits = self._limits.get(instance_id, False) and self._natives.get(instance_id, not self._sizes)
        is_unknown = instance_id in self._places and self._places[instance_id] is None
        return InstanceTiers(
            tuple(tiers), limits, self._pull_end(instance_id, former.pulls), UNKNOWN_PLACE if is_unknown else ""
        )

    def _pull_end(self, instance_id: str, former: PullEnd | None) -> PullEnd | None:
        place = self._places.get(instance_id)
        if place is None:
            return None
        measured = None if former is None or former.reason else former.price
        price, reason = _known_price(self._pulls.get(instance_id, MeasuredPrice(None)), measured)
        return PullEnd(place.host, place.port, place.layout, price, reason, fails_requests=place.fails_requests)


def _known_price(own: MeasuredPrice, measured: LoadPrice | None) -> tuple[LoadPrice, str]:
    """A price, and why it is a prior; ``measured`` is one that was measured before, None: none was."""
    if measured is not None and not own.is_measured and not own.reason:
        return measured, ""
    return own.price, own.why_prior


def takes_limits(version: str) -> bool:
    """Whether an engine of this version loads no more than a request allows. One whose version cannot be read is taken
    to load whatever it has."""
    found = re.match(r"v?(\d{1,9})\.(\d{1,9})", version)
    return found is not None and tuple(map(int, found.groups())) >= LIMITS_FROM


def _place_of(tiers: InstanceTiers) -> tuple[object, ...] | None:
    end = tiers.pulls
    return None if end is None else (end.host, end.port, end.layout, end.reason, end.fails_requests)


def _differs(former: InstanceTiers | None, now: InstanceTiers) -> bool:
    """Whether placements are to know the newer description."""
    if former is None or (former.takes_limits, former.no_pulls) != (now.takes_limits, now.no_pulls):
        return True
    sizes = [[(each.tier, each.tokens, each.reason) for each in tiers.tiers] for tiers in (former, now)]
    if sizes[0] != sizes[1]:
        return True
    pulled = [None if each.pulls is None else each.pulls.price.load_s(TYPICAL_TOKENS) for each in (former, now)]
    old_s, new_s = pulled
    if old_s is None or new_s is None:
        if (old_s is None) is not (new_s is None):
            return True
    elif _place_of(former) != _place_of(now) or abs(new_s - old_s) > PUBLISHED_SHARE * old_s:
        return True
    before, after = ([each.price.load_s(TYPICAL_TOKENS) for each in tiers.tiers] for tiers in (former, now))
    return any(abs(new - old) > PUBLISHED_SHARE * old for old, new in zip(before, after, strict=True))
