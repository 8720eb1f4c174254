"""A metrics page tells capacity and run of a server, whatever else is on it."""

from __future__ import annotations

import itertools
from collections.abc import Iterator

import pytest
from prometheus_client.parser import text_string_to_metric_families
from prometheus_client.samples import Sample

from dualmap.runtime.pool_settings import MAX_KV_CAPACITY_TOKENS
from dualmap.scheduling.estimates.adapters import Residency
from dualmap.scheduling.estimates.kv_tiers import Tier
from dualmap.scheduling.estimates.load_prices import LoadReading
from dualmap.workers import engine_metrics
from dualmap.workers.engine_metrics import (
    AdapterReport,
    ServerRun,
    adapters_of,
    block_tokens_of,
    kv_capacity_of,
    loads_of,
    pulls_of,
    server_run_of,
)

METRICS = """\
# HELP vllm:prompt_tokens_total Number of prefill tokens processed.
# TYPE vllm:prompt_tokens_total counter
vllm:prompt_tokens_total{engine="0",model_name="m"} 1200.0
vllm:prompt_tokens_total{engine="1",model_name="m"} 1.0e+03
vllm:generation_tokens_total{engine="0",model_name="m"} 34.0
vllm:num_requests_running{engine="0",model_name="m"} 3.0
vllm:cache_config_info{block_size="64",cache_dtype="auto",engine="0",num_gpu_blocks="300"} 1.0
vllm:cache_config_info{block_size="64",cache_dtype="auto",engine="1",num_gpu_blocks="300"} 1.0
# TYPE process_start_time_seconds gauge
process_start_time_seconds 1.76e+09
"""


def parsed(page: str) -> Iterator[Sample]:
    for family in text_string_to_metric_families(page):
        yield from family.samples


def config(**labels: str) -> str:
    return "vllm:cache_config_info{" + ",".join(f'{name}="{text}"' for name, text in labels.items()) + "} 1.0\n"


def test_the_run_of_a_server_is_its_start_and_the_tokens_of_all_its_engines() -> None:
    assert server_run_of(METRICS) == ServerRun(1.76e9, 2234.0, 3.0)


def test_blocks_that_every_engine_repeats_are_counted_once() -> None:
    assert kv_capacity_of(METRICS) == 300 * 64


def test_the_tokens_of_each_engine_add_up_and_come_before_its_blocks() -> None:
    page = config(block_size="4", num_gpu_blocks="900", kv_cache_size_tokens="9600", engine="0") + config(
        block_size="4", num_gpu_blocks="900", kv_cache_size_tokens="9600", engine="1"
    )

    assert kv_capacity_of(page) == 19_200


