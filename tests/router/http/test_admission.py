from __future__ import annotations

import json

import orjson
import pytest

from dualmap.router.errors import (
    ForbiddenPathError,
    InvalidApiKeyError,
    MethodNotAllowedError,
    NotFoundError,
    UnsupportedEncodingError,
)
from dualmap.router.http.admission import (
    OPS_BODY_BYTES,
    is_form,
    make_head_check,
    mint_request_id,
    read_form_request,
    read_inference_request,
    read_request_id,
    read_slo_s,
    read_stored_request,
)
from dualmap.router.http.paths import ENGINE_CONTROL_PATHS, is_inference, meant_path
from dualmap.router.http.request_reader import ClientRequest
from dualmap.router.prompts.inference_request import response_id
from dualmap.router.prompts.prompt import read_prompt
from dualmap.router.settings import RouterSettings
from dualmap.router.tenants.directory import TenantDirectory
from dualmap.scheduling.estimates.learned import Learned
from dualmap.scheduling.prompts.blocks import BlockRule, TokenPrompt
from dualmap.scheduling.tenants.tenant import Caller, Tenant
from tests.support.bodies import BODIES, ODD_VALUES, places, with_value

CHAT = "/v1/chat/completions"


def request(path: str = CHAT, body: object = None, method: str = "POST", **fields: str) -> ClientRequest:
    pairs = [(name.replace("_", "-").encode(), value.encode()) for name, value in fields.items()]
    raw = body if isinstance(body, bytes) else orjson.dumps(body)
    return ClientRequest(method, path, b"", pairs, http_10=False, keep_alive=True, body=raw)


def chat(**changes: object) -> dict[str, object]:
    return {"model": "m", "messages": [{"role": "user", "content": "hi"}], **changes}


def test_the_judge_knows_methods_keys_and_limits_by_path() -> None:
    check_head = make_head_check(TenantDirectory(["k"]), max_body_bytes=OPS_BODY_BYTES * 2)
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
def test_a_compressed_body_is_refused_by_name_where_the_router_must_read_it_and_else_passed_on(encoding: str) -> None:
    check_head = make_head_check(TenantDirectory(()), max_body_bytes=OPS_BODY_BYTES)
    with pytest.raises(UnsupportedEncodingError, match=encoding):
        check_head(request("/admin/instances", content_encoding=encoding))
    assert check_head(request("/admin/instances", content_encoding="Identity")) == OPS_BODY_BYTES
    assert check_head(request(content_encoding=encoding)) == OPS_BODY_BYTES
    read = read_inference_request(request(body=chat(), content_encoding=encoding), "id")
    assert read.prompt is None and encoding in read.unread


@pytest.mark.parametrize(
    "path",
    ["/sleep", "/sleep/", "//sleep", "/%73leep", "/v1/../sleep", "/sleep/now", "/v1/load_lora_adapter",
     "/update_weights", "/init_weight_transfer_engine", "/v1%2Fload_lora_adapter", "/a/%2e%2e/wake_up",
     "/emulator/die"],
)  # fmt: skip
def test_paths_that_change_an_engine_are_not_passed_on_however_they_are_written(path: str) -> None:
    forbidden = RouterSettings().forbidden_paths
    check_head = make_head_check(TenantDirectory(()), max_body_bytes=OPS_BODY_BYTES, forbidden_paths=forbidden)
    if (meant := meant_path(path)) in ENGINE_CONTROL_PATHS:
        assert not is_inference(meant), "it is the operator's, and the app's"
        return
    with pytest.raises(ForbiddenPathError, match="forbidden_paths"):
        check_head(request(meant))
    assert make_head_check(TenantDirectory(()), max_body_bytes=OPS_BODY_BYTES)(request(meant)) == OPS_BODY_BYTES


