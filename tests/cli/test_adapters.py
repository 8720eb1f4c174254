"""``dualmap adapters``: what it sends to a replica, and how it shows what that answers."""

from __future__ import annotations

import io

import pytest
from rich.console import Console

from dualmap.cli.adapters import adapters_table
from dualmap.cli.main import main
from tests.cli.scripted_replica import Replica, error

REGISTERED = {"rank": 8, "tenant": "acme", "loaded": ["a", "b"], "outdated": ["c"], "failed": {"d": "it answered 404"}}
FOUND = {
    "pool": "default",
    "room": {"a": {"device": 4, "host": 8, "running": 6}, "b": {"device": 4, "host": 8}},
    "adapters": [
        {"adapter": "sql", "running": 2, "idle_s": 0.0, "device": ["a"], "host": [], "registered": REGISTERED},
        {"adapter": "static", "running": 0, "idle_s": None, "device": [], "host": ["a"], "registered": None},
    ],
}


@pytest.mark.parametrize(
    ("words", "path", "body"),
    [
        (
            ("load", "sql", "/adapters/sql", "--rank", "8", "--tenant", "acme", "--replace"),
            "/v1/load_lora_adapter",
            {"lora_name": "sql", "lora_path": "/adapters/sql", "rank": 8, "tenant": "acme", "load_inplace": True},
        ),
        (
            ("load", "sql", "team/sql"),
            "/v1/load_lora_adapter",
            {"lora_name": "sql", "lora_path": "team/sql", "load_inplace": False},
        ),
        (("unload", "sql"), "/v1/unload_lora_adapter", {"lora_name": "sql"}),
    ],
)
def test_an_adapter_is_loaded_and_unloaded_by_the_calls_of_vllm(
    replica: Replica, capsys: pytest.CaptureFixture[str], words: tuple[str, ...], path: str, body: dict[str, object]
) -> None:
    replica.answers = [(200, "Success")]

    code = main(["adapters", "--url", replica.url, "--pool", "small", *words])

    assert code == 0
    ((method, asked, _, sent),) = replica.asked
    assert (method, asked, sent) == ("POST", f"{path}?pool=small", body)
    assert "Success" in capsys.readouterr().out


def test_a_refusal_is_shown_in_the_replicas_words(replica: Replica, capsys: pytest.CaptureFixture[str]) -> None:
    replica.answers = [(409, error("say load_inplace to replace it"))]

    assert main(["adapters", "--url", replica.url, "load", "sql", "/elsewhere"]) != 0
    assert "say load_inplace to replace it" in capsys.readouterr().err


def test_the_table_says_where_each_is_and_what_is_wrong() -> None:
    out = io.StringIO()
    Console(file=out, width=200).print(adapters_table(FOUND))
    lines = out.getvalue().splitlines()

    assert [" ".join(line.split()) for line in lines if line.startswith(("sql ", "static "))] == [
        "sql 8 acme 2 0.0 a b a",
        "static 0 (not registered) a",
    ]
    assert "sql: c has its former weights, and is to replace them" in lines
    assert "sql: d does not load it: it answered 404" in lines
    assert "a: 2 adapters with running requests wait for a slot on the device" in lines
    assert not any(line.startswith("b: ") for line in lines)


def test_a_name_that_looks_like_a_style_is_shown_as_it_is(replica: Replica, capsys: pytest.CaptureFixture[str]) -> None:
    named = [FOUND["adapters"][0] | {"adapter": name} for name in ("[/b]", "[red]sql[/red]")]
    replica.answers = [(200, FOUND | {"adapters": named})]

    assert main(["adapters", "--url", replica.url]) == 0

    shown = capsys.readouterr().out
    assert "[/b] " in shown
    assert "[red]sql[/red]" in shown


def test_a_replica_of_an_older_version_is_understood() -> None:
    older = [{name: each for name, each in row.items() if name != "registered"} for row in FOUND["adapters"]]  # type: ignore[attr-defined]
    out = io.StringIO()

    Console(file=out, width=200).print(adapters_table({**FOUND, "room": {}, "adapters": older}))

    assert "static" in out.getvalue()
