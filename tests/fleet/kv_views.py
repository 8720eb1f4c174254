"""Helpers that read what a fleet expects its instances to hold of a prompt, and how exactly it follows them."""

from __future__ import annotations

import json
import struct
import urllib.parse
import urllib.request

import redis
import zmq

from tests.fleet.fleet_process import Fleet


def complete(fleet: Fleet, ids: list[int]) -> tuple[int, int, str]:
    """Expected and reported cached tokens, and the instance."""
    body = json.dumps({"model": fleet.model, "prompt": ids, "max_tokens": 2}).encode()
    request = urllib.request.Request(f"{fleet.endpoint}/v1/completions", body, {"content-type": "application/json"})
    with urllib.request.urlopen(request, timeout=60) as answer:
        usage = json.loads(answer.read())["usage"]
        expected, instance_id = int(answer.headers["x-dualmap-cached-tokens"]), answer.headers["x-dualmap-instance"]
        return expected, usage["prompt_tokens_details"]["cached_tokens"], instance_id


def views(fleet: Fleet) -> set[str]:
    """Statuses of the KV metadata, of all instances."""
    with redis.Redis.from_url(fleet.store_url) as client:
        return {client.hget(key, "status").decode() for key in client.scan_iter("dualmap:{default}:kv_events:*")}


def has_read_all(fleet: Fleet, replay_offset: int = 20) -> bool:
    """Whether the fleet has read all that its instances have published, by what their replays have beyond that."""
    with redis.Redis.from_url(fleet.store_url) as client:
        read = {name: client.hget(f"dualmap:{{default}}:kv_events:{name}", "sequence") for name in fleet.instances()}
    urls = {name: urllib.parse.urlsplit(about["url"]) for name, about in fleet.instances().items()}
    with zmq.Context() as context:
        return all(
            _is_last(context, f"tcp://{urls[name].hostname}:{(urls[name].port or 0) + replay_offset}", int(at or -1))
            for name, at in read.items()
        )


def _is_last(context: zmq.Context[zmq.Socket[bytes]], endpoint: str, sequence: int) -> bool:
    with context.socket(zmq.DEALER) as replay:
        replay.linger = 0
        replay.connect(endpoint)
        replay.send_multipart([b"", struct.pack(">Q", sequence + 1)])
        assert replay.poll(60_000), "no replay"
        return bool(replay.recv_multipart()[-2] == b"\xff" * 8)
