"""The field's load tools through a fleet as before one vLLM: does each run to its end, and do its counts agree with the
fleet's?

    python benchmarks/load_tools.py --install tools                        # once: an environment for each tool
    python benchmarks/load_tools.py --install tools --only inference-perf --python /path/to/python3.13
    python benchmarks/load_tools.py --tools tools                          # a fleet with emulated instances of its own
    python benchmarks/load_tools.py --tools tools --url http://router:8000 --model NAME --tokenizer FOLDER --key KEY
    python benchmarks/load_tools.py --tools tools --only guidellm,aiperf --vllm /path/to/venv/bin/vllm

Each tool sends the same kind of load: requests of 256 tokens that answer with 32, 8 at a time. A tool passes if it ends
well, reports every request as answered with all its tokens, and the fleet's counters grew by as many answers or more
(some tools send requests to warm up, or to look at the server), and by no failure. docs/operate/benchmarking.md has the
commands for people.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import subprocess
import sys
import tempfile
import time
import urllib.request
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from real_fleet.errors import LackingError
from real_fleet.model_shape import SHAPES, write_model
from real_fleet.processes import running, wait_until_answers

from dualmap.cli.fleet_plan import first_of_free_ports
from dualmap.research.chaos.fleet_process import unconfigured

REQUESTS, CLIENTS, INPUT_TOKENS, OUTPUT_TOKENS = 64, 8, 256, 32
MODEL = "qwen2.5-7b"
INSTANCES = 4
TOOL_WITHIN_S = 420.0
SHARES_TRIES = 5
PYTHONS = (sys.executable, "python3.14", "python3.13", "python3.12")
"""Where a Python that is new enough for a tool is looked for, in this order."""


@dataclass(frozen=True, slots=True)
class Target:
    """The endpoint under load."""

    url: str
    """Without /v1."""
    model: str
    tokenizer: Path
    seed: int
    """A number of each run's own, so that the caches have none of its texts."""
    key: str | None


@dataclass(frozen=True, slots=True)
class Reported:
    """The counts of a tool's own report."""

    answered: int
    failed: int
    output_tokens: float
    """Tokens of all answers."""
    ttft_p50_s: float


@dataclass(frozen=True, slots=True)
class Tool:
    """One load tool."""

    package: str
    command: str
    """The program, in the environment of the tool."""
    words: Callable[[Target, Path], list[str]]
    """The arguments of the program; the folder is for the report."""
    reported: Callable[[Path], Reported]
    oldest_python: tuple[int, int] = (3, 11)
    """Major and minor version of the oldest Python that it runs on."""


def _only(folder: Path, pattern: str) -> Any:
    """The JSON of the one report that has this name."""
    found = sorted(folder.rglob(pattern), key=lambda path: path.stat().st_mtime)
    if not found:
        raise LackingError(f"it wrote no {pattern}")
    return json.loads(found[-1].read_text())


# vllm bench serve ------------------------------------------------------------------------------------------------
def _vllm_words(target: Target, folder: Path) -> list[str]:
    return [
        "bench", "serve", "--backend", "openai", "--base-url", target.url, "--endpoint", "/v1/completions",
        "--model", target.model, "--tokenizer", str(target.tokenizer), "--dataset-name", "random",
        "--random-input-len", str(INPUT_TOKENS), "--random-output-len", str(OUTPUT_TOKENS), "--ignore-eos",
        "--num-prompts", str(REQUESTS), "--max-concurrency", str(CLIENTS), "--seed", str(target.seed),
        "--save-result", "--result-dir", str(folder), "--result-filename", "report.json",
    ]  # fmt: skip


def _vllm_report(folder: Path) -> Reported:
    report = _only(folder, "report.json")
    failed = int(report.get("failed", REQUESTS - report["completed"]))
    return Reported(report["completed"], failed, report["total_output_tokens"], report["median_ttft_ms"] / 1000)


