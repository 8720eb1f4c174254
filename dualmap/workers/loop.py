"""The thin loop around every job: a bounded round, a pause, and a longer pause when the round failed."""

from __future__ import annotations

import asyncio
import logging
from typing import Protocol

from dualmap.scheduling.backoff import backoff_s, worth_logging
from dualmap.statestore.errors import LeaseLostError, StoreError, StoreUnavailableError
from dualmap.workers.context import PoolContext

log = logging.getLogger(__name__)

BACKOFF_FIRST_S = 0.1
"""Pause after the first failure; each one in a row doubles it."""
BACKOFF_MAX_S = 5.0
TICK_TIMEOUT_S = 10.0
"""Timeout of one round: a store call that hangs must not end a job permanently."""


class Job(Protocol):
    """One background job of one pool."""

    name: str
    interval_s: float
    """Pause between two rounds."""

    async def tick(self) -> None:
        """One round. Raises StoreError subclasses; LeaseLostError ends the term."""


class StopJobsError(Exception):
    """A job requests the end of all jobs of its group."""


async def run_job(job: Job, context: PoolContext, *, tick_timeout_s: float = TICK_TIMEOUT_S) -> None:
    """Repeat the job's round; only LeaseLostError, StopJobsError and cancellation end it. Pauses are shorter by the
    worker's time scale, where engines are faster than the clock."""
    failures = 0
    while True:
        outcome, failure = await _bounded_tick(job, context, tick_timeout_s)
        context.metrics.ticks.labels(context.pool.name, job.name, outcome).inc()
        if failure is None:
            if failures:
                log.info("job recovered pool=%s job=%s failed_rounds=%d", context.pool.name, job.name, failures)
            failures = 0
            delay_s = job.interval_s / context.time_scale
        else:
            failures += 1
            pause_s = backoff_s(failures, first_s=BACKOFF_FIRST_S, longest_s=BACKOFF_MAX_S)
            delay_s = pause_s * context.jitter.uniform(0.75, 1.25)
            _log_failure(job, context, outcome, failure, failures)
        await context.clock.sleep(delay_s)


async def _bounded_tick(job: Job, context: PoolContext, timeout_s: float) -> tuple[str, Exception | None]:
    started_s = context.clock.monotonic_s()
    try:
        async with asyncio.timeout(timeout_s):
            await job.tick()
    except (LeaseLostError, StopJobsError):
        raise
    except StoreUnavailableError as error:
        return "store_unavailable", error
    except StoreError as error:
        return "store_error", error
    except TimeoutError as error:
        return "timeout", error
    except Exception as error:  # a defect in one job must not end the others
        return "error", error
    finally:
        took_s = context.clock.monotonic_s() - started_s
        context.metrics.tick_seconds.labels(context.pool.name, job.name).observe(took_s)
    return "ok", None


def _log_failure(job: Job, context: PoolContext, outcome: str, failure: Exception, failures: int) -> None:
    if not worth_logging(failures):
        return
    log.warning(
        "job round failed pool=%s job=%s outcome=%s failed_rounds=%d error=%r",
        context.pool.name,
        job.name,
        outcome,
        failures,
        failure,
        exc_info=failure if outcome == "error" else None,
    )
