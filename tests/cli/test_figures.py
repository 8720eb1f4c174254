"""The live status: figures gathered, and how they read."""

from __future__ import annotations

import io

from rich.console import Console

from dualmap.cli.figures import FleetCounts, FleetFigures, RecentCounts, ReplicaCounts, fleet_figures
from dualmap.cli.live_status import LiveStatus, line, table
from dualmap.scheduling.settings import SchedulingSettings
from dualmap.scheduling.state.instance import InstanceSpec, InstanceState
from dualmap.statestore.memory import MemoryStore
from tests.support.placements import placement

PAGE = """\
# HELP dualmap_requests_total Requests by how they ended
dualmap_requests_total{outcome="completed",pool="default"} 40.0
dualmap_requests_total{outcome="upstream_failed",pool="default"} 1.0
dualmap_requests_created{outcome="completed",pool="default"} 1.7e+09
dualmap_prompt_tokens_total{by="expected",pool="default"} 900.0
dualmap_prompt_tokens_total{by="reported",pool="default"} 1000.0
dualmap_prompt_tokens_total{by="unreported",pool="default"} 60.0
dualmap_hit_tokens_total{by="expected",pool="default"} 100.0
dualmap_hit_tokens_total{by="reported",pool="default"} 250.0
dualmap_hit_tokens_total{by="unreported",pool="default"} 40.0
dualmap_slo_total{pool="default",slo="met"} 30.0
dualmap_slo_total{pool="default",slo="missed"} 10.0
"""


async def test_counters_of_all_replicas_are_summed_and_one_that_never_answered_is_left_out(
    metrics_pages: dict[str, str],
) -> None:
    metrics_pages.update({"http://a": PAGE, "http://b": PAGE})

    counts = await FleetCounts(["http://a", "http://b", "http://gone"]).read()

    assert counts == ReplicaCounts(
        requests=82, failed=2, prompt_tokens=2120.0, hit_tokens=580.0, slo_met=60, slo_missed=20
    )


async def test_sums_never_drop_when_a_replica_dies_and_another_takes_its_place(metrics_pages: dict[str, str]) -> None:
    metrics_pages.update({"http://a": PAGE, "http://b": PAGE})
    fleet = FleetCounts(["http://a", "http://b"])
    before = await fleet.read()

    del metrics_pages["http://b"]
    assert await fleet.read() == before
    metrics_pages["http://b"] = ""  # a new replica has served nothing yet
    assert await fleet.read() == before
    metrics_pages["http://b"] = 'dualmap_requests_total{outcome="completed",pool="default"} 3.0\n'
    assert (await fleet.read()).requests == before.requests + 3
    assert (await fleet.read()).requests == before.requests + 3


async def test_figures_add_up_over_instances() -> None:
    store = MemoryStore(SchedulingSettings())
    await store.open()
    pool = store.pool("default")
    await pool.members.put_instance(InstanceSpec("a", "http://a", state=InstanceState.READY, dispatch_window_tokens=1))
    await pool.members.set_instance_state("a", InstanceState.READY)
    for number in range(3):
        await pool.place(placement(f"r{number}", "a", 128))

    figures = fleet_figures([await pool.snapshot()], ReplicaCounts(), 2.0)

    assert figures.pending_tokens == 3 * 128
    assert figures.held == 2
    assert figures.instances[0].running == 1
    assert figures.hit_rate is None


def figures(**changes: object) -> FleetFigures:
    given: dict[str, object] = {
        "instances": (),
        "replicas": 3,
        "leader": "worker-1",
        "migrations": 7,
        "counts": ReplicaCounts(requests=82, failed=2, prompt_tokens=2000, hit_tokens=500, slo_met=60, slo_missed=20),
        "requests_per_s": 1.5,
    }
    return FleetFigures(**(given | changes))


def test_the_line_names_what_matters() -> None:
    text = line(figures())
    for part in ("hit rate 25.0%", "on time 75.0%", "leader worker-1", "requests 82 (1.5/s, 2 failed)", "migrations 7"):
        assert part in text
    assert "hit rate –" in line(figures(counts=ReplicaCounts()))


def test_on_time_is_that_of_the_last_minute_and_what_is_overdue_stands_beside_it() -> None:
    later = ReplicaCounts(requests=182, slo_met=70, slo_missed=110)

    text = line(figures(counts=later, last_minute=later.since(figures().counts), overdue=1234))

    assert "on time 10.0% (1,234 overdue)" in text
    assert "on time 75.0%" in line(figures(last_minute=ReplicaCounts()))
    recent = RecentCounts()
    sums = [recent.last_minute(ReplicaCounts(slo_met=10 * second), float(second)).slo_met for second in range(121)]
    assert (sums[0], sums[30], sums[120]) == (0, 300, 600)


def test_off_a_terminal_lines_come_now_and_then_and_only_when_something_changed() -> None:
    out = io.StringIO()
    with LiveStatus(Console(file=out, width=300), line_every=2) as status:
        for leader in ("one", "two", "one", "four", "five"):
            status.show(figures(leader=leader))
    assert [text.partition("leader ")[2].split()[0] for text in out.getvalue().splitlines()] == ["one", "five"]


def test_the_table_renders_with_and_without_instances() -> None:
    out = io.StringIO()
    Console(file=out, width=200).print(table(figures()))
    assert "pending tokens" in out.getvalue()
