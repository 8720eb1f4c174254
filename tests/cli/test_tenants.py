"""``dualmap tenants``: what it sends, and what it shows."""

from __future__ import annotations

import pytest

from dualmap.cli.main import main
from tests.cli.scripted_replica import Replica, error

TENANT = {
    "name": "acme", "source": "store", "weight": 2.0, "priority_class": None, "limits": {"requests_per_minute": 6000},
    "model_limits": {"large": {"tokens_per_day": 9}}, "models": [], "pools": ["small"],
    "keys": [{"name": "ci", "limits": {}}], "revision": 4, "created_ms": 1_700_000_000_000,
}  # fmt: skip


def told(replica: Replica, *words: str) -> int:
    return main(["tenants", *words, "--url", replica.url])


def test_limits_are_written_by_name_and_those_of_a_model_behind_it(replica: Replica) -> None:
    replica.answers = [(200, TENANT)]
    changes = ["requests_per_minute=6_000", "tokens_per_day=none", "org/large.v2.tokens_per_day=9"]
    assert (
        told(replica, "set", "a/b", *changes, "models=x,y", "pools=", "weight=2", "priority_class=batch", "draws=asked")
        == 0
    )

    assert replica.asked[0][:2] == ("PATCH", "/admin/tenants/a%2Fb")
    assert replica.asked[0][3] == {
        "limits": {"requests_per_minute": 6000, "tokens_per_day": None},
        "model_limits": {"org/large.v2": {"tokens_per_day": 9}},
        "models": ["x", "y"], "pools": [], "weight": 2.0, "priority_class": "batch", "draws": "asked",
    }  # fmt: skip


@pytest.mark.parametrize("change", ["requests_per_minute", "requests_per_minute=often", "weight=heavy", "=1"])
def test_a_change_that_cannot_be_read_is_not_sent(
    replica: Replica,
    capsys: pytest.CaptureFixture[str],
    change: str,
) -> None:
    assert told(replica, "set", "acme", change) == 2
    assert not replica.asked
    assert change.partition("=")[2] in capsys.readouterr().err


def test_keys_are_shown_where_they_are_made(replica: Replica, capsys: pytest.CaptureFixture[str]) -> None:
    key = {"tenant": "acme", "name": "ci", "key": "dm-new"}
    replica.answers = [(201, {"tenant": TENANT, "keys": [key]}), (201, key), (200, key | {"key": None})]
    assert told(replica, "create", "acme", "weight=2", "--key", "ci") == 0
    assert told(replica, "add-key", "acme", "ci", "requests_in_flight=2") == 0
    assert told(replica, "rotate", "acme", "ci", "--keep-old-s", "60", "--sha256", "ab") == 0

    assert [asked[3] for asked in replica.asked] == [
        {"name": "acme", "keys": [{"name": "ci"}], "weight": 2.0},
        {"name": "ci", "limits": {"requests_in_flight": 2}},
        {"keep_old_s": 60.0, "sha256": "ab"},
    ]
    shown = capsys.readouterr().out
    assert shown.count("shown this once: dm-new") == 2
    assert "the hash that you gave" in shown


def test_all_tenants_are_listed_however_many_there_are(
    replica: Replica,
    capsys: pytest.CaptureFixture[str],
) -> None:
    other = TENANT | {"name": "other", "keys": []}
    replica.answers = [(200, {"tenants": [TENANT], "next": "acme"}), (200, {"tenants": [other], "next": None})]
    assert told(replica, "list") == 0

    assert replica.asked[1][1] == "/admin/tenants?after=acme&limit=1000"
    shown = capsys.readouterr().out
    assert "acme" in shown and "other" in shown and "requests_per_minute=6_000" in shown


def test_the_log_says_who_changed_what(replica: Replica, capsys: pytest.CaptureFixture[str]) -> None:
    change = {
        "at_ms": 1_700_000_000_000, "by": "ada", "action": "set", "tenants": ["acme"],
        "before": {"weight": 1.0}, "after": {"weight": 2.0},
    }  # fmt: skip
    replica.answers = [(200, [change])]
    assert told(replica, "audit", "acme") == 0

    assert replica.asked[0][1] == "/admin/audit?limit=50&tenant=acme"
    shown = capsys.readouterr().out
    assert "2023-11-14 22:13:20" in shown and "ada" in shown


def test_removing_and_revoking_say_what_ends(replica: Replica, capsys: pytest.CaptureFixture[str]) -> None:
    replica.answers = [(204, None), (204, None), (404, error("there is no tenant 'x'"))]
    assert told(replica, "revoke", "acme", "ci") == 0
    assert told(replica, "remove", "acme") == 0
    assert told(replica, "remove", "x") == 1

    assert [asked[:2] for asked in replica.asked[:2]] == [
        ("DELETE", "/admin/tenants/acme/keys/ci"),
        ("DELETE", "/admin/tenants/acme"),
    ]
    assert "there is no tenant 'x'" in capsys.readouterr().err