def test_a_rank_has_its_own_run_and_its_own_share_of_the_memory() -> None:
    own = config(kv_cache_size_tokens="9600", engine="0") + config(kv_cache_size_tokens="6400", engine="1")

    assert server_run_of(METRICS, 1) == ServerRun(1.76e9, 1000.0)
    assert server_run_of(METRICS, 7) == ServerRun(1.76e9, None)
    assert (kv_capacity_of(METRICS, 1), kv_capacity_of(own, 1)) == (300 * 64 // 2, 6400)


def test_tokens_that_are_not_known_leave_the_blocks() -> None:
    assert kv_capacity_of(config(block_size="16", num_gpu_blocks="100", kv_cache_size_tokens="None")) == 1600


def test_a_label_with_braces_commas_and_escapes_is_read_as_text() -> None:
    assert kv_capacity_of(config(dtype='a,{b}=\\"c', block_size="16", num_gpu_blocks="100")) == 1600


@pytest.mark.parametrize(
    "page",
    [
        "",
        "other_metric 1",
        config(block_size="128"),
        config(block_size="128", num_gpu_blocks="None"),
        config(block_size="128", num_gpu_blocks="-1"),
        config(block_size="128", num_gpu_blocks=str(10**30)),
        config(kv_cache_size_tokens=str(MAX_KV_CAPACITY_TOKENS + 1)),
        'vllm:cache_config_info{block_size="128',
        "vllm:prompt_tokens_total 1.2.3",
        "vllm:prompt_tokens_total NaN\nprocess_start_time_seconds +Inf",
    ],
)
def test_a_metrics_page_without_the_figures_tells_nothing(page: str) -> None:
    assert server_run_of(page) == ServerRun()
    assert kv_capacity_of(page) is None


def test_a_malformed_line_costs_itself_alone() -> None:
    assert server_run_of("vllm:prompt_tokens_total{\nvllm:generation_tokens_total 7\n").tokens == 7.0


def test_a_page_is_read_as_by_the_library_of_prometheus() -> None:
    """This holds for what servers write: names that are none, which the library takes, are refused."""
    values = ["1", "1e5", "NaN", "+Inf", "-1.5", "0x1", "1 2", "", '"']
    labels = ["", "{}", '{a="b"}', '{a="b",}', '{a="b", c="\\"}"}', '{a="x\\ny\\\\"}', '{a="b"', "{a=b}", '{="b"}']
    for text, number in itertools.product(labels, values):
        line = f"vllm:prompt_tokens_total{text} {number}"
        try:
            expected = [(each.labels, float(each.value)) for each in parsed(line)]
        except ValueError:
            expected = []
        found = [(each.labels, each.value) for each in engine_metrics._samples(line)]
        assert repr(found) == repr(expected), line


def test_of_a_page_no_more_is_parsed_than_a_server_writes() -> None:
    line = 'vllm:prompt_tokens_total{engine="0",x="%s"} 1.0\n' % ("y" * 8000)

    assert (server_run_of(line * 500).tokens or 0) < 150


def test_a_line_that_would_take_long_to_parse_is_left_out() -> None:
    slow = 'vllm:prompt_tokens_total{a="' + '\\"' * 5000 + '"} 1\n'

    assert server_run_of(slow + "vllm:generation_tokens_total 7\n").tokens == 7.0


@pytest.mark.parametrize(
    ("former", "now", "restarted"),
    [
        (ServerRun(100.0, 50.0), ServerRun(100.0, 60.0), False),
        (ServerRun(100.0, 50.0), ServerRun(101.0, 60.0), True),
        (ServerRun(100.0, 50.0), ServerRun(99.0, 10.0), False),  # another of several processes behind one URL
        (ServerRun(None, 50.0), ServerRun(None, 50.0), False),
        (ServerRun(None, 50.0), ServerRun(None, 49.0), True),
        (ServerRun(None, 50.0), ServerRun(101.0, 0.0), True),
        (ServerRun(None, 50.0), ServerRun(None, None), False),
        (ServerRun(None, None), ServerRun(100.0, 0.0), False),
    ],
)
def test_a_later_start_or_counters_that_went_back_are_a_restart(
    former: ServerRun, now: ServerRun, restarted: bool
) -> None:
    assert now.is_restart_of(former) is restarted


def test_the_block_size_is_read_unless_engines_differ() -> None:
    line = 'vllm:cache_config_info{{block_size="{size}",engine="{engine}",num_gpu_blocks="9"}} 1.0\n'
    one, other = line.format(size=32, engine=0), line.format(size=16, engine=1)
    assert block_tokens_of(one + line.format(size=32, engine=1)) == 32
    assert block_tokens_of(one + other) is None
    assert block_tokens_of("") is None


LOADS = """\
vllm:prompt_tokens_cached_by_source_total{engine="0",model_name="m",source="device"} 900.0
vllm:prompt_tokens_cached_by_source_total{engine="0",model_name="m",source="host"} 500.0
vllm:prompt_tokens_cached_by_source_total{engine="1",model_name="m",source="host"} 30.0
vllm:prompt_tokens_cached_by_source_total{engine="0",model_name="m",source="disk"} 70.0
vllm:prompt_tokens_cached_by_source_total{engine="0",model_name="m",source="tape"} 8.0
vllm:kv_offload_load_time_total{engine="0",model_name="m"} 0.25
vllm:kv_offload_load_time_total{engine="1",model_name="m"} 0.05
vllm:kv_offload_load_size_count{engine="0",model_name="m"} 4.0
vllm:kv_offload_tiering_read_time_total{engine="0",model_name="m",tier="fs"} 0.5
vllm:kv_offload_tiering_read_time_total{engine="0",model_name="m",tier="tape"} 0.5
"""


def test_loads_are_counted_by_tier_and_rank_and_a_tier_never_heard_of_counts_for_nothing() -> None:
    assert loads_of(LOADS) == {Tier.HOST: LoadReading(530.0, 0.3, 4.0), Tier.DISK: LoadReading(70.0, 0.5)}
    assert loads_of(LOADS, 1) == {Tier.HOST: LoadReading(30.0, 0.05)}
    assert loads_of(LOADS.replace('tier="fs"', 'tier="1:fs"')) == loads_of(LOADS), "its number may stand before it"
    assert loads_of(METRICS) == loads_of("") == {}


def test_pulls_are_counted_by_rank() -> None:
    page = "".join(
        f'vllm:prompt_tokens_cached_by_source_total{{engine="{engine}",source="p2p"}} {10.0 * engine}\n'
        f'vllm:kv_offload_tiering_read_time_total{{engine="{engine}",tier="1:p2p"}} {0.5 * engine}\n'
        for engine in (1, 2)
    )

    assert [pulls_of(page, rank) for rank in (None, 1, 2)] == [
        LoadReading(30.0, 1.5),
        LoadReading(10.0, 0.5),
        LoadReading(20.0, 1.0),
    ]
    assert pulls_of(page, 3) is None


def adapter_sample(in_flight: str, time_s: float, slots: str = "4") -> str:
    return (
        f'vllm:lora_requests_info{{max_lora="{slots}",running_lora_adapters="{in_flight}",'
        f'waiting_lora_adapters="{in_flight}"}} {time_s}\n'
    )


@pytest.mark.parametrize(
    ("page", "report"),
    [
        (adapter_sample("a,b", 1.7e9), AdapterReport(4, ("a", "b"))),
        (adapter_sample("", 1.7e9), AdapterReport(4)),
        (adapter_sample("a", 1.0, slots="none"), AdapterReport(None, ("a",))),
        ("vllm:lora_requests_info{ broken", AdapterReport()),
        ("", AdapterReport()),
    ],
)
def test_slots_and_adapters_in_flight_are_read_where_a_server_has_any(page: str, report: AdapterReport) -> None:
    assert adapters_of(page) == report


def loaded_page(*engines: str) -> str:
    """The metrics that are proposed for versions after 0.33, of a server with these engines."""
    lines = [f'vllm:num_gpu_loaded_lora_adapters{{engine="{each}"}} 1.0' for each in engines]
    lines += [f'vllm:max_gpu_lora_adapters{{engine="{each}"}} 2.0' for each in engines]
    for level, name in (("gpu", "sql"), ("cpu", "sql"), ("cpu", "chat")):
        labels = f'adapter_name="{name}",engine="0",level="{level}",pinned="false",rank="8"'
        lines.append(f"vllm:lora_adapter_loaded{{{labels}}} 1.0")
    return "\n".join(lines)


def test_a_version_that_reports_its_adapters_says_which_are_on_the_device_and_which_in_host_memory() -> None:
    report = adapters_of(loaded_page("0") + "\n" + adapter_sample("sql", 1.7e9, slots="none"))

    assert report == AdapterReport(2, ("sql",), Residency(frozenset({"sql"}), frozenset({"sql", "chat"})))
    assert adapters_of('vllm:num_gpu_loaded_lora_adapters{engine="0"} 0.0').resident == Residency(
        frozenset(), frozenset()
    )


def test_which_of_several_engines_has_an_adapter_is_not_known() -> None:
    assert adapters_of(loaded_page("0", "1")).resident is None


def test_of_all_sets_of_adapters_that_were_in_flight_the_newest_counts() -> None:
    """vLLM keeps a sample of each."""
    page = adapter_sample("old", 1.7e9) + adapter_sample("new", 1.8e9) + adapter_sample("older", 1.6e9)

    assert adapters_of(page).in_flight == ("new",)


def test_a_block_of_a_hybrid_model_is_one_of_full_attention() -> None:
    page = config(block_size="32", effective_attention_block_size="64")

    assert block_tokens_of(page) == 64
    assert block_tokens_of(config(block_size="32", effective_attention_block_size="None")) == 32
