"""How far engines of measured kernels are off from their database, and presets by data sheets from those engines.

    python benchmarks/silicon.py [--only fit|derived] [--model MODEL …] [--card CARD …]

The first table has the error of each fit over random steps of 1 to 8,192 tokens and 1 to 128 sequences, which the fit
has not seen, for a dense model, a mixture of experts and hybrid models. The second compares a preset by data sheets
(``qwen3-8b-h100``) with the engine of measured kernels of the same model, card and width: the first token of a prompt
alone, in steps of 2,048 tokens, a decode step at 4,100 tokens a sequence, and the tokens of KV memory. Both have the
same costs of the host. Needs the extra ``silicon``.
"""

from __future__ import annotations

from argparse import ArgumentParser, Namespace
from collections.abc import Sequence

from dualmap.simulation.engine.kernel_times import NoKernelsError, measured_kernels, package_version
from dualmap.simulation.engine.presets import UnknownPresetError, find_preset
from dualmap.simulation.engine.silicon import keep_kernels

FITTED = (
    "qwen3-8b", "qwen3-30b-a3b", "nvidia-nemotron-3-nano-30b-a3b-bf16", "qwen3.5-27b", "qwen3.5-35b-a3b",
    "gemma-4-26b-a4b", "gpt-oss-20b",
)  # fmt: skip
DERIVED = {
    "qwen3-8b": ("qwen3-8b", 1),
    "qwen3-32b": ("qwen3-32b", 2),
    "llama-3.1-8b": ("meta-llama-3.1-8b", 1),
    "llama-3.1-70b": ("meta-llama-3.1-70b", 4),
}
"""Presets' models, what the database calls them, and a width at which most cards hold them."""
CARDS = ("a100", "h100", "h200", "b200", "l40s")
PROMPTS = (1024, 8192, 20_480)
BATCHES = (1, 16, 64)
CONTEXT_TOKENS = 4100
BUDGET_TOKENS = 2048


def main() -> None:
    parser = ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--only", choices=("fit", "derived"), help="one of the two tables")
    parser.add_argument("--model", action="append", help="a model of the database, for the fits; may be repeated")
    parser.add_argument("--card", action="append", help="a card; may be repeated")
    arguments = parser.parse_args()
    if package_version() is None:
        parser.error("this needs the extra silicon: pip install -e '.[silicon]'")
    if arguments.only != "derived":
        print_fits(arguments)
    if arguments.only != "fit":
        print_derived(arguments.card or CARDS)


def print_fits(arguments: Namespace) -> None:
    print("| model | card | P90 | prefill, mixed, decode | worst | measured, in part, by formula |")
    print("| --- | --- | ---: | ---: | ---: | ---: |")
    lacking: list[str] = []
    for model in arguments.model or FITTED:
        for card in arguments.card or CARDS:
            try:
                kept = keep_kernels(measured_kernels(model, card), fp8=False)
            except NoKernelsError as why:
                lacking.append(str(why))
                continue
            error, formula = kept.error, 1 - kept.measured - kept.interpolated
            kinds = f"{error.prefill_p90:.1%}, {error.mixed_p90:.1%}, {error.decode_p90:.1%}"
            shares = f"{kept.measured:.0%}, {kept.interpolated:.0%}, {formula:.0%}"
            name = kept.model.rpartition("/")[2]
            print(f"| {name} | {kept.card} | {error.p90:.1%} | {kinds} | {error.worst:.0%} | {shares} |")
    for reason in lacking:
        print(f"\nleft out: {reason}")


def print_derived(cards: Sequence[str]) -> None:
    prompts = ", ".join(f"{tokens:,}" for tokens in PROMPTS)
    batches = ", ".join(map(str, BATCHES))
    print(f"\n| preset | first token of {prompts} tokens | decode step of {batches} sequences | KV memory |")
    print("| --- | ---: | ---: | ---: |")
    for model, (name, width) in DERIVED.items():
        for card in cards:
            try:
                derived, measured = (
                    find_preset(f"{model}-{card}-tp{width}"),
                    find_preset(f"silicon:{name}@{card}-tp{width}"),
                )
            except UnknownPresetError:
                continue
            ours, theirs = derived.engine.costs, measured.engine.costs
            prefills = [ours.prefill_s(n, BUDGET_TOKENS) / theirs.prefill_s(n, BUDGET_TOKENS) - 1 for n in PROMPTS]
            steps = [
                ours.step_s(0, 0, n, n * CONTEXT_TOKENS) / theirs.step_s(0, 0, n, n * CONTEXT_TOKENS) - 1
                for n in BATCHES
            ]
            memory = derived.engine.kv_capacity_tokens / measured.engine.kv_capacity_tokens - 1
            print(f"| {derived.name} | {signed(prefills)} | {signed(steps)} | {signed([memory])} |")


def signed(shares: Sequence[float]) -> str:
    return ", ".join(f"{share:+.0%}" for share in shares)


if __name__ == "__main__":
    main()
