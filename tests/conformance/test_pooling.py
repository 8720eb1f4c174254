"""Embeddings, scores and reranking. A server with a model that generates has none of them, and says so."""

from __future__ import annotations

import base64
import math
import struct
from typing import Any

import pytest

from tests.conformance.server import Server

EMBEDDINGS = "/v1/embeddings"


@pytest.fixture
async def pooling(server: Server) -> Server:
    """A server that pools."""
    answer = await server.http.post(EMBEDDINGS, json={"model": server.model, "input": "hello"})
    if server.real and answer.status_code == 404:
        pytest.skip("the server has no embeddings: start it with --runner pooling --convert embed")
    return server


async def test_texts_are_embedded_in_their_order(pooling: Server) -> None:
    texts = ["hello there", "something else", "hello there"]
    answer = await pooling.post(EMBEDDINGS, input=texts)
    assert (answer["object"], answer["model"]) == ("list", pooling.model) and answer["id"].startswith("embd-")
    assert [each["index"] for each in answer["data"]] == [0, 1, 2]
    vectors = [each["embedding"] for each in answer["data"]]
    assert vectors[0] == pytest.approx(vectors[2], abs=0.02) and vectors[0] != vectors[1]
    assert all(math.hypot(*vector) == pytest.approx(1, abs=0.02) for vector in vectors)
    tokens = [(await pooling.post(EMBEDDINGS, input=text))["usage"]["prompt_tokens"] for text in texts]
    assert answer["usage"]["prompt_tokens"] == answer["usage"]["total_tokens"] == sum(tokens)


async def test_token_ids_are_embedded_and_count_as_they_are(pooling: Server) -> None:
    answer = await pooling.post(EMBEDDINGS, input=[list(range(300, 350)), list(range(300, 320))])
    assert [each["index"] for each in answer["data"]] == [0, 1]
    assert answer["usage"]["prompt_tokens"] == 70


async def test_an_embedding_may_come_in_base64(pooling: Server) -> None:
    (one,) = (await pooling.post(EMBEDDINGS, input="hello there"))["data"]
    (other,) = (await pooling.post(EMBEDDINGS, input="hello there", encoding_format="base64"))["data"]
    data = base64.b64decode(other["embedding"])
    assert struct.unpack(f"<{len(data) // 4}f", data) == pytest.approx(one["embedding"], abs=0.02)


async def test_one_text_is_scored_against_each_other_one(pooling: Server) -> None:
    answer = await pooling.post("/v1/score", text_1="hello there", text_2=["something else", "hello there"])
    assert answer["object"] == "list" and [each["index"] for each in answer["data"]] == [0, 1]
    assert {each["object"] for each in answer["data"]} == {"score"}
    scores = [each["score"] for each in answer["data"]]
    assert scores[1] == pytest.approx(1, abs=0.02) and scores[0] < scores[1]
    assert answer["usage"]["prompt_tokens"] == answer["usage"]["total_tokens"] > 0


@pytest.mark.parametrize("path", ["/v1/rerank", "/v2/rerank", "/rerank"])
async def test_documents_are_ranked_by_their_score(pooling: Server, path: str) -> None:
    documents = ["something else", "hello there", "a third one"]
    answer = await pooling.post(path, query="hello there", documents=documents)
    results = answer["results"]
    assert sorted(each["index"] for each in results) == [0, 1, 2] and results[0]["index"] == 1
    assert all(each["document"]["text"] == documents[each["index"]] for each in results)
    scores = [each["relevance_score"] for each in results]
    assert scores == sorted(scores, reverse=True)
    assert answer["usage"]["total_tokens"] > 0
    best = await pooling.post(path, query="hello there", documents=documents, top_n=1)
    assert [each["index"] for each in best["results"]] == [1]


@pytest.mark.parametrize(
    ("path", "body", "status"),
    [
        (EMBEDDINGS, {}, 400),
        (EMBEDDINGS, {"input": []}, 400),
        (EMBEDDINGS, {"input": "x", "model": "no-such-model"}, 404),
        ("/v1/score", {"text_1": ["a", "b"], "text_2": ["a", "b", "c"]}, 400),
        ("/v1/rerank", {"query": "a"}, 400),
    ],
)
async def test_errors_have_one_shape(pooling: Server, path: str, body: dict[str, Any], status: int) -> None:
    found, answer = await pooling.refused(path, **body)
    assert found == status and answer["error"]["message"] and answer["error"]["code"] == status
