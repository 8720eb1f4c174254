"""``dualmap batches``: progress, forecasts and reasons."""

from __future__ import annotations

import argparse
from typing import Any

import pytest
from rich.console import Console

from dualmap.cli import batches
from dualmap.cli.batches import batches_table
from dualmap.cli.errors import UsageError
from dualmap.cli.settings import Settings


def shown(*batches: dict[str, Any]) -> str:
    console = Console(width=160, no_color=True)
    with console.capture() as captured:
        console.print(batches_table({"now": 1000, "batches": list(batches)}))
    return captured.get()


def batch(status: str = "in_progress", **forecast: Any) -> dict[str, Any]:
    return {
        "id": "batch_0123456789abcdef01234567",
        "tenant": "acme",
        "status": status,
        "request_counts": {"total": 1000, "completed": 400, "failed": 12},
        "expires_at": 1000 + 7200,
        "forecast": {"ends_at": None, "delay": None} | forecast,
    }


def test_a_batch_is_shown_with_how_far_it_is_and_when_it_will_be_done() -> None:
    text = shown(batch(ends_at=1000 + 1800))
    for word in ("acme", "in_progress", "400", "12", "1,000", "2 h 00 min", "30 min", "1 batches"):
        assert word in text, word


def test_one_that_will_be_late_is_shown_with_the_reason() -> None:
    assert "limits" in shown(batch(ends_at=1000 + 9000, delay="limits"))
    assert "late by reason of" in shown(batch())


def test_one_that_is_over_has_no_window_any_more() -> None:
    assert "2 h 00 min" not in shown(batch("completed"))
    assert "no batches" in shown()


def test_all_batches_of_a_tenant_or_of_one_of_its_keys_are_cancelled(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    calls: list[tuple[object, ...]] = []
    left: list[str] = []

    class Api:
        def __init__(self, *_: object) -> None:
            pass

        def call(self, *words: object, query: dict[str, str]) -> dict[str, list[str]]:
            calls.append((*words, query))
            return {"cancelled": ["batch_1", "batch_2"], "not_cancelled": left}

    monkeypatch.setattr(batches, "AdminApi", Api)
    parser = argparse.ArgumentParser()
    batches.add_arguments(parser)

    assert batches.run(parser.parse_args(["--tenant", "acme", "--key", "ci", "--cancel"]), Settings()) == 0

    assert calls == [("POST", "/batches/cancel", {"tenant": "acme", "key": "ci"})]
    assert capsys.readouterr().out.split("\n") == ["batch_1", "batch_2", "2 cancelled", ""]
    left.append("batch_3")
    assert batches.run(parser.parse_args(["--tenant", "acme", "--cancel"]), Settings()) == 1
    assert "batch_3; run it again" in capsys.readouterr().err
    with pytest.raises(UsageError, match="name the tenant"):
        batches.run(parser.parse_args(["--cancel"]), Settings())
    with pytest.raises(UsageError, match="--key is for --cancel"):
        batches.run(parser.parse_args(["--tenant", "acme", "--key", "ci"]), Settings())
