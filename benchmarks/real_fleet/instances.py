"""The instances that all routers are measured on: vLLM on this machine, running servers, or emulated ones."""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import json
import math
import os
import shlex
import subprocess
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field, replace
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

from dualmap.cli.fleet_plan import emulated_pool, first_of_free_ports, plain
from dualmap.runtime.pool_settings import KvEventSettings, PoolSettings
from dualmap.scheduling.settings import SchedulingSettings
from dualmap.simulation.emulator.settings import EmulatorSettings
from dualmap.simulation.emulator.time_scale import scaled_scheduling
from dualmap.simulation.engine.presets import find_preset
from dualmap.workers.probe import EngineFacts, Prober
from real_fleet.errors import LackingError
from real_fleet.machine import Card
from real_fleet.model_shape import SHAPES, write_model
from real_fleet.processes import running, wait_until_answers

SERVED_MODEL = "model"
KV_EVENTS_OFFSET, KV_REPLAY_OFFSET = 10_000, 20_000
_KV_EVENTS = KvEventSettings(
    endpoint=f"tcp://{{host}}:{{port+{KV_EVENTS_OFFSET}}}",
    replay_endpoint=f"tcp://{{host}}:{{port+{KV_REPLAY_OFFSET}}}",
)
_FIRST_PORT = 8100
_CARD_SHARE = 0.93
"""Share of a card's memory that instances may take together."""
_ENGINE_BYTES = 2_800_000_000
"""Memory of an instance besides weights and KV cache: CUDA's context, graphs and activations."""
_SHAPE_CONTEXT = 32_768
_LEAD_S = 3.0
_BUSIEST_SCALE = 16.0


@dataclass(frozen=True, slots=True)
class Instances:
    """Running instances, as routers and replays need them."""

    urls: tuple[str, ...]
    model: str
    facts: EngineFacts
    """The report of the first one about itself."""
    kv_events: KvEventSettings | None
    tokenizer: str | None
    described: str
    """The set-up in one sentence, for people."""
    time_scale: float = 1.0
    pool: Mapping[str, Any] = field(default_factory=dict)
    """Settings of each instance in the fleet's configuration, beside id and URL."""
    host_tokens: int | None = None
    """Tokens that each keeps in host memory; None: none."""

    def scheduling(self, slo_ttft_s: float) -> dict[str, Any]:
        """The fleet's scheduling settings by the clock."""
        given = SchedulingSettings(slo_ttft_s=slo_ttft_s)
        scaled = plain(scaled_scheduling(given, self.time_scale))
        return {name: value for name, value in scaled.items() if value != getattr(SchedulingSettings(), name)}


def add_arguments(parser: argparse.ArgumentParser) -> None:
    group = parser.add_argument_group("instances")
    group.add_argument("--instances", type=int, metavar="N", help="so many (none: one a card; 8 emulated ones)")
    group.add_argument("--cards", metavar="I,J", help="cards to use, by their index (none: all)")
    group.add_argument(
        "--shape", choices=SHAPES, default="qwen2.5-1.5b", help="a model of this shape with random weights"
    )
    group.add_argument("--model", metavar="FOLDER", help="a real model's folder or name, in place of a shape")
    group.add_argument(
        "--kv-cache-gb", type=float, metavar="GB",
        help="KV cache of each instance (none: vLLM's own; an even part of the free memory where several share a card)",
    )  # fmt: skip
    group.add_argument(
        "--host-tokens", type=int, metavar="N",
        help="tokens of KV cache that each instance keeps in host memory too, by vLLM's own offloading (none: none)",
    )  # fmt: skip
    group.add_argument(
        "--vllm", default=f"{sys.executable} -m vllm.entrypoints.cli.main", metavar="COMMAND",
        help="how vLLM is called, without its subcommand 'serve'",
    )  # fmt: skip
    group.add_argument("--vllm-args", default="", metavar="ARGS", help="further arguments of every 'vllm serve'")
    group.add_argument("--start-within-s", type=float, default=900.0, metavar="S", help="time for all to start")
    group.add_argument("--url", action="append", default=[], metavar="URL", help="a running vLLM server; repeat")
    group.add_argument(
        "--no-kv-events", action="store_true",
        help=f"the servers at --url publish none (else on their port + {KV_EVENTS_OFFSET}, replayed on + "
        f"{KV_REPLAY_OFFSET})",
    )  # fmt: skip
    group.add_argument(
        "--tokenizer", metavar="FOLDER",
        help="the model's tokenizer for the fleet (none: the model's folder, else the instances tokenize)",
    )  # fmt: skip
    group.add_argument("--emulated", action="store_true", help="emulated instances: no figure of real hardware")
    group.add_argument("--preset", default="qwen2.5-7b-910b4", help="the engine that they emulate")
    group.add_argument("--time-scale", type=float, default=1.0, metavar="K", help="their engine seconds in a second")


