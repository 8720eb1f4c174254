"""Learning from first tokens and from ends of requests, once for a pool, by the leader.

The store logs samples; the leader reads them, in order, and publishes. Replicas take what was published as it is.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence, Set
from dataclasses import KW_ONLY, dataclass, field, replace
from typing import Any, NamedTuple

import orjson

from dualmap.scheduling.estimates.adapter_prices import Prices, learn_prices, prices_of, prices_prior
from dualmap.scheduling.estimates.answer_length import AnswerLengths
from dualmap.scheduling.estimates.learned import PAIRS_UNIT, Learned
from dualmap.scheduling.estimates.prefill_rate import PUBLISHED_SHARE, BusyTime, PeerRates
from dualmap.scheduling.estimates.ridge import Ridge
from dualmap.scheduling.estimates.transfer_model import learn_transfer, transfer_cost, transfer_prior
from dualmap.scheduling.estimates.ttft_model import PRIOR_WEIGHTS, learn_ttft, ttft_prior
from dualmap.scheduling.estimates.weights import Form
from dualmap.scheduling.state.instance import InstanceLoad, InstanceSpec, Role
from dualmap.scheduling.values import value

RATIO_MEMORY_TOKENS = 4_000_000
"""Sums of bytes and tokens are halved above this, so that old prompts fade."""
RATIO_MIN_TOKENS = 16_384
"""Tokens seen before the prior of bytes per token is replaced."""
RATIO_TOLERANCE = 0.1
"""Share by which the learned ratio must differ from the published one to replace it: every replica counts prompts by
the published one."""
LEAST_RATIO = 0.001
IMAGE_MEMORY = 1000
"""Sums of images and their tokens are halved above so many images."""
MIN_IMAGES = 10
"""Images seen before the prior of their tokens is replaced."""
LEARNED_FEATURES = len(PRIOR_WEIGHTS)
TPOT_KEEP = 0.98
"""Share of the former mean that remains at each new answer: about fifty answers are remembered."""


@value
class FirstTokenSample:
    """The end of a prefill, and what was expected of it."""

    instance_id: str
    tokens: int
    """Prompt tokens that were prefilled."""
    enqueued_ms: int
    dispatched_ms: int
    former_ms: int
    """The end of the instance's last prefill that was seen."""
    prefilled_ms: int
    features: tuple[float, ...] | None
    """Features of its placement, as ``features_to_note`` returns them; None where its TTFT says nothing: it was
    retried, migrated, or deferred, or waited for a slot for its adapter."""
    _: KW_ONLY
    unseen: int = 0
    """Prefills without a seen end since ``former_ms``: of answers that do not stream. The time between has a part in
    it that is theirs, so it says nothing of the rate."""

    @property
    def busy_time(self) -> BusyTime:
        """When its instance was busy with the prefill; no time where the clock stepped back."""
        began_ms = min(max(self.former_ms, self.dispatched_ms), self.prefilled_ms)
        return BusyTime(self.tokens, 1, began_ms, self.prefilled_ms, int(self.former_ms < self.dispatched_ms))

    @property
    def loads_s(self) -> tuple[float, float, float]:
        """Times of its loads, as expected: all of them, and of those the loads of its adapter from host memory and into
        it. The instance may have computed nothing meanwhile."""
        all_s, host_s, disk_s = (*(self.features or ())[LEARNED_FEATURES:], 0.0, 0.0, 0.0)[:3]
        return all_s, host_s, disk_s

    def unloaded_ttft_s(self, prices: Prices) -> float:
        """Its TTFT without the time of its loads: those from tiers as the engine's own counters have them, those of its
        adapter at these prices."""
        (all_s, host_s, disk_s), (host, disk) = self.loads_s, prices
        loads_s = all_s + (host - 1.0) * host_s + (disk - 1.0) * disk_s
        return max(0.0, (self.prefilled_ms - self.enqueued_ms) / 1000 - loads_s)


class DisprovedTier(NamedTuple):
    """A tier that lacks what was used at that time: where the longest unused leaves first, it also lacks what was used
    before."""

    instance_id: str
    tier: str
    used_ms: int


