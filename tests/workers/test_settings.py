"""Wrong values stop the start with a message that names them."""

from __future__ import annotations

from typing import Any

import pytest
from pydantic import ValidationError

from dualmap.workers.settings import WorkerSettings


def test_every_setting_is_described_and_names_its_unit() -> None:
    for name, field in WorkerSettings.model_fields.items():
        assert field.description, name
        if field.annotation is float:
            assert name.endswith("_s") and "seconds" in field.description, name


@pytest.mark.parametrize(
    "wrong",
    [
        {"lease_s": 0.1},
        {"ops_port": 70_000},
        {"health_interval_s": 0},
        {"stall_down_s": 0},
        {"lease_ms": 3000},
        {"upstream_api_key": "a\r\nhost: elsewhere"},
    ],
)
def test_a_wrong_value_is_refused_by_name(wrong: dict[str, Any]) -> None:
    with pytest.raises(ValidationError, match=next(iter(wrong))):
        WorkerSettings(**wrong)
