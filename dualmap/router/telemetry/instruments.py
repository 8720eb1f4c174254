"""Counters, gauges and histograms of one event loop, read by Prometheus when it scrapes.

The instruments of prometheus_client take a lock and check their labels at every addition, for threads that a replica
does not have. At two dozen additions per request that was a tenth of its CPU. These are plain numbers, written only
from the event loop.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from itertools import accumulate
from typing import Any, Generic, TypeVar

from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, HistogramMetricFamily, Metric
from prometheus_client.registry import Collector
from prometheus_client.utils import floatToGoString


class Counter:
    """A sum that only grows."""

    __slots__ = ("value",)

    def __init__(self) -> None:
        self.value = 0.0

    def inc(self, amount: float = 1.0) -> None:
        self.value += amount


class Gauge:
    """A number that comes and goes."""

    __slots__ = ("value",)

    def __init__(self) -> None:
        self.value = 0.0

    def inc(self, amount: float = 1.0) -> None:
        self.value += amount

    def set(self, value: float) -> None:
        self.value = value


class Histogram:
    """The number of values in each bucket, and their sum. A value on a bound belongs to the bucket below it.

    A value that is observed is kept until it is folded into the counts: a request pays for an entry in a list alone. A
    reader of the counts folds it, and so does every heartbeat, so that the list stays short.
    """

    __slots__ = ("_counts", "_observed", "_sum", "bounds", "observe")

    def __init__(self, bounds: Sequence[float]) -> None:
        self.bounds = bounds
        self._counts = [0] * (len(bounds) + 1)
        self._sum = 0.0
        self._observed: list[float] = []
        self.observe: Callable[[float], None] = self._observed.append

    def fold(self) -> None:
        """Sort what was observed into its buckets."""
        observed, counts, bounds = self._observed, self._counts, self.bounds
        if not observed:
            return
        for value in observed:
            counts[bisect_left(bounds, value)] += 1
        self._sum = sum(observed, self._sum)
        observed.clear()

    def add(self, counts: Sequence[int], total: float) -> None:
        """Add the counts and the sum of another one with the same bounds."""
        self._counts = [mine + more for mine, more in zip(self._counts, counts, strict=True)]
        self._sum += total

    @property
    def counts(self) -> Sequence[int]:
        """The number of values in each bucket, the last one without a bound."""
        self.fold()
        return self._counts

    @property
    def sum(self) -> float:
        self.fold()
        return self._sum

    def buckets(self) -> list[tuple[str, float]]:
        """Upper bound and how many values are not above it, as Prometheus counts: each bucket holds those before."""
        names = (*map(floatToGoString, self.bounds), "+Inf")
        return list(zip(names, map(float, accumulate(self.counts)), strict=True))


T = TypeVar("T", Counter, Gauge, Histogram)


class Family(Generic[T]):
    """One metric: an instrument for each set of label values, made when first used."""

    def __init__(
        self,
        name: str,
        text: str,
        labels: Sequence[str],
        make: Callable[[], T],
        *,
        largest: bool = False,
        most: int | None = None,
    ) -> None:
        """``largest``: of several replicas' values the largest is that of all, not the sum. ``most``: the number of
        instruments at most, of which the first made goes first; None: the label values are few."""
        self.largest = largest
        self._most = most
        self.name = name
        self.text = text
        self.labels_named = tuple(labels)
        self.instruments: dict[tuple[str, ...], T] = {}
        self._make: Callable[[], T] = make

    def labels(self, *values: str) -> T:
        """The instrument for these label values, in the order of the family's labels."""
        if len(values) != len(self.labels_named):
            raise ValueError(f"{self.name} takes the labels {self.labels_named}, not {values}")
        instrument = self.instruments.get(values)
        if instrument is None:
            if len(self.instruments) == self._most:
                del self.instruments[next(iter(self.instruments))]
            instrument = self.instruments[values] = self._make()
        return instrument

    def take(self, counts: Mapping[str, Any], add: Callable[[T, list[float]], None]) -> None:
        """Add what another one has counted (``Instruments.counts``)."""
        for values, numbers in counts.get(self.name, ()):
            if len(values) == len(self.labels_named):
                add(self.labels(*values), numbers)


