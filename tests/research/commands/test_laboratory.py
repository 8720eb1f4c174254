import argparse
import json
from pathlib import Path

import pytest

from dualmap.research.commands import laboratory
from dualmap.scheduling.settings import SchedulingSettings
from dualmap.simulation.engine.settings import EngineSettings
from dualmap.simulation.errors import SimulationError

TINY = ["--trace", "uniform", "--preset", "7b", "--instances", "2", "--seeds", "2", "--requests-per-instance", "20"]


def run(*words: str) -> int:
    parser = argparse.ArgumentParser()
    laboratory.add_arguments(parser)
    return laboratory.run(
        parser.parse_args([*words, "--quiet", "--workers", "1"]), SchedulingSettings(), EngineSettings()
    )


def test_it_compares_variants_and_writes_a_report(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    variants = ["--variant", "a=dualmap-least-cost,queue_order=deadline", "--variant", "b=min-ttft"]
    folders = ["--cache", str(tmp_path / "cache"), "--out", str(tmp_path / "out")]

    code = run(*TINY, *variants, *folders, "--rates", "4,8", "--no-goodput")

    assert code == 0
    assert "uniform, 2 × 7B: at 8/s, 2 seeds" in capsys.readouterr().out
    document = json.loads((tmp_path / "out" / "results.json").read_text())
    assert [cell["rate"] for cell in document["rates"]] == ["4/s", "8/s"]
    assert document["made"]["command"].startswith("dualmap")
    assert "## uniform, 2 × 7B: at 4/s, 2 seeds" in (tmp_path / "out" / "report.md").read_text()
    assert len(list((tmp_path / "cache").iterdir())) == 8


def test_a_former_report_is_made_again_without_running_anything(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    variants = ["--variant", "a=dualmap-least-cost", "--variant", "b=min-ttft"]
    folder, elsewhere = tmp_path / "out", tmp_path / "elsewhere"
    run(*TINY, *variants, "--rates", "4", "--cache", str(tmp_path / "cache"), "--out", str(folder))
    printed, report = capsys.readouterr().out, (folder / "report.md").read_text()
    results = (folder / "results.json").read_bytes()
    (folder / "report.md").unlink()

    assert run("--from", str(folder), "--cache", str(tmp_path / "unused")) == 0
    assert run("--from", str(folder), "--out", str(elsewhere)) == 0

    assert capsys.readouterr().out == 2 * printed
    assert "Summary" in printed
    assert (folder / "report.md").read_text() == (elsewhere / "report.md").read_text() == report
    assert (folder / "results.json").read_bytes() == results
    assert not (tmp_path / "unused").exists()


def test_saturation_can_be_that_of_a_split_fleet() -> None:
    parser = argparse.ArgumentParser()
    laboratory.add_arguments(parser)

    assert laboratory.suite_of(parser.parse_args(["--saturation-of", "6P2D"])).saturation_of == "6P2D"
    with pytest.raises(SimulationError, match="roles must read as"):
        laboratory.suite_of(parser.parse_args(["--saturation-of", "half"]))


def test_options_change_the_suite(tmp_path: Path) -> None:
    parser = argparse.ArgumentParser()
    laboratory.add_arguments(parser)

    suite = laboratory.suite_of(parser.parse_args(["--quick", "--instances", "4,8", "--rates", "1x,9", "--seeds", "7"]))
    strict = laboratory.suite_of(parser.parse_args(["--targets", "99", "--slo-tpot-ms", "40"]))
    other = laboratory.suite_of(parser.parse_args(["--suite", "splits", "--variant", "a=llm-d"]))

    assert (suite.name, suite.sizes, suite.rates, suite.seeds) == ("quick", (4, 8), ("1x", "9"), 7)
    assert strict.targets == ("90", "99"), "saturation is a goodput of the main target"
    assert {traffic.slo_tpot_s for traffic in strict.traffic} == {0.04}
    assert (other.saturation_of, other.variants) == ("4P4D", ("a=llm-d",))


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["--variant", "a=best"], "unknown policy 'best'"),
        (["--variant", "a=dualmap", "--variant", "a=llm-d"], "two variants are named 'a'"),
        (["--preset", "abacus"], "unknown preset 'abacus'"),
        (["--targets", "80"], "unknown target '80'"),
        (["--preset", "7b:turbo"], "unknown change 'turbo'"),
        (["--instances", "0"], "--instances must be a whole number of at least 1"),
        (["--instances", "many"], "--instances must be a whole number of at least 1"),
        (["--rates", "fast"], "rate 'fast' must be requests per second"),
        (["--trace", ","], "--trace names nothing"),
        (["--trace", "nothing"], "neither a file nor a generator"),
        (["--trace", "zipf:skew=steep"], "needs a number"),
        (["--traces", "/nowhere"], "--traces /nowhere is not a folder"),
        (["--from", "/nowhere"], "/nowhere/results.json: cannot be read"),
        (["--from", ".", "--quick", "--trace", "uniform"], "--from runs nothing, and what was run is in its folder"),
        (["--document", "README.md"], "--document needs --from"),
        (["--slo-tpot-ms", "0"], "--slo-tpot-ms must be more than 0"),
        (["--seeds", "0"], "--seeds must be a whole number of at least 1"),
    ],
)
def test_wrong_input_is_named_with_exit_code_2(
    words: list[str], message: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert run(*words, "--cache", str(tmp_path)) == 2
    assert message in capsys.readouterr().err
