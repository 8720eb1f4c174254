"""The load tools' verdicts."""

from __future__ import annotations

import json
from pathlib import Path

import load_tools
import pytest
from load_tools import OUTPUT_TOKENS, REQUESTS, TOOLS, Reported, Target, answers_of
from real_fleet.errors import LackingError

WELL = Reported(REQUESTS, 0, REQUESTS * OUTPUT_TOKENS, 0.1)


def test_answers_are_counted_over_the_instances_of_the_fleet() -> None:
    counts = {"a": (40, 40), "b": (30, 28), "none": (1, 0)}
    served = {name: {"requests": requests, "answered": answered} for name, (requests, answered) in counts.items()}

    assert answers_of({"instances": served}) == (68, 3, 2)


@pytest.mark.parametrize(
    ("reported", "seen", "reason"),
    [
        (WELL, (REQUESTS, 0, 4), ""),
        (WELL, (REQUESTS + 5, 0, 4), ""),
        (Reported(REQUESTS - 1, 1, REQUESTS * OUTPUT_TOKENS, 0.1), (REQUESTS, 0, 4), "it counts 63 answers of 64"),
        (Reported(REQUESTS, 0, REQUESTS * OUTPUT_TOKENS / 2, 0.1), (REQUESTS, 0, 4), "it counts 1024 tokens of 2048"),
        (WELL, (REQUESTS - 1, 0, 4), "the fleet counts 63 answers"),
        (WELL, (REQUESTS, 2, 4), "and 2 requests without one"),
    ],
)
def test_a_tool_passes_if_its_counts_are_whole_and_the_fleets_agree(
    reported: Reported, seen: tuple[int, int, int], reason: str
) -> None:
    found = load_tools.verdict_of(reported, seen)

    assert reason in found and bool(found) == bool(reason)


def test_every_tool_is_given_the_model_its_tokenizer_and_the_seed(tmp_path: Path) -> None:
    target = Target("http://h:1", "the-model", tmp_path / "tokenizer", 4711, "key")
    for name, tool in TOOLS.items():
        words = " ".join(tool.words(target, tmp_path))
        if name == "inference-perf":
            words = (tmp_path / "config.yml").read_text()
            json.loads(words)
        else:
            assert "4711" in words, name
        assert all(part in words for part in ("http://h:1", "the-model", str(tmp_path / "tokenizer"))), name


def stub_python(folder: Path, version: str) -> str:
    """A program that answers with this version, whatever it is asked."""
    program = folder / f"python-{version.replace(' ', '.')}"
    program.write_text(f"#!/bin/sh\necho {version}\n")
    program.chmod(0o755)
    return str(program)


def test_a_tool_is_installed_with_the_first_python_that_is_new_enough_for_it(tmp_path: Path) -> None:
    old, new, newer = (stub_python(tmp_path, version) for version in ("3 11", "3 12", "3 13"))
    pythons = ("no-such-python", old, new, newer)

    assert load_tools.python_for("guidellm", pythons) == old
    assert load_tools.python_for("inference-perf", pythons) == new


def test_a_tool_that_no_python_is_new_enough_for_says_which_it_needs(tmp_path: Path) -> None:
    old = stub_python(tmp_path, "3 11")

    with pytest.raises(LackingError, match=r"inference-perf needs Python 3\.12 or newer"):
        load_tools.install(tmp_path / "tools", ["inference-perf"], [old])