class Instruments(Collector):
    """All families of one replica; register it with a ``CollectorRegistry``."""

    def __init__(self) -> None:
        self._counters: list[Family[Counter]] = []
        self._gauges: list[Family[Gauge]] = []
        self._histograms: list[Family[Histogram]] = []
        self._folds: list[Callable[[], None]] = []

    def fold_before_reading(self, fold: Callable[[], None]) -> None:
        """Have this called before values are read, and by every heartbeat, for what others keep to count at once."""
        self._folds.append(fold)

    def counter(self, name: str, text: str, *labels: str, most: int | None = None) -> Family[Counter]:
        """``name`` without ``_total``, which the export adds. ``most``: see ``Family``."""
        family = Family(name, text, labels, Counter, most=most)
        self._counters.append(family)
        return family

    def gauge(self, name: str, text: str, *labels: str, largest: bool = False) -> Family[Gauge]:
        """``largest``: see ``Family``."""
        family = Family(name, text, labels, Gauge, largest=largest)
        self._gauges.append(family)
        return family

    def histogram(self, name: str, text: str, *labels: str, bounds: Sequence[float]) -> Family[Histogram]:
        family = Family(name, text, labels, lambda: Histogram(bounds))
        self._histograms.append(family)
        return family

    def fold(self) -> None:
        """Fold what all histograms have observed, and what others keep."""
        self._fold_others()
        for histograms in self._histograms:
            for each in histograms.instruments.values():
                each.fold()

    def _fold_others(self) -> None:
        for fold in self._folds:
            fold()

    def counts(self) -> dict[str, list[Any]]:
        """All values by family, as JSON can hold them, for ``add`` of another one."""
        self._fold_others()
        counts: dict[str, list[Any]] = {}
        for counters in self._counters:
            counts[counters.name] = [[values, [each.value]] for values, each in counters.instruments.items()]
        for gauges in self._gauges:
            counts[gauges.name] = [[values, [each.value]] for values, each in gauges.instruments.items()]
        for histograms in self._histograms:
            named = histograms.instruments.items()
            counts[histograms.name] = [[values, [*each.counts, each.sum]] for values, each in named]
        return counts

    def add(self, counts: Mapping[str, Any]) -> None:
        """Add the ``counts`` of another one. What is unknown here, as of another version, is left out."""
        for counters in self._counters:
            counters.take(counts, _add_value)
        for gauges in self._gauges:
            gauges.take(counts, _take_larger if gauges.largest else _add_value)
        for histograms in self._histograms:
            histograms.take(counts, _add_counts)

    def describe(self) -> Iterable[Metric]:
        return ()  # registering must not collect

    def collect(self) -> Iterator[Metric]:
        self._fold_others()
        for counters in self._counters:
            counted = CounterMetricFamily(counters.name, counters.text, labels=counters.labels_named)
            for values, counter in counters.instruments.items():
                counted.add_metric(values, counter.value)
            yield counted
        for gauges in self._gauges:
            gauged = GaugeMetricFamily(gauges.name, gauges.text, labels=gauges.labels_named)
            for values, gauge in gauges.instruments.items():
                gauged.add_metric(values, gauge.value)
            yield gauged
        for histograms in self._histograms:
            distributed = HistogramMetricFamily(histograms.name, histograms.text, labels=histograms.labels_named)
            for values, histogram in histograms.instruments.items():
                distributed.add_metric(values, histogram.buckets(), histogram.sum)
            yield distributed


def _add_value(instrument: Counter | Gauge, numbers: list[float]) -> None:
    instrument.value += numbers[0]


def _take_larger(gauge: Gauge, numbers: list[float]) -> None:
    gauge.value = max(gauge.value, numbers[0])


def _add_counts(histogram: Histogram, numbers: list[float]) -> None:
    if len(numbers) == len(histogram.counts) + 1:
        *counts, total = numbers
        histogram.add([int(count) for count in counts], total)
