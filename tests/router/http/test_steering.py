"""What clients say that steers engines is found in every place where engines read it."""

from __future__ import annotations

from typing import Any

import orjson
import pytest

from dualmap.router.http.body_edits import edited, field_edit
from dualmap.router.http.steering import may_steer, overriding_fields
from dualmap.router.steps import without_pause

PARAMS = {"do_remote_prefill": True, "remote_host": "10.6.6.6", "kv_load_tiers": []}
REPORT = {"kv_cache_report_mode": "full"}


def read_behind(body: dict[str, Any], *, trusts: bool = False) -> dict[str, Any]:
    """The body as an engine reads it."""
    raw = orjson.dumps(body)
    fields = overriding_fields(body, {}, trusts_transfers=trusts)
    found: dict[str, Any] = orjson.loads(b"".join(edited(raw, [field_edit(raw, *fields)] if fields else [])))
    return found


def test_transfers_are_dropped_wherever_an_engine_reads_them() -> None:
    args = {"kv_transfer_params": PARAMS, "ec_transfer_params": PARAMS, "mine": 1, **REPORT}
    body = {
        "prompt": "hi",
        "kv_transfer_params": PARAMS,
        "ec_transfer_params": {"x": 1},
        "vllm_xargs": args,
        "extra_args": args,
        "sampling_params": {"max_tokens": 3, "extra_args": args, "vllm_xargs": args},
    }

    assert read_behind(body) == {
        "prompt": "hi",
        "kv_transfer_params": None,
        "ec_transfer_params": None,
        "vllm_xargs": {"mine": 1},
        "extra_args": {"mine": 1},
        "sampling_params": {"max_tokens": 3, "extra_args": {"mine": 1}, "vllm_xargs": {"mine": 1}},
    }
    kept = {name: value for name, value in args.items() if name not in REPORT}
    assert read_behind(body, trusts=True) == {
        **body,
        "vllm_xargs": kept,
        "extra_args": kept,
        "sampling_params": {"max_tokens": 3, "extra_args": kept, "vllm_xargs": kept},
    }


@pytest.mark.parametrize(
    "body",
    [
        {"kv_transfer_params": None},
        {"vllm_xargs": {"mine": 1}},
        {"vllm_xargs": [REPORT]},
        {"sampling_params": {"n": 2}},
    ],
)
def test_a_body_that_steers_nothing_is_left_as_it_is(body: dict[str, Any]) -> None:
    assert overriding_fields(body, {}, trusts_transfers=False) == ()


def test_a_long_string_beside_what_is_dropped_is_whole_again() -> None:
    (field,) = overriding_fields(
        {"vllm_xargs": {**REPORT, "grammar": "\0name"}}, {"\0name": b"a long one"}, trusts_transfers=False
    )

    assert orjson.loads(b"{%b}" % field) == {"vllm_xargs": {"grammar": "a long one"}}


@pytest.mark.parametrize(
    ("body", "steers"),
    [
        (b'{"kv_transfer_params": {}', True),
        (b'{"vllm_xargs":{"kv_cache_report_mode":"full"},"a":NaN', True),
        (b'{"kv_transfer_params" : null,', False),
        (rb'{"\u006bv_transfer_par\u0061ms":1', True),
        (rb'{"a":"\"kv_transfer_params\":1"', False),
        ('{"ec_transfer_params":1}'.encode("utf-16"), True),
        ('{"ec_transfer_params":1}'.encode("utf-32-be"), True),
        (b" " * ((256 << 10) - 9) + b'"kv_transfer_params"' + b" " * 5000 + b":1", True),
        (b"\xff\xfe\x00", False),
    ],
)
def test_what_may_steer_is_found_in_a_body_that_cannot_be_read(body: bytes, steers: bool) -> None:
    assert without_pause(may_steer(body, trusts_transfers=False)) is steers
    assert without_pause(may_steer(body, trusts_transfers=True)) is (b"report" in body)
