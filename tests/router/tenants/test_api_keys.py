"""Keys, as a request sends them."""

from __future__ import annotations

import pytest

from dualmap.router.errors import InvalidApiKeyError
from dualmap.router.tenants.api_keys import ApiKeys, presented_key


def test_without_keys_everybody_may_ask() -> None:
    ApiKeys([]).check({}.get)


@pytest.mark.parametrize(
    "fields",
    [
        {b"authorization": b"Bearer b"},
        {b"authorization": b"bearer  b "},
        {b"x-api-key": b"b"},
        {b"x-api-key": b" b "},
        {b"authorization": b"Basic c", b"x-api-key": b"b"},
        {b"authorization": "Bearer schlüssel".encode()},
    ],
)
def test_any_of_the_keys_opens(fields: dict[bytes, bytes]) -> None:
    ApiKeys(["a", "b", "schlüssel"]).check(fields.get)


@pytest.mark.parametrize(
    "fields",
    [
        {},
        {b"authorization": b"Bearer c"},
        {b"authorization": b"Bearer c", b"x-api-key": b"b"},
        {b"authorization": b"Basic b"},
        {b"authorization": b"Bearer "},
        {b"x-api-key": "é".encode()},
        {b"x-api-key": b"\xff"},
    ],
)
def test_no_key_and_wrong_keys_are_refused(fields: dict[bytes, bytes]) -> None:
    with pytest.raises(InvalidApiKeyError, match="here they are asked for"):
        ApiKeys(["a", "b"], refusal="here they are asked for").check(fields.get)


def test_a_key_is_read_as_it_was_sent() -> None:
    assert presented_key({b"authorization": b"Bearer \xc3\xbc"}.get) == "ü".encode()
    assert presented_key({}.get) == b""
