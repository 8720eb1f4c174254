"""The request for the rest of an answer whose instance failed in the middle, or why there is none.

By tokens where the engine has told them: the prompt's tokens and those of the answer so far are the new prompt, so that
the rest is what the engine would have computed next. Such a request is a completion, whatever the client asked for.
Else by text: behind a completion's prompt, or as the last message of a chat or a response, which the engine continues.

Limits are lowered by what there is. Penalties for presence and frequency, which look at the answer alone, start again,
and so do the draws from a seed.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, Final

from dualmap.api_bodies.errors import PromptError
from dualmap.api_bodies.json_body import write_json
from dualmap.api_bodies.lax_values import lax_int
from dualmap.api_bodies.messages_api import chat_of_message
from dualmap.api_bodies.responses_api import is_part_of_answer, is_partial
from dualmap.router.answers.so_far import AnswerSoFar, read_ids
from dualmap.router.prompts.inference_request import (
    CHAT_PATH,
    COMPLETIONS_PATH,
    COMPLETIONS_PATHS,
    MESSAGES_PATH,
    RESPONSES_PATH,
)
from dualmap.router.prompts.token_bounds import completed_prompts
from dualmap.scheduling.values import value

CONTINUED_PATHS: Final = frozenset({CHAT_PATH, COMPLETIONS_PATH, MESSAGES_PATH, RESPONSES_PATH})

_REFUSED: Final = {
    **dict.fromkeys(
        ("structured_outputs", "guided_json", "guided_regex", "guided_choice", "guided_grammar", "functions"),
        "a grammar would start again",
    ),
    "truncate_prompt_tokens": "the answer would take the place of the prompt's begin",
    "echo": "it repeats its prompt",
    "prompt_logprobs": "it has log probabilities of its prompt",
    "use_beam_search": "it is searched for in beams",
    "kv_transfer_params": "its client transfers KV itself",
    "prompt_embeds": "its prompt is no text",
    "suffix": "it is inserted",
    "background": "it runs in the background",
    "previous_response_id": "only its own instance has stored the conversation before it",
    "previous_input_messages": "its conversation is no list of items",
    "enable_response_messages": "it lists its tokens at its end",
}
"""Fields with which an answer is not continued, and why."""
_HINDERING: Final = _REFUSED.keys() | {
    "include_stop_str_in_output",
    "include_reasoning",
    "response_format",
    "tool_choice",
    "output_config",
}
"""Fields for which an answer may not be continued: few requests have one."""
_NOT_CHATS: Final = frozenset(
    {
        *("messages", "tools", "tool_choice", "parallel_tool_calls", "response_format", "max_completion_tokens"),
        *("add_generation_prompt", "continue_final_message", "chat_template", "chat_template_kwargs", "documents"),
        *("reasoning", "reasoning_effort", "include_reasoning", "thinking_token_budget", "logprobs", "top_logprobs"),
        *("mm_processor_kwargs", "media_io_kwargs", "return_tokens_as_token_ids", "add_special_tokens", "modalities"),
    }
)
"""Fields of a chat that a completion does not have, or that mean something else in it."""
_SAMPLING: Final = ("temperature", "top_p", "top_k", "priority", "cache_salt", "vllm_xargs")
"""Fields of a message that a chat has too."""
MOST_ANSWERS: Final = 16
"""A stream with more answers is not continued: each that is not over takes a connection and a request of its own."""
_COMPLETION_TOKENS: Final = 16
"""``max_tokens`` of a completion that does not say."""


class CannotContinueError(Exception):
    """There is no request for the rest; the message says why."""


@value
class Rest:
    """The request for the rest of an answer."""

    path: str
    body: bytes
    tokens: int
    """Tokens of the answer with which its prompt ends."""
    chars: int
    """Characters that these tokens stand for: what the client has beyond them comes again."""
    by_tokens: bool = False


@value
class Over:
    """Nothing of the answer is missing but its end."""

    finish_reason: str | None
    """The one to tell; None where it was told."""


@value
class Measured:
    """What the instance that goes on with an answer has said of its text, as far as that has to be known."""

    context_tokens: int | None = None
    """The longest context of the model; None: not known."""
    text_tokens: int | None = None
    """The number of tokens of the text, where that was counted."""
    trims: bool = False
    """Its chat template drops the white space with which the text ends: the rest begins before that, and the tokens are
    those of the text without it."""


def answers_of(path: str, request: Mapping[str, Any]) -> int:
    """The number of answers that a request of this path asks for: ``n`` for each of its prompts."""
    each = 1 if request.get("n") is None else max(1, lax_int(request["n"]) or 1)
    return each * prompts_of(path, request)


def prompts_of(path: str, request: Mapping[str, Any]) -> int:
    """The number of prompts of a request; 1 where that cannot be read."""
    return completed_prompts(request) if path == COMPLETIONS_PATH else 1


def _prompts(request: Mapping[str, Any]) -> list[Any]:
    prompt = request.get("prompt")
    return prompt if isinstance(prompt, list) and prompt and not isinstance(prompt[0], int) else [prompt]


def requests_of(request: Mapping[str, Any], answers: int) -> list[dict[str, Any]]:
    """A request for each of several answers, as an engine computes them: to its own prompt, with its own seed."""
    prompts, seed = _prompts(request), lax_int(request.get("seed"))
    each, made = answers // len(prompts), []
    for index in range(answers):
        one = {name: given for name, given in request.items() if name not in ("n", "best_of")}
        if one.get("prompt") is not None:
            one["prompt"] = prompts[index // each]
        if seed is not None and index % each:
            one["seed"] = seed + index % each
        made.append(one)
    return made


def _why_not_several(path: str, request: Mapping[str, Any], answers: int) -> str:
    """Why several answers are not continued; empty where they may be, or there is one."""
    best_of, options = request.get("best_of"), request.get("stream_options")
    if best_of is not None and lax_int(best_of) not in (1, lax_int(request.get("n"))):
        return "it is chosen from several answers (best_of)"
    if answers == 1:
        return ""
    if path not in COMPLETIONS_PATHS:
        return "it has several answers"
    if answers > MOST_ANSWERS:
        return f"it has more than {MOST_ANSWERS} answers"
    if isinstance(options, dict) and options.get("continuous_usage_stats"):
        return "each event of its several answers counts the usage (continuous_usage_stats)"
    return ""


def why_not_continued(path: str, request: Mapping[str, Any], answers: int) -> str:
    """Why the streamed answers to this request are not continued; empty where they may be."""
    if path not in CONTINUED_PATHS:
        return "answers of this API are not continued"
    if why := _why_not_several(path, request, answers):
        return why
    if not _HINDERING.isdisjoint(request) and (why := _why_hindered(request)):
        return why
    if path == COMPLETIONS_PATH:
        return "" if request.get("prompt") and isinstance(request["prompt"], str | list) else "its prompt is no text"
    if path == RESPONSES_PATH:
        return _why_no_response(request)
    messages = request.get("messages")
    return "" if isinstance(messages, list) and messages else "it has no messages"


def _why_hindered(request: Mapping[str, Any]) -> str:
    """Why fields hinder that an answer is continued; empty where they do not."""
    for name in _REFUSED.keys() & request.keys():
        if request[name] not in (None, False, [], ""):
            return f"{_REFUSED[name]} ({name})"
    if request.get("stop") and request.get("include_stop_str_in_output"):
        return "a part of a stop string may have been sent (include_stop_str_in_output)"
    if request.get("include_reasoning") is False:
        return "its reasoning is not shown (include_reasoning)"
    wanted = request.get("response_format") or {"type": "text"}
    if not isinstance(wanted, dict) or wanted.get("type") != "text":
        return "a grammar would start again (response_format)"
    choice = request.get("tool_choice")
    if (isinstance(choice, dict) and choice.get("type") not in ("auto", "none")) or choice == "required":
        return "a grammar would start again (tool_choice)"
    output = request.get("output_config")
    if isinstance(output, dict) and output.get("format"):
        return "a grammar would start again (output_config)"
    return ""


def _why_no_response(request: Mapping[str, Any]) -> str:
    text, included, given = request.get("text"), request.get("include"), request.get("input")
    wanted = (text.get("format") if isinstance(text, dict) else None) or {"type": "text"}
    if not isinstance(wanted, dict) or wanted.get("type") != "text":
        return "a grammar would start again (text.format)"
    if isinstance(included, list) and "message.output_text.logprobs" in included:
        return "its end repeats all of its log probabilities (include)"
    if request.get("truncation") not in (None, "disabled"):
        return f"{_REFUSED['truncate_prompt_tokens']} (truncation)"
    if isinstance(given, list) and given and isinstance(given[-1], dict):
        if is_part_of_answer(given[-1]):
            return "its input ends with a part of an answer that is no message"
        return ""
    return "" if given and isinstance(given, str) else "it has no input"


def rest_of(
    path: str,
    request: Mapping[str, Any],
    so_far: AnswerSoFar,
    *,
    context_tokens: int | None,
    text_tokens: int | None,
    trims: bool = False,
) -> Rest | Over:
    """The request for what is missing.

    Args:
        path: of the client's request.
        request: the client's body.
        context_tokens, text_tokens, trims: as ``Measured`` has them.

    Raises:
        CannotContinueError: there is none.
    """
    if so_far.unfit:
        raise CannotContinueError(so_far.unfit)
    if so_far.finished:
        return Over(None)
    limit = _limit_of(path, request)
    if so_far.response is not None and so_far.response.is_between_items:
        raise CannotContinueError("it was between two items of its output")
    if _is_by_tokens(path, request, so_far, limit, context_tokens) and (kept := _kept(request, so_far)) is not None:
        tokens, chars = kept
        if limit is not None and tokens >= limit:
            return Over("length")
        return _by_tokens(path, request, so_far, tokens, chars, limit, context_tokens)
    if so_far.reasoned:
        reason = "its reasoning cannot be put before the text again" if so_far.chars else "it was in its reasoning"
        raise CannotContinueError(reason)
    if so_far.chars and _held_chars(request):
        raise CannotContinueError("stop strings hold its text back, which so ends within a token that is not known")
    text = so_far.text.rstrip() if trims else so_far.text
    tokens = 0 if not text else so_far.tokens if text_tokens is None else text_tokens
    if limit is not None and tokens >= limit:
        return Over("length")
    if len(text) < so_far.chars and (detail := _detail_of_tokens(request)):  # they would come twice
        raise CannotContinueError(f"it has {detail}, and the white space at its end comes again")
    return _by_text(path, request, text, tokens, limit)


def begin_rest(so_far: AnswerSoFar, rest: Rest) -> str:
    """Make of the answer so far what its rest goes on from. Returns the text that the client has and the rest begins
    with."""
    if rest.by_tokens:
        return so_far.cut(rest.tokens, rest.chars)
    overlap = so_far.text[rest.chars :]
    so_far.by_text(rest.tokens, "" if rest.path == RESPONSES_PATH else overlap)
    return overlap


def can_go_on(path: str, requests: Sequence[Mapping[str, Any]], answers: Sequence[AnswerSoFar]) -> bool:
    """Whether another instance could go on with all answers, each to its request, and has a part of one to give."""
    try:
        rests = [
            rest_of(path, request, answer, context_tokens=1, text_tokens=None)
            for request, answer in zip(requests, answers, strict=True)
        ]
    except CannotContinueError:
        return False
    return any(isinstance(rest, Rest) for rest in rests)


def wants_usage(request: Mapping[str, Any]) -> bool:
    """Whether the client asked for the usage event of its stream."""
    options = request.get("stream_options")
    return isinstance(options, dict) and options.get("include_usage") is True


def needs_count(path: str, so_far: AnswerSoFar) -> bool:
    """Whether nothing but the text so far tells how many tokens it has."""
    return bool(so_far.chars) and not so_far.finished and so_far.counted is None and not _has_ids(so_far)


def needs_context(path: str, request: Mapping[str, Any], so_far: AnswerSoFar) -> bool:
    """Whether the longest context of the model has to be known: a completion is short that sets no limit."""
    return path == CHAT_PATH and not so_far.finished and _has_ids(so_far) and _limit_of(path, request) is None


_LIMITS: Final = {CHAT_PATH: ("max_completion_tokens", "max_tokens"), RESPONSES_PATH: ("max_output_tokens",)}


def _limit_of(path: str, request: Mapping[str, Any]) -> int | None:
    for name in _LIMITS.get(path, ("max_tokens",)):
        if limit := lax_int(request.get(name)):
            return limit
    return _COMPLETION_TOKENS if path == COMPLETIONS_PATH else None


def _has_ids(so_far: AnswerSoFar) -> bool:
    return so_far.has_ids and len(so_far.token_ids) > 0 and so_far.prompt_ids is not None


def _is_by_tokens(
    path: str, request: Mapping[str, Any], so_far: AnswerSoFar, limit: int | None, context_tokens: int | None
) -> bool:
    if not _has_ids(so_far):
        return False
    if path == COMPLETIONS_PATH:
        return True
    if path != CHAT_PATH or not so_far.chars or (limit is None and context_tokens is None):
        return False
    has_tools = bool(request.get("tools")) and request.get("tool_choice") != "none"
    return not has_tools and not request.get("logprobs") and not _has_media(request)


def _has_media(request: Mapping[str, Any]) -> bool:
    """Whether the prompt's tokens may stand for something else than text."""
    parts = [each.get("content") for each in request["messages"] if isinstance(each, dict)]
    return any(
        isinstance(part, dict) and part.get("type", "text") not in ("text", "input_text")
        for content in parts
        if isinstance(content, list)
        for part in content
    )


