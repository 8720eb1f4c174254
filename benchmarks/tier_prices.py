"""Whether to load or to compute: the P90 of the first token by prices, beside always and never loading, and beside
other routers.

    python -m benchmarks.tier_prices [--requests 1200] [--bandwidths 25 5 1.5] [--prompts 4000 20000 100000]
        [--models 7B 14B] [--seed 1]

Eight instances that keep 184,000 tokens each are asked about documents of one length, 2.5 times what their devices
keep, by Zipf's law; one tier behind each device keeps 800,000 tokens. *never* has no tier, *always* has engines that
take no limit. The rate is one at which instances without a tier compute for about 60 % of the time. *llm-d* and
*dynamo* are the policies of that name: they count blocks in tiers by constants, and load all of them.
"""

from __future__ import annotations

from argparse import ArgumentParser

from dualmap.scheduling.settings import SchedulingSettings
from dualmap.simulation.engine.engine_types import EngineConfig
from dualmap.simulation.engine.presets import find_preset
from dualmap.simulation.virtual_time.scenario import Scenario
from dualmap.simulation.virtual_time.simulate import simulate
from dualmap.simulation.workload.generators import documents

MODELS = {"7B": "qwen2.5-7b-910b4", "14B": "qwen2.5-14b-910b3"}
INSTANCES, DEVICE_TOKENS, TIER_TOKENS = 8, 184_000, 800_000
BUSY, MISSES = 0.6, 0.35
WAYS = {
    "never": "",
    "always": "+disk_kv_tokens={tokens}+disk_gb_per_s={bandwidth}+ignores_load_limits",
    "by price": "+disk_kv_tokens={tokens}+disk_gb_per_s={bandwidth}",
    "llm-d": "+disk_kv_tokens={tokens}+disk_gb_per_s={bandwidth}",
    "dynamo": "+disk_kv_tokens={tokens}+disk_gb_per_s={bandwidth}",
}
PEERS = ("llm-d", "dynamo")


def p90_s(engine: EngineConfig, policy: str, tokens: int, rate_per_s: float, requests: int, seed: int) -> float:
    """The P90 of the first token, of the last two thirds of the requests."""
    number = round(2.5 * INSTANCES * DEVICE_TOKENS / tokens)
    trace = documents(requests=requests, seed=seed, documents=number, tokens=tokens).at_rate(rate_per_s)
    scheduling = SchedulingSettings(policy=policy, slo_ttft_s=30.0)
    return simulate(trace, Scenario(scheduling, engine, INSTANCES, skip_requests=requests // 3)).ttft_s.p90


def main() -> None:
    parser = ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--requests", type=int, default=1200, help="(%(default)s)")
    parser.add_argument("--bandwidths", type=float, nargs="+", default=[25.0, 5.0, 1.5], help="GB/s (%(default)s)")
    parser.add_argument("--prompts", type=int, nargs="+", default=[4000, 20_000, 100_000], help="(%(default)s)")
    parser.add_argument("--models", nargs="+", choices=MODELS, default=[*MODELS])
    parser.add_argument("--seed", type=int, default=1, help="(%(default)s)")
    arguments = parser.parse_args()
    print(f"| model | GB/s | prompt | {' | '.join(WAYS)} | by price beside the better of never and always |")
    print("| --- | ---: | ---: | ---: | ---: | ---: | ---: | ---: | ---: |")
    for model in arguments.models:
        preset = MODELS[model]
        for tokens in arguments.prompts:
            card = find_preset(f"{preset}-tp1").engine
            rate_per_s = BUSY * INSTANCES * card.prefill_tokens_per_s(tokens) / tokens / MISSES
            never_s: float | None = None
            for bandwidth in arguments.bandwidths:
                times: list[float] = []
                for way, change in WAYS.items():
                    if way == "never" and never_s is not None:
                        times.append(never_s)
                        continue
                    name = f"{preset}-tp1:kv_capacity_tokens={DEVICE_TOKENS}"
                    engine = find_preset(name + change.format(tokens=TIER_TOKENS, bandwidth=bandwidth)).engine
                    policy = way if way in PEERS else "dualmap-least-cost"
                    times.append(p90_s(engine, policy, tokens, rate_per_s, arguments.requests, arguments.seed))
                never_s = times[0]
                beside = times[2] / min(times[:2]) - 1
                shown = " | ".join(f"{time_s:.2f}" for time_s in times)
                print(f"| {model} | {bandwidth:g} | {tokens:,} | {shown} | {beside:+.1%} |", flush=True)


if __name__ == "__main__":
    main()
