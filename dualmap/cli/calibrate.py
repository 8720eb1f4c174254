"""``dualmap calibrate``: what an instance reports, by the workers' probe, and how fast it is, by the simulation's."""

from __future__ import annotations

import argparse
import asyncio
import sys

from dualmap.cli.errors import CommandError
from dualmap.cli.instance_trust import instance_trust
from dualmap.cli.settings import Settings
from dualmap.runtime.pool_settings import why_no_base_url
from dualmap.runtime.trust import InstanceTrust
from dualmap.simulation.calibrate.preset import Limits
from dualmap.simulation.commands import calibrate
from dualmap.workers.probe import EngineFacts, Prober

DEFAULT_BATCHED_TOKENS = 2048
DEFAULT_SEQS = 256
"""vLLM's own, on most devices."""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    calibrate.add_arguments(parser)


def run(arguments: argparse.Namespace, settings: Settings) -> int:
    if calibrate.is_silicon(arguments.url):
        return calibrate.write_silicon(arguments)
    key = settings.router.upstream_api_key
    api_key = key.get_secret_value() if key is not None else None
    arguments.url = arguments.url.rstrip("/")
    if (reason := why_no_base_url(arguments.url)) is not None:
        raise CommandError(f"the URL must be http://HOST:PORT: {reason}")
    trust = instance_trust(settings)
    facts = asyncio.run(_facts(arguments.url, api_key, trust))
    return calibrate.run(arguments, _limits(arguments, facts), api_key, trust)


async def _facts(url: str, api_key: str | None, trust: InstanceTrust) -> EngineFacts:
    async with Prober(timeout_s=10.0, api_key=api_key, trust=trust) as prober:
        return await prober.facts(url)


def _limits(arguments: argparse.Namespace, facts: EngineFacts) -> Limits:
    capacity, block_tokens, longest = facts.kv_capacity_tokens, facts.block_tokens, facts.max_model_len
    if not facts.models or capacity is None or block_tokens is None or longest is None:
        raise CommandError(
            f"{arguments.url} does not report its model, context length and KV cache (/v1/models and /metrics): is it"
            " a vLLM server, and does it need router.upstream_api_key?"
        )
    budget = arguments.batched_tokens or facts.max_num_batched_tokens
    sequences = arguments.seqs or facts.max_num_seqs
    if budget is None or sequences is None:
        print(
            "dualmap calibrate: the server does not report its scheduler's limits (VLLM_SERVER_DEV_MODE=1 makes it);"
            f" {budget or DEFAULT_BATCHED_TOKENS} tokens a step and {sequences or DEFAULT_SEQS} sequences are assumed,"
            " see --batched-tokens and --seqs",
            file=sys.stderr,
        )
    return Limits(
        model=arguments.model or facts.models[0],
        kv_capacity_tokens=capacity,
        block_tokens=block_tokens,
        max_num_batched_tokens=budget or DEFAULT_BATCHED_TOKENS,
        max_num_seqs=sequences or DEFAULT_SEQS,
        max_model_len=longest,
    )
