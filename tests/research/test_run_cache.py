import json
from dataclasses import replace
from pathlib import Path

import pytest

from dualmap.research import run_cache
from dualmap.research.figures import Figures
from dualmap.research.run_cache import RunCache, code_digest, run_key
from dualmap.research.scalers import Scaler
from dualmap.research.unshared.load_view import LoadView
from dualmap.research.unshared.routers import UnsharedRouters
from dualmap.scheduling.scaling.scale_settings import autoscale_of
from dualmap.scheduling.settings import SchedulingSettings
from dualmap.simulation.engine.presets import find_preset
from dualmap.simulation.virtual_time.autoscale import Autoscale
from dualmap.simulation.virtual_time.runs import RunJob
from dualmap.simulation.virtual_time.scenario import Scenario
from dualmap.simulation.workload.sources import TraceSource

ENGINE = find_preset("qwen2.5-7b-910b4").engine
JOB = RunJob(TraceSource("uniform", 30), Scenario(SchedulingSettings(policy="llm-d"), ENGINE, instances=2), 4.0)


def test_a_run_that_was_made_before_is_not_made_again(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    cache = RunCache(tmp_path)
    first = cache.figures(JOB)

    def run_again(job: RunJob) -> Figures:
        raise AssertionError("it ran again")

    monkeypatch.setattr(RunJob, "run", run_again)

    assert cache.figures(JOB) == first == RunCache(tmp_path).figures(JOB)
    with pytest.raises(AssertionError, match="it ran again"):
        cache.figures(replace(JOB, rate_per_s=5.0))


def test_the_figures_are_those_of_a_run_without_a_cache(tmp_path: Path) -> None:
    assert RunCache(tmp_path).figures(JOB) == RunCache(None).figures(JOB) == Figures.of(JOB.run())


def test_a_broken_file_is_made_again(tmp_path: Path) -> None:
    cache = RunCache(tmp_path)
    first = cache.figures(JOB)
    (path,) = tmp_path.iterdir()
    path.write_text('{"on_time": 1}')

    assert cache.figures(JOB) == first
    assert [left.name for left in tmp_path.iterdir()] == [path.name], "no partial file is left"


def test_a_file_without_a_figure_that_came_later_is_made_again(tmp_path: Path) -> None:
    cache = RunCache(tmp_path)
    first = cache.figures(JOB)
    (path,) = tmp_path.iterdir()
    older = json.loads(path.read_text())
    del older["undisturbed_share"], older["ttft_p99_s"]
    path.write_text(json.dumps(older))

    assert cache.figures(JOB) == first
    assert json.loads(path.read_text())["undisturbed_share"] == first.undisturbed_share
    assert json.loads(path.read_text())["ttft_p99_s"] == first.ttft_p99_s > 0


def test_a_policy_of_another_package_is_run_every_time(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(run_cache, "POLICIES", ("preble",))  # and so llm-d is none of the product's

    assert RunCache(tmp_path).figures(JOB) == Figures.of(JOB.run())
    assert list(tmp_path.iterdir()) == []


def test_a_fleet_that_sizes_itself_is_in_the_key() -> None:
    keys = {
        run_key(replace(JOB, scenario=replace(JOB.scenario, autoscale=Autoscale(autoscale_of(bounds), plan))))
        for bounds in ("1:2", "1:3")
        for plan in (None, Scaler("dynamo"), Scaler("apa"), Scaler("apa", (("target", 0.3),)))
    }

    assert len(keys) == 8


def test_replicas_that_share_no_store_are_in_the_key() -> None:
    routers = [None, *(UnsharedRouters(replicas, view) for replicas in (1, 8) for view in LoadView)]
    keys = {run_key(replace(JOB, scenario=replace(JOB.scenario, routers=each))) for each in routers}

    assert len(keys) == len(routers)


def test_everything_that_a_run_depends_on_is_in_its_key(tmp_path: Path) -> None:
    trace = tmp_path / "trace.jsonl"
    trace.write_text("one")
    scenario = JOB.scenario
    others = [
        replace(JOB, rate_per_s=4.5),
        replace(JOB, source=TraceSource("uniform", 31)),
        replace(JOB, source=TraceSource("uniform", 30, seed=2)),
        replace(JOB, source=TraceSource("uniform", 30, start=1)),
        replace(JOB, source=TraceSource(str(trace), 30)),
        replace(JOB, scenario=replace(scenario, instances=3)),
        replace(JOB, scenario=replace(scenario, dispatch_window_tokens=1)),
        replace(JOB, scenario=replace(scenario, engine=replace(ENGINE, kv_capacity_tokens=200_000))),
        replace(JOB, scenario=replace(scenario, scheduling=SchedulingSettings(policy="preble"))),
        replace(JOB, scenario=replace(scenario, scheduling=SchedulingSettings(policy="llm-d", slo_ttft_s=4))),
    ]

    keys = {run_key(job) for job in (JOB, *others)}

    assert len(keys) == 1 + len(others)
    assert run_key(replace(JOB)) == run_key(JOB)


def test_a_change_to_one_policy_concerns_that_policy_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    read_bytes = Path.read_bytes

    def edited(path: Path) -> bytes:
        return read_bytes(path) + (b"# edited" if path.name == "preble.py" else b"")

    before = {policy: code_digest(policy) for policy in ("preble", "llm-d", "dualmap-least-cost")}
    code_digest.cache_clear()
    monkeypatch.setattr(Path, "read_bytes", edited)
    after = {policy: code_digest(policy) for policy in ("preble", "llm-d", "dualmap-least-cost")}
    code_digest.cache_clear()

    assert [policy for policy in before if before[policy] != after[policy]] == ["preble"]


@pytest.mark.parametrize("name", ["engine.py", "pair.py", "choice.py", "ttft.py", "placing.py", "routers.py", "hpa.py"])
def test_a_change_to_what_all_pass_through_concerns_all(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    read_bytes = Path.read_bytes
    before = code_digest("dualmap-least-cost")
    code_digest.cache_clear()
    monkeypatch.setattr(Path, "read_bytes", lambda path: read_bytes(path) + (b"#" if path.name == name else b""))
    after = code_digest("dualmap-least-cost")
    code_digest.cache_clear()

    assert before != after