def cards_for(options: argparse.Namespace, here: Sequence[Card]) -> tuple[Card, ...]:
    """The cards of this machine that instances will be started on; none for running and emulated ones.

    Raises:
        LackingError: there are none, or not those that are wanted.
    """
    if options.url and options.emulated:
        raise LackingError("--url names running servers, --emulated starts some: choose one of them")
    if options.url or options.emulated:
        return ()
    if not here:
        raise LackingError(
            "no NVIDIA card is found (nvidia-smi lists none). Give running vLLM servers with --url URL, or see the "
            "command work on emulated instances with --emulated"
        )
    if options.cards is None:
        return tuple(here)
    known = {str(card.index): card for card in here}
    names = [name.strip() for name in options.cards.split(",") if name.strip()]
    if not names or any(name not in known for name in names):
        raise LackingError(f"--cards {options.cards}: this machine has {', '.join(known)}")
    return tuple(known[name] for name in names)


@contextmanager
def instances_of(options: argparse.Namespace, cards: Sequence[Card], folder: Path) -> Iterator[Instances]:
    """The instances that the options name, serving for the time of the block. Raises LackingError."""
    with ExitStack() as stack:
        if options.url:
            urls, events = tuple(url.rstrip("/") for url in options.url), not options.no_kv_events
            facts = _facts(urls[0])
            described = f"{len(urls)} running server{'s' if len(urls) > 1 else ''}"
            started = _real(urls, facts.models[0], facts, events, options.tokenizer or "instances", described)
        elif options.emulated:
            started = stack.enter_context(_emulated(options, folder))
        else:
            started = stack.enter_context(_vllm(options, cards, folder))
        if options.host_tokens is not None:
            described = f"{started.described}, {options.host_tokens:,} tokens each in host memory"
            started = replace(started, described=described, host_tokens=options.host_tokens)
        yield started


def _real(
    urls: tuple[str, ...], model: str, facts: EngineFacts, events: bool, tokenizer: str, described: str
) -> Instances:
    limits = [f"{described}, vLLM {facts.version}"]
    if facts.kv_capacity_tokens:
        limits.append(f"{facts.kv_capacity_tokens:,} tokens of KV cache each")
    if facts.max_num_batched_tokens:
        limits.append(f"{facts.max_num_batched_tokens:,} tokens a step")
    if facts.max_num_seqs:
        limits.append(f"{facts.max_num_seqs} sequences")
    pool = {"max_running_requests": facts.max_num_seqs} if facts.max_num_seqs else {}
    kv_events = _KV_EVENTS if events else None
    return Instances(urls, model, facts, kv_events, tokenizer, ", ".join(limits), pool=pool)


def _facts(url: str) -> EngineFacts:
    async def ask() -> EngineFacts:
        async with Prober(timeout_s=10.0) as prober:
            return await prober.facts(url)

    facts = asyncio.run(ask())
    if not facts.models:
        raise LackingError(f"{url}/v1/models names no model: is it a vLLM server?")
    return facts


