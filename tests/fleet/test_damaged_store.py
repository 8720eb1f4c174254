"""Somebody damages what a fleet keeps in its store, while traffic flows: no request fails, and no process ends."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor, as_completed
from pathlib import Path

import pytest
import redis
from openai import OpenAI

from dualmap.research.chaos.fleet_process import alive
from tests.fleet.fleet_process import Fleet, running_fleet, until

DAMAGE: dict[str, tuple[str, ...]] = {
    "epoch": ("HSET", "meta", "epoch", "abc"),
    "huge_epoch": ("HSET", "meta", "epoch", "9" * 40),
    "expiry": ("HSET", "leader", "expires_ms", "abc"),
    "fence": ("HSET", "leader", "fence", ""),
    "description": ("HSET", "instances", "instance-1", "[]"),
    "record": ("HSET", "instances:records", "instance-2", "{"),
    "weights": ("HSET", "learned", "ttft_weights", "null"),
    "setting": ("HSET", "settings", "no_such_setting", "1"),
    "tree": ("HSET", "hotness:tree", "no hash", "x"),
    "type": ("SET", "replicas", "x"),
}


def ask(client: OpenAI, fleet: Fleet, number: int) -> str | None:
    done = client.completions.create(model=fleet.model, prompt=f"{number:04d} {'word ' * 200}", max_tokens=5)
    return done.choices[0].finish_reason


def test_every_request_is_served_and_every_process_lives_on(tmp_path: Path) -> None:
    with (
        running_fleet(tmp_path, ("--replicas", "2")) as fleet,
        OpenAI(base_url=f"{fleet.endpoint}/v1", api_key="any", max_retries=0, timeout=60) as client,
        redis.Redis(unix_socket_path=fleet.store_url.removeprefix("unix://")) as store,
        ThreadPoolExecutor(8) as senders,
    ):
        processes, sent = fleet.pids(), 0
        for what, (command, key, *words) in DAMAGE.items():
            name = "dualmap:{default}:" + key
            damaged = words[-1].encode()
            store.execute_command(command, name, *words)
            asked = [senders.submit(ask, client, fleet, sent + number) for number in range(24)]
            sent += len(asked)
            assert [each.result() for each in as_completed(asked)] == ["length"] * len(asked), what
            field = words[0] if command == "HSET" else None
            until(lambda n=name, f=field, d=damaged: _value(store, n, f) != d, f"the {what} is mended")
        until(lambda: {each["state"] for each in fleet.instances().values()} == {"ready"}, "all instances are ready")
        until(lambda: len(fleet.instances()) == 4, "all instances are members")
        fleet.until_idle()

        assert fleet.pids() == processes
        assert all(map(alive, processes.values()))
        logs = "".join(path.read_text() for path in fleet.directory.glob("*.log"))
        assert "Traceback" not in logs
        assert "to=down" not in logs
        assert "unreadable state mended key=dualmap:{default}:meta field=epoch" in logs


def _value(store: redis.Redis, key: str, field: str | None) -> object:
    if field is None:
        return b"x" if store.type(key) == b"string" else None
    return store.hget(key, field)


@pytest.mark.parametrize("key", ["instances", "instances:records", "meta", "leader", "replicas"])
def test_a_key_that_is_deleted_comes_again(fleet: Fleet, client: OpenAI, key: str) -> None:
    with redis.Redis(unix_socket_path=fleet.store_url.removeprefix("unix://")) as store:
        processes = fleet.pids()
        store.delete("dualmap:{default}:" + key)

        if key != "meta":  # that counts from the start again when there is something to count
            until(lambda: store.exists("dualmap:{default}:" + key), "the key is back")
        until(lambda: len(fleet.instances()) == 4, "all instances are members")
        assert ask(client, fleet, hash(key) % 1000) == "length"
        fleet.until_idle()

        assert fleet.pids() == processes