def _kept(request: Mapping[str, Any], so_far: AnswerSoFar) -> tuple[int, int] | None:
    """The tokens to begin from, and the characters that they stand for; None where no such place is known.

    The engine holds the last characters back while a stop string may begin there, and the rest of a character that is
    not whole: the client has fewer characters than the tokens stand for. So they begin where the client has all, and
    some come again.
    """
    held, client_chars = _held_chars(request), max(so_far.chars, so_far.client_chars)
    for tokens, chars, exact in reversed(so_far.marks):
        decoded = chars if exact else chars + held
        if decoded <= client_chars:
            detail = _detail_of_tokens(request)
            if detail and (decoded < client_chars or tokens < len(so_far.token_ids)):  # they would come twice
                raise CannotContinueError(f"it has {detail}, and text of its last tokens was held back")
            return tokens, decoded
    return None


def _detail_of_tokens(request: Mapping[str, Any]) -> str:
    """Name the part of each token that the client gets with its text; "" for none."""
    if request.get("logprobs") is not None and request["logprobs"] is not False:
        return "log probabilities"
    return "the ids of its tokens" if request.get("return_token_ids") else ""


def _held_chars(request: Mapping[str, Any]) -> int:
    """Characters that the engine may hold back at most, as a stop string may begin there."""
    stop = request.get("stop") or request.get("stop_sequences")
    stops = [stop] if isinstance(stop, str) else stop if isinstance(stop, list) else []
    return max((len(each) for each in stops if isinstance(each, str)), default=1) - 1


