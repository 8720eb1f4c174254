import json
from pathlib import Path

import pytest

from dualmap.research.run import Run
from dualmap.research.variant import parse_variant
from dualmap.research.workload import Traffic, Workload, recorded, traffic_of
from dualmap.scheduling.settings import SchedulingSettings
from dualmap.simulation.errors import TraceError

PRESET = "qwen2.5-7b-910b4"


def write_trace(path: Path, requests: int) -> Path:
    rows = (
        {"timestamp": 100 * n, "input_length": 600, "output_length": 5, "hash_ids": [n, n]} for n in range(requests)
    )
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return path


def test_a_seed_gives_a_generator_another_trace() -> None:
    workload = Workload(Traffic("uniform", "uniform"), PRESET, 2, 40)

    first, second = (workload.source(seed).load() for seed in (1, 2))

    assert workload.seeds(3) == (1, 2, 3)
    assert len(first.requests) == len(second.requests) == 40
    assert first != second


def test_seeds_of_a_file_are_windows_that_do_not_overlap(tmp_path: Path) -> None:
    path = write_trace(tmp_path / "trace.jsonl", 50)
    workload = Workload(Traffic("mine", str(path)), PRESET, 2, 20)

    assert workload.seeds(5) == (1, 2), "50 requests have two whole windows of 20"
    ids = [{request.hash_ids for request in workload.source(seed).load().requests} for seed in (1, 2)]
    assert len(ids[0]) == len(ids[1]) == 20
    assert not ids[0] & ids[1]


def test_a_file_that_is_too_short_is_an_error(tmp_path: Path) -> None:
    workload = Workload(Traffic("mine", str(write_trace(tmp_path / "trace.jsonl", 19))), PRESET, 2, 20)

    with pytest.raises(TraceError, match="has 19 requests, fewer than the 20 of one window"):
        workload.seeds(1)


def test_a_recording_takes_the_generators_place_where_there_is_one(tmp_path: Path) -> None:
    write_trace(tmp_path / "conversation_trace.jsonl", 3)

    assert traffic_of("conversation", tmp_path).source == str(tmp_path / "conversation_trace.jsonl")
    assert traffic_of("toolagent", tmp_path).source == "toolagent"
    assert recorded(traffic_of("coding", None), tmp_path).source == "coding"


def test_any_generator_or_file_can_be_traffic() -> None:
    assert traffic_of("thinking", None).capped, "as the suites have it"
    assert traffic_of("zipf:skew=1.2", None) == Traffic("zipf:skew=1.2", "zipf:skew=1.2")
    assert traffic_of("some/where/trace.jsonl", None) == Traffic("trace", "some/where/trace.jsonl")


def test_prompts_are_cut_as_the_paper_does_where_traffic_says_so() -> None:
    capped = Workload(Traffic("conversation", "conversation", capped=True), PRESET, 2, 60)
    whole = Workload(Traffic("conversation", "conversation"), PRESET, 2, 60)

    assert max(request.input_tokens for request in capped.source(1).load().requests) == 20_480
    assert max(request.input_tokens for request in whole.source(1).load().requests) > 20_480


def test_traffic_may_have_an_slo_of_its_own_behind_its_name() -> None:
    patient = traffic_of("uniform@30", None)
    workload = Workload(patient, PRESET, 8, 800)

    assert (patient.name, patient.source, patient.slo_ttft_s) == ("uniform", "uniform", 30.0)
    assert workload.title == "uniform in 30 s, 8 × 7B"
    run = Run(workload, parse_variant("a=dualmap,slo_ttft_s=5", SchedulingSettings()), rate_per_s=4.0)
    assert run.job.scenario.scheduling.slo_ttft_s == 30.0


@pytest.mark.parametrize("slo", ["soon", "", "0", "-5", "nan", "inf"])
def test_an_slo_that_is_no_time_is_an_error(slo: str) -> None:
    with pytest.raises(TraceError, match=f"must be seconds above 0, found '{slo}'"):
        traffic_of(f"uniform@{slo}", None)


def test_agents_warm_up_until_their_contexts_were_sent_once() -> None:
    workload = Workload(traffic_of("agents", None), PRESET, 8, 1200)

    assert (workload.skip_requests, workload.traffic.slo_ttft_s) == (400, 15.0)


def test_an_engine_that_is_changed_is_told_in_the_title_and_capped_like_its_preset() -> None:
    workload = Workload(
        Traffic("conversation", "conversation", capped=True), f"{PRESET}:prefill_first+max_num_seqs=64", 8, 800
    )

    assert workload.title == "Conversation, 8 × 7B prefill first, max num seqs=64"
    assert workload.source(1).max_input_tokens == 20_480


def test_recorded_traces_are_titled_as_their_authors_write_them() -> None:
    titles = [Workload(Traffic(name, name), PRESET, 8, 800).title for name in ("toolagent", "uniform")]

    assert titles == ["Tool&Agent, 8 × 7B", "uniform, 8 × 7B"]
