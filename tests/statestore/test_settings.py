"""Settings of the state store."""

from __future__ import annotations

import pytest
from pydantic import ValidationError

from dualmap.statestore.settings import StoreSettings


@pytest.mark.parametrize("url", ["", "foo", "foo://x", "redis://h/first"])
def test_a_wrong_store_url_is_refused(url: str) -> None:
    with pytest.raises(ValidationError, match="url"):
        StoreSettings(url=url)


def test_a_wrong_store_url_is_refused_without_its_password() -> None:
    with pytest.raises(ValidationError, match="unknown scheme 'magic'") as caught:
        StoreSettings(url="magic://user:hunter2@host")

    assert "hunter2" not in str(caught.value)