@pytest.mark.parametrize("path", ["/v2/anything", "/tokenizer_info", "/v1/sleep_tracks", "/generative_scoring"])
def test_other_paths_are_passed_on_by_any_usual_method_and_need_a_key_where_inference_does(path: str) -> None:
    forbidden = RouterSettings().forbidden_paths
    check_head = make_head_check(TenantDirectory(["k"]), max_body_bytes=OPS_BODY_BYTES, forbidden_paths=forbidden)
    assert check_head(request(path, authorization="Bearer k")) == OPS_BODY_BYTES
    with pytest.raises(InvalidApiKeyError, match="x-api-key"):
        check_head(request(path))
    with pytest.raises(MethodNotAllowedError):
        check_head(request(path, method="TRACE", authorization="Bearer k"))


def test_an_ask_is_what_the_request_says() -> None:
    asked = read_inference_request(request(body=chat(stream=True), x_slo_ttft_ms="2500"), "id-1")
    assert (asked.request_id, asked.model, asked.path, asked.stream, asked.slo_s) == ("id-1", "m", CHAT, True, 2.5)
    assert asked.prompt is not None


@pytest.mark.parametrize(
    ("body", "why"),
    [
        (b"", "no body"),
        (b"{", "not valid JSON"),
        (b"[]", "no JSON object"),
        (b'"text"', "no JSON object"),
        (b"\xff\xfe", "not valid JSON"),
        (b"[" * 100_000, "nested too deeply"),
        (b'{"n":' + b"9" * 5000 + b"}", "not valid JSON"),
    ],
)
def test_a_body_that_cannot_be_read_is_passed_on_and_the_reason_kept(body: bytes, why: str) -> None:
    read = read_inference_request(request(body=body), "id")
    assert read.prompt is None and read.model == "" and read.body_hash
    assert why in read.unread


def test_a_body_is_read_as_the_engines_own_reader_reads_it() -> None:
    for more in (b'"user":"\\ud800"', b'"seed":NaN', b'"seed":1e999', b'"seed":-Infinity'):
        body = b'\xef\xbb\xbf{"model":"m","messages":[{"role":"user","content":"hi"}],%b}' % more
        read = read_inference_request(request(body=body), "id")
        assert read.model == "m" and read.prompt is not None and not read.unread


@pytest.mark.parametrize("changes", [{"messages": each} for each in (None, [], "hi", ["hi"], [{"role": 1}])])
def test_a_body_in_which_no_prompt_is_found_is_passed_on(changes: dict[str, object]) -> None:
    read = read_inference_request(request(body=chat(**changes)), "id")
    assert read.prompt is None and read.model == "m" and read.body_hash
    assert not read.leaves_usage_open and not read.may_split


@pytest.mark.parametrize("stream", [True, "true", "TRUE", 1, 1.0, "on"])
def test_a_request_streams_where_an_engine_would_say_so(stream: object) -> None:
    assert read_inference_request(request(body=chat(stream=stream)), "id").stream
    assert read_inference_request(request(body=chat(stream=stream)), "id").leaves_usage_open


@pytest.mark.parametrize("value", [None, False, "no", 0, "maybe", [], {}, 7])
def test_what_is_no_yes_does_not_stream(value: object) -> None:
    assert not read_inference_request(request(body=chat(stream=value)), "id").stream


@pytest.mark.parametrize(
    ("limit", "known"),
    [
        (1024.0, 1024),
        ("100", 100),
        (" 7 ", 7),
        (True, 1),
        ("many", None),
        (-1, None),
        (1.5, None),
        ([], None),
        (2**40, None),
    ],
)
def test_a_limit_is_read_as_an_engine_reads_it_or_unknown(limit: object, known: int | None) -> None:
    read = read_inference_request(request(body=chat(max_tokens=limit)), "id")
    assert read.prompt is not None and read.prompt.output_limit == known


@pytest.mark.parametrize(("field", "value"), [("n", 1.0), ("n", "1"), ("best_of", 1)])
def test_one_answer_may_be_split_however_its_number_is_written(field: str, value: object) -> None:
    assert read_inference_request(request(body=chat(**{field: value})), "id").may_split
    for several in (2, "2", 2.0, "x", [1], -1, True + 1):
        assert not read_inference_request(request(body=chat(**{field: several})), "id").may_split


@pytest.mark.parametrize("model", [7, ["m"], {"m": 1}, True])
def test_a_model_that_is_no_name_counts_as_none(model: object) -> None:
    assert read_inference_request(request(body=chat(model=model)), "id").model == ""


