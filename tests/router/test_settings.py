"""Settings of a replica."""

from __future__ import annotations

import pytest
from pydantic import ValidationError

from router.settings import RouterSettings


def test_every_setting_is_described() -> None:
    assert [name for name, field in RouterSettings.model_fields.items() if not field.description] == []


@pytest.mark.parametrize(
    ("name", "value"),
    [("port", 70_000), ("hold_timeout_s", 0), ("max_attempts", 0), ("retry_budget_share", 2), ("x", 1)],
)
def test_a_wrong_value_is_named(name: str, value: float) -> None:
    with pytest.raises(ValidationError, match=name):
        RouterSettings.model_validate({name: value})


def test_keys_do_not_show_when_settings_are_printed() -> None:
    settings = RouterSettings.model_validate({"api_keys": ["k-secret"], "admin_key": "a-secret"})
    assert "secret" not in repr(settings).replace("SecretStr", "")
    assert "secret" not in settings.model_dump_json()