# emulated --------------------------------------------------------------------------------------------------------
@contextmanager
def _emulated(options: argparse.Namespace, folder: Path) -> Iterator[Instances]:
    count = options.instances or 8
    port = first_of_free_ports(_FIRST_PORT, count, "127.0.0.1")
    preset = options.preset
    if options.host_tokens is not None:
        preset += f"{'+' if ':' in preset else ':'}host_kv_tokens={options.host_tokens}"
    settings = EmulatorSettings(
        preset=preset,
        instances=count,
        port=port,
        time_scale=options.time_scale,
        kv_events_port_offset=KV_EVENTS_OFFSET,
        stream_interval=max(1, round(min(_BUSIEST_SCALE, 2 * options.time_scale))),  # the machine's share of a token
    )
    words = [sys.executable, "-m", "dualmap", "emulate"]
    for name in ("preset", "instances", "port", "time_scale", "kv_events_port_offset", "stream_interval"):
        words += [f"--emulator.{name}", str(getattr(settings, name))]
    log = folder / "logs" / "instances.log"
    pool = emulated_pool(PoolSettings(), settings)
    urls = tuple(one.url for one in pool.instances)
    with running(words, log, os.environ) as process:
        for url in urls:
            wait_until_answers(f"{url}/health", process, log, 60)
        facts = _facts(urls[0])
        own = ("prefill_tokens_per_s", "kv_capacity_tokens", "max_running_requests")
        scale = "" if options.time_scale == 1 else f", {options.time_scale:g} engine seconds in a second"
        yield Instances(
            urls, facts.models[0], facts, _KV_EVENTS, options.tokenizer or "instances",
            f"{count} **emulated** instances ({find_preset(preset).name}{scale}): nothing here is measured on "
            "hardware",
            options.time_scale,
            {name: getattr(pool.instances[0], name) for name in own},
        )  # fmt: skip


# vLLM ------------------------------------------------------------------------------------------------------------
@contextmanager
def _vllm(options: argparse.Namespace, cards: Sequence[Card], folder: Path) -> Iterator[Instances]:
    count = options.instances or len(cards)
    per_card = math.ceil(count / len(cards))
    model, random_weights, weight_bytes = _model(options, folder)
    kv_bytes = _kv_bytes(options.kv_cache_gb, min(card.memory_mib for card in cards), per_card, weight_bytes)
    port = first_of_free_ports(_FIRST_PORT, count, "127.0.0.1")
    words = [*shlex.split(options.vllm), "serve", model, "--served-model-name", SERVED_MODEL, "--host", "127.0.0.1"]
    words += ["--enable-prefix-caching", "--enable-prompt-tokens-details"]
    if random_weights:
        words += ["--load-format", "dummy", "--max-model-len", str(_SHAPE_CONTEXT)]
    if kv_bytes is not None:
        # The utilization is checked against free memory before, which the others take at the same time.
        words += ["--kv-cache-memory-bytes", str(kv_bytes), "--gpu-memory-utilization", "0.05"]
    if options.host_tokens is not None:
        words += ["--kv-transfer-config", _offloading(options.host_tokens * kv_bytes_of(Path(model)))]
    words += shlex.split(options.vllm_args)
    with ExitStack() as stack:
        environment = {**os.environ, "VLLM_SERVER_DEV_MODE": "1"}  # /server_info reports the scheduler's limits
        environment["PYTHONHASHSEED"] = "0"
        if per_card > 1:
            environment |= stack.enter_context(_mps(folder))
            environment["CUDA_MPS_ACTIVE_THREAD_PERCENTAGE"] = f"{100 / per_card:g}"
        started, ending = [], ExitStack()  # all are to end before the first one is waited for
        for number in range(count):
            own = {**environment, "CUDA_VISIBLE_DEVICES": str(cards[number % len(cards)].index)}
            here, log = port + number, folder / "logs" / f"vllm-{number + 1}.log"
            process = stack.enter_context(running([*words, "--port", str(here), *_publishing(here)], log, own))
            ending.callback(process.terminate)
            started.append((f"http://127.0.0.1:{here}", process, log))
            if number == 0 and per_card > 1:
                time.sleep(_LEAD_S)  # the first one starts the server of MPS
        stack.enter_context(ending)
        deadline_s = time.monotonic() + options.start_within_s
        for url, process, log in started:
            _wait_for_vllm(options.vllm, f"{url}/health", process, log, max(1.0, deadline_s - time.monotonic()))
        described = f"{count} instances on {len(cards)} card{'s' if len(cards) > 1 else ''}"
        if per_card > 1:
            described += f" ({100 / per_card:g} % of the multiprocessors each, by MPS)"
        described += f", {_weights(options)}"
        if options.vllm_args:
            described += f", `{options.vllm_args}`"
        urls = tuple(url for url, _, _ in started)
        tokenizer = options.tokenizer or (model if Path(model).is_dir() else "instances")
        torch = _installed("torch")
        yield _real(urls, SERVED_MODEL, _facts(urls[0]), True, tokenizer, described + (f", {torch}" if torch else ""))


