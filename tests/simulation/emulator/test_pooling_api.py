"""Embeddings, scores and reranking."""

from __future__ import annotations

import math
from typing import Any

import httpx
import openai
import pytest

MODEL = "qwen2.5-7b"


async def test_embeddings_are_unit_vectors_one_for_each_input(openai_client: openai.AsyncOpenAI) -> None:
    answer = await openai_client.embeddings.create(model=MODEL, input=["hello", "there you"])
    assert [each.index for each in answer.data] == [0, 1]
    assert all(math.hypot(*each.embedding) == pytest.approx(1, abs=1e-5) for each in answer.data)
    assert answer.usage.prompt_tokens == answer.usage.total_tokens == 2 + 3


async def test_an_embedding_is_the_same_in_either_encoding_and_for_token_ids(
    openai_client: openai.AsyncOpenAI, http: httpx.AsyncClient
) -> None:
    text = "hello you"
    ids = (await http.post("/tokenize", json={"prompt": text})).json()["tokens"]
    as_floats = await openai_client.embeddings.create(model=MODEL, input=text, encoding_format="float")
    as_base64 = await openai_client.embeddings.create(model=MODEL, input=text)  # what the client asks for by default
    of_ids = await openai_client.embeddings.create(model=MODEL, input=[ids])
    assert as_base64.data[0].embedding == pytest.approx(as_floats.data[0].embedding)
    assert of_ids.data[0].embedding == as_base64.data[0].embedding


async def test_a_chat_can_be_embedded(http: httpx.AsyncClient) -> None:
    body = {"model": MODEL, "messages": [{"role": "user", "content": "hello there"}]}
    assert (await http.post("/v1/embeddings", json=body)).json()["usage"]["prompt_tokens"] == 16


@pytest.mark.parametrize("path", ["/v1/score", "/score"])
async def test_scores_are_of_pairs(http: httpx.AsyncClient, path: str) -> None:
    for body, pairs in (
        ({"text_1": "a b", "text_2": "a b"}, 1),
        ({"text_1": "a b", "text_2": ["a b", "x y"]}, 2),
        ({"queries": ["a b", "x y"], "documents": ["a b", "x y"]}, 2),
    ):
        answer = (await http.post(path, json={"model": MODEL, **body})).json()
        scores = [each["score"] for each in answer["data"]]
        assert len(scores) == pairs
        assert scores[0] == pytest.approx(1, abs=1e-5)
    assert answer["usage"]["prompt_tokens"] == 4


@pytest.mark.parametrize("path", ["/v1/rerank", "/rerank", "/v2/rerank"])
async def test_documents_come_in_the_order_of_the_words_that_they_share(http: httpx.AsyncClient, path: str) -> None:
    documents = ["the weather was fine", "a capital is a city", "Paris is the capital of France"]
    body = {"model": MODEL, "query": "which city is the capital of France", "documents": documents, "top_n": 2}
    results = (await http.post(path, json=body)).json()["results"]
    assert [result["index"] for result in results] == [2, 1]
    assert results[0]["document"]["text"] == documents[2]
    assert results[0]["relevance_score"] > results[1]["relevance_score"]


async def test_pooled_prompts_are_computed_by_the_engine(http: httpx.AsyncClient) -> None:
    body = {"model": MODEL, "input": "x " * 2000}
    await http.post("/v1/embeddings", json=body)
    assert (await http.get("/emulator/statistics")).json()["prefill_tokens"] == 1000


@pytest.mark.parametrize(
    ("path", "body", "status", "message"),
    [
        ("/v1/embeddings", {}, 400, "body.input"),
        ("/v1/embeddings", {"input": ""}, 400, "cannot be empty"),
        ("/v1/embeddings", {"input": []}, 400, "at least one prompt"),
        ("/v1/embeddings", {"input": "x", "dimensions": 16}, 400, "Matryoshka"),
        ("/v1/embeddings", {"input": "x", "encoding_format": "nope"}, 400, "body.encoding_format"),
        ("/v1/embeddings", {"input": "x" * 4 * 131_072}, 400, "maximum context length"),
        ("/v1/embeddings", {"input": "x", "model": "nope"}, 404, "does not exist"),
        ("/v1/rerank", {"query": "q"}, 400, "body.documents"),
        ("/v1/rerank", {"documents": ["a"]}, 400, "body.query"),
        ("/v1/rerank", {"query": "", "documents": ["a"]}, 400, "cannot be empty"),
        ("/v1/rerank", {"query": "q", "documents": []}, 400, "At least one text_pair"),
        ("/v1/rerank", {"query": "q", "documents": [{"text": "a"}]}, 400, "body.documents.0"),
        ("/v1/rerank", {"query": "q", "documents": ["a"], "top_n": -1}, 400, "body.top_n"),
        ("/v1/score", {"text_1": "a"}, 400, "body.text_2"),
        ("/v1/score", {"text_1": ["a", "b"], "text_2": ["a", "b", "c"]}, 400, "1:1, 1:N or N:N"),
    ],
)
async def test_bad_requests_are_refused(
    http: httpx.AsyncClient, path: str, body: dict[str, Any], status: int, message: str
) -> None:
    answer = await http.post(path, json={"model": MODEL, **body})
    assert answer.status_code == status
    assert message in answer.json()["error"]["message"]