@pytest.mark.parametrize("body", [{"messages": [{"role": "user"}]}, chat(model=None), chat(model="")])
def test_a_request_may_leave_its_model_out(body: object) -> None:
    assert read_inference_request(request(body=body), "id").model == ""


@pytest.mark.parametrize("prompt", [None, "", [], 5, {"a": 1}, [None], ["a", 1], [[]]])
def test_a_completion_without_a_prompt_is_passed_on(prompt: object) -> None:
    read = read_inference_request(request("/v1/completions", {"model": "m", "prompt": prompt}), "id")
    assert read.prompt is None and read.model == "m"


@pytest.mark.parametrize("prompt", [{}, {"prompt": ""}, {"prompt": None}])
def test_embeddings_do_for_a_prompt(prompt: dict[str, object]) -> None:
    asked = read_inference_request(request("/v1/completions", {"model": "m", **prompt, "prompt_embeds": "AAAA"}), "id")
    assert asked.prompt is not None and isinstance(asked.prompt.prompt, TokenPrompt)
    asked = read_inference_request(request("/v1/completions", {"model": "m", **prompt, "prompt_embeds": 7}), "id")
    assert asked.prompt is None


@pytest.mark.parametrize("path", sorted(BODIES))
async def test_whatever_value_stands_anywhere_in_a_body_it_is_read_or_passed_on(path: str) -> None:
    body = {"model": "m", **BODIES[path]}
    for place in places(body):
        for value in ODD_VALUES:
            read = read_inference_request(request(path, json.dumps(with_value(body, place, value)).encode()), "id")
            assert not read.unread
            if read.prompt is not None:
                rule, learned = BlockRule(), Learned()
                prompt = await read_prompt(read.prompt, model="m", lora=None, rule=rule, learned=learned)
                assert prompt.chain.hashes and prompt.expected_output_tokens >= 0


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


@pytest.mark.parametrize(
    ("path", "fields", "scored"),
    [
        (CHAT, {"prompt_logprobs": 0}, True),
        (CHAT, {"prompt_logprobs": None}, False),
        (CHAT, {"echo": True}, True),
        (CHAT, {"echo": False, "logprobs": True}, False),
        ("/v1/completions", {"prompt_logprobs": 1}, True),
        ("/v1/completions", {"echo": True, "logprobs": 0}, True),
        ("/v1/completions", {"echo": True}, False),
        ("/v1/messages", {"prompt_logprobs": 1}, False),
    ],
)
def test_no_cache_is_looked_at_for_a_prompt_whose_own_tokens_are_scored(
    path: str, fields: dict[str, object], scored: bool
) -> None:
    """vLLM computes all of such a prompt; expecting a hit, placements would count a token of its work."""
    body = {"model": "m", "prompt": "hi", "messages": [{"role": "user", "content": "hi"}], **fields}
    prompt = read_inference_request(request(path, body), "r").prompt

    assert prompt is not None
    assert prompt.pooled is scored


def test_an_engine_that_truncates_a_prompt_does_not_see_it_whole() -> None:
    reads = [read_inference_request(request(CHAT, chat(truncate_prompt_tokens=at)), "r") for at in (None, 5)]

    assert [(read.shows_prompt, read.truncates_to) for read in reads] == [(True, None), (False, 5)]


@pytest.mark.parametrize("tenant", ["", "acme"])
def test_a_prompt_has_the_name_of_its_tenant(tenant: str) -> None:
    asked = request("/v1/completions", {"model": "m", "prompt": "hi"})
    asked.caller = Caller(Tenant(tenant), "ci") if tenant else None
    prompt = read_inference_request(asked, "r").prompt

    assert prompt is not None
    assert prompt.tenant == tenant


