"""Calls of the API: with which token and trust, and what a refusal says."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from dualmap.runtime.discovery_settings import KubernetesSettings
from dualmap.workers.discovery import kubernetes_api
from dualmap.workers.discovery.kubernetes_api import ApiError, ExpiredError, KubernetesApi, refusal
from tests.support.kubernetes_cluster import PODS, Cluster, ClusterTransport, Refusal
from tests.support.manual_clock import ManualClock


@pytest.fixture
def cluster() -> Cluster:
    return Cluster(ManualClock())


def api_of(cluster: Cluster, **settings: Any) -> KubernetesApi:
    settings = {"label_selector": "app=vllm", "api_url": "http://cluster", **settings}
    return KubernetesApi(KubernetesSettings(**settings), transport=ClusterTransport(cluster))


async def test_the_token_is_read_again_for_every_call(cluster: Cluster, tmp_path: Path) -> None:
    token = tmp_path / "token"
    async with api_of(cluster, token_file=token) as api:
        for text in ("first\n", "second\n"):
            token.write_text(text)
            await api.get(PODS)
        async with api.watch(PODS, {"watch": "1", "resourceVersion": "100", "timeoutSeconds": 1}):
            pass

    assert [call.token for call in cluster.calls] == ["first", "second", "second"]


async def test_what_a_pod_of_the_cluster_has_is_the_default(
    cluster: Cluster, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(kubernetes_api, "SERVICE_ACCOUNT", tmp_path)
    monkeypatch.setenv("KUBERNETES_SERVICE_HOST", "fd00::1")
    monkeypatch.setenv("KUBERNETES_SERVICE_PORT", "6443")
    (tmp_path / "token").write_text("own")
    (tmp_path / "namespace").write_text("models\n")
    async with api_of(cluster, api_url=None) as api:
        await api.get(PODS)
        assert (api.namespace, api._base_url()) == ("models", "https://[fd00::1]:6443")
    assert cluster.calls[0].token == "own"


async def test_outside_of_a_cluster_the_error_names_the_setting(
    cluster: Cluster, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("KUBERNETES_SERVICE_HOST", raising=False)
    async with api_of(cluster, api_url=None) as api:
        with pytest.raises(ApiError, match=r"set pools\[\].discovery.kubernetes.api_url"):
            await api.get(PODS)


@pytest.mark.parametrize("name", ["token_file", "ca_file"])
async def test_a_file_that_is_missing_is_named(cluster: Cluster, tmp_path: Path, name: str) -> None:
    async with api_of(cluster, **{name: tmp_path / "none"}) as api:
        with pytest.raises(ApiError, match=rf"{name} .*none: No such file"):
            await api.get(PODS)


async def test_a_ca_that_cannot_be_read_is_named(cluster: Cluster, tmp_path: Path) -> None:
    (tmp_path / "ca").write_text("no certificate")
    async with api_of(cluster, ca_file=tmp_path / "ca") as api:
        with pytest.raises(ApiError, match="holds no PEM"):
            await api.get(PODS)


async def test_a_ca_that_was_replaced_is_trusted_from_the_next_call_on(cluster: Cluster, tmp_path: Path) -> None:
    import trustme

    ca = tmp_path / "ca"
    async with api_of(cluster, ca_file=ca) as api:
        clients = []
        for _ in range(2):
            trustme.CA().cert_pem.write_to_path(str(ca))
            await api.get(PODS)
            await api.get(PODS)
            clients.append(api._client)
        assert clients[0] is not clients[1]


@pytest.mark.parametrize(
    ("status", "kind", "said"),
    [
        (401, ApiError, "token"),
        (403, ApiError, "Role with this right"),
        (404, ApiError, "namespace"),
        (410, ExpiredError, "no"),
        (503, ApiError, "no"),
    ],
)
async def test_a_refusal_says_what_to_do(cluster: Cluster, status: int, kind: type[ApiError], said: str) -> None:
    cluster.refuse = lambda _: Refusal(status)
    async with api_of(cluster) as api:
        with pytest.raises(kind, match=said):
            await api.get(PODS)
        with pytest.raises(kind, match=said):
            async with api.watch(PODS, {}):
                pass


@pytest.mark.parametrize(("header", "pause_s"), [("7", 7), ("99999", 120), ("soon", 0), ("", 0)])
def test_the_pause_that_the_server_asks_for_is_bounded(header: str, pause_s: float) -> None:
    assert refusal(429, "slow down", header).retry_after_s == pause_s


@pytest.mark.parametrize("body", [b"<html>", b"[1]", b"", b"\xff"])
async def test_a_reply_that_is_no_object_is_an_error(cluster: Cluster, body: bytes) -> None:
    cluster.refuse = lambda _: Refusal(200, body)
    async with api_of(cluster) as api:
        with pytest.raises(ApiError, match="is api_url right"):
            await api.get(PODS)