@value
class EndSample:
    """Figures that the end of a request shows; 0: not known."""

    text_bytes: int = 0
    """Length of the prompt's text, in bytes."""
    tokens: int = 0
    """Prompt tokens, as the instance counted them."""
    answer_tokens: int = 0
    """Tokens of the answer, where it was answered to its end."""
    _: KW_ONLY
    output_limit: int = 0
    """The most tokens that it let its answer have; 0: it set no limit."""
    answer_ms: int = 0
    """Time from the first to the last token of a whole answer that streamed."""
    transfer_ms: int = 0
    """Time from the end of the prefill leg to the first token of the decode leg."""
    transferred_tokens: int = 0
    images: int = 0
    """Images in the prompt; ``text_bytes`` counts their marks alone."""
    disproved: DisprovedTier | None = None
    """The tier of its instance that had less than was taken to be there; None: none, or it is not known."""

    @classmethod
    def of_note(cls, note: Mapping[str, Any]) -> EndSample:
        """Read the sample from a note that ``finished_note`` or ``transfer_note`` wrote."""
        disproved = note.get("disproved")
        named = {name: int(note.get(name, 0)) for name in _FINISHED}
        return cls(**named, disproved=None if disproved is None else DisprovedTier(*disproved))


_FINISHED = (
    "text_bytes", "tokens", "answer_tokens", "output_limit", "answer_ms", "transfer_ms", "transferred_tokens", "images",
)  # fmt: skip


def finished_note(
    text_bytes: int,
    tokens: int,
    answer_tokens: int,
    output_limit: int,
    answer_ms: int = 0,
    images: int = 0,
    *,
    disproved: DisprovedTier | None = None,
) -> str:
    """The note that goes with the end of a request, as JSON; "" if it would teach nothing. Arguments as in
    ``EndSample``."""
    if not answer_tokens and not (text_bytes and tokens) and disproved is None:
        return ""
    lacks = "" if disproved is None else f',"disproved":{orjson.dumps(list(disproved)).decode()}'
    return (
        f'{{"text_bytes":{text_bytes},"tokens":{tokens},"answer_tokens":{answer_tokens},"output_limit":{output_limit},'
        f'"answer_ms":{answer_ms},"images":{images}{lacks}}}'
    )


def transfer_note(transfer_s: float, tokens: int) -> str:
    """The note that goes with the end of a prefill leg whose decode leg has the KV, as JSON."""
    return f'{{"transfer_ms":{max(1, round(transfer_s * 1000))},"transferred_tokens":{tokens}}}'


@value
class Sample:
    """One entry of the sample log."""

    entry_id: str
    content: FirstTokenSample | EndSample


def features_to_note(features: Form) -> tuple[float, ...]:
    """The features that a TTFT is learned from, in units that make all of them about one; then, where there are some,
    the time of loads from tiers and of adapters, and that of the latter as described."""
    ahead_s = features.ahead_s - features.progress_s
    learned = (1.0, ahead_s, features.compute_s, features.attention_pairs / PAIRS_UNIT, features.kv_demand)
    adapter_s = features.adapter_host_s, features.adapter_disk_s
    loads_s = features.load_s + sum(adapter_s)
    return (*learned, loads_s, *(adapter_s if any(adapter_s) else ())) if loads_s else learned


