import itertools
import os
from collections import Counter
from pathlib import Path
from statistics import fmean, pstdev

import pytest

from dualmap.simulation.errors import TraceError
from dualmap.simulation.workload.generators import (
    GENERATORS,
    GeneratorSpec,
    adapters,
    agents,
    bursts,
    conversation,
    fewshot,
    heavytail,
    hotspot,
    moving,
    onoff,
    reasoning,
    shared,
    thinking,
    toolagent,
    zipf,
)
from dualmap.simulation.workload.recording import render_mooncake
from dualmap.simulation.workload.trace_figures import quantile, trace_figures
from dualmap.simulation.workload.traces import Trace, TraceRequest, read_trace

TRACES = Path(os.environ.get("DUALMAP_TRACES", "tests/simulation/traces"))


@pytest.mark.parametrize("name", GENERATORS)
def test_the_same_seed_gives_the_same_trace_and_another_seed_another(name: str) -> None:
    generate = GENERATORS[name]

    first = generate(requests=300, seed=7).requests
    assert first == generate(requests=300, seed=7).requests
    assert first != generate(requests=300, seed=8).requests


@pytest.mark.parametrize("name", GENERATORS)
def test_a_generated_trace_is_well_formed(name: str) -> None:
    trace = GENERATORS[name](requests=1500, seed=3)

    assert len(trace.requests) == 1500
    arrivals = [r.arrival_s for r in trace.requests]
    assert arrivals == sorted(arrivals)
    assert arrivals[0] >= 0
    parents: dict[int, int] = {}
    for request in trace.requests:
        assert len(request.hash_ids) == -(-request.input_tokens // trace.block_tokens)
        assert request.output_tokens >= 1
        for parent, block in zip((-1, *request.hash_ids), request.hash_ids, strict=False):
            assert parents.setdefault(block, parent) == parent, "an id stands for one prefix only"


@pytest.mark.parametrize("seed", [1, 2, 3])
def test_conversation_agrees_with_the_measured_figures(seed: int) -> None:
    figures = trace_figures(conversation(requests=12_031, seed=seed))

    assert figures.rate_per_s == pytest.approx(3.40, rel=0.06)
    assert figures.mean_input_tokens == pytest.approx(12_035, rel=0.05)
    assert figures.mean_output_tokens == pytest.approx(343, rel=0.05)
    assert figures.infinite_cache_hit == pytest.approx(0.374, abs=0.03)
    assert figures.root_shares == (1.0,)
    assert figures.distinct_block_share == pytest.approx(0.634, abs=0.03)
    assert figures.input_quantiles == pytest.approx((964, 2306, 6909, 15_367, 27_367, 85_400), rel=0.15)
    assert figures.output_quantiles == pytest.approx((24, 156, 350, 472, 597, 1118), rel=0.15)
    assert figures.burst_mean == pytest.approx(10.2, rel=0.06)
    assert figures.burst_dispersion == pytest.approx(1.1, abs=0.2)


@pytest.mark.parametrize("seed", [1, 2, 3])
def test_toolagent_agrees_with_the_published_figures(seed: int) -> None:
    figures = trace_figures(toolagent(requests=23_608, seed=seed))

    assert figures.rate_per_s == pytest.approx(6.67, rel=0.05)
    assert figures.mean_input_tokens == pytest.approx(8590, rel=0.05)
    assert figures.mean_output_tokens == pytest.approx(182, rel=0.05)
    assert figures.infinite_cache_hit == pytest.approx(0.571, abs=0.03)
    assert figures.root_shares == pytest.approx((0.463, 0.390, 0.146), abs=0.02)
    assert figures.blocks_per_request == pytest.approx(409_356 / 23_608, rel=0.05)
    assert figures.distinct_block_share == pytest.approx(183_166 / 409_356, abs=0.03)


def test_toolagent_starts_as_cold_as_the_real_trace() -> None:
    hits = [trace_figures(toolagent(requests=1000, seed=seed)).infinite_cache_hit for seed in range(1, 6)]

    assert sum(hits) / len(hits) == pytest.approx(0.391, abs=0.03)


@pytest.mark.parametrize("name", ["conversation_trace.jsonl", "toolagent_first1000.jsonl"])
def test_generated_and_real_traces_agree_where_the_real_ones_are_at_hand(name: str) -> None:
    if not (TRACES / name).exists():
        pytest.skip(f"no {name}; set DUALMAP_TRACES to the folder that holds it")
    real = read_trace(TRACES / name)
    generate = conversation if name.startswith("conversation") else toolagent

    ours, theirs = trace_figures(generate(len(real.requests), seed=1)), trace_figures(real)

    assert ours.infinite_cache_hit == pytest.approx(theirs.infinite_cache_hit, abs=0.03)
    assert ours.mean_input_tokens == pytest.approx(theirs.mean_input_tokens, rel=0.12)
    assert ours.distinct_block_share == pytest.approx(theirs.distinct_block_share, abs=0.03)
    for our_share, their_share in zip(ours.root_shares, theirs.root_shares, strict=True):
        assert our_share == pytest.approx(their_share, abs=0.03)


@pytest.mark.parametrize("seed", [1, 2, 3])
def test_agent_sessions_agree_with_what_is_published_of_coding_agents(seed: int) -> None:
    trace = agents(requests=4000, seed=seed)
    figures = trace_figures(trace)

    assert figures.rate_per_s == pytest.approx(4.0, rel=0.25)
    assert figures.mean_output_tokens == pytest.approx(523, rel=0.15)
    assert 0.90 < figures.infinite_cache_hit < 0.96
    assert figures.mean_input_tokens > 50_000
    assert 100_000 < figures.input_quantiles[4] < max(r.input_tokens for r in trace.requests) < 128_000
    assert max(r.input_tokens + r.output_tokens for r in trace.requests) <= 131_072


def test_agent_sessions_append_as_much_as_measured_ones_and_are_compacted() -> None:
    sessions: dict[int, TraceRequest] = {}
    appended: list[int] = []
    compacted = 0
    for request in agents(requests=4000, seed=1).requests:
        *known, _ = (0, *(block for block in request.hash_ids if block in sessions))
        former = sessions.get(known[-1]) if len(known) > 1 else None
        if former is not None and 64_000 <= former.input_tokens < request.input_tokens:
            appended.append(request.input_tokens - former.input_tokens)
        compacted += request.input_tokens > 120_000
        sessions |= dict.fromkeys(request.hash_ids[-3:], request)

    assert quantile(sorted(appended), 0.5) == pytest.approx(790, rel=0.35)
    assert quantile(sorted(appended), 0.9) == pytest.approx(4900, rel=0.35)
    assert compacted > 0


def test_a_higher_skew_makes_the_first_prefix_more_popular() -> None:
    mild, strong = (trace_figures(zipf(requests=2000, seed=1, skew=skew)) for skew in (0.6, 1.4))

    assert strong.root_shares[0] > 2 * mild.root_shares[0]


def test_the_hot_spot_moves_in_time() -> None:
    trace = hotspot(requests=4000, seed=1)
    half = len(trace.requests) // 2

    def most_popular(requests: object) -> int:
        roots = [r.hash_ids[0] for r in requests]  # type: ignore[attr-defined]
        return max(set(roots), key=roots.count)

    assert most_popular(trace.requests[:half]) != most_popular(trace.requests[half:])


def test_reasoning_answers_are_longer_than_their_prompts() -> None:
    figures = trace_figures(reasoning(requests=1000, seed=1))

    assert figures.mean_output_tokens > 2 * figures.mean_input_tokens


def test_of_few_shot_prompts_nearly_all_is_shared() -> None:
    figures = trace_figures(fewshot(requests=1000, seed=1))

    assert figures.infinite_cache_hit > 0.95
    assert figures.mean_output_tokens < 100


def test_documents_are_a_multiple_of_memory_and_a_hot_set_gets_its_share() -> None:
    def questions(text: str) -> list[int]:
        """The number of questions about each document, the most popular first."""
        spec = GeneratorSpec.parse(text)
        assert spec is not None
        return sorted(Counter(r.hash_ids[0] for r in spec.generate(requests=4000, seed=2).requests).values())[::-1]

    alike, by_zipf, hot = questions("documents:skew=0"), questions("documents"), questions("hotset:hot=20,share=70")

    assert len(alike) == 300
    assert alike[0] < 3 * alike[150]
    assert by_zipf[0] > 30 * by_zipf[150]
    assert sum(hot[:20]) / 4000 == pytest.approx(0.7, abs=0.03)
    trace = GENERATORS["documents"](requests=50, seed=2)
    assert all(12_288 < request.input_tokens <= 12_288 + 500 for request in trace.requests)


def test_agents_go_on_with_contexts_of_their_own_within_bounds() -> None:
    trace = GENERATORS["contexts"](requests=600, seed=3)
    turns = {name: [r for r in trace.requests if r.session == name] for name in {r.session for r in trace.requests}}

    assert 30 < len(turns) <= 40
    assert all(30_000 <= request.input_tokens <= 140_000 for request in trace.requests)
    for own in turns.values():
        assert own[0].think_s is None
        assert all(later.think_s is not None for later in own[1:])
        for former, later in itertools.pairwise(own):
            full = former.input_tokens // trace.block_tokens
            assert later.hash_ids[:full] == former.hash_ids[:full]
    assert len({own[0].hash_ids[0] for own in turns.values()}) == len(turns), "nothing is shared"


def test_many_ask_about_a_new_document_from_one_moment_on() -> None:
    trace = GENERATORS["newdocument"](requests=4000, seed=2)
    about = [request for request in trace.requests if request.input_tokens > 30_000 - 512]
    later = [request for request in trace.requests if request.arrival_s >= 60]

    assert len({request.hash_ids[0] for request in about}) == 1
    assert min(request.arrival_s for request in about) == pytest.approx(60, abs=5)
    assert len(about) / len(later) == pytest.approx(0.3, abs=0.03)
    assert trace.rate_per_s == pytest.approx(10, rel=0.1)


def test_a_generator_is_named_with_its_options() -> None:
    spec = GeneratorSpec.parse("zipf:requests=50,skew=1.5,seed=4")

    assert spec is not None
    assert len(spec.generate(requests=10).requests) == 50
    assert spec.generate().name == "zipf-1.5"
    assert GeneratorSpec.parse("some/file.jsonl") is None


@pytest.mark.parametrize("text", ["conversation:skew=1", "zipf:skew=much", "uniform:requests=0", "uniform:requests=x"])
def test_a_wrong_generator_option_is_refused(text: str) -> None:
    with pytest.raises(TraceError, match=text):
        GeneratorSpec.parse(text)


def test_thinking_is_toolagent_with_longer_answers() -> None:
    plain, longer = toolagent(requests=200, seed=1), thinking(requests=200, seed=1, answers=3)

    assert [one.output_tokens for one in longer.requests] == [3 * one.output_tokens for one in plain.requests]
    assert [one.hash_ids for one in longer.requests] == [one.hash_ids for one in plain.requests]
    assert longer.name == "thinking"


def first_blocks(trace: Trace, blocks: int) -> Counter[tuple[int, ...]]:
    return Counter(request.hash_ids[:blocks] for request in trace.requests)


def test_the_moving_prompt_is_another_one_every_minute() -> None:
    trace = moving(requests=3000, seed=1)

    hot = [heads for heads, count in first_blocks(trace, 12).items() if count > 100]
    spells = {
        heads: [request.arrival_s for request in trace.requests if request.hash_ids[:12] == heads] for heads in hot
    }
    assert len(hot) == pytest.approx(trace.requests[-1].arrival_s / 60, abs=1)
    assert all(max(times) - min(times) <= 60 for times in spells.values())
    assert sum(map(len, spells.values())) / 3000 == pytest.approx(0.6, abs=0.03)


@pytest.mark.parametrize("share", [20, 80])
def test_a_share_of_the_requests_has_one_system_prompt_for_good(share: int) -> None:
    assert first_blocks(shared(requests=3000, seed=1, share=share), 12).most_common(1)[0][1] == pytest.approx(
        30 * share, rel=0.05
    )


@pytest.mark.parametrize("variation", [1, 3])
def test_gaps_vary_as_they_are_told_to(variation: int) -> None:
    arrivals = [request.arrival_s for request in bursts(requests=20_000, seed=1, variation=variation).requests]
    gaps = [later - earlier for earlier, later in itertools.pairwise(arrivals)]

    assert fmean(gaps) == pytest.approx(1 / 8, rel=0.1)
    assert pstdev(gaps) / fmean(gaps) == pytest.approx(variation, rel=0.1)


def test_on_and_off_change_every_ten_and_twenty_seconds() -> None:
    trace = onoff(requests=5000, seed=1)

    on = sum(request.arrival_s % 30 < 10 for request in trace.requests)
    assert on / 5000 == pytest.approx(0.9, abs=0.02)
    assert trace.rate_per_s == pytest.approx(8.0, rel=0.05)


def test_one_answer_in_a_hundred_is_very_long() -> None:
    outputs = sorted(request.output_tokens for request in heavytail(requests=20_000, seed=1).requests)

    assert quantile(outputs, 0.5) == pytest.approx(100, rel=0.1)
    assert sum(tokens > 8000 for tokens in outputs) / 20_000 == pytest.approx(0.01, abs=0.003)


def test_adapters_have_a_rank_each_that_is_read_back(tmp_path: Path) -> None:
    trace = adapters(300, 1, count=9, rank=32)
    (tmp_path / "trace.jsonl").write_text(render_mooncake(trace))

    ranks = {(each.adapter, each.adapter_rank) for each in trace.requests}
    assert Counter(rank for _, rank in ranks) == {8: 3, 16: 3, 32: 3}
    assert [each.adapter_rank for each in read_trace(tmp_path / "trace.jsonl").requests] == [
        each.adapter_rank for each in trace.requests
    ]
    assert {each.adapter_rank for each in adapters(20, 1).requests} == {0}