# guidellm --------------------------------------------------------------------------------------------------------
def _guidellm_words(target: Target, folder: Path) -> list[str]:
    key = "" if target.key is None else f",api_key={target.key}"
    return [
        "run", "--backend", f"kind=openai_http,target={target.url},model={target.model}{key}",
        "--tokenizer", f"kind=huggingface_auto,model={target.tokenizer}",
        "--profile", f"kind=concurrent,streams={CLIENTS}", "--constraint", f"kind=max_requests,count={REQUESTS}",
        "--data", f"kind=synthetic_text,prompt_tokens={INPUT_TOKENS},output_tokens={OUTPUT_TOKENS}",
        "--seed", f"kind=static,value={target.seed}", "--output", f"kind=json,path={folder / 'report.json'}",
        "--disable-console",
    ]  # fmt: skip


def _guidellm_report(folder: Path) -> Reported:
    (benchmark,) = _only(folder, "report.json")["benchmarks"]
    metrics = benchmark["metrics"]
    totals = metrics["request_totals"]
    return Reported(
        totals["successful"],
        totals["errored"] + totals["incomplete"],
        metrics["output_token_count"]["successful"]["total_sum"],
        metrics["time_to_first_token_ms"]["successful"]["median"] / 1000,
    )


# aiperf ----------------------------------------------------------------------------------------------------------
def _aiperf_words(target: Target, folder: Path) -> list[str]:
    return [
        "profile", "--model", target.model, "--url", target.url, "--endpoint-type", "chat", "--streaming",
        "--tokenizer", str(target.tokenizer), "--concurrency", str(CLIENTS), "--request-count", str(REQUESTS),
        "--synthetic-input-tokens-mean", str(INPUT_TOKENS), "--output-tokens-mean", str(OUTPUT_TOKENS),
        "--extra-inputs", "ignore_eos:true", "--extra-inputs", f"min_tokens:{OUTPUT_TOKENS}",
        "--random-seed", str(target.seed), "--use-server-token-count", "--artifact-dir", str(folder), "--ui", "none",
    ]  # fmt: skip


def _aiperf_report(folder: Path) -> Reported:
    report = _only(folder, "profile_export_aiperf.json")
    answered = round(report["request_count"]["avg"])
    errors = report.get("error_request_count") or {}
    return Reported(
        answered,
        round(errors.get("avg") or 0),
        report["output_sequence_length"]["avg"] * answered,
        report["time_to_first_token"]["p50"] / 1000,
    )


# inference-perf --------------------------------------------------------------------------------------------------
def _inference_perf_words(target: Target, folder: Path) -> list[str]:
    lengths = {
        name: {"min": tokens, "max": tokens, "mean": tokens, "std_dev": 0, "total_count": REQUESTS}
        for name, tokens in (("input_distribution", INPUT_TOKENS), ("output_distribution", OUTPUT_TOKENS))
    }
    config = {
        "api": {"type": "completion", "streaming": True},
        "data": {"type": "random", **lengths},
        "load": {
            "type": "concurrent", "num_workers": 1,
            "stages": [{"num_requests": REQUESTS, "concurrency_level": CLIENTS}],
        },
        "server": {
            "type": "vllm", "model_name": target.model, "base_url": target.url, "ignore_eos": True,
            **({} if target.key is None else {"api_key": target.key}),
        },
        "tokenizer": {"pretrained_model_name_or_path": str(target.tokenizer)},
        "report": {
            "request_lifecycle": {
                "summary": True, "per_stage": False, "per_request": False, "use_server_output_tokens": True,
            },
        },
        "storage": {"local_storage": {"path": str(folder / "report")}},
    }  # fmt: skip
    path = folder / "config.yml"
    path.write_text(json.dumps(config))  # JSON is YAML
    return ["--config_file", str(path)]


def _inference_perf_report(folder: Path) -> Reported:
    report = _only(folder, "summary_lifecycle_metrics.json")
    answered = report["successes"]
    return Reported(
        answered["count"],
        report["failures"]["count"],
        answered["output_tokens"]["total"],
        answered["latency"]["time_to_first_token"]["median"],
    )


