"""The one table from errors to OpenAI-style answers."""

from __future__ import annotations

import pytest

import router.errors as errors
from router.errors import RouterError, UnavailableError, error_body, error_headers, from_exception
from statestore.errors import StoreConfigurationError, StoreUnavailableError

KINDS = [kind for kind in vars(errors).values() if isinstance(kind, type) and issubclass(kind, RouterError)]


@pytest.mark.parametrize("kind", KINDS, ids=lambda kind: kind.__name__)
def test_every_kind_has_a_status_and_leaves_in_openais_shape(kind: type[RouterError]) -> None:
    error = kind("what went wrong", param="model")

    assert 400 <= error.status <= 504
    assert error_body(error) == {
        "error": {"message": "what went wrong", "type": kind.type, "param": "model", "code": kind.code}
    }


def test_no_two_kinds_share_status_and_code() -> None:
    assert len({(kind.status, kind.code) for kind in KINDS}) == len(KINDS)


def test_retry_after_is_whole_seconds_and_never_zero() -> None:
    assert error_headers(UnavailableError("later", retry_after_s=0.2)) == {"retry-after": "1"}
    assert error_headers(UnavailableError("later", retry_after_s=2.1)) == {"retry-after": "3"}
    assert error_headers(UnavailableError("later")) == {}


def test_a_missing_key_is_challenged() -> None:
    assert error_headers(errors.InvalidApiKeyError("no")) == {"www-authenticate": "Bearer"}


def test_store_errors_become_503_and_unknown_ones_give_nothing_away() -> None:
    assert from_exception(StoreUnavailableError("10.0.0.7 refused")).status == 503
    assert from_exception(StoreConfigurationError("wrong")).status == 503
    unknown = from_exception(ValueError("a secret"))
    assert unknown.status == 500
    assert "secret" not in unknown.message


def test_a_router_error_stays_itself() -> None:
    error = UnavailableError("no")
    assert from_exception(error) is error
