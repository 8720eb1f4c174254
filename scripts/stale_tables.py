"""Says which published figures were measured on other code than this.

A table of the documents that holds figures stands below, or above, a sentence ``Commit HASH, DATE: `COMMAND` ``. It is
stale when the code that the command runs has changed since that commit, comments and docstrings aside. Stale ones are
named, and end nothing: a change may well leave them as they are, and only the command can tell.
"""

from __future__ import annotations

import ast
import re
import subprocess
import sys
from collections.abc import Iterator
from itertools import islice
from pathlib import Path
from typing import NamedTuple

ROOT = Path(__file__).resolve().parents[1]
PAGES = ("README.md", "docs/**/*.md")
_UNMEASURED = ("docs/reference/",)
"""Pages whose numbers are defaults, codes and limits."""
_SENTENCE = re.compile(
    r"Commit\s+`?(?P<commit>[0-9a-f]{7,40})(?P<changed>\+?)`?,\s+(?P<date>[\d-]{10}):\s+`(?P<command>[^`]+)`"
)
_HELD_BY_A_TEST = re.compile(r"`tests/[\w/.]+` (holds|hold) ")
"""A section that says so needs no commit: the test fails when its figures are no longer true."""
_LABORATORY = re.compile(r"<!-- laboratory ([\w-]+): (\S+) -->")
"""Above each table that `dualmap laboratory` fills in: the results' name, and which table; `made` is the sentence."""
_SCALING = tuple(
    f":(exclude){path}"
    for path in (
        "scheduling/scale_*.py",
        "simulation/autoscale*.py",
        "simulation/scalers",
        "simulation/evaluate/autoscaling.py",
        "simulation/evaluate/constant_load.py",
    )
)
"""Not run by a fleet of fixed size."""
_SPLITTING = (":(exclude)scheduling/split.py",)
"""Not run by a fleet of mixed instances."""
_LIVE = tuple(
    f":(exclude){path}"
    for path in (
        *(f"scheduling/{name}.py" for name in ("backoff", "breaker", "policies/pinned")),
        *(f"scheduling/{name}.py" for name in ("messages_api", "pooled_prompt", "prompt", "responses_api")),
        *(f"simulation/{name}" for name in ("calibrate", "commands", "emulator")),
        *(f"simulation/{name}.py" for name in ("answer_stream", "fleet_probe", "http_client", "prompts", "recording")),
        *(f"simulation/{name}.py" for name in ("replay*", "routed_chains", "terminal", "time_scale", "tokenizer")),
    )
)
"""Not run by simulations: what reads prompts, and what deals with real processes."""
_BOOKS = ("statestore/pool", "statestore/lua", "statestore/memory", "statestore/records.py", "statestore/leases.py")
_SIMULATED = ("scheduling", "simulation", *_BOOKS, *_LIVE)
"""Simulations keep their books with the store's own code, on a server within the process."""
_EVALUATE, _LABORATORIES = (":(exclude)simulation/evaluate",), (":(exclude)simulation/laboratory",)
"""Commands of their own; the laboratory has the workers of the evaluation."""
_SHOWN = tuple(
    f":(exclude)simulation/{name}.py"
    for name in ("laboratory/suite", "laboratory/overview", "evaluate/plan", "evaluate/run")
)
"""What a suite runs stands in its results, and a test holds the tables to them."""
_MEASURES = {
    "dualmap simulate": (*_SIMULATED, *_EVALUATE, *_LABORATORIES),
    "dualmap laboratory": (*_SIMULATED, *_SHOWN),
    "dualmap evaluate": (*_SIMULATED, *_LABORATORIES),
    "benchmarks/scheduling_cost.py": ("scheduling",),
    "benchmarks.size_curve": (*_SIMULATED, *_LABORATORIES),
    "benchmarks/simulation_speed.py": (*_SIMULATED, *_LABORATORIES),
    "benchmarks/kv_events_hit_rate.py": (*_SIMULATED, *_EVALUATE, *_LABORATORIES),
    "": ("router", "scheduling", "statestore"),
}
"""What a command measures, by its beginning; the last is for every other benchmark."""


_FEW = 4
"""So many cells with figures make a table that was measured."""


