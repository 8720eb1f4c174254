import argparse
import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest

from dualmap.cli import what_if
from dualmap.cli.admin_api import AdminApi
from dualmap.cli.configuration import ConfigurationError
from dualmap.cli.errors import UsageError
from dualmap.cli.main import main
from dualmap.cli.settings import Settings
from dualmap.simulation.commands.what_if import Change
from dualmap.simulation.workload.generators import uniform
from dualmap.simulation.workload.recording import render_mooncake


@pytest.fixture
def recording(tmp_path: Path) -> Path:
    path = tmp_path / "hour.jsonl"
    path.write_text(render_mooncake(uniform(requests=150, seed=2).at_rate(6.0)))
    return path


@pytest.fixture(autouse=True)
def _wide_terminal(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COLUMNS", "160")


def change_of(tmp_path: Path, text: str, settings: Settings | None = None) -> Change:
    (tmp_path / "change.yaml").write_text(text)
    return what_if._change(tmp_path / "change.yaml", settings or Settings())


def run(recording: Path, change: str, *words: str) -> int:
    file = recording.with_name("change.yaml")
    file.write_text(change)
    return main(["what-if", "--recording", str(recording), "--change", str(file), "--workers", "1", "--quiet", *words])


def test_half_of_the_instances_is_forecast_to_be_worse_in_words_figures_and_pictures(
    recording: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    pytest.importorskip("matplotlib")

    code = run(
        recording, "fleet: {instances: 2}", "--instances", "4", "--json", str(tmp_path / "out.json"), "--plots",
        str(tmp_path / "plots"),
    )  # fmt: skip

    said = capsys.readouterr().out
    assert code == 0, said
    assert "The forecast cannot be checked" in said, "a generated trace has no measurements"
    assert "If fleet.instances is 2" in said
    assert "Gets worse for" in said and "all requests: on time" in said
    assert "Not known from here" in said
    document = json.loads((tmp_path / "out.json").read_text())
    by_name = {row["figure"]: row for row in document["differences"]}
    assert by_name["on time"]["verdict"] == by_name["TTFT P90"]["verdict"] == "worse"
    assert by_name["on time"]["then"] < by_name["on time"]["as_it_is"]
    assert document["instance_hours"]["then"] == pytest.approx(document["instance_hours"]["as_it_is"] / 2, rel=0.05)
    assert {path.name for path in (tmp_path / "plots").iterdir()} == {"ttft.svg", "ttft-over-time.svg"}


def test_a_change_that_changes_nothing_gets_nothing_worse(recording: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert run(recording, "fleet: {instances: 4}", "--instances", "4") == 0

    assert "Nothing gets worse beyond chance" in capsys.readouterr().out


def test_a_change_keeps_all_that_it_does_not_name(tmp_path: Path) -> None:
    now = Settings.model_validate(
        {
            "scheduling": {"slo_ttft_s": 3.0, "policy_options": {"recompute_weight": 2.0}},
            "emulator": {"max_num_seqs": 9},
        }
    )

    change = change_of(tmp_path, "scheduling: {queue_order: fifo}\nrouter: {late_requests: refuse}", now)

    assert change.configured.scheduling == now.scheduling.model_copy(update={"queue_order": "fifo"})
    assert change.configured.engine == now.emulator
    assert (now.router.late_requests, change.configured.late_requests) == ("serve", "refuse")
    assert change.words == ["scheduling.queue_order is fifo", "router.late_requests is refuse"]


def test_another_policy_begins_without_the_parameters_of_the_former_one(tmp_path: Path) -> None:
    now = Settings.model_validate({"scheduling": {"policy_options": {"recompute_weight": 2.0}}})

    other = change_of(tmp_path, "scheduling: {policy: preble, policy_options: {decode_s_per_token: 0.03}}", now)
    same = change_of(tmp_path, "scheduling: {policy_options: {crowding_weight: 1.0}}", now)

    assert other.configured.scheduling.policy_options == {"decode_s_per_token": 0.03}
    assert same.configured.scheduling.policy_options == {"recompute_weight": 2.0, "crowding_weight": 1.0}


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("", "changes nothing"),
        ("fleet: {machines: 3}", "fleet.machines is not known; below 'fleet:' there are autoscale"),
        ("store: {url: redis://a}", "store.url makes no difference to a twin; it follows emulator, pools"),
        ("router: {port: 1}", "router.port makes no difference"),
    ],
)
def test_what_a_twin_does_not_follow_is_refused_with_what_it_does(tmp_path: Path, text: str, said: str) -> None:
    with pytest.raises(UsageError, match=said):
        change_of(tmp_path, text)


def test_a_misspelt_setting_is_refused_by_its_name(tmp_path: Path) -> None:
    with pytest.raises(ConfigurationError, match=r"change.yaml: scheduling.slo_tfft_s"):
        change_of(tmp_path, "scheduling: {slo_tfft_s: 3}")


def test_a_wrong_value_is_named_and_nothing_is_run(recording: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert run(recording, "scheduling: {policy_options: {recompute_weight: 0}}") == 2

    assert "recompute_weight: Input should be greater than or equal to 1" in capsys.readouterr().err


ROW: Mapping[str, Any] = {
    "id": "npu-0", "url": "http://10.0.0.1:8000", "role": "mixed", "state": "ready", "prefill_tokens_per_s": 5000.0,
    "kv_capacity_tokens": 300_000, "dispatch_window_tokens": 8192, "max_running_requests": 64,
    "max_queued_requests": 1000, "load": {"prefill_tokens_per_s": 7300.0},
}  # fmt: skip


def answered(monkeypatch: pytest.MonkeyPatch, *rows: Mapping[str, Any]) -> None:
    """The running fleet answers with these instances, and a policy that was changed in it."""

    def call(self: AdminApi, method: str, path: str, *_: object, query: Mapping[str, object]) -> Any:
        if path == "/settings":
            return {"pool": "default", "scheduling": {"policy": "preble"}}
        assert (path, query) == ("/instances", {"pool": "default"})
        return {"instances": rows}

    monkeypatch.setattr(AdminApi, "call", call)


ARGUMENTS = argparse.Namespace(url="http://127.0.0.1:8000", pool=None)


def test_the_twin_of_a_running_fleet_has_its_settings_and_its_serving_instances(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    answered(monkeypatch, ROW, {**ROW, "id": "npu-1", "state": "down"}, {**ROW, "id": "npu-2", "load": None})

    found = what_if._running(ARGUMENTS, Settings())

    assert found.scheduling.policy == "preble"
    (pool,) = found.pools
    assert [(each.id, each.prefill_tokens_per_s) for each in pool.instances] == [("npu-0", 7300.0), ("npu-2", 5000.0)]
    assert pool.instances[0].kv_capacity_tokens == 300_000


def test_a_fleet_without_instances_has_no_twin(monkeypatch: pytest.MonkeyPatch) -> None:
    answered(monkeypatch, {**ROW, "state": "down"})

    with pytest.raises(UsageError, match="no instance in service"):
        what_if._running(ARGUMENTS, Settings())
