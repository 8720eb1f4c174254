"""Bare server processes, as Sentinels and nodes of a cluster are."""

from __future__ import annotations

import asyncio
import contextlib
import subprocess
import time
from collections.abc import Iterator
from pathlib import Path

import redis

from tests.support.ports import free_port


def node_port() -> int:
    """The port of a node of a cluster, whose bus listens 10,000 ports higher."""
    return free_port(10_000)


@contextlib.contextmanager
def running(binary: Path, folder: Path, *arguments: str, port: int) -> Iterator[redis.Redis]:
    """A bare process of a server's executable with these arguments, and a client to it."""
    log = folder / "log"
    with log.open("wb") as output:
        process = subprocess.Popen(
            [str(binary), *arguments, "--port", str(port), "--bind", "127.0.0.1", "--dir", str(folder)],
            stdout=output,
            stderr=output,
        )
    client = redis.Redis(port=port, retry=None)
    try:
        deadline_s = time.monotonic() + 60
        while True:
            try:
                client.ping()
                assert process.poll() is None, f"another server has its port: {log.read_text()}"
                break
            except redis.AuthenticationError:  # it is there, and has a password
                break
            except redis.ConnectionError:
                assert process.poll() is None and time.monotonic() < deadline_s, log.read_text()
                time.sleep(0.02)
        yield client
    finally:
        client.close()
        process.kill()
        process.wait()


async def form_cluster(nodes: list[tuple[redis.Redis, int]]) -> None:
    """Two nodes, each with half of the slots, that know each other."""
    (left, _), (right, right_port) = nodes
    left.execute_command("CLUSTER", "ADDSLOTS", *range(8192))
    right.execute_command("CLUSTER", "ADDSLOTS", *range(8192, 16_384))
    left.execute_command("CLUSTER", "MEET", "127.0.0.1", right_port)
    await until_ok([left, right])


async def until_ok(nodes: list[redis.Redis]) -> None:
    deadline_s = time.monotonic() + 60
    while any(client.cluster("info").get("cluster_state") != "ok" for client in nodes):
        assert time.monotonic() < deadline_s
        await asyncio.sleep(0.05)
