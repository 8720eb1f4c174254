"""How fast runs are simulated: CPU seconds and peak memory, against their limits.

    python benchmarks/simulation_speed.py [--policies dualmap,preble] [--repetitions 3] [--skip-large]

Small: 4,000 Conversation requests on 8 instances, one policy, at most 6 s of one core.
Large: 32,000 requests on 32 instances, one policy, at most 90 s of one core and 1 GB.
Each run has a process of its own, so that peak memory is its own too. Exit code 1 when a limit is passed.
"""

from __future__ import annotations

import argparse
import multiprocessing
import resource
import sys
import time
from dataclasses import dataclass, replace

from dualmap.research.studies.plan import FULL, variant_of
from dualmap.scheduling.settings import PolicyName
from dualmap.simulation.commands.options import policies_of


@dataclass(frozen=True, slots=True)
class Case:
    name: str
    trace: str
    requests: int
    instances: int
    cpu_limit_s: float
    memory_limit_mb: float


CASES = (
    Case("small", "conversation", 4_000, 8, 6.0, 1024),
    Case("large", "toolagent", 32_000, 32, 90.0, 1024),
)
LOAD = 0.85


def measure(case: Case, policy: PolicyName) -> tuple[float, float, float]:
    """(CPU s, peak memory in MB, share on time) of making the trace and running it."""
    started = time.process_time()
    workload = replace(FULL.workload(case.trace, requests=case.requests), instances=case.instances)
    result = FULL.run(workload, variant_of(policy), FULL.rate(workload, LOAD)).job.run()
    cpu_s = time.process_time() - started
    return cpu_s, resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024, result.effective_capacity


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--policies", default="dualmap,preble,llm-d")
    parser.add_argument("--repetitions", type=int, default=3)
    parser.add_argument("--skip-large", action="store_true")
    arguments = parser.parse_args()
    too_slow = False
    print(f"{'case':<7}{'policy':<24}{'CPU s':>8}{'limit':>7}{'MB':>7}{'limit':>7}{'on time':>9}")
    for case in CASES[: 1 if arguments.skip_large else 2]:
        for policy in policies_of(arguments.policies):
            with multiprocessing.get_context("spawn").Pool(1, maxtasksperchild=1) as pool:
                runs = [pool.apply(measure, (case, policy)) for _ in range(arguments.repetitions)]
            cpu_s, memory_mb = min(run[0] for run in runs), max(run[1] for run in runs)
            too_slow |= cpu_s > case.cpu_limit_s or memory_mb > case.memory_limit_mb
            print(
                f"{case.name:<7}{policy:<24}{cpu_s:>8.2f}{case.cpu_limit_s:>7.0f}{memory_mb:>7.0f}"
                f"{case.memory_limit_mb:>7.0f}{runs[0][2]:>9.1%}"
            )
    return 1 if too_slow else 0


if __name__ == "__main__":
    sys.exit(main())
