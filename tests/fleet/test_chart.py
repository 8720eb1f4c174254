"""What the chart renders, run as processes by a stand-in for the kubelet, serves a request."""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import socket
import subprocess
import sys
from collections.abc import AsyncIterator
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import httpx
import pytest

pytest.importorskip("helm_python", reason="helm-python-sdk has no wheel for this platform")

from dualmap.runtime.clock import RealClock
from dualmap.workers.ops import serve_ops
from tests.support.fork_servers import ForkedCommand, start_command
from tests.support.helm_chart import Manifest, Values, manifests, named, of_kind
from tests.support.kubernetes_cluster import Cluster, asgi

WITHIN_S = 120.0


def free_ports(count: int) -> list[int]:
    with ExitStack() as stack:
        listeners = [stack.enter_context(socket.create_server(("127.0.0.1", 0))) for _ in range(count)]
        return [listener.getsockname()[1] for listener in listeners]


class Kubelet:
    """Runs containers of rendered pods on this machine. Each pod's address is 127.0.0.1, so ports must differ."""

    def __init__(self, objects: list[Manifest], cluster: Cluster, folder: Path) -> None:
        self._objects, self._cluster, self._folder = objects, cluster, folder
        self.processes: dict[str, ForkedCommand] = {}
        settings = named(objects, "ConfigMap", "dualmap-settings")["data"]["fleet.yaml"]
        (folder / "fleet.yaml").write_text(settings, "utf-8")

    def environment(self, pod: str, container: Manifest) -> dict[str, str]:
        """The variables of a container, and what a process needs on this machine."""
        given: dict[str, str] = {}
        for variable in container["env"]:
            field = variable.get("valueFrom", {}).get("fieldRef", {}).get("fieldPath")
            value = {"metadata.name": pod, "status.podIP": "127.0.0.1"}[field] if field else variable["value"]
            given[variable["name"]] = self.expanded(value, given)
        if "DUALMAP_CONFIG" in given:
            given["DUALMAP_CONFIG"] = str(self._folder / "fleet.yaml")
        return {"PATH": os.environ["PATH"], **given, "HOME": str(self._folder)}

    @staticmethod
    def expanded(text: str, variables: dict[str, str]) -> str:
        for name, value in variables.items():
            text = text.replace(f"$({name})", value)
        return text

    async def start(self, workload: Manifest, pod: str) -> None:
        """Start a pod, and enter it in the API once its readiness probe has passed."""
        template = workload["spec"]["template"]
        (container,) = template["spec"]["containers"]
        self.run(pod, container)
        probe = container["readinessProbe"].get("httpGet") or container["livenessProbe"]["httpGet"]
        port = {each["name"]: each["containerPort"] for each in container["ports"]}[probe["port"]]
        await answers(f"http://127.0.0.1:{port}{probe['path']}")
        self._cluster.put_pod(pod, ip="127.0.0.1", labels=template["metadata"]["labels"])

    def run(self, pod: str, container: Manifest) -> None:
        variables = self.environment(pod, container)
        words = [self.expanded(word, variables) for word in container["args"]]
        self.processes[pod] = start_command(*words, out=self._folder / f"{pod}.log", environment=variables)

    def dualmap(self, workload: Manifest, pod: str, *words: str) -> str:
        """``kubectl exec POD -- dualmap …``."""
        (container,) = workload["spec"]["template"]["spec"]["containers"]
        return subprocess.run(
            [sys.executable, "-m", "dualmap", *words],
            env=self.environment(pod, container), capture_output=True, text=True, timeout=60, check=True,
        ).stdout  # fmt: skip

    def stop(self) -> None:
        for process in self.processes.values():
            process.terminate()
        for process in self.processes.values():
            process.wait()


async def answers(url: str) -> None:
    """Wait until a URL answers 200."""
    async with httpx.AsyncClient() as client, asyncio.timeout(WITHIN_S):
        while True:
            with contextlib.suppress(httpx.TransportError):
                if (await client.get(url)).status_code == 200:
                    return
            await asyncio.sleep(0.05)


@pytest.fixture
async def cluster() -> AsyncIterator[tuple[Cluster, str]]:
    made = Cluster(RealClock())
    async with serve_ops(asgi(made), "127.0.0.1", 0) as port:
        yield made, f"http://127.0.0.1:{port}"
        made.close()


