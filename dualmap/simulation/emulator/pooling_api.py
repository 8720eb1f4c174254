"""Embeddings, scores and reranking. Texts that share words are close; beyond that, vectors mean nothing."""

from __future__ import annotations

import math
from array import array
from base64 import b64encode
from collections.abc import Sequence
from typing import Any

import orjson
import xxhash

from dualmap.simulation.emulator.errors import ApiError, bad_request, invalid, missing
from dualmap.simulation.emulator.fields import Body, integer, text, word
from dualmap.simulation.emulator.generation_request import Choice, GenerationRequest, Limits, read_prompt
from dualmap.simulation.emulator.openai_api import chat_prompt, check_model, texts_or_ids
from dualmap.simulation.emulator.replies import Ended, Stamp, Usage
from dualmap.simulation.emulator.scripts import GivenText, Script
from dualmap.simulation.workload.tokenizer import PromptText

DIMENSIONS = 128

_SCORED = (("text_1", "text_2"), ("queries", "documents"), ("queries", "items"), ("data_1", "data_2"))
"""Names of the two inputs of a score; the first pair is the usual one."""


def read_embedding(payload: Body, limits: Limits, stamp: Stamp) -> tuple[GenerationRequest, PoolingReply]:
    """A request for embeddings. Raises ApiError."""
    check_model(payload, limits)
    prompts = [chat_prompt(payload).data] if "messages" in payload else _texts(payload, "input")
    as_base64 = word(payload, "encoding_format", ("float", "base64")) == "base64"
    dimensions = integer(payload, "dimensions")
    if dimensions is not None:
        raise bad_request(
            f"Model '{limits.model}' does not support Matryoshka embeddings; dimensions must be unset (received "
            f"dimensions={dimensions})."
        )
    vectors = [embedding(prompt) for prompt in prompts]
    data = [
        {"index": index, "object": "embedding", "embedding": _encoded(vector) if as_base64 else list(vector)}
        for index, vector in enumerate(vectors)
    ]
    return _gen_request(prompts, limits), PoolingReply(_listed(f"embd-{stamp.request_id}", stamp, data))


def read_score(payload: Body, limits: Limits, stamp: Stamp) -> tuple[GenerationRequest, PoolingReply]:
    """A request for the scores of pairs: one and one, one and many, or as many as there are. Raises ApiError."""
    check_model(payload, limits)
    names = next((pair for pair in _SCORED if all(name in payload for name in pair)), None)
    if names is None:
        first, second = _SCORED[0]
        raise missing(first if first not in payload else second, payload)
    left, right = (_texts(payload, name) for name in names)
    prompts = [*left, *right]
    if len(left) == 1:
        left = left * len(right)
    if len(left) != len(right):
        raise bad_request("Input lengths must be either 1:1, 1:N or N:N")
    data = [
        {"index": index, "object": "score", "score": similarity(*pair)}
        for index, pair in enumerate(zip(left, right, strict=True))
    ]
    return _gen_request(prompts, limits), PoolingReply(_listed(f"score-{stamp.request_id}", stamp, data))


def read_rerank(payload: Body, limits: Limits, stamp: Stamp) -> tuple[GenerationRequest, PoolingReply]:
    """A request for documents in the order of their closeness to a query. Raises ApiError."""
    check_model(payload, limits)
    query = text(payload, "query")
    if query is None:
        raise missing("query", payload)
    if not query:
        raise bad_request("The decoder prompt cannot be empty")
    documents = _texts(payload, "documents", "At least one text_pair element must be given")
    top = integer(payload, "top_n") or 0
    if top < 0:
        raise invalid("top_n", "greater_than_equal", "Input should be greater than or equal to 0", top)
    query_bytes = query.encode("utf-8", "surrogatepass")
    scores = sorted(
        ((similarity(query_bytes, document), index) for index, document in enumerate(documents)),
        key=lambda one: -one[0],
    )
    results = [
        {
            "index": index,
            "document": {"text": documents[index].decode("utf-8", "replace"), "multi_modal": None},
            "relevance_score": score,
        }
        for score, index in scores[: top or len(scores)]
    ]
    answer = {"id": f"score-{stamp.request_id}", "model": stamp.model, "usage": {}, "results": results}
    return _gen_request([query_bytes, *documents], limits), PoolingReply(answer)


class PoolingReply:
    """An answer that is known except for its usage, once the prompts are computed."""

    def __init__(self, answer: dict[str, Any]) -> None:
        self._answer = answer

    def whole(self, ends: Sequence[Ended], usage: Usage) -> bytes:
        tokens = usage.prompt_tokens
        return orjson.dumps(
            {**self._answer, "usage": {**self._answer["usage"], "prompt_tokens": tokens, "total_tokens": tokens}}
        )

    def refusal(self, error: ApiError) -> bytes:
        return error.body()


def embedding(prompt: bytes) -> array[float]:
    """A unit vector in which every word of a text has its share."""
    sums = [0] * DIMENSIONS
    for one in prompt.lower().split() or [prompt]:
        drawn = xxhash.xxh3_64_intdigest(one)
        for shift in (0, 16, 32, 48):
            at = drawn >> shift & 0xFFFF
            sums[at % DIMENSIONS] += 1 if at & 0x8000 else -1
    length = math.sqrt(sum(each * each for each in sums))
    if length == 0:
        return array("f", [1.0] + [0.0] * (DIMENSIONS - 1))
    return array("f", [each / length for each in sums])


def similarity(left: bytes, right: bytes) -> float:
    """The cosine of two texts' embeddings."""
    return sum(one * other for one, other in zip(embedding(left), embedding(right), strict=True))


def _gen_request(prompts: Sequence[bytes], limits: Limits) -> GenerationRequest:
    """Prompts to be computed; the one token of output that the engine model needs represents the pooling."""
    pooled = Script(GivenText(""), 1, "stop")
    return GenerationRequest(
        tuple(Choice(read_prompt(PromptText(prompt), limits, spare_tokens=1), pooled) for prompt in prompts)
    )


def _listed(answer_id: str, stamp: Stamp, data: list[dict[str, Any]]) -> dict[str, Any]:
    usage = {"completion_tokens": 0, "prompt_tokens_details": None}
    return {
        "id": answer_id,
        "object": "list",
        "created": stamp.created,
        "model": stamp.model,
        "data": data,
        "usage": usage,
    }


def _texts(payload: Body, name: str, none_given: str = "You must pass at least one prompt") -> list[bytes]:
    value = payload.get(name)
    if value is None:
        raise missing(name, payload)
    if value == []:
        raise bad_request(none_given)
    return texts_or_ids([value] if isinstance(value, str) else value, name)


def _encoded(vector: array[float]) -> str:
    return b64encode(vector.tobytes()).decode("ascii")
