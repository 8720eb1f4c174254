"""Helpers that read what a fleet expects its instances to hold of a prompt, and how exactly it follows them."""

from __future__ import annotations

import json
import urllib.request

import redis

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