def _by_tokens(
    path: str,
    request: Mapping[str, Any],
    so_far: AnswerSoFar,
    tokens: int,
    chars: int,
    limit: int | None,
    context_tokens: int | None,
) -> Rest:
    assert so_far.prompt_ids is not None
    prompt: Sequence[int] = [*read_ids(so_far.prompt_ids), *so_far.token_ids[:tokens]]
    left_out = _NOT_CHATS if path == CHAT_PATH else frozenset[str]()
    body = {name: given for name, given in request.items() if name not in left_out}
    body |= {"prompt": prompt, "return_token_ids": True, "stream_options": _usage_options(request)}
    if limit is not None:
        body["max_tokens"] = max(1, limit - tokens)
    elif context_tokens is not None:
        body["max_tokens"] = max(1, context_tokens - len(prompt))
    _lower_minimum(body, tokens)
    return Rest(COMPLETIONS_PATH, write_json(body), tokens, chars, by_tokens=True)


def _by_text(path: str, request: Mapping[str, Any], text: str, tokens: int, limit: int | None) -> Rest:
    if path == RESPONSES_PATH:
        return _response_by_text(request, text, tokens, limit)
    body = _chat_of(request) if path == MESSAGES_PATH else dict(request)
    if text and path == COMPLETIONS_PATH:
        if not isinstance(body["prompt"], str):
            raise CannotContinueError("its prompt is of token ids, and the tokens of its answer are not known")
        body["prompt"] += text
    elif text:
        _continue_message(body, text)
    if limit is not None:
        name = "max_completion_tokens" if lax_int(request.get("max_completion_tokens")) else "max_tokens"
        body[name] = limit - tokens
        if name != "max_tokens" and lax_int(body.get("max_tokens")):
            body["max_tokens"] = limit - tokens
    _lower_minimum(body, tokens)
    body["stream_options"] = _usage_options(request)
    return Rest(COMPLETIONS_PATH if path == COMPLETIONS_PATH else CHAT_PATH, write_json(body), tokens, len(text))


