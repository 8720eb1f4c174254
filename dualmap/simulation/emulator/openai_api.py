"""Reading chats and completions."""

from __future__ import annotations

from codecs import getincrementaldecoder
from collections.abc import Sequence
from dataclasses import replace

from dualmap.simulation.emulator.errors import ApiError, bad_request, invalid, not_emulated
from dualmap.simulation.emulator.fields import Body, flag, mapping, required, text
from dualmap.simulation.emulator.generation_request import (
    CacheScope,
    GenerationRequest,
    Limits,
    generation,
    read_max_tokens,
    read_sampling,
)
from dualmap.simulation.emulator.kv_transfer_params import read_kv_transfer_params
from dualmap.simulation.emulator.logprobs import read_chat_logprobs, read_completion_logprobs
from dualmap.simulation.emulator.openai_replies import ChatReply, CompletionReply, StreamOptions
from dualmap.simulation.emulator.replies import Stamp
from dualmap.simulation.emulator.structured import read_chat_tools, read_output_format
from dualmap.simulation.workload.tokenizer import TOKEN_BYTES, PromptText, decode, render_chat

DEFAULT_COMPLETION_TOKENS = 16
AFTER_MESSAGE = b"<|im_end|>\n<|im_start|>assistant\n"
"""Text between the last message and the answer, unless the answer continues that message."""


def check_model(payload: Body, limits: Limits) -> None:
    """A request may leave the model out. Raises ApiError: it names one that is not served."""
    limits.names.check(payload)


def read_chat(payload: Body, limits: Limits, stamp: Stamp) -> tuple[GenerationRequest, ChatReply]:
    """A chat completion request. Raises ApiError."""
    check_model(payload, limits)
    _refuse(payload, ("prompt_logprobs", "use_beam_search", "echo"))
    prompt = chat_prompt(payload)
    call = read_chat_tools(payload)
    sampling = read_sampling(payload, read_max_tokens(payload, ("max_completion_tokens", "max_tokens"), limits))
    given = call.tool.arguments if call is not None else read_output_format(payload)
    options, logprobs = _read_stream_options(payload), read_chat_logprobs(payload)
    gen_request = generation([prompt], replace(sampling, given=given), limits, cache_scope(payload, limits))
    gen_request = replace(gen_request, kv=read_kv_transfer_params(payload, stamp.request_id))
    return gen_request, ChatReply(gen_request, stamp, options, logprobs, call)


def read_completion(payload: Body, limits: Limits, stamp: Stamp) -> tuple[GenerationRequest, CompletionReply]:
    """A text completion request. Raises ApiError."""
    check_model(payload, limits)
    _refuse(payload, ("prompt_logprobs", "use_beam_search", "prompt_embeds"))
    if payload.get("suffix"):
        raise ApiError(
            400, "BadRequestError", "suffix is only supported for models with FIM completion rendering", "suffix"
        )
    prompts = completion_prompts(payload)
    echo = flag(payload, "echo")
    wanted = read_max_tokens(payload, ("max_tokens",), limits, minimum=0 if echo else 1)
    sampling = read_sampling(payload, DEFAULT_COMPLETION_TOKENS if wanted is None else wanted)
    options, logprobs = _read_stream_options(payload), read_completion_logprobs(payload)
    sampling = replace(sampling, given=read_output_format(payload))
    gen_request = replace(
        generation([PromptText(each) for each in prompts], sampling, limits, cache_scope(payload, limits)),
        kv=read_kv_transfer_params(payload, stamp.request_id),
    )
    echoes = [token_texts(prompt) if echo else [] for prompt in prompts for _ in range(sampling.answers)]
    return gen_request, CompletionReply(gen_request, stamp, options, logprobs, echoes)