def test_what_a_tenant_stored_is_there_for_it_alone() -> None:
    stored = response_id("r", "npu-0", "acme")
    body = {"model": "m", "input": "hi", "previous_response_id": stored}
    for tenant in (None, "other", "acme"):
        caller = None if tenant is None else Caller(Tenant(tenant), "ci")
        asked, continued = request(f"/v1/responses/{stored}"), request("/v1/responses", body)
        asked.caller = continued.caller = caller
        if tenant == "acme":
            assert read_stored_request(asked, "r").pinned_to == "npu-0"
            assert read_inference_request(continued, "r").continues == stored
            continue
        with pytest.raises(NotFoundError, match="not found"):
            read_stored_request(asked, "r")
        with pytest.raises(NotFoundError, match="not found"):
            read_inference_request(continued, "r")


def test_a_client_cannot_store_a_response_under_the_id_of_another_tenants() -> None:
    own = response_id("r", "npu-0", "acme")
    for tenant, named in ((None, own), ("other", own), ("acme", own), ("acme", "resp_mine"), ("acme", 7)):
        asked = request("/v1/responses", {"model": "m", "input": "hi", "request_id": named})
        asked.caller = None if tenant is None else Caller(Tenant(tenant), "ci")
        if tenant == "acme":
            assert not read_inference_request(asked, "r").leaves_id_open
            continue
        with pytest.raises(NotFoundError, match="not found"):
            read_inference_request(asked, "r")


def test_a_body_of_embeddings_without_a_prompt_is_passed_on() -> None:
    read = read_inference_request(request("/v1/embeddings", {"model": "m", "pixels": [1]}), "r")
    assert read.prompt is None and read.body_hash


def test_a_clients_request_id_is_kept_and_a_missing_one_minted() -> None:
    assert read_request_id("my-id.1") == "my-id.1"
    assert read_request_id(None) != read_request_id(None)
    assert len(mint_request_id()) == 32


def test_a_request_is_named_by_its_header_and_else_by_its_body() -> None:
    def named(path: str = CHAT, given: object = "mine", **fields: str) -> str:
        return read_inference_request(request(path, chat(request_id=given), **fields), "minted").request_id

    assert named() == named("/inference/v1/generate") == "mine"
    assert named(x_request_id="sent") == named(given="a b") == named(given=7) == named(given=None) == "minted"
    assert named("/v1/responses") == "minted", "there it is the response's id"


@pytest.mark.parametrize("sent", ["a1, b2", "a1,b2,c3", "a1,", "a1, b 2", "a1,\x00"])
def test_of_joined_request_ids_the_first_counts(sent: str) -> None:
    assert read_request_id(sent) == "a1"


@pytest.mark.parametrize("sent", ["a b", "x" * 129, "é", "a\nb", '{"a"}', ", b2", ",", " ", "<a>, b"])
def test_a_request_id_that_would_not_be_safe_to_pass_on_is_replaced_and_logged(
    sent: str, caplog: pytest.LogCaptureFixture
) -> None:
    with caplog.at_level("INFO"):
        minted = read_request_id(sent)
    assert len(minted) == 32 and "\n" not in caplog.messages[0]
    assert minted in caplog.text and repr(sent)[:100] in caplog.text


def test_llmds_name_of_the_slo_counts_where_ours_is_not_sent() -> None:
    assert read_inference_request(request(body=chat(), x_llm_d_slo_ttft_ms="700"), "id-1").slo_s == 0.7
    both = request(body=chat(), x_llm_d_slo_ttft_ms="700", x_slo_ttft_ms="900")
    assert read_inference_request(both, "id-1").slo_s == 0.9


def test_an_slo_is_read_in_milliseconds() -> None:
    assert read_slo_s("2500") == 2.5
    assert read_slo_s("1500.6") == 1.501
    assert read_slo_s("0.4") == 0.001
    assert read_slo_s("500, 700") == 0.5
    assert read_slo_s("3600001") == read_slo_s("inf") == read_slo_s("1e99") == 3600.0
    assert read_slo_s(None) is None


@pytest.mark.parametrize("sent", ["", "0", "-5", "soon", "nan", "-inf", "é"])
def test_an_slo_that_is_no_time_leaves_the_configured_one_and_is_logged(
    sent: str, caplog: pytest.LogCaptureFixture
) -> None:
    with caplog.at_level("INFO"):
        assert read_slo_s(sent) is None
    assert "x-slo-ttft-ms" in caplog.text
