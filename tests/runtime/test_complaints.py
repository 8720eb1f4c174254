"""What pydantic has against a value, in words."""

from __future__ import annotations

import pytest
from pydantic import ValidationError

from dualmap.runtime.complaints import in_words
from dualmap.runtime.tenant_settings import TenantFields, TenantSettings


def test_a_name_with_a_blank_is_answered_with_what_names_are_made_of() -> None:
    with pytest.raises(ValidationError) as caught:
        TenantSettings.model_validate({"name": "A B"})

    assert in_words(caught.value.errors()[0]).startswith("a name has letters, digits, '_', '-' and '.'")


def test_an_unknown_field_is_answered_with_the_one_that_may_be_meant() -> None:
    with pytest.raises(ValidationError) as caught:
        TenantFields.model_validate({"wieght": 2})

    (detail,) = caught.value.errors()
    assert in_words(detail, TenantFields.model_fields) == "there is no such field; did you mean weight?"


def test_what_a_validator_says_is_said_as_it_is() -> None:
    with pytest.raises(ValidationError) as caught:
        TenantSettings.model_validate({"name": "a", "keys": [{"name": "b"}]})

    assert in_words(caught.value.errors()[0]) == "key 'b' needs either key or sha256"
