"""The thin loop around every job: a bounded round, a pause, and a longer pause when the round failed."""

from __future__ import annotations

import asyncio
import logging
import random
from dataclasses import dataclass
from typing import Protocol

from statestore.clock import Clock
from statestore.errors import LeaseLostError, StoreUnavailableError
from workers.metrics import WorkerMetrics

log = logging.getLogger(__name__)

_BACKOFF_FIRST_S = 0.1


class Job(Protocol):
    """One background job of one pool."""

    name: str
    interval_s: float
    """Pause between two rounds."""

    async def tick(self) -> None:
        """One round. Raises StoreError subclasses; LeaseLostError ends the term."""


@dataclass(frozen=True, slots=True)
class LoopContext:
    """What every loop of a worker shares."""

    pool_name: str
    clock: Clock
    metrics: WorkerMetrics
    jitter: random.Random
    tick_timeout_s: float
    backoff_max_s: float


def backoff_s(failures: int, longest_s: float) -> float:
    """Pause after that many failed rounds in a row: doubling from 0.1 s, bounded."""
    return min(longest_s, _BACKOFF_FIRST_S * 2.0 ** min(failures - 1, 30))


def worth_logging(failures: int) -> bool:
    """True for failures 1, 2, 4, 8, …: an outage is told without flooding the log."""
    return failures & (failures - 1) == 0


async def run_job(job: Job, context: LoopContext) -> None:
    """Repeat the job's round for ever; only LeaseLostError and cancellation end it."""
    failures = 0
    while True:
        outcome, failure = await _bounded_tick(job, context)
        context.metrics.ticks.labels(context.pool_name, job.name, outcome).inc()
        if failure is None:
            if failures:
                log.info("job recovered pool=%s job=%s failed_rounds=%d", context.pool_name, job.name, failures)
            failures = 0
            delay_s = job.interval_s
        else:
            failures += 1
            delay_s = backoff_s(failures, context.backoff_max_s) * context.jitter.uniform(0.75, 1.25)
            _log_failure(job, context, outcome, failure, failures)
        await context.clock.sleep(delay_s)


async def _bounded_tick(job: Job, context: LoopContext) -> tuple[str, Exception | None]:
    started_s = context.clock.monotonic_s()
    try:
        async with asyncio.timeout(context.tick_timeout_s):
            await job.tick()
    except LeaseLostError:
        raise
    except StoreUnavailableError as error:
        return "store_unavailable", error
    except TimeoutError as error:
        return "timeout", error
    except Exception as error:  # a defect in one job must not end the others
        return "error", error
    finally:
        took_s = context.clock.monotonic_s() - started_s
        context.metrics.tick_seconds.labels(context.pool_name, job.name).observe(took_s)
    return "ok", None


def _log_failure(job: Job, context: LoopContext, outcome: str, failure: Exception, failures: int) -> None:
    if not worth_logging(failures):
        return
    log.warning(
        "job round failed pool=%s job=%s outcome=%s failed_rounds=%d error=%r",
        context.pool_name,
        job.name,
        outcome,
        failures,
        failure,
        exc_info=failure if outcome == "error" else None,
    )
