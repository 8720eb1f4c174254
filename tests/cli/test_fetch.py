"""Small HTTP calls of the commands."""

from __future__ import annotations

from dualmap.cli.fetch import fetch


def test_a_url_with_a_password_is_no_answer_and_the_password_is_not_shown() -> None:
    answer = fetch("http://bob:hunter2@127.0.0.1:1/health", timeout_s=1.0)
    assert answer.status == 0
    assert b"hunter2" not in answer.body and b"password" in answer.body


def test_a_port_where_nobody_listens_is_no_answer() -> None:
    assert fetch("http://127.0.0.1:1/health", timeout_s=1.0).status == 0
    assert fetch("https://127.0.0.1:1/health", timeout_s=1.0).status == 0
