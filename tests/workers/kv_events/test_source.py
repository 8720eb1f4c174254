"""Where instances publish their KV events, by templates of endpoints."""

from __future__ import annotations

import pytest

from dualmap.runtime.pool_settings import KvEventSettings, PoolSettings
from dualmap.scheduling.state.instance import InstanceSpec
from dualmap.workers.kv_events.source import endpoint_of, source_of


@pytest.mark.parametrize(
    ("template", "rank", "endpoint"),
    [
        ("tcp://{host}:5557", None, "tcp://npu-0:5557"),
        ("tcp://{host}:{port+10000}", None, "tcp://npu-0:18000"),
        ("tcp://{host}:{port-1}", 3, "tcp://npu-0:8002"),
        ("tcp://10.0.0.1:{port}", 0, "tcp://10.0.0.1:8000"),
        ("ipc:///run/kv", None, "ipc:///run/kv"),
        ("ipc:///run/kv", 1, "ipc:///run/kv_dp1"),
    ],
)
def test_a_template_names_the_endpoint_of_an_instance(template: str, rank: int | None, endpoint: str) -> None:
    spec = InstanceSpec("a", "http://npu-0:8000", data_parallel_rank=rank)
    pool = PoolSettings(kv_events=KvEventSettings(endpoint=template))

    source = source_of(spec, pool)

    assert source is not None
    assert (source.endpoint, source.replay_endpoint, source.rank) == (endpoint, None, rank)


def test_a_replay_has_an_endpoint_of_its_own() -> None:
    events = KvEventSettings(endpoint="tcp://{host}:1", replay_endpoint="tcp://{host}:{port+1}")
    source = source_of(InstanceSpec("a", "http://npu-0:8000"), PoolSettings(kv_events=events))
    assert source is not None
    assert source.replay_endpoint == "tcp://npu-0:8001"


def test_a_url_without_a_port_has_that_of_its_scheme() -> None:
    assert endpoint_of(InstanceSpec("a", "https://npu-0"), "tcp://{host}:{port}") == "tcp://npu-0:443"
    assert endpoint_of(InstanceSpec("a", "http://[::1]"), "tcp://{host}:{port}") == "tcp://[::1]:80"


def test_an_instance_of_a_pool_without_events_has_no_source() -> None:
    assert source_of(InstanceSpec("a", "http://npu-0"), PoolSettings()) is None