# evalscope -------------------------------------------------------------------------------------------------------
def _evalscope_words(target: Target, folder: Path) -> list[str]:
    return [
        "perf", "--url", f"{target.url}/v1/chat/completions", "--api", "openai", "--model", target.model,
        "--tokenizer-path", str(target.tokenizer), "--dataset", "random",
        "--min-prompt-length", str(INPUT_TOKENS), "--max-prompt-length", str(INPUT_TOKENS),
        "--min-tokens", str(OUTPUT_TOKENS), "--max-tokens", str(OUTPUT_TOKENS), "--extra-args", '{"ignore_eos": true}',
        "--parallel", str(CLIENTS), "--number", str(REQUESTS), "--seed", str(target.seed), "--stream",
        "--outputs-dir", str(folder),
        *(() if target.key is None else ("--api-key", target.key)),
    ]  # fmt: skip


def _evalscope_report(folder: Path) -> Reported:
    report = _only(folder, "benchmark_summary.json")
    answered = int(report["Success Requests"])
    return Reported(
        answered,
        int(report["Failed Requests"]),
        report["Avg Output Tokens"] * answered,
        report["Avg TTFT (ms)"] / 1000,
    )


TOOLS: Mapping[str, Tool] = {
    "vllm bench serve": Tool("", "vllm", _vllm_words, _vllm_report),
    "guidellm": Tool("guidellm==0.8.1", "guidellm", _guidellm_words, _guidellm_report),
    "aiperf": Tool("aiperf==0.13.0", "aiperf", _aiperf_words, _aiperf_report),
    "inference-perf": Tool(
        "inference-perf==0.7.0", "inference-perf", _inference_perf_words, _inference_perf_report, (3, 12)
    ),
    "evalscope": Tool("evalscope[perf]==1.14.1", "evalscope", _evalscope_words, _evalscope_report),
}


def version_of(python: str) -> tuple[int, int] | None:
    """Major and minor version of a Python, None if there is no such program."""
    try:
        words = [python, "-c", "import sys; print(*sys.version_info[:2])"]
        done = subprocess.run(words, capture_output=True, text=True, check=True)
    except (OSError, subprocess.CalledProcessError):
        return None
    major, minor = done.stdout.split()
    return int(major), int(minor)


def python_for(name: str, pythons: Sequence[str] = PYTHONS) -> str:
    """The first of these Pythons that is new enough for a tool. Raises LackingError."""
    needed = TOOLS[name].oldest_python
    for python in pythons:
        if (version_of(python) or (0, 0)) >= needed:
            return python
    needed_text = ".".join(map(str, needed))
    raise LackingError(f"{name} needs Python {needed_text} or newer, which {', '.join(pythons)} is not: add --python")


def install(folder: Path, names: Sequence[str], pythons: Sequence[str]) -> None:
    """An environment of its own for each of these tools but vLLM's, whose is that of an installed vLLM.

    Raises:
        LackingError: some could not be installed; the others are.
    """
    failed = []
    for name in names:
        package, home = TOOLS[name].package, folder / name
        if not package:
            continue
        try:
            python = python_for(name, pythons)
        except LackingError as error:
            failed.append(str(error))
            continue
        steps = ([python, "-m", "venv", str(home)], [str(home / "bin" / "pip"), "install", "--quiet", package])
        if any(subprocess.run(step, check=False).returncode != 0 for step in steps):
            failed.append(f"{package} could not be installed into {home}")
    if failed:
        raise LackingError("; ".join(failed))


def program_of(name: str, tools: Path | None, vllm: str) -> str:
    """The program of a tool. Raises LackingError."""
    if name == "vllm bench serve":
        return vllm
    program = Path(sys.executable).parent / TOOLS[name].command
    if tools is not None:
        program = tools / name / "bin" / TOOLS[name].command
    if not program.exists():
        raise LackingError(f"{name} is not at {program}: add --install DIR first, then --tools DIR")
    return str(program.absolute())


