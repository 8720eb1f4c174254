from __future__ import annotations

from typing import Any

import orjson
import pytest

from dualmap.router.http.admission import may_split
from dualmap.router.http.body_edits import edited, field_edit
from dualmap.router.http.connectors import PREFILL_PARAMS
from dualmap.router.http.leg_bodies import freeing_body, params_field, prefill_body, transfer_params
from dualmap.router.prompts.prompt import output_limit

CHAT, COMPLETION = "/v1/chat/completions", "/v1/completions"


@pytest.mark.parametrize(
    ("path", "fields", "split"),
    [
        (CHAT, {}, True),
        (CHAT, {"n": 1, "max_tokens": 2}, True),
        (CHAT, {"n": 2}, False),
        (CHAT, {"max_completion_tokens": 1}, False),
        (CHAT, {"max_completion_tokens": 9, "max_tokens": 1}, True),
        (COMPLETION, {"prompt": "text", "max_tokens": 1}, False),
        (COMPLETION, {"prompt": "text", "max_tokens": 0}, False),
        (COMPLETION, {"prompt": "text"}, True),
        (COMPLETION, {"prompt": [1, 2, 3]}, True),
        (COMPLETION, {"prompt": ["one", "two"]}, False),
        (COMPLETION, {"prompt": "text", "echo": True}, False),
        (COMPLETION, {"prompt": "text", "echo": False}, True),
        (COMPLETION, {"prompt": "text", "best_of": 3}, False),
        (COMPLETION, {"prompt": "text", "kv_transfer_params": {"mine": 1}}, True),
        ("/v1/embeddings", {"input": "text"}, False),
    ],
)
def test_one_prompt_with_one_answer_of_more_than_a_token_may_be_split(
    path: str, fields: dict[str, Any], split: bool
) -> None:
    assert may_split(path, fields, output_limit(path, fields)) is split


@pytest.mark.parametrize("other", [{}, {"model": "other"}, {"model": "other", "cache_salt": "acme's"}])
@pytest.mark.parametrize(
    "fields",
    [{}, {"stream": True, "stream_options": {"include_usage": True}}, {"max_tokens": 9, "min_tokens": 3}],
)
def test_a_prefill_leg_is_the_clients_request_with_one_token_and_no_stream(
    fields: dict[str, Any], other: dict[str, str]
) -> None:
    body = orjson.dumps({"model": "m", "cache_salt": "the client's", "messages": [], "temperature": 0.5, **fields})

    more = b"".join(b'"%b":%b,' % (name.encode(), orjson.dumps(value)) for name, value in other.items())
    made = orjson.loads(b"".join(prefill_body(CHAT, body, orjson.dumps(PREFILL_PARAMS), more)))
    assert made.pop("stream_options", None) is None

    assert made == {
        "model": "m",
        "cache_salt": "the client's",
        "messages": [],
        "temperature": 0.5,
        "max_tokens": 1,
        "max_completion_tokens": 1,
        "min_tokens": 1,
        "stream": False,
        "kv_transfer_params": PREFILL_PARAMS,
        **other,
    }


def test_a_completions_prefill_leg_has_the_limits_that_completions_have() -> None:
    made = orjson.loads(b"".join(prefill_body(COMPLETION, b'{"prompt":"a}b"} ', orjson.dumps(PREFILL_PARAMS))))

    assert made["max_tokens"] == made["min_tokens"] == 1
    assert "max_completion_tokens" not in made
    assert made["prompt"] == "a}b"


def test_what_the_prefill_leg_said_of_its_kv_is_handed_on_as_it_is() -> None:
    params = {"remote_block_ids": [[1, 2]], "remote_pcp_size": 4, "nested": {"x": None}}
    answer = orjson.dumps({"choices": [], "kv_transfer_params": params})
    body = b'{"prompt": "p", "stream": true}'

    told = transfer_params(answer)
    assert told == params
    made = orjson.loads(b"".join(edited(body, [field_edit(body, params_field(told))])))

    assert made == {"prompt": "p", "stream": True, "kv_transfer_params": params}


def test_an_answer_may_name_no_kv_and_must_be_an_answer() -> None:
    assert transfer_params(b'{"choices":[],"kv_transfer_params":null}') is None
    with pytest.raises(ValueError, match="completion"):
        transfer_params(b'{"error":{}}')


def test_a_leg_without_a_client_takes_kv_over_with_one_token() -> None:
    body = b'{"prompt":"p","stream":true,"stream_options":{},"max_tokens":900,"kv_transfer_params":{"a":1}}'

    made = orjson.loads(freeing_body(COMPLETION, [body], None))

    assert made == {
        "prompt": "p",
        "stream": False,
        "max_tokens": 1,
        "min_tokens": 1,
        "kv_transfer_params": {"a": 1},
    }


def test_a_body_that_does_not_say_where_the_kv_is_is_told_so() -> None:
    made = orjson.loads(freeing_body(COMPLETION, [b'{"prompt":', b'"p"}'], {"a": 1}))

    assert made["kv_transfer_params"] == {"a": 1}
