"""Which published figures were measured on other code."""

from __future__ import annotations

import runpy
import subprocess
from pathlib import Path
from typing import Any

import pytest

ROOT = Path(__file__).resolve().parents[2]
SCRIPT: dict[str, Any] = runpy.run_path(str(ROOT / "scripts" / "stale_tables.py"))


@pytest.fixture
def repository(tmp_path: Path) -> Path:
    for folder in ("scheduling", "simulation", "statestore/memory", "docs/research", "router"):
        (tmp_path / folder).mkdir(parents=True)
        (tmp_path / folder / "code.py").write_text("one")
    for words in (("init", "-q"), ("add", "-A"), ("-c", "user.name=n", "-c", "user.email=e", "commit", "-qm", "c")):
        subprocess.run(["git", *words], cwd=tmp_path, check=True, timeout=60)
    return tmp_path


def publish(root: Path, command: str, mark: str = "") -> Any:
    commit = subprocess.check_output(["git", "rev-parse", "--short=10", "HEAD"], cwd=root, text=True, timeout=60)
    (root / "docs/research/page.md").write_text(
        f"Text.\nCommit {commit.strip()}{mark}, 2026-11-22:\n`{command}`. More."
    )
    [figures] = SCRIPT["published"](root)
    return figures


def test_figures_are_stale_once_what_they_measure_has_changed(repository: Path) -> None:
    figures = publish(repository, "dualmap simulate --trace toolagent")
    assert SCRIPT["why_stale"](figures, repository) is None

    (repository / "router" / "code.py").write_text("two")
    assert SCRIPT["why_stale"](figures, repository) is None, "simulated runs do not run the router"

    (repository / "scheduling" / "code.py").write_text("two")
    assert "scheduling/code.py" in SCRIPT["why_stale"](figures, repository)


def test_comments_docstrings_and_layout_make_no_figure_stale(repository: Path) -> None:
    code = repository / "scheduling" / "code.py"
    code.write_text('"""Old words."""\n\ndef one():\n    """Old."""\n    return 1  # why\n')
    subprocess.run(["git", "add", "-A"], cwd=repository, check=True, timeout=60)
    commit = ("-c", "user.name=n", "-c", "user.email=e", "commit", "-qm", "c")
    subprocess.run(["git", *commit], cwd=repository, check=True, timeout=60)
    figures = publish(repository, "dualmap simulate")

    code.write_text('"""New words."""\ndef one():\n\n    return (1)\n')
    assert SCRIPT["why_stale"](figures, repository) is None

    code.write_text('"""New words."""\ndef one():\n    return 2\n')
    assert "scheduling/code.py" in SCRIPT["why_stale"](figures, repository)
    code.unlink()
    assert "scheduling/code.py" in SCRIPT["why_stale"](figures, repository)


def test_figures_of_a_benchmark_are_stale_once_the_router_has_changed(repository: Path) -> None:
    figures = publish(repository, "python benchmarks/router_overhead.py --modes full")

    (repository / "router" / "code.py").write_text("two")

    assert "router/code.py" in SCRIPT["why_stale"](figures, repository)


def test_what_nobody_can_repeat_is_stale(repository: Path) -> None:
    figures = publish(repository, "dualmap laboratory", mark="+")

    assert "uncommitted" in SCRIPT["why_stale"](figures, repository)
    assert "does not have" in SCRIPT["why_stale"](figures._replace(changed=False, commit="0" * 10), repository)


def test_a_table_of_figures_without_a_commit_is_named(repository: Path) -> None:
    table = "| a | b |\n| --- | --- |\n| 1.5 s | 20 % |\n| 2.5 s | **30 %** |\n"
    words = "| a | b |\n| --- | --- |\n| one | two |\n"
    (repository / "docs/research/page.md").write_text(f"# Page\n\n## Measured\n\n{table}\n## Told\n\n{words}")

    assert list(SCRIPT["without_commit"](repository)) == [("docs/research/page.md", "Measured")]


def test_a_table_whose_results_name_their_commit_elsewhere_on_the_page_has_one(repository: Path) -> None:
    table = "| a | b |\n| --- | --- |\n| 1.5 s | 20 % |\n| 2.5 s | **30 %** |\n"
    page = repository / "docs/research/page.md"
    page.write_text(
        f"# Page\n\n<!-- laboratory runs: made -->\n\n## Measured\n\n<!-- laboratory runs: goodput -->\n{table}"
    )
    assert list(SCRIPT["without_commit"](repository)) == []

    page.write_text(
        f"# Page\n\n<!-- laboratory runs: made -->\n\n## Measured\n\n<!-- laboratory others: goodput -->\n{table}"
    )
    assert list(SCRIPT["without_commit"](repository)) == [("docs/research/page.md", "Measured")]


def test_figures_that_a_test_holds_and_numbers_of_the_reference_need_no_commit(repository: Path) -> None:
    table = "| a | b |\n| --- | --- |\n| 1.5 s | 20 % |\n| 2.5 s | **30 %** |\n"
    (repository / "docs/research/page.md").write_text(f"# Page\n\n{table}\n`tests/test_traces.py` holds them.\n")
    (repository / "docs/reference").mkdir()
    (repository / "docs/reference/errors.md").write_text(f"# Errors\n\n{table}")
    (repository / "docs/operate").mkdir()
    (repository / "docs/operate/sizing.md").write_text(f"# Sizing\n\n{table}")

    assert list(SCRIPT["without_commit"](repository)) == [("docs/operate/sizing.md", "Sizing")]


def test_autoscaling_is_no_part_of_a_simulated_fleet_of_fixed_size(repository: Path) -> None:
    fixed = publish(repository, "dualmap simulate --trace toolagent")
    (repository / "scheduling" / "scale_plan.py").write_text("plan")
    subprocess.run(["git", "add", "-A"], cwd=repository, check=True, timeout=60)

    assert SCRIPT["why_stale"](fixed, repository) is None
    for command in ("dualmap evaluate", "dualmap evaluate --section constant_load", "python -m benchmarks.size_curve"):
        assert "scale_plan" in SCRIPT["why_stale"](fixed._replace(command=command), repository)