# the fleet -------------------------------------------------------------------------------------------------------
@contextlib.contextmanager
def emulated_fleet(folder: Path) -> Iterator[Target]:
    """A fleet with emulated instances, and a tokenizer for the tools. Raises LackingError."""
    tokenizer = folder / "tokenizer"
    write_model(tokenizer, SHAPES["qwen2.5-0.5b"])
    port = first_of_free_ports(18_000, 40, "127.0.0.1")
    words = [sys.executable, "-m", "dualmap", "up", "--port", str(port), "--instances", str(INSTANCES)]
    words += ["--replicas", "2", "--time-scale", "5", "--status-interval-s", "60"]
    url, log = f"http://127.0.0.1:{port}", folder / "fleet.log"
    with running(words, log, unconfigured()) as process:
        wait_until_answers(f"{url}/ready", process, log, 120)
        yield Target(url, MODEL, tokenizer, seed=1, key=None)


def answers_of(shares: Mapping[str, Any]) -> tuple[int, int, int]:
    """Answers, requests that had none, and instances, of ``/admin/shares``."""
    served = shares["instances"]
    answered = sum(each["answered"] for each in served.values())
    return answered, sum(each["requests"] for each in served.values()) - answered, len(served.keys() - {"none"})


def shares_since(target: Target, since_s: float) -> dict[str, Any]:
    """``/admin/shares`` from this moment on, by ``time.monotonic``. A busy replica may not answer the first time.

    Raises:
        LackingError: a replica does not answer at all.
    """
    missing: object = None
    for _ in range(SHARES_TRIES):
        seconds = time.monotonic() - since_s + 1
        request = urllib.request.Request(f"{target.url}/admin/shares?seconds={seconds:.1f}")
        if target.key is not None:
            request.add_header("authorization", f"Bearer {target.key}")
        with urllib.request.urlopen(request, timeout=20) as answer:
            found: dict[str, Any] = json.loads(answer.read())
        missing = found["not_asked"]
        if not missing:
            return found
    raise LackingError(f"the counts of some replicas are missing: {missing}")


# the runs --------------------------------------------------------------------------------------------------------
@dataclass(frozen=True, slots=True)
class Verdict:
    """The outcome of one tool."""

    name: str
    reported: Reported | None
    seen: tuple[int, int, int] | None
    """Answers, failures and instances that the fleet counted."""
    reason: str = ""
    """Why it did not pass; empty: it did."""


def run(name: str, program: str, target: Target, folder: Path) -> Verdict:
    tool, log = TOOLS[name], folder / "log"
    folder.mkdir(parents=True)
    environment = {**os.environ, "OPENAI_API_KEY": target.key or "none", "DO_NOT_TRACK": "1"}
    started_s = time.monotonic()
    with log.open("wb") as output:
        try:
            done = subprocess.run(
                [program, *tool.words(target, folder)], stdout=output, stderr=subprocess.STDOUT, cwd=folder,
                stdin=subprocess.DEVNULL, env=environment, check=False, timeout=TOOL_WITHIN_S,
            )  # fmt: skip
        except (OSError, subprocess.TimeoutExpired) as error:
            return Verdict(name, None, None, f"{error}; its output: {log}")
    try:
        seen = answers_of(shares_since(target, started_s))
    except LackingError as error:
        return Verdict(name, None, None, str(error))
    if done.returncode != 0:
        return Verdict(name, None, seen, f"ended with {done.returncode}; its output: {log}")
    try:
        reported = tool.reported(folder)
    except (LackingError, KeyError, ValueError, TypeError) as error:
        return Verdict(name, None, seen, f"its report cannot be read: {error!r}; its output: {log}")
    return Verdict(name, reported, seen, verdict_of(reported, seen))