def _response_by_text(request: Mapping[str, Any], text: str, tokens: int, limit: int | None) -> Rest:
    """The rest of a response. It is not stored: the id by which it would be found is that of the failed instance."""
    body = {**request, "store": False}
    if limit is not None:
        body["max_output_tokens"] = limit - tokens
    if text:
        given = request["input"]
        body["input"] = _with_partial([{"role": "user", "content": given}] if isinstance(given, str) else given, text)
    return Rest(RESPONSES_PATH, write_json(body), tokens, len(text))


def _with_partial(items: Sequence[Mapping[str, Any]], text: str) -> list[Mapping[str, Any]]:
    """The items of an input, and the text so far as a message that is not complete."""
    last = items[-1]
    if not is_partial(last):
        part = {"type": "output_text", "text": text, "annotations": []}
        return [
            *items,
            {"type": "message", "id": "msg_0", "role": "assistant", "status": "in_progress", "content": [part]},
        ]
    content = last.get("content")
    if isinstance(content, str):
        return [*items[:-1], {**last, "content": content + text}]
    if isinstance(content, list) and len(content) == 1 and isinstance(content[0], dict):
        said = content[0].get("text")
        if isinstance(said, str):
            return [*items[:-1], {**last, "content": [{**content[0], "text": said + text}]}]
    raise CannotContinueError("the message that it continues is no text")


