"""Settings of an endpoint picker."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from pydantic import ValidationError

from dualmap.router.picker.settings import PickerSettings


@pytest.mark.parametrize(
    "given", [{"tls_certificate": Path("c")}, {"tls_key": Path("k")}, {"tls_client_ca": Path("ca")}, {"choices": 3}]
)
def test_settings_that_do_not_fit_are_refused(given: dict[str, Any]) -> None:
    with pytest.raises(ValidationError):
        PickerSettings(**given)


def test_a_picker_listens_on_its_own_machine_by_default() -> None:
    assert PickerSettings().host == "127.0.0.1"
    assert PickerSettings().port == 9002
