"""Tokens, models, health and metrics."""

from __future__ import annotations

from tests.conformance.server import Server

METRICS = {
    "vllm:num_requests_running", "vllm:num_requests_waiting", "vllm:num_requests_waiting_by_reason",
    "vllm:kv_cache_usage_perc", "vllm:cache_config_info",
    "vllm:prefix_cache_queries_total", "vllm:prefix_cache_hits_total", "vllm:prompt_tokens_total",
    "vllm:generation_tokens_total", "vllm:num_preemptions_total", "vllm:time_to_first_token_seconds_bucket",
    "vllm:inter_token_latency_seconds_bucket", "vllm:request_queue_time_seconds_bucket", "process_start_time_seconds",
}  # fmt: skip
"""The interfaces that the fleet, its dashboards and its alerts read."""


async def test_a_model_card_has_its_length(server: Server) -> None:
    card = (await server.http.get("/v1/models")).json()["data"][0]
    assert (card["object"], card["id"]) == ("model", server.model) and card["max_model_len"] > 0


async def test_a_text_is_tokenized_and_back(server: Server) -> None:
    text = "def f(x):\n    return x + 1  # é 你好"
    found = await server.post("/tokenize", prompt=text)
    assert found["count"] == len(found["tokens"]) > 3
    assert found["max_model_len"] == server.max_model_len
    assert (await server.post("/detokenize", tokens=found["tokens"]))["prompt"] == text


async def test_tokens_of_a_text_are_a_prompt_that_counts_as_the_text_does(server: Server) -> None:
    text = "once upon a time there was " * 20
    tokens = (await server.post("/tokenize", prompt=text))["tokens"]
    counted = [
        (await server.post("/v1/completions", prompt=prompt, max_tokens=1))["usage"]["prompt_tokens"]
        for prompt in (text, tokens)
    ]
    assert counted == [len(tokens)] * 2


async def test_a_conversations_tokens_begin_with_those_of_its_start(server: Server) -> None:
    chat = [{"role": "user", "content": "hello there, how are you?"}]
    longer = [*chat, {"role": "assistant", "content": "well"}, {"role": "user", "content": "and now?"}]
    first = (await server.post("/tokenize", messages=chat, add_generation_prompt=False))["tokens"]
    second = (await server.post("/tokenize", messages=longer))["tokens"]
    common = next((at for at, pair in enumerate(zip(first, second, strict=False)) if pair[0] != pair[1]), len(first))
    assert common >= len(first) - 1  # where tokens are not of the template's making, the last one may grow


async def test_metrics_have_the_names_that_the_fleet_reads(server: Server) -> None:
    await server.post("/v1/completions", prompt="x", max_tokens=2)
    page = (await server.http.get("/metrics")).text
    names = {line.split("{")[0].split(" ")[0] for line in page.splitlines() if line and not line.startswith("#")}
    assert METRICS - names == set()
    config = next(line for line in page.splitlines() if line.startswith("vllm:cache_config_info{"))
    assert 'block_size="32"' in config and "num_gpu_blocks=" in config


async def test_health_version_and_load_are_answered(server: Server) -> None:
    for path in ("/health", "/ping"):
        assert (await server.http.get(path)).status_code == 200
    assert (await server.http.get("/version")).json()["version"]
    assert (await server.http.get("/load")).json()["server_load"] == 0