def _usage_options(request: Mapping[str, Any]) -> dict[str, Any]:
    options = request.get("stream_options")
    return {**(options if isinstance(options, dict) else {}), "include_usage": True}


def _lower_minimum(body: dict[str, Any], tokens: int) -> None:
    if minimum := lax_int(body.get("min_tokens")):
        body["min_tokens"] = max(0, minimum - tokens)


def _continue_message(body: dict[str, Any], text: str) -> None:
    messages = body["messages"]
    last = messages[-1]
    if body.get("continue_final_message"):
        if not isinstance(last.get("content"), str):
            raise CannotContinueError("the message that it continues is no text")
        body["messages"] = [*messages[:-1], {**last, "content": last["content"] + text}]
        return
    body["messages"] = [*messages, {"role": "assistant", "content": text}]
    body |= {"add_generation_prompt": False, "continue_final_message": True}


def _chat_of(request: Mapping[str, Any]) -> dict[str, Any]:
    """The chat that stands for a message."""
    try:
        chat = chat_of_message(request)
    except PromptError as error:
        raise CannotContinueError(str(error)) from error
    chat |= {name: request[name] for name in _SAMPLING if request.get(name) is not None}
    choice = request.get("tool_choice")
    if isinstance(choice, dict) and choice.get("type") == "none":
        chat["tool_choice"] = "none"
    if request.get("stop_sequences"):
        chat["stop"] = request["stop_sequences"]
    return chat | {"model": request.get("model"), "stream": True}
