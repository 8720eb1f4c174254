"""Measures what many tenants cost: how long a replica takes to read them, to learn of a change, and to know a key.

    python benchmarks/tenant_book.py [--tenants 0 10000] [--keys 10]

Starts a private Valkey and one keeper as a router has it. Times are CPU time of the one process, of one run each.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import time
from collections.abc import Callable

import redis
import uvloop

from dualmap.router.errors import InvalidApiKeyError
from dualmap.router.tenants.administration import TenantAdministration, hash_of
from dualmap.router.tenants.directory import TenantDirectory
from dualmap.router.tenants.keeper import TenantKeeper
from dualmap.router.tenants.tenant_record import KeyRecord, TenantRecord
from dualmap.runtime.clock import RealClock
from dualmap.runtime.tenant_settings import LimitSettings
from dualmap.scheduling.settings import SchedulingSettings
from dualmap.statestore.embedded import EmbeddedValkey
from dualmap.statestore.redis import RedisStore
from dualmap.statestore.settings import StoreSettings
from dualmap.statestore.tenants.tenant_book import Edition

ENTERED_TOGETHER = 500
LOOKUPS = 100_000


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--tenants", type=int, nargs="+", default=[0, 1, 10_000])
    parser.add_argument("--keys", type=int, default=10, help="of each tenant")
    arguments = parser.parse_args()
    print("tenants  keys     MB in store  read s  longest pause ms  a change ms  known key us  wrong key us")
    for tenants in arguments.tenants:
        with EmbeddedValkey() as server:
            uvloop.run(measure(server.url, tenants, arguments.keys))


async def measure(url: str, tenants: int, keys: int) -> None:
    store = RedisStore(StoreSettings(url=url, command_timeout_s=10.0), scheduling=SchedulingSettings())
    await store.open()
    edition = Edition()
    for first in range(0, tenants, ENTERED_TOGETHER):
        texts: dict[str, bytes | None] = {
            f"tenant-{number}": record(number, keys).text()
            for number in range(first, min(tenants, first + ENTERED_TOGETHER))
        }
        made = await store.tenants.change(edition, texts, by="benchmark", action="create", before={}, after={})
        assert made is not None
        edition = made
    directory = TenantDirectory((), needs_key=True)
    keeper = TenantKeeper(store.tenants, directory, RealClock(), replica_id="one", changed=lambda: None)
    began_s = time.process_time()
    pause_s, _ = await asyncio.gather(longest_pause_s(keeper), keeper.refresh())
    read_s = time.process_time() - began_s
    began_s = time.process_time()
    await TenantAdministration(keeper).change("one more", lambda _: record(-1, keys), by="benchmark", action="create")
    change_s = time.process_time() - began_s
    known_us = per_call_us(directory, key_of(-1, 0))
    wrong_us = per_call_us(directory, "a wrong key")
    with redis.Redis.from_url(url) as client:
        megabytes = int(client.memory_usage("dualmap:{fleet}:tenants", samples=0) or 0) / 1e6
    print(
        f"{tenants:7}  {tenants * keys:7}  {megabytes:11.1f}  {read_s:6.2f}  {1000 * pause_s:16.1f}"
        f"  {1000 * change_s:11.1f}  {known_us:12.2f}  {wrong_us:12.2f}"
    )
    await store.close()


def record(number: int, keys: int) -> TenantRecord:
    made = tuple(KeyRecord(name=f"key-{each}", sha256=hash_of(key_of(number, each))) for each in range(keys))
    limits = LimitSettings(requests_per_minute=600, tokens_per_month=2_000_000_000)
    return TenantRecord(keys=made, limits=limits, revision=1)


def key_of(tenant: int, key: int) -> str:
    return f"key {key} of tenant {tenant}"


async def longest_pause_s(keeper: TenantKeeper) -> float:
    """The longest time for which the event loop did nothing else, until the book is read."""
    longest_s, last_s = 0.0, time.process_time()
    while keeper.edition is None:
        await asyncio.sleep(0)
        now_s = time.process_time()
        longest_s, last_s = max(longest_s, now_s - last_s), now_s
    return longest_s


def per_call_us(directory: TenantDirectory, key: str) -> float:
    field: Callable[[bytes], bytes | None] = {b"authorization": b"Bearer " + key.encode()}.get
    began_s = time.process_time()
    for _ in range(LOOKUPS):
        with contextlib.suppress(InvalidApiKeyError):
            directory.caller(field)
    return (time.process_time() - began_s) / LOOKUPS * 1e6


if __name__ == "__main__":
    main()