@dataclass(slots=True)
class FleetLearner:
    """The leader's memory of what it learned. A new leader reads the log from its beginning."""

    learned: Learned
    _: KW_ONLY
    _rates: dict[Role, PeerRates] = field(default_factory=dict)
    _ttft: Ridge = field(default_factory=ttft_prior)
    _adapters: Ridge = field(default_factory=prices_prior)
    _transfer: Ridge = field(default_factory=transfer_prior)
    _answers: AnswerLengths = field(default_factory=AnswerLengths)
    _text_bytes: int = 0
    _text_tokens: int = 0
    _images: int = 0
    _image_tokens: float = 0.0

    def learn(
        self,
        samples: Iterable[Sample],
        loads: Mapping[str, InstanceLoad],
        instances: Mapping[str, InstanceSpec],
        now_ms: int,
    ) -> dict[str, float]:
        """Take samples in, of which there may be none; returns the prefill rates that are to be published.

        ``loads`` and ``instances`` are those of the whole pool: the published rates are the prior of peers that gave no
        sample yet. ``now_ms`` is the store's time.
        """
        firsts: list[FirstTokenSample] = []
        for sample in samples:
            content = sample.content
            if isinstance(content, EndSample):
                self._learn_end(content)
            elif content.instance_id in loads:
                firsts.append(content)
        self._learn_ttft(firsts)
        self._learn_adapter_prices(firsts)
        return self._learn_rates(firsts, loads, instances, now_ms)

    def _learn_ttft(self, firsts: Sequence[FirstTokenSample]) -> None:
        prices = self.learned.adapter_prices
        seen = [
            (first.features[:LEARNED_FEATURES], first.unloaded_ttft_s(prices))
            for first in firsts
            if first.features is not None
        ]
        if seen:
            self._ttft = learn_ttft(self._ttft, seen)
            self.learned = replace(self.learned, ttft_weights=self._ttft.weights)

    def _learn_adapter_prices(self, firsts: Sequence[FirstTokenSample]) -> None:
        seen = []
        for first in firsts:
            _, host_s, disk_s = first.loads_s
            if first.features is not None and (host_s or disk_s):
                alone_s = first.unloaded_ttft_s((0.0, 0.0)) - self._ttft.expected(first.features[:LEARNED_FEATURES])
                seen.append(((host_s, disk_s), alone_s))
        if seen:
            self._adapters = learn_prices(self._adapters, seen)
            self.learned = replace(self.learned, adapter_prices=prices_of(self._adapters))

    def _learn_rates(
        self,
        firsts: Sequence[FirstTokenSample],
        loads: Mapping[str, InstanceLoad],
        instances: Mapping[str, InstanceSpec],
        now_ms: int,
    ) -> dict[str, float]:
        times: dict[str, list[BusyTime]] = {}
        for first in firsts:
            if first.unseen or first.loads_s[0]:
                continue
            times.setdefault(first.instance_id, []).append(first.busy_time)
        changed: dict[str, float] = {}
        for role in Role:
            peers = {name: load for name, load in loads.items() if name in instances and instances[name].role is role}
            seen = {name: times[name] for name in peers if name in times}
            rates = self._rates.get(role)
            if rates is None:
                if not seen:
                    continue
                rates = self._rates[role] = PeerRates.prior(peers, instances)
            rates.learn(seen, peers, instances)
            changed |= _to_publish(rates.rates(peers, instances, now_ms), peers)
        return changed

    def _learn_end(self, content: EndSample) -> None:
        if content.text_bytes and content.tokens:
            self._learn_images(content) if content.images else self._learn_ratio(content)
        if content.transfer_ms:
            self._transfer = learn_transfer(self._transfer, [(content.transferred_tokens, content.transfer_ms / 1000)])
            self.learned = replace(self.learned, transfer=transfer_cost(self._transfer))
        if content.answer_tokens:
            self._answers.add(content.output_limit, content.answer_tokens)
            self.learned = replace(self.learned, answer_tokens=self._answers.means)
        if content.answer_ms and content.answer_tokens > 1:
            self._learn_time(content.answer_ms / 1000, content.answer_tokens - 1)

    def _learn_time(self, answer_s: float, gaps: int) -> None:
        learned, tpot_s = self.learned, answer_s / gaps
        if learned.tpot_s is not None:
            tpot_s = TPOT_KEEP * learned.tpot_s + (1 - TPOT_KEEP) * tpot_s
        answer_s = TPOT_KEEP * learned.answer_s + (1 - TPOT_KEEP) * answer_s
        self.learned = replace(learned, tpot_s=tpot_s, answer_s=answer_s)

    def _learn_ratio(self, content: EndSample) -> None:
        self._text_bytes += content.text_bytes
        self._text_tokens += content.tokens
        if self._text_tokens > RATIO_MEMORY_TOKENS:
            self._text_bytes //= 2
            self._text_tokens //= 2
        if self._text_tokens < RATIO_MIN_TOKENS:
            return
        ratio, published = max(LEAST_RATIO, self._text_bytes / self._text_tokens), self.learned.bytes_per_token
        if abs(ratio - published) > RATIO_TOLERANCE * published:
            self.learned = replace(self.learned, bytes_per_token=ratio)

    def _learn_images(self, content: EndSample) -> None:
        """Learn tokens per image from the prompt's tokens less those of its text, as replicas count them."""
        self._images += content.images
        self._image_tokens += content.tokens - content.text_bytes / self.learned.bytes_per_token
        if self._images > IMAGE_MEMORY:
            self._images //= 2
            self._image_tokens /= 2
        if self._images < MIN_IMAGES:
            return
        tokens, published = max(0.0, self._image_tokens / self._images), self.learned.image_tokens
        if abs(tokens - published) > RATIO_TOLERANCE * published:
            self.learned = replace(self.learned, image_tokens=tokens)

    def forget_all_but(self, instance_ids: Set[str]) -> None:
        """Drop what is known of other instances alone: one that comes back may be another engine."""
        for rates in self._rates.values():
            rates.forget_all_but(instance_ids)


def _to_publish(rates: Mapping[str, float], loads: Mapping[str, InstanceLoad]) -> dict[str, float]:
    """The rates to publish: none while all are close to the published ones, otherwise all that differ. Equal rates stay
    exactly equal this way, and no placement depends on the moment at which they were published."""
    published = {name: loads[name].prefill_tokens_per_s for name in rates}
    if all(abs(rate - published[name]) <= PUBLISHED_SHARE * published[name] for name, rate in rates.items()):
        return {}
    return {name: rate for name, rate in rates.items() if rate != published[name]}
