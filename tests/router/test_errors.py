"""The one table from errors to OpenAI-style answers."""

from __future__ import annotations

import pytest

import dualmap.router.errors as errors
from dualmap.router.errors import NoInstanceError, RouterError, error_body, error_headers, from_exception, unknown_model
from dualmap.statestore.errors import StoreConfigurationError, StoreUnavailableError

KINDS = [kind for kind in vars(errors).values() if isinstance(kind, type) and issubclass(kind, RouterError)]

ANTHROPIC_SERVER_TYPES = {
    "authentication_error",
    "not_found_error",
    "permission_error",
    "request_too_large",
    "rate_limit_error",
    "api_error",
    "overloaded_error",
    "timeout_error",
}


@pytest.mark.parametrize("kind", KINDS, ids=lambda kind: kind.__name__)
def test_every_kind_has_a_status_and_leaves_in_openais_shape(kind: type[RouterError]) -> None:
    error = kind("what went wrong", param="model")

    assert 400 <= error.status <= 504
    assert error_body(error) == {
        "error": {"message": "what went wrong", "type": kind.type, "param": "model", "code": kind.code}
    }


@pytest.mark.parametrize("kind", KINDS, ids=lambda kind: kind.__name__)
def test_every_kind_leaves_in_anthropics_shape_on_its_paths(kind: type[RouterError]) -> None:
    body = error_body(kind("what went wrong", param="model"), "/v1/messages")

    assert body == {"type": "error", "error": {"type": body["error"]["type"], "message": "what went wrong"}}
    expected = (
        {"invalid_request_error"} if kind.status in (400, 405, 408, 409, 415, 422, 431) else ANTHROPIC_SERVER_TYPES
    )
    assert body["error"]["type"] in expected


def test_a_full_replica_is_a_rate_limit_and_no_instance_an_overload_to_anthropics_clients() -> None:
    def kind(error: RouterError) -> str:
        name: str = error_body(error, "/v1/messages/count_tokens")["error"]["type"]
        return name

    assert kind(errors.QueueFullError("full")) == "rate_limit_error"
    assert kind(NoInstanceError("none")) == "overloaded_error"
    assert kind(errors.InvalidApiKeyError("no")) == "authentication_error"


def test_no_two_kinds_share_status_and_code() -> None:
    assert len({(kind.status, kind.code) for kind in KINDS}) == len(KINDS)


def test_a_message_repeats_the_beginning_of_a_long_name_of_a_model_alone() -> None:
    assert unknown_model("x" * 60_000).message == (
        f"the model '{'x' * 128}…' does not exist; GET /v1/models lists those that do"
    )


def test_retry_after_is_whole_seconds_and_never_zero() -> None:
    assert error_headers(NoInstanceError("later", retry_after_s=0.2)) == {"retry-after": "1"}
    assert error_headers(NoInstanceError("later", retry_after_s=2.1)) == {"retry-after": "3"}
    assert error_headers(NoInstanceError("later", retry_after_s=3600.0)) == {"retry-after": "60"}
    assert error_headers(NoInstanceError("later")) == {}


def test_a_missing_key_is_challenged() -> None:
    assert error_headers(errors.InvalidApiKeyError("no")) == {"www-authenticate": "Bearer"}


def test_store_errors_become_503_and_unknown_ones_give_nothing_away() -> None:
    assert from_exception(StoreUnavailableError("10.0.0.7 refused")).status == 503
    assert from_exception(StoreConfigurationError("wrong")).status == 503
    unknown = from_exception(ValueError("a secret"))
    assert unknown.status == 500
    assert "secret" not in unknown.message


def test_a_router_error_stays_itself() -> None:
    error = NoInstanceError("no")
    assert from_exception(error) is error
