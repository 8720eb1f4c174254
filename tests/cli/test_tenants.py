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


LISTED = {"tenants": [{"name": "acme"}, {"name": "other"}], "next": None}


def test_removing_and_revoking_say_what_ends(replica: Replica, capsys: pytest.CaptureFixture[str]) -> None:
    replica.answers = [(204, None), (204, None), (404, error("there is no tenant 'acm'")), (200, LISTED)]
    assert told(replica, "revoke", "acme", "ci") == 0
    assert told(replica, "remove", "acme") == 0
    assert told(replica, "remove", "acm") == 2

    assert [asked[:2] for asked in replica.asked[:2]] == [
        ("DELETE", "/admin/tenants/acme/keys/ci"),
        ("DELETE", "/admin/tenants/acme"),
    ]
    assert "there is no tenant 'acm'; did you mean acme?" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (
            ["create", "x", "tokens_per_minut=5"],
            "a tenant has no limit or field 'tokens_per_minut'; did you mean tokens_per_minute?",
        ),
        (["create", "x", "large.tokens_per_minut=5"], "did you mean tokens_per_minute?"),
        (["set", "x", "wieght=2"], "did you mean weight?"),
        (["set", "x", "nonsense=2"], "there are: requests_per_minute, tokens_per_minute"),
        (["set", "x", "weight=abc"], "weight takes a number: not 'abc'"),
        (["set", "x", "shares_cache=yes"], "shares_cache takes true or false: not 'yes'"),
        (["set", "x", "max_adapters=2.5"], "max_adapters takes a whole number: not '2.5'"),
        (["set", "x", "tokens_per_minute=lots"], "takes a whole number such as 600, 100k or 2M, or none: not 'lots'"),
        (["set", "x", "tokens_per_minute=0.0001k"], "takes a whole number"),
        (["add-key", "x", "ci", "tokens_per_minut=5"], "did you mean tokens_per_minute?"),
        (["create", "A B"], "the name of a tenant has letters, digits, '_', '-' and '.', begins with a letter"),
        (["create", ""], "the name of a tenant has letters"),
        (["create", "x", "--key", "a b"], "the name of a key has letters"),
        (["add-key", "x", "a b"], "the name of a key has letters"),
    ],
)
def test_a_wrong_word_is_answered_with_the_right_one_and_nothing_is_sent(
    words: list[str], said: str, replica: Replica, capsys: pytest.CaptureFixture[str]
) -> None:
    assert told(replica, *words) == 2
    assert said in capsys.readouterr().err
    assert replica.asked == []


@pytest.mark.parametrize(
    ("text", "amount"), [("600", 600), ("50_000", 50_000), ("100k", 100_000), ("1.5M", 1_500_000), ("2G", 2 * 10**9)]
)
def test_a_limit_may_be_written_in_thousands_and_millions(text: str, amount: int, replica: Replica) -> None:
    replica.answers = [(200, {})]

    assert told(replica, "set", "acme", f"tokens_per_minute={text}") == 0

    assert replica.asked[0][3] == {"limits": {"tokens_per_minute": amount}}
