"""Where others pull from an instance: by its own configuration, or by the settings; what is unknown takes no part."""

from __future__ import annotations

from typing import Any

import orjson
import pytest
from pydantic import ValidationError

from dualmap.runtime.pool_settings import PullSettings
from dualmap.scheduling.state.instance import InstanceSpec
from dualmap.workers.pull_ends import BY_SETTINGS, PullPlace, pull_place_of

SPEC = InstanceSpec("a", "http://10.0.0.7:8000")
UNSET = PullSettings(enabled=True)


def info(tier: object, policy: object = "recompute", **cache: Any) -> bytes:
    transfer = {"kv_load_failure_policy": policy, "kv_connector_extra_config": {"secondary_tiers": [tier]}}
    return orjson.dumps({"vllm_config": {"kv_transfer_config": transfer, "cache_config": {"block_size": 16, **cache}}})


@pytest.mark.parametrize(
    ("tier", "host", "port"),
    [
        ({"type": "p2p", "host": "10.1.0.7", "port": 6000}, "10.1.0.7", 6000),
        ({"type": "p2p"}, "10.0.0.7", 5710),
        ({"type": "p2p", "host": "localhost", "port": None}, "10.0.0.7", 5710),
        ({"type": "p2p", "host": "0.0.0.0"}, "10.0.0.7", 5710),
    ],
)
def test_a_server_says_its_place_or_has_vllms_own(tier: dict[str, Any], host: str, port: int) -> None:
    found = pull_place_of(info(tier), SPEC, UNSET)
    assert found is not None
    assert (found.host, found.port, found.fails_requests) == (host, port, False)


def test_each_rank_serves_on_a_port_of_its_own() -> None:
    spec = InstanceSpec("a", "http://10.0.0.7:8000", data_parallel_rank=3)
    found = pull_place_of(info({"type": "p2p", "port": 6000}), spec, UNSET)
    assert found is not None
    assert found.port == 6003


def test_engines_with_unlike_blocks_have_unlike_layouts() -> None:
    tier = {"type": "p2p"}
    places = [
        pull_place_of(info(tier, **cache), SPEC, UNSET) for cache in ({}, {"block_size": 32}, {"cache_dtype": "fp8"})
    ]
    assert len({place.layout for place in places if place is not None}) == 3


@pytest.mark.parametrize(
    "answer",
    [
        b"",
        b"[]",
        b'{"vllm_config": "text"}',
        info({"type": "fs"}),
        info("p2p"),
        info({"type": "p2p", "port": "5710"}),
        info({"type": "p2p", "port": 65_536}),
        info({"type": "p2p"}, policy=None),
        info({"type": "p2p"}, policy="sometimes"),
        info({"type": "p2p", "host": 'a", 1]'}),
        info({"type": "p2p", "host": "x" * 300}),
        info({"type": "p2p"}, block_size=[1] * 1000),
    ],
)
def test_what_is_unknown_takes_no_part(answer: bytes) -> None:
    assert pull_place_of(answer, SPEC, PullSettings(enabled=True, port=5710, failure_policy="recompute")) is None


def test_the_settings_speak_for_servers_that_do_not_answer() -> None:
    whole = PullSettings(enabled=True, port=5711, failure_policy="fail")
    assert pull_place_of(None, SPEC, whole) == PullPlace("10.0.0.7", 5711, BY_SETTINGS, fails_requests=True)
    beside = PullSettings(enabled=True, port="{port+1000}", failure_policy="recompute")
    ranked = InstanceSpec("a", "http://10.0.0.7:8001", data_parallel_rank=2)
    places = [pull_place_of(None, spec, beside) for spec in (SPEC, ranked, InstanceSpec("a", "http://10.0.0.7:65000"))]
    assert [None if place is None else place.port for place in places] == [9000, 9003, None]
    for partly in (UNSET, PullSettings(port=5710), PullSettings(failure_policy="fail")):
        assert pull_place_of(None, SPEC, partly) is None


@pytest.mark.parametrize("port", [0, 70_000, "{port", "{host}", "1{port}", "port+1", "{port+1}x", "tcp://{port}"])
def test_a_port_is_a_number_or_follows_from_that_of_the_url(port: object) -> None:
    with pytest.raises(ValidationError, match="port"):
        PullSettings.model_validate({"port": port})