def verdict_of(reported: Reported, seen: tuple[int, int, int]) -> str:
    """Why a tool did not pass; empty: it did. ``seen`` are the answers, failures and instances of the fleet."""
    answered, failed, _ = seen
    if reported.answered != REQUESTS or reported.failed:
        return f"it counts {reported.answered} answers of {REQUESTS}, and {reported.failed} failures"
    if not 0.97 < reported.output_tokens / (REQUESTS * OUTPUT_TOKENS) < 1.03:
        return f"it counts {reported.output_tokens:.0f} tokens of {REQUESTS * OUTPUT_TOKENS}"
    if answered < REQUESTS or failed:
        return f"the fleet counts {answered} answers, and {failed} requests without one"
    return ""


def table(verdicts: Sequence[Verdict]) -> str:
    lines = [
        "| tool | its answers, failures | its tokens | its TTFT | the fleet's answers, failures | instances | passed |",
        "| --- | ---: | ---: | ---: | ---: | ---: | --- |",
    ]
    for one in verdicts:
        cells = ["", "", ""]
        if one.reported is not None:
            reported = one.reported
            cells = [
                f"{reported.answered}, {reported.failed}",
                f"{reported.output_tokens:.0f}",
                f"{1000 * reported.ttft_p50_s:.0f} ms",
            ]
        seen = ["", ""] if one.seen is None else [f"{one.seen[0]}, {one.seen[1]}", str(one.seen[2])]
        lines.append(f"| {' | '.join((one.name, *cells, *seen, one.reason or 'yes'))} |")
    return "\n".join(lines)


def _options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--install", type=Path, metavar="DIR", help="install the tools there, run nothing")
    parser.add_argument(
        "--python", metavar="PROGRAM", help="the Python of their environments (none: the first one that is new enough)"
    )
    parser.add_argument("--tools", type=Path, metavar="DIR", help="folder of the tools (none: this environment's)")
    parser.add_argument("--vllm", default="vllm", metavar="PROGRAM", help="the program of an installed vLLM")
    parser.add_argument("--only", metavar="T,U", help=f"of {', '.join(TOOLS)}")
    parser.add_argument("--url", help="a running fleet (none: one with emulated instances is started)")
    parser.add_argument("--model", default=MODEL, help="model name there")
    parser.add_argument("--tokenizer", type=Path, metavar="FOLDER", help="its tokenizer")
    parser.add_argument("--key", help="a key that may send requests and look at /admin")
    parser.add_argument("--out", type=Path, metavar="DIR", help="folder of the tools' reports (none: a temporary one)")
    return parser.parse_args()


def main() -> int:
    options = _options()
    try:
        names = [name.strip() for name in options.only.split(",")] if options.only else list(TOOLS)
        if unknown := [name for name in names if name not in TOOLS]:
            raise LackingError(f"--only {', '.join(unknown)}: known are {', '.join(TOOLS)}")
        if options.install is not None:
            install(options.install, names, PYTHONS if options.python is None else (options.python,))
            return 0
        programs = {name: program_of(name, options.tools, options.vllm) for name in names}
        with contextlib.ExitStack() as stack:
            folder = options.out or Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="load-tools-")))
            folder.mkdir(parents=True, exist_ok=True)
            if options.url is None:
                target = stack.enter_context(emulated_fleet(folder.resolve()))
            elif options.tokenizer is None:
                raise LackingError("--url needs the model's --tokenizer FOLDER")
            else:
                target = Target(options.url.rstrip("/"), options.model, options.tokenizer.resolve(), 1, options.key)
            verdicts = []
            for number, (name, program) in enumerate(programs.items()):
                own = replace(target, seed=time.time_ns() % 10**6 + number)
                verdicts.append(run(name, program, own, folder.resolve() / name.replace(" ", "-")))
                print(f"{name}: {verdicts[-1].reason or 'passed'}", file=sys.stderr, flush=True)
            print(table(verdicts))
    except LackingError as error:
        print(f"load_tools: {error}", file=sys.stderr)
        return 2
    return 1 if any(one.reason for one in verdicts) else 0


if __name__ == "__main__":
    sys.exit(main())