def values(api_url: str, store_url: str, ports: list[int]) -> Values:
    """The emulated fleet, on ports of one machine."""
    router, ops, worker, grpc, grpc_health, picker_ops, *engines = ports
    selector = "app.kubernetes.io/instance={{ .Release.Name }},dualmap/pool=default"
    found = {"label_selector": selector, "api_url": api_url, "namespace": "default"}
    return {
        "store": {"url": store_url},
        "fleet": {
            "pools": [{"name": "default", "model": "qwen2.5-7b", "discovery": {"kubernetes": found}}],
            "router": {"port": router, "ops_port": ops, "settle_s": 0},
            "worker": {"ops_port": worker, "health_interval_s": 0.1},
            "picker": {"port": grpc, "health_port": grpc_health, "ops_port": picker_ops},
        },
        "pickers": {"enabled": True},
        "engines": [
            {
                "name": f"emulated-{number}",
                "port": port,
                "args": ["emulate", "--emulator.host=0.0.0.0", f"--port={port}", "--time-scale=20"],
            }
            for number, port in enumerate(engines)
        ],
    }


async def test_the_rendered_fleet_finds_its_pods_serves_and_is_replaced_without_a_cut_answer(
    cluster: tuple[Cluster, str], valkey_url: str, tmp_path: Path
) -> None:
    api, api_url = cluster
    ports = free_ports(8)
    objects = manifests(values(api_url, valkey_url, ports))
    kubelet = Kubelet(objects, api, tmp_path)
    router = named(objects, "Deployment", "dualmap-router")
    try:
        for engine in of_kind(objects, "StatefulSet"):
            await kubelet.start(engine, f"{engine['metadata']['name']}-0")
        await kubelet.start(named(objects, "Deployment", "dualmap-worker"), "dualmap-worker-7d4b9-x2x2x")
        await kubelet.start(router, "dualmap-router-5f6c8-abcde")
        await kubelet.start(named(objects, "Deployment", "dualmap-picker"), "dualmap-picker-6c5d4-fghij")
        body = {"model": "qwen2.5-7b", "messages": [{"role": "user", "content": "Hello!"}], "max_tokens": 4}
        async with httpx.AsyncClient(base_url=f"http://127.0.0.1:{ports[0]}", timeout=WITHIN_S) as client:
            answer = await served(client, body)
            request = answer.headers["x-request-id"]

        pods = {"dualmap-emulated-0-0", "dualmap-emulated-1-0"}
        listed = await said(kubelet, router, "instances", "list", "--json")
        assert pods == {each["id"] for each in json.loads(listed)}
        explained = await said(kubelet, router, "explain", request)
        assert any(pod in explained for pod in pods), explained
        overview = await said(kubelet, router, "inspect", "overview")
        assert "dualmap-router-5f6c8-abcde" in overview, "replicas are named as their pods"
        assert "dualmap-picker-6c5d4-fghij" in overview, "routers and pickers are replicas of one fleet"
        assert f"http://127.0.0.1:{ports[1]}" in overview

        # A rollout ends the router while it serves.
        body |= {"stream": True, "max_tokens": 2000}
        async with (
            httpx.AsyncClient(base_url=f"http://127.0.0.1:{ports[0]}", timeout=WITHIN_S) as client,
            client.stream("POST", "/v1/chat/completions", json=body) as stream,
        ):
            lines = stream.aiter_lines()
            await anext(lines)
            kubelet.processes["dualmap-router-5f6c8-abcde"].terminate()
            rest = [line async for line in lines]
        assert rest[-2:] == ["data: [DONE]", ""], "its answers are finished first"
        grace_s = router["spec"]["template"]["spec"]["terminationGracePeriodSeconds"]
        assert await asyncio.to_thread(kubelet.processes["dualmap-router-5f6c8-abcde"].wait, grace_s) == 0
    finally:
        await asyncio.to_thread(kubelet.stop)


async def said(kubelet: Kubelet, workload: Manifest, *words: str) -> str:
    return await asyncio.to_thread(kubelet.dualmap, workload, "dualmap-router-5f6c8-abcde", *words)


async def served(client: httpx.AsyncClient, body: dict[str, Any]) -> httpx.Response:
    """The answer, once an instance is ready."""
    async with asyncio.timeout(WITHIN_S):
        while True:
            answer = await client.post("/v1/chat/completions", json=body)
            if answer.status_code != 503:
                assert answer.status_code == 200, answer.text
                return answer
            await asyncio.sleep(0.05)
