"""Fields that a body has twice are found, however they are spelled, where a right may depend on them."""

from __future__ import annotations

import orjson
import pytest

from dualmap.api_bodies.json_body import UnreadableJsonError
from dualmap.router.http.doubled_fields import doubled_fields
from dualmap.scheduling.tenants.budgets import Limit, Measure, Period
from dualmap.scheduling.tenants.tenant import Caller, Tenant

MODELS = Caller(Tenant("acme", models=frozenset({"m"})), "ci")
TOKENS = Caller(Tenant("acme", (Limit(Measure.TOKENS, Period.DAY, 100),)), "ci")
MODEL_LIMITS = Caller(Tenant("acme", (Limit(Measure.REQUESTS, Period.DAY, 100, "model:m"),)), "ci")
NONE = Caller(Tenant("acme"), "ci")


def doubled(body: bytes, caller: Caller = MODELS) -> set[str]:
    return set(doubled_fields(body, orjson.loads(body), caller))


@pytest.mark.parametrize("caller", [MODELS, MODEL_LIMITS])
@pytest.mark.parametrize(
    "body",
    [
        b'{"model":"secret","model":"m"}',
        b'{"model":"m","model":"m"}',
        rb'{"model":"m","\u006dodel":"secret"}',
        rb'{"\u006D\u006f\u0064\u0065\u006C":"m","mo\u0064el":"secret"}',
        b'{"model":"m","a":[{"model":1}],"model" : 7}',
    ],
)
def test_a_second_model_is_found_however_it_is_spelled(body: bytes, caller: Caller) -> None:
    assert doubled(body, caller) == {"model"}


@pytest.mark.parametrize(
    "body",
    [
        b'{"model":"m","tools":[{"properties":{"model":{"type":"string"}}},{"model":1,"model":2}]}',
        b'{"model":"model","messages":[{"content":"say \\"model\\": twice, \\"model\\""}]}',
        rb'{"model":"m","messages":[{"content":"\u006dodel \u00e9"}]}',
        b"{}",
    ],
)
def test_one_that_is_nested_or_a_value_is_no_second_one(body: bytes) -> None:
    assert doubled(body) == set()


def test_fields_are_looked_for_where_a_right_may_depend_on_them() -> None:
    models, tokens = b'"model":"m","model":"m"', b'"max_tokens":1,"max_tokens":2'
    salts = b'"cache_salt":"a","cache_salt":"b"'
    found = {
        caller: [doubled(b"{%b}" % fields, caller) for fields in (models, tokens, salts)]
        for caller in (MODELS, TOKENS, NONE)
    }

    assert found == {
        MODELS: [{"model"}, set(), {"cache_salt"}],
        TOKENS: [{"model"}, {"max_tokens"}, {"cache_salt"}],
        NONE: [{"model"}, set(), {"cache_salt"}],  # an adapter may be another tenant's alone
    }


def test_a_body_that_is_too_deep_to_say_is_not_read() -> None:
    body = b'{"model":"m","model":"m","a":' + b"[" * 1000 + b"]" * 1000 + b"}"

    with pytest.raises(UnreadableJsonError, match="deep"):
        doubled(body)
