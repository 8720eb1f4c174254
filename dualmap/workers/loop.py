"""The thin loop around every job: a bounded round, a pause, and a longer pause when the round failed."""

from __future__ import annotations

import asyncio
import logging
import random
from dataclasses import dataclass
from typing import Protocol

from dualmap.runtime.clock import Clock
from dualmap.scheduling.backoff import backoff_s, worth_logging
from dualmap.statestore.errors import LeaseLostError, StoreError, StoreUnavailableError
from dualmap.workers.metrics import WorkerMetrics

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


@dataclass(frozen=True, slots=True)
class LoopContext:
    """Resources that every loop of a worker shares."""

    pool_name: str
    clock: Clock
    metrics: WorkerMetrics
    jitter: random.Random
    tick_timeout_s: float = TICK_TIMEOUT_S
    backoff_max_s: float = BACKOFF_MAX_S
    time_scale: float = 1.0
    """Divides the pauses, where engines are faster than the clock."""


class StopJobsError(Exception):
    """A job requests the end of all jobs of its group."""


async def run_job(job: Job, context: LoopContext) -> None:
    """Repeat the job's round; only LeaseLostError, StopJobsError and cancellation end it."""
    failures = 0
    while True:
        outcome, failure = await _bounded_tick(job, context)
        context.metrics.ticks.labels(context.pool_name, job.name, outcome).inc()
        if failure is None:
            if failures:
                log.info("job recovered pool=%s job=%s failed_rounds=%d", context.pool_name, job.name, failures)
            failures = 0
            delay_s = job.interval_s / context.time_scale
        else:
            failures += 1
            pause_s = backoff_s(failures, first_s=BACKOFF_FIRST_S, longest_s=context.backoff_max_s)
            delay_s = pause_s * context.jitter.uniform(0.75, 1.25)
            _log_failure(job, context, outcome, failure, failures)
        await context.clock.sleep(delay_s)


async def _bounded_tick(job: Job, context: LoopContext) -> tuple[str, Exception | None]:
    started_s = context.clock.monotonic_s()
    try:
        async with asyncio.timeout(context.tick_timeout_s):
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