def _wait_for_vllm(command: str, url: str, process: subprocess.Popen[bytes], log: Path, within_s: float) -> None:
    try:
        wait_until_answers(url, process, log, within_s)
    except LackingError as error:
        raise LackingError(
            f"'{command} serve' does not start; install vLLM (pip install vllm) into the Python that runs this, or "
            f"name its command with --vllm: {error}"
        ) from error


def _offloading(host_bytes: int) -> str:
    own = {"spec_name": "TieringOffloadingSpec", "cpu_bytes_to_use": host_bytes}
    config = {"kv_connector": "OffloadingConnector", "kv_role": "kv_both", "kv_load_failure_policy": "recompute"}
    return json.dumps(config | {"kv_connector_extra_config": own})


def kv_bytes_of(model: Path) -> int:
    """Bytes of a token's KV, at two a value, by a model's folder.

    Raises:
        LackingError: the folder does not say them.
    """
    try:
        config = json.loads((model / "config.json").read_text())
        heads = config["num_attention_heads"]
        size = config.get("head_dim") or config["hidden_size"] // heads
        return int(2 * 2 * config["num_hidden_layers"] * config.get("num_key_value_heads", heads) * size)
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise LackingError(f"--host-tokens needs the model's folder, with its config.json: {error!r}") from error


def _publishing(port: int) -> list[str]:
    config = {
        "enable_kv_cache_events": True, "publisher": "zmq", "topic": "kv",
        "endpoint": f"tcp://*:{port + KV_EVENTS_OFFSET}", "replay_endpoint": f"tcp://*:{port + KV_REPLAY_OFFSET}",
    }  # fmt: skip
    return ["--kv-events-config", json.dumps(config)]


def _installed(package: str) -> str | None:
    """The package and its version, if it is in this Python."""
    with contextlib.suppress(PackageNotFoundError):
        return f"{package} {version(package)}"
    return None


def _weights(options: argparse.Namespace) -> str:
    if options.model:
        return f"model {Path(options.model).name}"
    return f"the shape of {options.shape} with random weights and a small vocabulary"


def _model(options: argparse.Namespace, folder: Path) -> tuple[str, bool, int | None]:
    """The model that vLLM is to serve, whether the weights are random, and their bytes if known."""
    if options.model is None:
        shape, made = SHAPES[options.shape], folder.resolve() / "model"
        write_model(made, shape)
        return str(made), True, shape.weight_bytes
    files = list(Path(options.model).glob("*.safetensors"))
    return options.model, False, sum(file.stat().st_size for file in files) or None


def _kv_bytes(gigabytes: float | None, card_mib: int, per_card: int, weight_bytes: int | None) -> int | None:
    """KV cache of an instance; None: vLLM takes what it finds.

    Raises:
        LackingError: the card is too small, or the size of the weights is unknown.
    """
    if gigabytes is not None:
        return round(gigabytes * 1e9)
    if per_card == 1:
        return None
    if weight_bytes is None:
        raise LackingError("several instances of this model share a card: state the KV cache of each, --kv-cache-gb GB")
    free = round(card_mib * 2**20 * _CARD_SHARE / per_card) - weight_bytes - _ENGINE_BYTES
    if free < 500_000_000:
        raise LackingError(
            f"{per_card} instances with {weight_bytes / 1e9:.1f} GB of weights do not fit a card of {card_mib} MiB: "
            "choose fewer with --instances, or a smaller --shape"
        )
    return free


@contextmanager
def _mps(folder: Path) -> Iterator[dict[str, str]]:
    """The environment of clients of NVIDIA's multi-process service: a running one's, or one for this block."""
    control = "nvidia-cuda-mps-control"

    def tell(words: str, environment: Mapping[str, str]) -> bool:
        return subprocess.run([control], input=words, text=True, env=environment, capture_output=True).returncode == 0

    pipes = folder.resolve() / "mps"
    own = {"CUDA_MPS_PIPE_DIRECTORY": str(pipes), "CUDA_MPS_LOG_DIRECTORY": str(pipes)}
    try:
        runs_already = tell("get_server_list\n", os.environ)
        if not runs_already:
            pipes.mkdir(parents=True, exist_ok=True)
            subprocess.run([control, "-d"], env={**os.environ, **own}, check=True, capture_output=True)
    except (OSError, subprocess.CalledProcessError) as error:
        raise LackingError(
            f"several instances share a card, and its multi-process service does not start: {error}"
        ) from error
    if runs_already:
        yield {}
        return
    try:
        yield own
    finally:
        tell("quit\n", {**os.environ, **own})
