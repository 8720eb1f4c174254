"""The processes that `dualmap up` would start."""

from __future__ import annotations

import socket
from unittest.mock import MagicMock

import pytest
import yaml

from dualmap.cli.configuration import load_settings, split_flags
from dualmap.cli.errors import CommandError
from dualmap.cli.fleet_plan import FleetSize, first_of_free_ports, free_ports, plain, plan_fleet
from dualmap.cli.settings import Settings
from tests.support.ports import ports_in_a_row

SIZE = FleetSize(replicas=3, workers=2, instances=4)


def settings(*words: str) -> Settings:
    flags, _ = split_flags(("--router.port", "0", *words), {})
    return load_settings(flags, {})


def test_a_fleet_has_replicas_with_ports_of_their_own_workers_and_emulated_instances() -> None:
    plan = plan_fleet(settings(), SIZE, (), "fleet.yaml")

    names = [child.name for child in plan.children]
    instances = ["instance-1", "instance-2", "instance-3", "instance-4"]
    assert names == [*instances, "worker-1", "worker-2", "router-1", "router-2", "router-3"]
    assert len(set(plan.ops_urls)) == 3
    assert [child.health_url for child in plan.children[6:]] == [f"{url}/health" for url in plan.ops_urls]
    assert [instance.id for instance in plan.settings.pools[0].instances] == [f"instance-{i}" for i in range(1, 5)]
    assert plan.settings.router.port > 0


def test_emulated_instances_are_described_by_their_engine_and_serve_the_pools_model() -> None:
    plan = plan_fleet(settings("--emulator.preset", "qwen2.5-14b-910b3"), SIZE, (), "f")
    assert {each.kv_capacity_tokens for each in plan.settings.pools[0].instances} == {500_000}
    assert plan.settings.pools[0].model == plan.settings.emulator.served_model == "qwen2.5-14b"

    named = plan_fleet(settings("--pools", '[{"model": "mine"}]'), SIZE, (), "f").settings
    assert named.pools[0].model == named.emulator.served_model == "mine"


def test_engines_that_live_faster_shorten_what_is_stated_in_their_time() -> None:
    plan = plan_fleet(settings("--emulator.time_scale", "10"), SIZE, (), "f").settings
    plain_fleet = plan_fleet(settings(), SIZE, (), "f").settings
    assert plan.scheduling.slo_ttft_s == plain_fleet.scheduling.slo_ttft_s / 10
    assert plan.scheduling.time_scale == 10
    assert plan.worker.lease_s == plain_fleet.worker.lease_s
    rates = [each.pools[0].instances[0].prefill_tokens_per_s for each in (plan, plain_fleet)]
    assert rates[0] == 10 * rates[1]


def test_given_or_configured_instances_are_used_instead_of_emulated_ones() -> None:
    given = plan_fleet(settings(), SIZE, ("http://a:8000", "http://b:8000"), "f")
    assert [each.url for each in given.settings.pools[0].instances] == ["http://a:8000", "http://b:8000"]

    pools = '[{"instances": [{"id": "npu-0", "url": "http://npu:8000"}]}]'
    configured = plan_fleet(settings("--pools", pools), SIZE, (), "f")
    assert [each.id for each in configured.settings.pools[0].instances] == ["npu-0"]

    for plan in (given, configured):
        assert {child.arguments[0] for child in plan.children} == {"worker", "router"}


def test_a_port_in_use_is_named_with_the_way_out() -> None:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        port = taken.getsockname()[1]
        with pytest.raises(CommandError, match=rf"127.0.0.1:{port}: .*--router.port"):
            plan_fleet(settings("--router.port", str(port)), SIZE, (), "f")


def test_a_shared_port_counts_as_taken_although_the_kernel_would_let_us_in() -> None:
    with socket.socket() as taken:
        taken.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEPORT, 1)
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        with pytest.raises(CommandError):
            plan_fleet(settings("--router.port", str(taken.getsockname()[1])), SIZE, (), "f")


