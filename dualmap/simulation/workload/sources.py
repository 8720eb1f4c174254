"""The source of a run's trace: a file or a generator, cut, capped and scaled. Small, so that jobs contain it."""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache

from dualmap.runtime.spelling import did_you_mean
from dualmap.simulation.errors import TraceError
from dualmap.simulation.workload.generators import DEFAULT_SEED, GENERATORS, GeneratorSpec
from dualmap.simulation.workload.traces import Trace, read_trace


@dataclass(frozen=True, slots=True)
class TraceSource:
    """A trace by name, and what is done to it before a run."""

    source: str
    """A file, or a generator with its options (see ``simulation.workload.generators``)."""
    requests: int | None = None
    """Number of requests from ``start`` on; a generator makes exactly so many."""
    max_input_tokens: int | None = None
    block_tokens: int | None = None
    """Block size for files that do not carry theirs."""
    seed: int = DEFAULT_SEED
    start: int = 0
    """Requests of a file to skip before the first: windows of one file take the place of seeds."""

    @property
    def sources(self) -> tuple[str, ...]:
        """The files and generators that it comes from."""
        return (self.source,)

    def load(self, rate_per_s: float | None = None) -> Trace:
        """The trace, scaled to a mean rate; None keeps its own times.

        Raises:
            TraceError: the file or the generator's options are wrong.
        """
        trace = _load(self)
        return trace if rate_per_s is None else trace.at_rate(rate_per_s)


@lru_cache(maxsize=4)
def _load(source: TraceSource) -> Trace:
    """Read once per process: a process runs many jobs on one trace."""
    trace = _read(source)
    return trace if source.max_input_tokens is None else trace.capped(source.max_input_tokens)


def _read(source: TraceSource) -> Trace:
    spec = GeneratorSpec.parse(source.source)
    if spec is not None:
        return spec.generate(seed=source.seed, **({} if source.requests is None else {"requests": source.requests}))
    try:
        trace = read_trace(source.source, source.block_tokens)
    except TraceError as error:
        if error.line is None and ("/" not in source.source and "." not in source.source):
            meant = did_you_mean(source.source, GENERATORS) or f"; there are: {', '.join(GENERATORS)}"
            reason = f"neither a file nor a generator{meant}"
            raise TraceError(source.source, None, reason) from error
        raise
    return trace.window(source.start, source.requests)
