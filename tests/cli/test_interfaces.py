"""The generated references of command line and HTTP."""

from __future__ import annotations

from pathlib import Path

from dualmap.cli.interfaces import COMMAND_LINE, HTTP, command_line, with_operator_api
from dualmap.cli.main import COMMANDS

REFERENCE = Path(__file__).resolve().parents[2] / "docs" / "reference"


def test_the_page_of_the_command_line_is_what_the_parsers_say() -> None:
    page = (REFERENCE / COMMAND_LINE).read_text("utf-8")

    assert page == command_line(), "run: make docs"
    assert all(f"## `dualmap {name}`\n" in page for name in COMMANDS)
    assert "| `--sort {name,ahead,held,running,kv,state}` |" in page


def test_the_page_of_http_has_every_endpoint_of_operators() -> None:
    page = (REFERENCE / HTTP).read_text("utf-8")

    assert page == with_operator_api(page), "run: make docs"
    assert "| `GET /admin/explain/{request_id}?local=` | One request: its hash key" in page
