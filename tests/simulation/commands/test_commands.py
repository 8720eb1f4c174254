import argparse
import json
from pathlib import Path

import pytest

from dualmap.runtime.pool_settings import InstanceSettings, PoolSettings
from dualmap.scheduling.settings import PriorityClassSettings, SchedulingSettings
from dualmap.scheduling.state.instance import InstanceSpec, Role
from dualmap.simulation.commands import simulate
from dualmap.simulation.commands.options import ConfiguredFleet, FleetOptions, OptionError, fleet_options
from dualmap.simulation.commands.tables import COLUMNS
from dualmap.simulation.engine.settings import EngineSettings
from dualmap.simulation.engine.step_time import TabledCosts
from dualmap.simulation.errors import SimulationError
from dualmap.simulation.virtual_time.scenario import Dispatch

KEPT = Path(__file__).parents[1] / "engine" / "qwen3-8b-h100.json"
"""An engine of measured kernels that was kept."""


def parsed(*words: str) -> argparse.Namespace:
    parser = argparse.ArgumentParser()
    simulate.add_arguments(parser)
    return parser.parse_args([*words, "--quiet"])


def run(*words: str, scheduling: SchedulingSettings | None = None) -> int:
    return simulate.run(parsed(*words), ConfiguredFleet(scheduling or SchedulingSettings(), EngineSettings()))


