"""``dualmap settings`` finds the settings that a start would refuse."""

from __future__ import annotations

from pathlib import Path

import pytest

from dualmap.cli.main import main
from dualmap.router.requests import tracing

NOT_THERE = "/no/such/file"


@pytest.mark.parametrize(
    ("words", "named"),
    [
        (("--store.url", "memory://"), "store.url memory:// is seen by one process only"),
        (("--store.url", f"rediss://h:1/0?ssl_ca_certs={NOT_THERE}"), f"ssl_ca_certs {NOT_THERE} cannot be read"),
        (("--upstream.ca_file", NOT_THERE), f"upstream.ca_file {NOT_THERE}"),
        (("--upstream.certificate_file", NOT_THERE), f"upstream.certificate_file {NOT_THERE}"),
        (
            ("--router.tls_certificate", NOT_THERE, "--router.tls_key", NOT_THERE),
            f"router.tls_certificate {NOT_THERE} cannot be read",
        ),
        (
            ("--picker.tls_certificate", NOT_THERE, "--picker.tls_key", NOT_THERE),
            f"picker.tls_certificate {NOT_THERE} cannot be read",
        ),
        (("--router.host", "0.0.0.0", "--router.api_keys", '["of-clients"]'), "set router.admin_key or router.admins"),
        (("--pools", f'[{{"name": "chat", "tokenizer": "{NOT_THERE}"}}]'), "pool 'chat'"),
    ],
)
def test_what_a_start_would_refuse_is_named_with_exit_code_2(
    words: tuple[str, ...], named: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["settings", *words]) == 2

    seen = capsys.readouterr()
    assert named in seen.err
    assert "scheduling:" in seen.out, "the values are printed all the same"


def test_every_complaint_is_named_and_not_only_the_first(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["settings", "--store.url", "memory://", "--upstream.ca_file", NOT_THERE]) == 2
    assert len(capsys.readouterr().err.splitlines()) == 2


def test_settings_that_a_fleet_starts_with_are_nothing_to_complain_of(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    for url in ("redis://127.0.0.1:1/0", f"embedded://{tmp_path}/s.sock", f"unix://{tmp_path}/s.sock"):
        assert main(["settings", "--store.url", url, "--router.tracing_url", "http://127.0.0.1:9"]) == 0
    assert capsys.readouterr().err == ""


def test_packages_that_tracing_lacks_are_named(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def missing(_: object) -> None:
        raise tracing.TracingUnavailableError("router.tracing_url needs OpenTelemetry")

    monkeypatch.setattr("dualmap.cli.checks.require_tracing", missing)
    assert main(["settings", "--router.tracing_url", "http://127.0.0.1:9"]) == 2
    assert "needs OpenTelemetry" in capsys.readouterr().err
