"""Settings that cannot work are refused when they are read: figures of an instance, URLs of instances and stores."""

from __future__ import annotations

import pytest
from pydantic import ValidationError

from dualmap.runtime.pool_settings import InstanceSettings, KvEventSettings

URL = "http://10.0.0.1:8000"


@pytest.mark.parametrize(
    "url",
    [
        URL,
        "https://vllm.internal/base",
        "http://[::1]:8000",
        "http://instance_1:8000",
        "http://bücher.example:8000",
        "http://10.0.0.1",
        "http://h:65535",
    ],
)
def test_a_url_at_which_a_server_can_be_is_taken(url: str) -> None:
    assert InstanceSettings(id="a", url=url).url == url
    assert InstanceSettings(id="a", url=f"{url}/").url == url


@pytest.mark.parametrize(
    ("url", "reason"),
    [
        ("notaurl", "http://"),
        ("10.0.0.1:8000", "http://"),
        ("http://127.0.0.1:99999", "ort"),
        ("http://127.0.0.1:abc", "ort"),
        ("http://h:0", "port 0"),
        ("http://h:-1", "ort"),
        ("http://[::1", "IPv6"),
        ("http://[vx]:1", ""),
        ("http://h ost:1", "blank"),
        ("http://h:1/a\r\nx: y", "blank"),
        ("http://h:1\n", "blank"),
        ("http://", "host"),
        ("http://:80", "host"),
        ("http://a..b:1", "host"),
        (f"http://{'x' * 300}:1", "host"),
        (f"http://{'.'.join(['x' * 60] * 5)}:1", "host"),
        ("http://h<o>:1", "host"),
        ("http://a/b?x=1", "query"),
        ("http://a/b#f", "query"),
        ("http://a/b?", "query"),
    ],
)
def test_a_url_at_which_no_server_can_be_is_refused_with_the_reason(url: str, reason: str) -> None:
    with pytest.raises(ValidationError, match=rf"(?s)url\n.*must be http://HOST:PORT.*{reason}"):
        InstanceSettings(id="a", url=url)


@pytest.mark.parametrize("instance_id", [".", "..", "", "a/b", "x" * 129])
def test_an_id_that_no_path_can_name_is_refused(instance_id: str) -> None:
    with pytest.raises(ValidationError, match="id"):
        InstanceSettings(id=instance_id, url=URL)


@pytest.mark.parametrize(
    ("name", "most", "too_much"),
    [
        ("prefill_tokens_per_s", 1e9, 1.1e9),
        ("kv_capacity_tokens", 10**12, 10**30),
        ("dispatch_window_tokens", 10**9, 10**9 + 1),
        ("max_running_requests", 10**6, 10**6 + 1),
        ("max_queued_requests", 10**6, 10**6 + 1),
    ],
)
def test_a_figure_beyond_any_machine_is_refused_with_its_bound(name: str, most: float, too_much: float) -> None:
    InstanceSettings.model_validate({"id": "a", "url": URL, name: most})

    with pytest.raises(ValidationError, match=rf"{name}\n.*less than or equal to {most:.0f}"):
        InstanceSettings.model_validate({"id": "a", "url": URL, name: too_much})


@pytest.mark.parametrize("rate", [float("inf"), float("nan"), 1e308])
def test_a_rate_that_is_no_finite_figure_is_refused(rate: float) -> None:
    with pytest.raises(ValidationError, match="prefill_tokens_per_s"):
        InstanceSettings(id="a", url=URL, prefill_tokens_per_s=rate)


@pytest.mark.parametrize("template", ["", "npu-0:5557", "tcp://npu-0", "http://{host}:5557", "tcp://{name}:{porte}"])
def test_what_is_no_endpoint_is_refused(template: str) -> None:
    with pytest.raises(ValidationError, match="must be tcp://HOST:PORT"):
        KvEventSettings(endpoint=template)


@pytest.mark.parametrize(
    "url", ["http://bob:hunter2@a:8000", "https://bob@a", "http://:hunter2@a:1/", "http://hunter2@@a"]
)
def test_a_url_with_a_password_is_refused_without_showing_it(url: str) -> None:
    with pytest.raises(ValidationError, match=r"router\.upstream_api_key and\s+worker\.upstream_api_key") as caught:
        InstanceSettings(id="a", url=url)
    assert "hunter2" not in str(caught.value) and "bob" not in str(caught.value)
