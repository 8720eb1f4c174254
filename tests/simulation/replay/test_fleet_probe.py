"""The samples that the probe makes of a router's metrics."""

from __future__ import annotations

from dualmap.simulation.http_client import HttpClient
from dualmap.simulation.replay.fleet_probe import FleetProbe


class PagesInTurn(HttpClient):
    """A client whose server answers with these pages."""

    def __init__(self, *pages: str) -> None:
        super().__init__("http://127.0.0.1:1")
        self._pages = list(pages)

    async def read(self, path: str, headers: dict[str, str] | None = None) -> tuple[int, bytes]:
        assert path == "/metrics"
        return 200, self._pages.pop(0).encode()


def page(first: int, second: int, migrated: int) -> str:
    return (
        "# HELP dualmap_instance_pending_tokens Pending\n"
        f'dualmap_instance_pending_tokens{{instance="i-2",pool="p"}} {second}.0\n'
        f'dualmap_instance_pending_tokens{{instance="i-1",pool="p"}} {first}.0\n'
        f'dualmap_migrations_total{{pool="p",reason="rebalance"}} {migrated}.0\n'
        'dualmap_migrations_total{pool="p",reason="drain"} 1.0\n'
    )


async def test_pending_tokens_are_sampled_and_migrations_counted_since_the_first_look() -> None:
    probe = FleetProbe(PagesInTurn(page(10, 20, 4), page(0, 7, 9)), 1.0)
    await probe.look()
    await probe.look()
    assert [sample.pending_tokens for sample in probe.samples] == [(10, 20), (0, 7)]
    assert probe.migrations == 5


async def test_a_server_that_is_no_fleet_is_not_observed() -> None:
    probe = FleetProbe(PagesInTurn("vllm:num_requests_running 1.0\n"), 1.0)
    await probe.look()
    assert (probe.samples, probe.migrations) == ([], None)
    unreachable = FleetProbe(HttpClient("http://127.0.0.1:1"), 1.0)
    await unreachable.look()
    assert unreachable.samples == []
