from __future__ import annotations

from dataclasses import replace

import orjson
import pytest

from dualmap.runtime.pool_settings import AdapterSettings
from dualmap.scheduling.state.instance import InstanceSpec
from dualmap.scheduling.state.model_names import ModelList
from dualmap.workers.described import adapter_room, reported_changes, reported_limits
from dualmap.workers.probe import EngineFacts, adapter_slots_in, dropped_blocks_of, scheduler_limits_of


def facts(**reported: int) -> EngineFacts:
    return EngineFacts("0.32.0", ModelList({"m": ""}), **{"kv_capacity_tokens": None, **reported})


def test_what_a_server_reports_of_its_cache_replaces_what_was_known() -> None:
    spec = InstanceSpec("a", "http://a", kv_capacity_tokens=5, block_tokens=16)
    assert reported_changes(spec, facts(kv_capacity_tokens=9, block_tokens=32), {}) == {
        "kv_capacity_tokens": 9,
        "block_tokens": 32,
    }
    assert reported_changes(spec, facts(kv_capacity_tokens=5, block_tokens=16), {}) == {}


def test_limits_follow_the_server_unless_an_operator_set_them() -> None:
    reported = facts(max_num_batched_tokens=8192, max_num_seqs=128)
    limits = {"dispatch_window_tokens": 16384, "max_running_requests": 128}
    assert reported_limits(reported) == limits
    assert reported_changes(InstanceSpec("a", "http://a"), reported, {}) == limits
    tuned = InstanceSpec("a", "http://a", dispatch_window_tokens=1000, max_running_requests=7)
    assert reported_changes(tuned, reported, {}) == {}


def test_a_server_that_comes_back_with_other_limits_is_followed() -> None:
    spec = InstanceSpec("a", "http://a", dispatch_window_tokens=16384, max_running_requests=128)
    former = {"dispatch_window_tokens": 16384, "max_running_requests": 128}
    reported = facts(max_num_batched_tokens=2048, max_num_seqs=64)
    assert reported_changes(spec, reported, former) == {"dispatch_window_tokens": 4096, "max_running_requests": 64}


@pytest.mark.parametrize(
    ("body", "limits"),
    [
        (b'{"vllm_config": {"scheduler_config": {"max_num_batched_tokens": 2048, "max_num_seqs": 128}}}', (2048, 128)),
        (b'{"vllm_config": {"scheduler_config": {"max_num_batched_tokens": "2048", "max_num_seqs": 0}}}', (None, None)),
        (b'{"vllm_config": "model=..."}', (None, None)),
        (b"nonsense", (None, None)),
    ],
)
def test_limits_are_read_from_the_servers_configuration(body: bytes, limits: tuple[int | None, int | None]) -> None:
    assert scheduler_limits_of(body) == limits


def test_the_room_for_adapters_is_as_reported_or_as_configured() -> None:
    spec, times = InstanceSpec("a", "http://a"), {"adapter_host_ms": 20, "adapter_disk_ms": 500}

    assert adapter_room(spec, None, None, AdapterSettings()) == {}
    assert adapter_room(spec, 4, None, AdapterSettings()) == {
        "adapter_slots": 4,
        "adapter_host_slots": 4,
        **times,
    }
    known = adapter_room(spec, 4, 16, AdapterSettings(host_slots=32))
    assert known["adapter_host_slots"] == 32
    assert adapter_room(replace(spec, **known), 4, None, AdapterSettings(host_slots=32)) == {}


def test_a_server_that_does_not_report_its_slots_again_keeps_what_was_known() -> None:
    spec = InstanceSpec("a", "http://a", adapter_slots=4, adapter_host_slots=4, adapter_host_ms=20, adapter_disk_ms=500)

    assert adapter_room(spec, None, None, AdapterSettings()) == {}


@pytest.mark.parametrize(
    ("body", "slots"),
    [
        (b'{"vllm_config": {"lora_config": {"max_loras": 4, "max_cpu_loras": 8}}}', (4, 8)),
        (b'{"vllm_config": {"lora_config": {"max_loras": 4, "max_cpu_loras": null}}}', (4, None)),
        (b'{"vllm_config": {"lora_config": null}}', (None, None)),
        (b"nonsense", (None, None)),
    ],
)
def test_room_for_adapters_is_read_from_the_servers_configuration(
    body: bytes, slots: tuple[int | None, int | None]
) -> None:
    assert adapter_slots_in(body) == slots


def server_info(draft: object, **others: object) -> bytes:
    return orjson.dumps({"vllm_config": {"speculative_config": draft, **others}})


FORMER = {"method": "eagle", "disable_eagle_block_drop": False}
NAMES_COVER = FORMER | {"disable_lookahead_block_hashes": False}


@pytest.mark.parametrize(
    ("info", "dropped"),
    [
        (server_info(None), 0),
        (server_info(FORMER), 1),
        (server_info(FORMER | {"method": "mtp"}), 1),
        (server_info(FORMER | {"method": "dflash"}), 1),
        (server_info(FORMER | {"method": "ngram"}), 0),
        (server_info(FORMER | {"disable_eagle_block_drop": True}), 0),
        (server_info(NAMES_COVER), 0),
        (server_info(NAMES_COVER | {"disable_lookahead_block_hashes": True}), 1),
        (server_info(NAMES_COVER, kv_transfer_config={"kv_connector": "OffloadingConnector"}), 1),
        (server_info(NAMES_COVER | {"method": "dflash"}, kv_transfer_config={}), 0),
        (server_info("eagle"), 0),
        (b'{"vllm_config": {}}', None),
        (b'{"vllm_config": "in words"}', None),
        (b"no JSON", None),
    ],
)
def test_a_server_that_reads_ahead_without_naming_it_computes_a_block_again(info: bytes, dropped: int | None) -> None:
    assert dropped_blocks_of(info) == dropped


def test_what_a_server_drops_of_a_hit_replaces_what_was_known() -> None:
    spec = InstanceSpec("a", "http://a")
    assert reported_changes(spec, facts(dropped_blocks=1), {}) == {"dropped_blocks": 1}
    assert reported_changes(replace(spec, dropped_blocks=1), facts(dropped_blocks=0), {}) == {"dropped_blocks": 0}
    assert reported_changes(replace(spec, dropped_blocks=1), facts(), {}) == {}, "it did not say"
