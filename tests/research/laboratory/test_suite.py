import json
from pathlib import Path

import pytest

from dualmap.research.laboratory.run_cache import RunCache
from dualmap.research.laboratory.suite import (
    QUICK,
    STANDARD,
    VARIATIONS,
    Fleet,
    Workload,
    fleets,
    recorded,
    workload_of,
)
from dualmap.research.laboratory.trials import Trial
from dualmap.research.laboratory.variants import parse_variant
from dualmap.scheduling.settings import SchedulingSettings
from dualmap.simulation.errors import TraceError

PRESET = "qwen2.5-7b-910b4"


def write_trace(path: Path, requests: int) -> Path:
    rows = (
        {"timestamp": 100 * n, "input_length": 600, "output_length": 5, "hash_ids": [n, n]} for n in range(requests)
    )
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return path


def test_the_standard_suite_covers_six_traces_two_sizes_and_both_presets() -> None:
    covered = fleets(STANDARD)

    assert len(covered) == 24
    names = {"conversation", "toolagent", "coding", "uniform", "hotspot", "agents"}
    assert {fleet.workload.name for fleet in covered} == names
    assert {fleet.requests for fleet in covered if fleet.instances == 32} == {32 * STANDARD.requests_per_instance}
    assert len(fleets(QUICK)) < len(covered)


def test_variations_change_the_engine_or_the_size_and_never_both() -> None:
    covered = fleets(VARIATIONS)
    usual = (VARIATIONS.presets[0], VARIATIONS.sizes[0])

    assert len(covered) == len(set(covered)) == len(VARIATIONS.workloads) * 10
    assert all(usual[0] == fleet.preset or usual[1] == fleet.instances for fleet in covered)
    requests = {fleet.instances: fleet.requests for fleet in covered}
    assert requests == {2: 480, 8: 480, 32: 1920}, "two instances get a trace as long as eight do"


def test_a_seed_gives_a_generator_another_trace() -> None:
    fleet = Fleet(Workload("uniform", "uniform"), PRESET, 2, 40)

    first, second = (fleet.source(seed).load() for seed in (1, 2))

    assert fleet.seeds(3) == (1, 2, 3)
    assert len(first.requests) == len(second.requests) == 40
    assert first != second


def test_seeds_of_a_file_are_windows_that_do_not_overlap(tmp_path: Path) -> None:
    path = write_trace(tmp_path / "trace.jsonl", 50)
    fleet = Fleet(Workload("mine", str(path)), PRESET, 2, 20)

    assert fleet.seeds(5) == (1, 2), "50 requests have two whole windows of 20"
    ids = [{request.hash_ids for request in fleet.source(seed).load().requests} for seed in (1, 2)]
    assert len(ids[0]) == len(ids[1]) == 20
    assert not ids[0] & ids[1]


def test_a_file_that_is_too_short_is_an_error(tmp_path: Path) -> None:
    fleet = Fleet(Workload("mine", str(write_trace(tmp_path / "trace.jsonl", 19))), PRESET, 2, 20)

    with pytest.raises(TraceError, match="has 19 requests, fewer than the 20 of one window"):
        fleet.seeds(1)


def test_a_recording_takes_the_generators_place_where_there_is_one(tmp_path: Path) -> None:
    write_trace(tmp_path / "conversation_trace.jsonl", 3)

    assert workload_of("conversation", tmp_path).source == str(tmp_path / "conversation_trace.jsonl")
    assert workload_of("toolagent", tmp_path).source == "toolagent"
    assert recorded(workload_of("coding", None), tmp_path).source == "coding"


def test_any_generator_or_file_can_be_a_workload() -> None:
    assert workload_of("thinking", None).capped, "as its own suite has it"
    assert workload_of("zipf:skew=1.2", None) == Workload("zipf:skew=1.2", "zipf:skew=1.2")
    assert workload_of("some/where/trace.jsonl", None) == Workload("trace", "some/where/trace.jsonl")


def test_prompts_are_cut_as_the_paper_does_where_a_workload_says_so() -> None:
    capped = Fleet(Workload("conversation", "conversation", capped=True), PRESET, 2, 60)
    whole = Fleet(Workload("conversation", "conversation"), PRESET, 2, 60)

    assert max(request.input_tokens for request in capped.source(1).load().requests) == 20_480
    assert max(request.input_tokens for request in whole.source(1).load().requests) > 20_480


def test_a_workload_may_have_an_slo_of_its_own_behind_its_name() -> None:
    patient = workload_of("uniform@30", None)
    fleet = Fleet(patient, PRESET, 8, 800)

    assert (patient.name, patient.source, patient.slo_ttft_s) == ("uniform", "uniform", 30.0)
    assert fleet.title == "uniform in 30 s, 8 × 7B"
    trial = Trial(parse_variant("a=dualmap,slo_ttft_s=5", SchedulingSettings()), fleet, 1, RunCache(None))
    assert trial.job(4.0).scenario.scheduling.slo_ttft_s == 30.0


@pytest.mark.parametrize("slo", ["soon", "", "0", "-5", "nan", "inf"])
def test_an_slo_that_is_no_time_is_an_error(slo: str) -> None:
    with pytest.raises(TraceError, match=f"must be seconds above 0, found '{slo}'"):
        workload_of(f"uniform@{slo}", None)


def test_agents_warm_up_until_their_contexts_were_sent_once() -> None:
    fleet = Fleet(workload_of("agents", None), PRESET, 8, 1200)

    assert (fleet.skip_requests, fleet.workload.slo_ttft_s) == (400, 15.0)


def test_an_engine_that_is_changed_is_told_in_the_title_and_capped_like_its_preset() -> None:
    fleet = Fleet(
        Workload("conversation", "conversation", capped=True), f"{PRESET}:prefill_first+max_num_seqs=64", 8, 800
    )

    assert fleet.title == "Conversation, 8 × 7B prefill first, max num seqs=64"
    assert fleet.source(1).max_input_tokens == 20_480


def test_recorded_traces_are_titled_as_their_authors_write_them() -> None:
    titles = [Fleet(Workload(name, name), PRESET, 8, 800).title for name in ("toolagent", "uniform")]

    assert titles == ["Tool&Agent, 8 × 7B", "uniform, 8 × 7B"]