class Figures(NamedTuple):
    """Published figures, as their sentence says."""

    page: str
    commit: str
    changed: bool
    """Made with uncommitted changes: they cannot be made again."""
    command: str


def published(root: Path = ROOT) -> Iterator[Figures]:
    for pattern in PAGES:
        for page in sorted(root.glob(pattern)):
            for found in _SENTENCE.finditer(page.read_text("utf-8")):
                yield Figures(str(page.relative_to(root)), found["commit"], bool(found["changed"]), found["command"])


def without_commit(root: Path = ROOT) -> Iterator[tuple[str, str]]:
    """Page and heading of every section that has a table of figures and names no commit."""
    for page in sorted(root.glob("docs/**/*.md")):
        name, text = str(page.relative_to(root)), page.read_text("utf-8")
        if name.startswith(_UNMEASURED):
            continue
        made = {results for results, table in _LABORATORY.findall(text) if table == "made"}
        for section in re.split(r"^(?=#+ )", text, flags=re.MULTILINE):
            filled = {results for results, _ in _LABORATORY.findall(section)}
            if _SENTENCE.search(section) or _HELD_BY_A_TEST.search(section) or (filled and filled <= made):
                continue
            cells = [cell for line in section.splitlines() if line.startswith("| ") for cell in line.split("|")]
            figures = [cell for cell in cells if re.fullmatch(r"\s*\**[<~]?\d[\d.,]*\W*[a-zµ%/ ]*\**\s*", cell)]
            if len(figures) >= _FEW:
                yield name, section.splitlines()[0].lstrip("# ")


def measured_by(command: str) -> tuple[str, ...]:
    """The paths whose change makes a command's figures stale."""
    words = command.removeprefix("python ").removeprefix("-m ")
    paths = next(paths for beginning, paths in _MEASURES.items() if words.startswith(beginning))
    sized = any(word in words for word in ("autoscal", "constant_load", "size_curve"))
    scales = sized or (words.startswith("dualmap evaluate") and "--section" not in words)
    splits = any(word in words for word in ("split", "roles", "disaggregation")) or words == "dualmap evaluate"
    return (*paths, *(() if scales else _SCALING), *(() if splits else _SPLITTING))


def why_stale(figures: Figures, root: Path = ROOT) -> str | None:
    """None where the code is the same."""
    if figures.changed:
        return "they were made with uncommitted changes"
    done = subprocess.run(
        ["git", "diff", "--no-renames", "--name-only", figures.commit, "--", *measured_by(figures.command)],
        cwd=root, capture_output=True, text=True, check=False, timeout=30,
    )  # fmt: skip
    if done.returncode != 0:
        return "this repository does not have that commit"
    changed = (path for path in done.stdout.splitlines() if not _runs_the_same(root, figures.commit, path))
    named = list(islice(changed, 3))
    return f"what it measures has changed since: {', '.join(named)}{' …' * (len(named) == 3)}" if named else None


def _runs_the_same(root: Path, commit: str, path: str) -> bool:
    """Whether a changed file differs in comments, docstrings and layout alone."""
    if not path.endswith(".py") or not (root / path).exists():
        return False
    former = subprocess.run(
        ["git", "show", f"{commit}:{path}"], cwd=root, capture_output=True, text=True, check=False, timeout=30
    )
    return former.returncode == 0 and _code(former.stdout) == _code((root / path).read_text("utf-8"))


def _code(source: str) -> str:
    """What runs of it: a string that stands alone is a docstring or a note on the attribute before it."""
    tree = ast.parse(source)
    for node in ast.walk(tree):
        if isinstance(body := getattr(node, "body", None), list):
            node.body = [each for each in body if not _is_text(each)]  # type: ignore[attr-defined]
    return ast.dump(tree)


def _is_text(node: ast.AST) -> bool:
    return isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant) and isinstance(node.value.value, str)


def main() -> int:
    for figures in published():
        if reason := why_stale(figures):
            print(f"stale figures in {figures.page}, of commit {figures.commit}: {reason}", file=sys.stderr)
            print(f"  renew them with: {figures.command}", file=sys.stderr)
    for page, heading in without_commit():
        print(f"figures without a commit in {page}: {heading}", file=sys.stderr)
    return 0


if __name__ == "__main__":
    sys.exit(main())
