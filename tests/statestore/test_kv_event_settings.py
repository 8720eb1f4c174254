from __future__ import annotations

import pytest
from pydantic import ValidationError

from statestore.kv_event_settings import KvEventSettings


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
    settings = KvEventSettings(endpoint=template)

    assert settings.endpoint_of("http://npu-0:8000", rank) == endpoint
    assert settings.replay_endpoint_of("http://npu-0:8000", rank) is None


def test_a_url_without_a_port_has_that_of_its_scheme() -> None:
    assert KvEventSettings(endpoint="tcp://{host}:{port}").endpoint_of("https://npu-0", None) == "tcp://npu-0:443"


@pytest.mark.parametrize("template", ["", "npu-0:5557", "tcp://npu-0", "http://{host}:5557", "tcp://{name}:{porte}"])
def test_what_is_no_endpoint_is_refused(template: str) -> None:
    with pytest.raises(ValidationError, match="must be tcp://HOST:PORT"):
        KvEventSettings(endpoint=template)