def chat_prompt(payload: Body) -> PromptText:
    """The input that the model sees for ``messages`` and ``tools``. Raises ApiError."""
    messages = required(payload, "messages")
    if not isinstance(messages, list):
        raise invalid("messages", "list_type", "Input should be a valid list", messages)
    if not messages:
        raise bad_request("Cannot apply chat template to an empty conversation. Provide at least one message.")
    continues = flag(payload, "continue_final_message")
    if continues and payload.get("add_generation_prompt", True):
        raise bad_request("Cannot set both `continue_final_message` and `add_generation_prompt` to True.")
    try:
        rendered = render_chat(messages, payload.get("tools"))
        return without_opening(rendered) if continues else rendered
    except ValueError as error:
        raise invalid("messages", "value_error", f"Value error, {error}", messages) from error


def without_opening(prompt: PromptText) -> PromptText:
    """The prompt up to the end of its last message, which its answer continues."""
    return replace(prompt, data=prompt.data.removesuffix(AFTER_MESSAGE))


def completion_prompts(payload: Body) -> list[bytes]:
    """``prompt`` as texts: a string, a list of token ids, or a list of these. Raises ApiError."""
    prompt = payload.get("prompt")
    if prompt is None or prompt == "":
        raise bad_request("Either prompt or prompt_embeds must be provided and non-empty.", "prompt")
    if isinstance(prompt, str):
        return [prompt.encode("utf-8", "surrogatepass")]
    return texts_or_ids(prompt, "prompt")


def texts_or_ids(value: object, name: str) -> list[bytes]:
    """Several texts, or one or several lists of token ids. Raises ApiError."""
    if not isinstance(value, list):
        raise invalid(name, "list_type", "Input should be a valid string or a valid list", value)
    if not value:
        raise bad_request("You must pass at least one prompt")
    if isinstance(value[0], int):
        return [token_bytes(value, name)]
    kind = type(value[0])
    found: list[bytes] = []
    for index, each in enumerate(value):
        if kind not in (str, list) or type(each) is not kind:
            message = "Input should be a valid string or a valid list of integers, as all others"
            raise invalid(f"{name}.{index}", "string_type", message, each)
        if not each:
            raise bad_request("The decoder prompt cannot be empty")
        found.append(
            str(each).encode("utf-8", "surrogatepass") if kind is str else token_bytes(each, f"{name}.{index}")
        )
    return found


def token_bytes(ids: Sequence[object], name: str) -> bytes:
    """Token ids from JSON as text. Raises ApiError."""
    if not all(type(token) is int for token in ids):
        index, wrong = next((index, token) for index, token in enumerate(ids) if type(token) is not int)
        raise invalid(f"{name}.{index}", "int_type", "Input should be a valid integer", wrong)
    try:
        return decode(ids)  # type: ignore[arg-type]
    except ValueError as error:
        raise invalid(name, "greater_than_equal", f"Value error, {error}", ids) from error


def _read_stream_options(payload: Body) -> StreamOptions:
    options, token_ids = mapping(payload, "stream_options"), flag(payload, "return_token_ids")
    if options is None:
        return StreamOptions(token_ids=token_ids)
    if not flag(payload, "stream"):
        raise bad_request("Stream options can only be defined when `stream=True`.", "stream_options")
    include = flag(options, "include_usage")
    return StreamOptions(include, include and flag(options, "continuous_usage_stats"), token_ids)


def _refuse(payload: Body, names: Sequence[str]) -> None:
    for name in names:
        if payload.get(name) not in (None, False):
            raise not_emulated(name)


def cache_scope(payload: Body, limits: Limits) -> CacheScope:
    """Requests that differ in it share no KV: those of different adapters, and those of different salts."""
    return CacheScope(limits.names.adapter_of(payload), text(payload, "cache_salt") or "")


def token_texts(prompt: bytes) -> list[str]:
    """The prompt's tokens as text; a character belongs to the token that it ends in."""
    decoder = getincrementaldecoder("utf-8")("replace")
    tokens = [decoder.decode(prompt[at : at + TOKEN_BYTES]) for at in range(0, len(prompt), TOKEN_BYTES)]
    tokens[-1] += decoder.decode(b"", final=True)
    return tokens
