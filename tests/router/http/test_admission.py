from __future__ import annotations

import orjson
import pytest

from router.api_keys import ApiKeys
from router.errors import (
    InvalidApiKeyError,
    InvalidRequestError,
    MethodNotAllowedError,
    RouterError,
    UnsupportedEncodingError,
)
from router.http.admission import (
    OPS_BODY_BYTES,
    is_form,
    make_head_check,
    mint_request_id,
    read_form_request,
    read_inference_request,
    read_request_id,
    read_slo_s,
)
from router.http.request_reader import Request
from router.inference_request import response_id
from scheduling.blocks import TokenPrompt

CHAT = "/v1/chat/completions"


def request(path: str = CHAT, body: object = None, method: str = "POST", **fields: str) -> Request:
    pairs = [(name.replace("_", "-").encode(), value.encode()) for name, value in fields.items()]
    raw = body if isinstance(body, bytes) else orjson.dumps(body)
    return Request(method, path, b"", pairs, http_10=False, keep_alive=True, body=raw)


def chat(**changes: object) -> dict[str, object]:
    return {"model": "m", "messages": [{"role": "user", "content": "hi"}], **changes}


def test_the_judge_knows_methods_keys_and_limits_by_path() -> None:
    check_head = make_head_check(ApiKeys(["k"]), max_body_bytes=OPS_BODY_BYTES * 2)
    assert check_head(request(authorization="Bearer k")) == OPS_BODY_BYTES * 2
    assert check_head(request("/admin/instances")) == OPS_BODY_BYTES
    for path in (CHAT, "/v1/models"):
        assert check_head(request(path, method="OPTIONS")) == OPS_BODY_BYTES
    for method in ("GET", "HEAD", "DELETE", "PUT"):
        with pytest.raises(MethodNotAllowedError):
            check_head(request(method=method, authorization="Bearer k"))
    with pytest.raises(MethodNotAllowedError):
        check_head(request("h:443", method="CONNECT"))
    for path in (CHAT, "/v1/embeddings", "/v1/models", "/v1/models/m"):
        with pytest.raises(InvalidApiKeyError):
            check_head(request(path, method="GET" if "models" in path else "POST"))


@pytest.mark.parametrize("encoding", ["gzip", "br", "GZIP, identity"])
def test_a_compressed_body_is_refused_by_name(encoding: str) -> None:
    check_head = make_head_check(ApiKeys(()), max_body_bytes=OPS_BODY_BYTES)
    with pytest.raises(UnsupportedEncodingError, match=encoding):
        check_head(request(content_encoding=encoding))
    assert check_head(request(content_encoding="Identity")) == OPS_BODY_BYTES


def test_an_ask_is_what_the_request_says() -> None:
    asked = read_inference_request(request(body=chat(stream=True), x_slo_ttft_ms="2500"), "id-1")
    assert (asked.request_id, asked.model, asked.path, asked.stream, asked.slo_s) == ("id-1", "m", CHAT, True, 2.5)
    assert asked.prompt is not None


@pytest.mark.parametrize(
    ("body", "param"),
    [
        (b"", None),
        (b"{", None),
        (b"[]", None),
        (b'"text"', None),
        (b"\xff\xfe", None),
        (b"[" * 100_000, None),
        (chat(model=7), "model"),
        (chat(messages=None), "messages"),
        (chat(messages=[]), "messages"),
        (chat(messages="hi"), "messages"),
        (chat(messages=["hi"]), "messages[0]"),
        (chat(stream="yes"), "stream"),
        (chat(max_tokens="5"), "max_tokens"),
        (chat(max_tokens=-1), "max_tokens"),
        (chat(max_completion_tokens=1.5), "max_completion_tokens"),
        (chat(n=True), "n"),
    ],
)
def test_a_body_of_the_wrong_shape_is_refused_and_the_field_named(body: object, param: str | None) -> None:
    with pytest.raises(InvalidRequestError) as caught:
        read_inference_request(request(body=body), "id")
    assert caught.value.param == param


@pytest.mark.parametrize("body", [{"messages": [{"role": "user"}]}, chat(model=None), chat(model="")])
def test_a_request_may_leave_its_model_out(body: object) -> None:
    assert read_inference_request(request(body=body), "id").model == ""


