from __future__ import annotations

import pytest

from dualmap.router.http.paths import is_inference, likely_meant, meant_path, methods_of, stored_response_id


@pytest.mark.parametrize(
    ("sent", "meant"),
    [
        ("/", "/"),
        ("//", "/"),
        ("/v1/chat/completions", "/v1/chat/completions"),
        ("/v1/chat/completions/", "/v1/chat/completions"),
        ("/v1/chat/completions//", "/v1/chat/completions"),
        ("//v1///chat//completions", "/v1/chat/completions"),
        ("/v1/chat/completion%73", "/v1/chat/completions"),
        ("/v1/responses/resp_a%2Fb@i/", "/v1/responses/resp_a%2Fb@i"),
        ("/v1/models/", "/v1/models"),
        ("/health/", "/health"),
        ("/ui/", "/ui/"),
        ("/a%zz%", "/a%zz%"),
        ("*", "*"),
    ],
)
def test_a_path_is_read_as_the_one_that_is_meant(sent: str, meant: str) -> None:
    assert meant_path(sent) == meant == meant_path(meant)


def test_every_path_goes_to_an_instance_but_the_apps_own_and_likely_mistakes() -> None:
    for path in ("/v1/chat/completions", "/v1/responses/resp_1@i", "/v2/new", "/tokenizer_info", "/robots.txt"):
        assert is_inference(path)
    for path in ("/", "/health", "/metrics", "/v1/models", "/v1/models/a/b", "/admin/x", "/ui/x.js", "/docs", "*"):
        assert not is_inference(path)
    assert likely_meant("/chat/completions") == likely_meant("/v1/v1/chat/completions") == "/v1/chat/completions"
    assert not is_inference("/chat/completions")


def test_methods_follow_from_the_path() -> None:
    assert methods_of("/tokenize") == methods_of("/v1/responses/a/cancel") == "POST, OPTIONS"
    assert methods_of("/v1/responses/a") == "GET, DELETE, OPTIONS"
    assert "PATCH" in methods_of("/v2/new")
    assert stored_response_id("/v1/responses/render") is None
