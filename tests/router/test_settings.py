"""Settings of a replica."""

from __future__ import annotations

import pytest
from pydantic import ValidationError

from dualmap.router.settings import RouterSettings


def test_every_setting_is_described() -> None:
    assert [name for name, field in RouterSettings.model_fields.items() if not field.description] == []


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("port", 70_000),
        ("replica_lease_s", 0),
        ("max_attempts", 0),
        ("max_requests", 0),
        ("admin_key", ""),
        ("admin_key", " \n"),
        ("api_keys", ["good", ""]),
        ("api_keys", ["two\nlines"]),
        ("upstream_api_key", "a\r\nhost: elsewhere"),
        ("upstream_api_key", "bell\a"),
        ("x", 1),
    ],
)
def test_a_wrong_value_is_named(name: str, value: object) -> None:
    with pytest.raises(ValidationError, match=name):
        RouterSettings.model_validate({name: value})


def test_a_body_that_may_be_sent_fits_among_all_that_may_be_buffered() -> None:
    with pytest.raises(ValidationError, match="max_buffered_body_bytes must not be below max_body_bytes"):
        RouterSettings(max_body_bytes=4096, max_buffered_body_bytes=4095)


def test_keys_do_not_show_when_settings_are_printed() -> None:
    settings = RouterSettings.model_validate({"api_keys": ["k-hidden"], "admin_key": "a-hidden"})
    assert "hidden" not in repr(settings)
    assert "hidden" not in settings.model_dump_json()


def test_a_key_is_read_without_the_line_break_that_mounted_secrets_end_with() -> None:
    settings = RouterSettings.model_validate(
        {"api_keys": ["cli\n", " two words\r\n"], "admin_key": "boss\n", "upstream_api_key": "\ttheirs\n"}
    )

    assert [key.get_secret_value() for key in settings.api_keys] == ["cli", "two words"]
    assert settings.admin_key is not None and settings.admin_key.get_secret_value() == "boss"
    assert settings.upstream_api_key is not None and settings.upstream_api_key.get_secret_value() == "theirs"


@pytest.mark.parametrize("names", ["tls_certificate", "tls_key", "tls_client_ca", "tls_key tls_client_ca"])
def test_half_a_certificate_is_refused(names: str) -> None:
    with pytest.raises(ValidationError, match="tls_certificate and tls_key"):
        RouterSettings.model_validate(dict.fromkeys(names.split(), "/file"))