@pytest.fixture(autouse=True)
def _wide_terminal(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COLUMNS", "220")


def test_simulate_prints_a_table_and_writes_json_and_plots(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    words = ["--trace", "uniform:requests=120", "--policy", "dualmap,preble", "--rate", "2,8", "--instances", "2"]

    code = run(*words, "--workers", "1", "--json", str(tmp_path / "r.json"), "--plots", str(tmp_path / "plots"))

    assert code == 0
    assert "preble" in capsys.readouterr().out
    rows = json.loads((tmp_path / "r.json").read_text())
    assert [(row["policy"], round(row["rate_per_s"])) for row in rows] == [
        ("dualmap", 2), ("preble", 2), ("dualmap", 8), ("preble", 8),
    ]  # fmt: skip
    assert {"on-time-share.svg", "pending-tokens.svg", "key-length.svg"} <= {
        path.name for path in (tmp_path / "plots").iterdir()
    }


def test_a_pipe_gets_every_column(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.delenv("COLUMNS")

    assert run("--trace", "uniform:requests=50", "--rate", "2", "--instances", "2") == 0

    heading = capsys.readouterr().out.splitlines()[0]
    assert [column for column in COLUMNS if column not in heading] == []


@pytest.mark.parametrize(
    ("named", "simulated"), [([], ["preble"]), (["--policy", "dualmap,llm-d"], ["dualmap", "llm-d"])]
)
def test_the_configured_policy_is_simulated_unless_others_are_named(
    named: list[str], simulated: list[str], tmp_path: Path
) -> None:
    words = ["--trace", "uniform:requests=20", "--instances", "2", "--workers", "1", "--json", str(tmp_path / "r.json")]

    assert run(*words, *named, scheduling=SchedulingSettings(policy="preble")) == 0
    assert [row["policy"] for row in json.loads((tmp_path / "r.json").read_text())] == simulated


SMALL = InstanceSettings(
    id="small", url="http://a:1", kv_capacity_tokens=200_000, dispatch_window_tokens=2048, max_running_requests=64,
    max_queued_requests=10,
)  # fmt: skip
PLAIN = InstanceSettings(id="plain", url="http://b:1")
POOLS = (
    PoolSettings(name="chat", instances=(SMALL, PLAIN, InstanceSettings(id="d", url="http://d:1", role=Role.DECODE))),
    PoolSettings(name="code", model="code", instances=(PLAIN.model_copy(update={"id": "alone"}),)),
)


def options(*words: str, pools: tuple[PoolSettings, ...] = POOLS) -> FleetOptions:
    configured = ConfiguredFleet(SchedulingSettings(policy="preble"), EngineSettings(kv_capacity_tokens=777_000), pools)
    return fleet_options(parsed(*words), configured)


def test_the_pools_instances_are_simulated_as_they_are_configured() -> None:
    assert options().scenario("preble").fleet == (
        SMALL.spec(),
        InstanceSpec("plain", "http://b:1", kv_capacity_tokens=777_000),
        InstanceSpec("d", "http://d:1", role=Role.DECODE, kv_capacity_tokens=777_000),
    ), "what an instance would report itself is the engine's"
    assert [spec.instance_id for spec in options("--pool", "code").fleet] == ["alone"]


def test_more_instances_than_the_pools_are_like_these_in_turn() -> None:
    windows = [spec.dispatch_window_tokens for spec in options("--instances", "5").fleet]

    assert windows == [2048, 4096, 4096, 2048, 4096]
    assert len({spec.instance_id for spec in options("--instances", "5").fleet}) == 5
    assert [spec.instance_id for spec in options("--instances", "1").fleet] == ["small"]
    assert {spec.dispatch_window_tokens for spec in options("--dispatch-window-tokens", "9000").fleet} == {9000}


def test_a_pool_without_instances_has_those_that_would_be_emulated() -> None:
    fleet = options(pools=(PoolSettings(),)).fleet

    assert len(fleet) == 8
    assert {(spec.kv_capacity_tokens, spec.max_queued_requests) for spec in fleet} == {(777_000, 1_000_000)}


def test_several_presets_make_a_fleet_of_these_kinds_in_turn() -> None:
    kinds = "qwen2.5-7b-910b4,qwen2.5-7b-910b4-tp1:host_kv_tokens=1577000"
    mixed = options("--preset", kinds, "--instances", "3", pools=(PoolSettings(),))
    made = mixed.scenario("preble")

    assert [spec.kv_capacity_tokens for spec in made.fleet] == [777_000, 777_000, 777_000]
    assert [[each.tokens for each in made.engine_of(number).kept_tiers] for number in range(3)] == [[], [1_577_000], []]
    with pytest.raises(OptionError, match="instances of one kind alone"):
        _ = mixed.engine


def test_a_pool_that_cannot_be_simulated_is_named() -> None:
    with pytest.raises(OptionError, match="no pool 'x'; known are chat, code"):
        options("--pool", "x")


def test_roles_can_be_given_to_any_number_of_instances() -> None:
    alone, more = options("--roles", "1P2D", pools=(PoolSettings(),)), options("--roles", "4P4D", "--instances", "4")

    assert [spec.role for spec in alone.fleet] == [Role.PREFILL, Role.DECODE, Role.DECODE]
    assert [spec.role for spec in more.fleet] == [Role.PREFILL, Role.PREFILL, Role.DECODE, Role.DECODE]
    assert more.fleet[0].dispatch_window_tokens == 2048, "like the pool's otherwise"


def test_roles_that_do_not_fit_are_refused() -> None:
    with pytest.raises(SimulationError, match="roles must read as 4P4D"):
        options("--roles", "prefill=4")
    with pytest.raises(SimulationError, match="3 instances cannot have the roles 4P4D"):
        options("--roles", "4P4D", "--instances", "3")
    with pytest.raises(SimulationError, match="needs --autoscale-decode"):
        options("--roles", "4P4D", "--autoscale", "2:4")
    with pytest.raises(SimulationError, match="--autoscale-decode needs --autoscale"):
        options("--autoscale-decode", "1:4")
    with pytest.raises(SimulationError, match="4 decode instances, outside of 1:3"):
        options("--roles", "4P4D", "--autoscale", "2:4", "--autoscale-decode", "1:3")
    with pytest.raises(SimulationError, match="mixed instances"):
        options("--roles", "2P1D1M", "--autoscale", "2:4", "--autoscale-decode", "1:3")


def test_roles_that_scale_begin_as_said_or_with_the_least_of_each() -> None:
    bounds = ("--autoscale", "1:3", "--autoscale-decode", "0:2")
    least, more = options(*bounds), options(*bounds, "--roles", "2P1D")

    assert [spec.role for spec in least.fleet] == ["prefill", "prefill", "prefill", "decode", "decode"]
    assert least.instances == 1
    assert [spec.role for spec in more.fleet] == ["prefill", "prefill", "decode", "prefill", "decode"]
    assert more.instances == 3


def test_a_split_fleet_tells_what_it_split(capsys: pytest.CaptureFixture[str]) -> None:
    assert run("--trace", "toolagent:requests=60", "--rate", "4", "--roles", "1P1D", "--workers", "1") == 0
    assert "and 50 ms" in capsys.readouterr().out


def test_a_policy_holds_as_in_a_live_fleet_unless_told_otherwise() -> None:
    assert options().scenario("dualmap").dispatch_of is Dispatch.HOLD
    assert options("--dispatch", "hold").scenario("preble").dispatch_of is Dispatch.HOLD
    assert options("--dispatch", "direct").scenario("dualmap").dispatch_of is Dispatch.DIRECT


def test_goodput_prints_the_rate_and_what_none_can_pass(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "g.json"

    code = run(
        "goodput", "--trace", "uniform:requests=150", "--instances", "1", "--tolerance", "0.2", "--json", str(path)
    )

    assert code == 0
    page = capsys.readouterr().out
    assert "(ideal goodput)" in page
    assert "(sustainable rate)" in page
    found = json.loads(path.read_text())
    assert 0 < found["goodput"][0]["rate_per_s"] < found["ideal_goodput_per_s"]


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["--policy", "best"], "unknown policy 'best'"),
        (["--policy", ","], "--policy names no policy"),
        (["--preset", "abacus"], "unknown preset 'abacus'"),
        (["--rate", "fast"], "--rate needs numbers"),
        (["--rate", "0"], "--rate needs requests per second above 0"),
        (["--instances", "0"], "--instances must be at least 1"),
        (["--slo-s", "-1"], "--slo-s must be more than 0"),
        (["--slo-s", "nan"], "--slo-s must be more than 0"),
        (["--slo-s", "inf"], "--slo-s must be more than 0"),
        (["--requests", "50", "--skip", "50"], "--skip 50 leaves nothing of 50 requests"),
        (["--trace", "nothing"], "neither a file nor a generator"),
        (["--trace", "zipf:skew=steep"], "needs a number"),
        (["goodput", "--on-time", "2"], "--on-time must be in (0, 1]"),
        (["--concurrency", "0"], "--concurrency must be at least 1"),
        (["--concurrency", "4", "--rate", "3"], "--concurrency has no rate"),
        (["--concurrency", "4", "--open-loop"], "exclude each other"),
        (["--seconds", "0"], "--seconds must be above 0"),
        (["--seconds", "5", "--skip-s", "5"], "--skip-s must be at least 0 and leave a part of --seconds"),
    ],
)
def test_wrong_input_is_named_with_exit_code_2(
    words: list[str], message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert run(*words) == 2
    assert message in capsys.readouterr().err


def test_a_broken_trace_leaves_no_report(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    trace = tmp_path / "broken.jsonl"
    trace.write_text('{"timestamp": 0, "input_length": -5, "output_length": 1, "hash_ids": [0]}\n')

    code = run("--trace", str(trace), "--json", str(tmp_path / "r.json"))

    assert code == 2
    assert f"{trace}:1: input_length must be at least 1, found -5" in capsys.readouterr().err
    assert not (tmp_path / "r.json").exists()


def test_a_place_that_cannot_be_written_is_named(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "file").write_text("in the way")

    code = run("--trace", "uniform:requests=20", "--json", str(tmp_path / "file" / "r.json"))

    assert code == 2
    assert "cannot be written" in capsys.readouterr().err


def test_size_lists_how_many_instances_and_cards_each_engine_needs(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    words = ["--trace", "uniform:requests=120", "--rate", "6", "--preset", "qwen2.5-7b-910b4,qwen2.5-32b-h100"]

    assert run("size", *words, "--on-time", "0.95", "--workers", "1", "--json", str(tmp_path / "s.json")) == 0

    document = json.loads((tmp_path / "s.json").read_text())
    rows = {row["preset"]: row for row in document["sizes"]}
    assert document["slo_tpot_ms"] == 100
    assert {name: row["cards"] for name, row in rows.items()} == {"qwen2.5-7b-910b4": 1, "qwen2.5-32b-h100": 2}
    assert rows["qwen2.5-7b-910b4"]["instances"] > rows["qwen2.5-32b-h100"]["instances"] >= 1
    said = capsys.readouterr().out
    assert "one less" in said and "5 s to the first token, 100 ms per output token" in said


def test_an_engine_of_measured_kernels_says_how_good_its_figures_are(capsys: pytest.CaptureFixture[str]) -> None:
    words = ["--trace", "uniform:requests=60", "--rate", "6", "--preset", f"silicon:{KEPT}", "--workers", "1"]

    assert run("size", *words) == 0
    said = capsys.readouterr()
    assert f"silicon:{KEPT}: Qwen/Qwen3-8B on 1 × h100_sxm: aiconfigurator-core 0.12.0" in said.err
    assert said.err.count("off from them by 3.3% at P90") == 1
    assert "the P99 of the first token may be" in said.out

    assert run(*words, "--instances", "2") == 0
    assert capsys.readouterr().err.count("off from them by 3.3% at P90") == 1


def test_changes_of_a_kept_engine_are_simulated() -> None:
    fleet = options("--preset", f"silicon:{KEPT}:prefill_first,silicon:{KEPT}")

    assert [engine.prefill_first for engine in fleet.engines] == [True, False]
    assert {type(engine.costs) for engine in fleet.engines} == {TabledCosts}


@pytest.mark.parametrize(
    ("words", "reason"),
    [
        (["size", "--preset", "silicon:qwen3-8b"], "silicon:MODEL@CARD"),
        (["size", "--instances", "4"], "--instances has no meaning here"),
        (["size", "--preset", "none"], "unknown preset 'none'"),
        (["size", "--on-time", "2"], "--on-time must be"),
        (["--slo-tpot-ms", "0"], "--slo-tpot-ms must be more than 0"),
    ],
)
def test_what_size_cannot_do_is_said(words: list[str], reason: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert run("--trace", "uniform:requests=20", *words) == 2
    assert reason in capsys.readouterr().err


def test_both_slos_are_a_column_where_there_are_two(capsys: pytest.CaptureFixture[str]) -> None:
    words = ["--trace", "uniform:requests=40", "--rate", "2", "--instances", "2"]

    assert run(*words, "--slo-tpot-ms", "1") == 0
    assert "both SLOs" in capsys.readouterr().out


def test_simulate_shows_what_each_tenant_got(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    light, heavy = "light=uncached:tokens=8000,answer=20@0.5@weight=2", "heavy=uncached:tokens=1000,answer=20@2x"
    words = ["--instances", "2", "--seconds", "10", "--workers", "1", "--json", str(tmp_path / "t.json")]

    assert run("--tenant", light, "--tenant", heavy, *words) == 0

    assert "of weights" in capsys.readouterr().out
    rows = json.loads((tmp_path / "t.json").read_text())
    assert [(row["rule"], row["tenant"]) for row in rows] == [
        ("none", "light"), ("none", "heavy"), ("shares", "light"), ("shares", "heavy"),
    ]  # fmt: skip
    assert rows[2]["weight_share"] == pytest.approx(2 / 3)
    assert rows[2]["on_time"] >= rows[0]["on_time"]


def test_a_class_can_be_lines_of_batches(tmp_path: Path) -> None:
    people, lines = "people=uncached:tokens=1000,answer=20@1", "work=uncached:tokens=600,answer=50@20@class=batch"
    classes = (PriorityClassSettings(name="default"), PriorityClassSettings(name="batch"))
    words = ["--instances", "1", "--seconds", "8", "--workers", "1", "--json", str(tmp_path / "t.json"), "--quiet"]

    assert run("--tenant", people, "--tenant", lines, "--lines", "batch", *words,
               scheduling=SchedulingSettings(classes=classes)) == 0  # fmt: skip

    rows = json.loads((tmp_path / "t.json").read_text())
    done = {row["tenant"]: row["requests"] for row in rows if row["rule"] == "none"}
    assert done["people"] == 8
    assert 8 < done["work"] < 160, "as many as there was room for while people came"


def test_lines_are_of_a_class_that_there_is(capsys: pytest.CaptureFixture[str]) -> None:
    assert run("--lines", "batch") != 0
    assert "--lines names a priority class of scheduling.classes: none; found 'batch'" in capsys.readouterr().err


@pytest.mark.parametrize("words", [["--rate", "2"], ["--seconds", "0"], ["--policy", "dualmap,preble"]])
def test_what_does_not_go_with_tenants_is_refused(words: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    assert run("--tenant", "one=uniform@2", *words, "--instances", "2") != 0
    assert "--" in capsys.readouterr().err