@pytest.mark.parametrize(
    ("host", "reached_at"),
    [("0.0.0.0", "127.0.0.1"), ("127.0.0.2", "127.0.0.2"), ("::", "127.0.0.1"), ("::1", "[::1]")],
)
def test_replicas_are_asked_where_they_listen(host: str, reached_at: str) -> None:
    plan = plan_fleet(settings("--router.host", host), SIZE, (), "f")

    assert {url.rpartition(":")[0] for url in (plan.endpoint, *plan.ops_urls)} == {f"http://{reached_at}"}


def test_ports_in_a_row_skip_those_that_are_taken() -> None:
    base = free_ports(1)[0]
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", base))
        taken.listen()
        assert first_of_free_ports(base, 2, "127.0.0.1") > base


def test_emulators_keep_off_the_ports_of_the_routers() -> None:
    # given an endpoint on the port that emulators would take first, with enough free ports above it
    port = ports_in_a_row(2 + SIZE.instances) + 1

    plan = plan_fleet(settings("--router.port", str(port), "--emulator.port", str(port - 1)), SIZE, (), "f")

    emulators = range(plan.settings.emulator.port, plan.settings.emulator.port + SIZE.instances)
    assert plan.settings.router.port == port
    assert port not in emulators
    assert plan.settings.emulator.port > port


def test_a_replicas_own_port_is_never_the_endpoints(monkeypatch: pytest.MonkeyPatch) -> None:
    # given a kernel that offers the endpoint's port, on which no process listens yet
    offered = MagicMock()
    offered.return_value.__enter__.return_value.getsockname.side_effect = [("", 7001), ("", 7002), ("", 7003)]
    monkeypatch.setattr("dualmap.cli.fleet_plan.socket.socket", offered)

    assert free_ports(2, taken=(7001,)) == (7002, 7003)


def test_secrets_reach_the_children_and_the_file_can_be_read_back() -> None:
    tree = settings("--router.api_keys", "one,two", "--router.admin_key", "boss")
    again = Settings.model_validate(yaml.safe_load(yaml.safe_dump(plain(tree))))
    assert again == tree


def test_the_store_is_shown_without_its_password_and_used_with_it() -> None:
    url = "redis://fleet:hunter2@store:6379/0"
    plan = plan_fleet(settings("--store.url", url), SIZE, (), "f")
    assert plan.store_shown_as == "redis://***:***@store:6379/0"
    assert plan.settings.store.url == url


@pytest.mark.parametrize("url", ["notaurl", "10.0.0.1:8000", "http://h:99999"])
def test_an_instance_url_that_is_none_is_named_with_the_form_it_needs(url: str) -> None:
    with pytest.raises(CommandError, match=rf"--instance-url needs http://HOST:PORT, not '{url}'"):
        plan_fleet(settings(), SIZE, ("http://a:8000", url), "f")


def test_the_password_of_an_instance_url_is_not_shown() -> None:
    with pytest.raises(CommandError, match=r"upstream_api_key") as caught:
        plan_fleet(settings(), SIZE, ("http://bob:hunter2@a:8000",), "f")
    assert "hunter2" not in str(caught.value)


def test_an_emulated_engine_beyond_any_machine_is_named() -> None:
    with pytest.raises(CommandError, match=r"kv_capacity_tokens.*less than or equal"):
        plan_fleet(settings("--emulator.kv_capacity_tokens", str(10**15)), SIZE, (), "f")


def test_a_fleet_stops_in_haste_unless_its_times_are_set() -> None:
    hasty = plan_fleet(settings(), SIZE, (), "f").settings.router
    patient = plan_fleet(
        settings("--router.drain_timeout_s", "60", "--router.settle_s", "2"), SIZE, (), "f"
    ).settings.router

    assert (hasty.settle_s, hasty.drain_timeout_s) == (0.0, 3.0)
    assert (patient.settle_s, patient.drain_timeout_s) == (2.0, 60.0)


def test_settings_with_paths_and_endpoints_survive_the_file() -> None:
    pool = {
        "tokenizer": "/models/m",
        "kv_events": {"endpoint": "tcp://{host}:5557"},
        "instances": [{"id": "a", "url": "http://a:1", "data_parallel_rank": 2}],
    }
    tree = Settings.model_validate({"pools": [pool]})

    assert Settings.model_validate(yaml.safe_load(yaml.safe_dump(plain(tree)))) == tree
