"""Instance-hours over the share on time: the day of ``dualmap evaluate --section autoscaling``, by a plan's options.

python -m benchmarks.size_curve dynamo:queue_up=2+queue_down=1+kv_up=0.4+kv_down=0.16 dualmap:margin=0.5
"""

from __future__ import annotations

from argparse import ArgumentParser
from dataclasses import replace

from dualmap.research.studies.autoscaling import COLD_START_S, DAY_LEAST, DAY_MOST, day_of
from dualmap.research.studies.plan import DEFAULT_POLICY, FULL, variant_of
from dualmap.research.variant import ScenarioOptions
from dualmap.scheduling.scaling.scale_settings import AutoscaleSettings


def main() -> None:
    parser = ArgumentParser(description=__doc__)
    parser.add_argument("plans", nargs="+", metavar="PLAN[:OPTION=VALUE+…]")
    parser.add_argument("--seed", type=int, default=1)
    arguments = parser.parse_args()
    plan = replace(FULL, seed=arguments.seed)
    settings = AutoscaleSettings(min_instances=DAY_LEAST, max_instances=DAY_MOST, start_s=COLD_START_S)
    day = day_of(plan)
    for text in arguments.plans:
        variant = replace(variant_of(DEFAULT_POLICY), options=ScenarioOptions(autoscale=settings, scaler=text))
        run = plan.run(day, variant).job.run()
        print(
            f"{text}: {100 * run.effective_capacity:.2f} % on time, {run.instance_hours:.2f} instance-hours, "
            f"{len(run.changes)} changes, {run.refused} refused",
            flush=True,
        )


if __name__ == "__main__":
    main()