@pytest.mark.parametrize("prompt", [None, "", [], 5, {"a": 1}])
def test_a_completion_needs_a_prompt(prompt: object) -> None:
    with pytest.raises(InvalidRequestError):
        read_inference_request(request("/v1/completions", {"model": "m", "prompt": prompt}), "id")


@pytest.mark.parametrize("prompt", [{}, {"prompt": ""}, {"prompt": None}])
def test_embeddings_do_for_a_prompt(prompt: dict[str, object]) -> None:
    asked = read_inference_request(request("/v1/completions", {"model": "m", **prompt, "prompt_embeds": "AAAA"}), "id")
    assert asked.prompt is not None and isinstance(asked.prompt.prompt, TokenPrompt)
    with pytest.raises(InvalidRequestError, match="prompt_embeds"):
        read_inference_request(request("/v1/completions", {"model": "m", **prompt, "prompt_embeds": 7}), "id")


@pytest.mark.parametrize("slo", ["0", "-1", "x", "nan", "inf", "1e99"])
def test_an_impossible_slo_is_refused(slo: str) -> None:
    with pytest.raises(RouterError):
        read_inference_request(request(body=chat(), x_slo_ttft_ms=slo), "id")


def test_paths_that_are_not_scheduled_need_no_model() -> None:
    assert read_inference_request(request("/tokenize", {"prompt": "x"}), "id").model == ""


def test_a_form_names_its_model() -> None:
    form = (
        b'--b\r\nContent-Disposition: form-data; name="model"\r\n\r\nwhisper\r\n'
        b'--b\r\nContent-Disposition: form-data; name="file"; filename="a.wav"\r\n'
        b"Content-Type: audio/wav\r\n\r\nRIFF\r\n--b--\r\n"
    )
    sent = request("/v1/audio/transcriptions", form, content_type="Multipart/Form-Data; boundary=b")
    assert is_form(sent) and not is_form(request(content_type="application/json"))
    asked = read_form_request(sent, "id")
    assert asked.model == "whisper" and asked.prompt is None


def test_a_response_that_continues_another_names_the_instance_that_stored_it() -> None:
    sent = {"model": "m", "input": "hi", "previous_response_id": response_id("client@1", "npu-0")}
    read = read_inference_request(request("/v1/responses", sent), "r")
    assert (read.pinned_to, read.leaves_id_open) == ("npu-0", True)
    assert (read.continues, read.stores) == (sent["previous_response_id"], True)
    foreign = {"model": "m", "input": "hi", "previous_response_id": "resp_123", "request_id": "resp_mine"}
    read = read_inference_request(request("/v1/responses", foreign), "r")
    assert (read.pinned_to, read.leaves_id_open, read.continues) == (None, False, None)


def test_a_body_of_embeddings_without_a_prompt_is_passed_on() -> None:
    read = read_inference_request(request("/v1/embeddings", {"model": "m", "pixels": [1]}), "r")
    assert read.prompt is None and read.body_hash


def test_a_clients_request_id_is_kept_and_a_missing_one_minted() -> None:
    assert read_request_id("my-id.1") == "my-id.1"
    assert read_request_id(None) != read_request_id(None)
    assert len(mint_request_id()) == 32


@pytest.mark.parametrize("sent", ["a b", "x" * 129, "é", "a\nb", '{"a"}'])
def test_a_request_id_that_would_not_be_safe_to_pass_on_is_refused(sent: str) -> None:
    with pytest.raises(InvalidRequestError, match="x-request-id"):
        read_request_id(sent)


def test_an_slo_is_read_in_milliseconds() -> None:
    assert read_slo_s("2500") == 2.5
    assert read_slo_s("1500.6") == 1.501
    assert read_slo_s("0.4") == 0.001
    assert read_slo_s(None) is None


@pytest.mark.parametrize("sent", ["", "0", "-5", "soon", "nan", "inf", "3600001"])
def test_an_slo_that_is_no_time_is_refused(sent: str) -> None:
    with pytest.raises(InvalidRequestError, match="x-slo-ttft-ms"):
        read_slo_s(sent)
