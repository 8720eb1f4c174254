"""Requests as the engine takes them: prompts, and answers of a known length."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Final

import xxhash

from dualmap.simulation.emulator.errors import ApiError, bad_request
from dualmap.simulation.emulator.fields import Body, flag, integer, number, texts
from dualmap.simulation.emulator.kv_transfer_params import KvTransferParams, PeerSource
from dualmap.simulation.emulator.scripts import GivenText, MadeUpText, Script, begun_answer, next_seed
from dualmap.simulation.emulator.served_names import Adapter, ServedNames
from dualmap.simulation.workload.tokenizer import (
    ImageRun,
    PromptText,
    block_hashes,
    count_tokens,
    image_keys,
)

DEADLY_TEXT = b"this prompt kills its emulated engine"
"""A prompt that contains this kills the engine that starts on it."""
MAX_ANSWERS = 16_384
"""Answers to one prompt at most, vLLM's own limit."""


@dataclass(frozen=True, slots=True)
class Limits:
    """The limits that a request is checked against."""

    names: ServedNames
    max_model_len: int
    block_tokens: int
    seed: int
    mean_output_tokens: int = 256
    """The mean length of answers to requests that do not set one."""
    gives_back_after: int | None = None
    """Tokens after which an answer is given back (``stop_reason: recomputed``); None: it is not."""

    @property
    def model(self) -> str:
        """The first name of the model."""
        return self.names.model


@dataclass(frozen=True, slots=True)
class CacheScope:
    """The parts that separate the KV of requests whose prompts are equal."""

    adapter: Adapter | None = None
    salt: str = ""

    @property
    def text(self) -> str:
        """The parts that names of blocks are made with: of an adapter its path, too, which no event has."""
        adapter = self.adapter
        return self.salt if adapter is None else f"{adapter.name}\n{adapter.path}\n{self.salt}"


NO_SCOPE: Final = CacheScope()


@dataclass(frozen=True, slots=True)
class Prompt:
    tokens: int
    block_hashes: tuple[int, ...]
    kills_engine: bool
    """The engine dies when it starts on this prompt."""
    text: bytes = b""
    scope: CacheScope = NO_SCOPE
    images: tuple[ImageRun, ...] = ()

    def extra_keys(self, place: int, block_tokens: int) -> list[Any] | None:
        """The extra keys of a block in events, in the engine's order: the adapter, the images in the block, and in the
        first one the salt."""
        adapter, salt = self.scope.adapter, self.scope.salt
        keys: list[Any] = [] if adapter is None else [adapter.name]
        keys += image_keys(self.images, block_tokens, place)
        if salt and not place:
            keys.append(salt)
        return keys or None


@dataclass(frozen=True, slots=True)
class Choice:
    """One requested answer."""

    prompt: Prompt
    script: Script
    first_of_prompt: bool = True
    """A prompt that is answered several times counts once."""


@dataclass(frozen=True, slots=True)
class GenerationRequest:
    """One request."""

    choices: tuple[Choice, ...]
    kv: KvTransferParams | None = None
    """None: its KV stays where it is."""
    max_load_tokens: int | None = None
    """Tokens that may be loaded from tiers for it; None: all that they have."""
    peer: PeerSource | None = None
    """The server that its prompts are pulled from; None: none."""
    priority: int = 0
    """The lower the sooner, where the engine schedules by priority."""

    @property
    def ends_at_once(self) -> bool:
        """Whether its length ends it with its first token: vLLM stages the KV of no other request."""
        script = self.choices[0].script
        return len(self.choices) == 1 and script.tokens == 1 and script.finish_reason == "length"

    @property
    def prompt_tokens(self) -> int:
        return sum(choice.prompt.tokens for choice in self.choices if choice.first_of_prompt)


@dataclass(frozen=True, slots=True, kw_only=True)
class Sampling:
    """How answers are wanted."""

    max_tokens: int | None = None
    """Exactly as long as this; None: as long as is drawn."""
    min_tokens: int = 0
    answers: int = 1
    """Number of answers to each prompt."""
    stop: tuple[str, ...] = ()
    include_stop: bool = False
    ignore_eos: bool = False
    priority: int = 0
    given: Callable[[int], str] | None = None
    """Makes the answer's text from a seed, where it is not made-up words."""


def read_sampling(payload: Body, max_tokens: int | None) -> Sampling:
    """The fields that all of OpenAI's forms of generation share. Raises ApiError."""
    temperature = number(payload, "temperature")
    if temperature is not None and temperature < 0:
        message = f"temperature must be non-negative, got {temperature}. (parameter=temperature, value={temperature})"
        raise ApiError(400, "BadRequestError", message, "temperature")
    min_tokens = integer(payload, "min_tokens") or 0
    if min_tokens < 0:
        raise bad_request(f"min_tokens must be greater than or equal to 0, got {min_tokens}.")
    if max_tokens is not None and min_tokens > max_tokens:
        raise bad_request(f"min_tokens must be less than or equal to max_tokens={max_tokens}, got {min_tokens}.")
    return Sampling(
        max_tokens=max_tokens,
        min_tokens=min_tokens,
        answers=_answers(payload),
        stop=read_stop(payload, "stop"),
        include_stop=flag(payload, "include_stop_str_in_output"),
        ignore_eos=flag(payload, "ignore_eos"),
        priority=integer(payload, "priority") or 0,
    )


def read_stop(payload: Body, name: str) -> tuple[str, ...]:
    """Stop strings. Raises ApiError."""
    stops = texts(payload, name)
    if "" in stops:
        raise bad_request("stop cannot contain an empty string.")
    return stops


def read_max_tokens(payload: Body, names: Sequence[str], limits: Limits, *, minimum: int = 1) -> int | None:
    """The first of these fields that is set. Raises ApiError."""
    for name in names:
        value = integer(payload, name)
        if value is None:
            continue
        if value < minimum:
            raise _too_few(value)
        if value > limits.max_model_len:
            raise ApiError(
                400,
                "BadRequestError",
                f"{name}={value} cannot be greater than max_model_len={limits.max_model_len}. Please request fewer "
                f"output tokens. (parameter={name}, value={value})",
                name,
            )
        return value
    return None


def read_prompt(given: PromptText, limits: Limits, scope: CacheScope = NO_SCOPE, spare_tokens: int = 0) -> Prompt:
    """A prompt as the engine sees it. Raises ApiError: with ``spare_tokens``, it exceeds the model's context."""
    text = given.data
    tokens = count_tokens(text)
    if tokens + spare_tokens > limits.max_model_len:
        raise ApiError(
            400,
            "BadRequestError",
            f"This model's maximum context length is {limits.max_model_len} tokens. However, your prompt contains at "
            f"least {limits.max_model_len + 1} input tokens, which exceeds this limit even without any output tokens. "
            f"Please reduce the length of the input prompt. (parameter=input_tokens, value={limits.max_model_len + 1})",
            "input_tokens",
        )
    return Prompt(
        tokens=tokens,
        block_hashes=block_hashes(text, limits.block_tokens, scope.text, given.images),
        kills_engine=DEADLY_TEXT in text,
        text=text,
        scope=scope,
        images=given.images,
    )


def generation(
    prompts: Sequence[PromptText], sampling: Sampling, limits: Limits, scope: CacheScope = NO_SCOPE
) -> GenerationRequest:
    """Answers to some prompts, all to the first one first. Raises ApiError."""
    choices: list[Choice] = []
    for given in prompts:
        prompt, text = read_prompt(given, limits, scope), given.data
        seed_of = limits.seed & 0xFFFFFFFFFFFFFFFF
        (seed, said), following = begun_answer(text, seed_of), xxhash.xxh3_64_intdigest(text, seed_of)
        for index in range(sampling.answers):
            script = _script(prompt, sampling, limits, seed, said)
            choices.append(Choice(prompt, script, first_of_prompt=index == 0))
            seed = following = next_seed(following)
            said = 0
    return GenerationRequest(tuple(choices), priority=sampling.priority)


def _script(prompt: Prompt, sampling: Sampling, limits: Limits, seed: int, said: int) -> Script:
    """An answer of which the prompt ends with ``said`` tokens."""
    room = limits.max_model_len - prompt.tokens
    if room < 1:
        raise _too_few(0)
    if sampling.max_tokens is not None:
        room = min(room, sampling.max_tokens)
    if sampling.max_tokens == 0:  # only the prompt is wanted; a token is computed in any case
        return Script(MadeUpText(seed), 1, "length", visible_chars=0)
    if sampling.given is not None:
        given = GivenText(sampling.given(seed))
        script = Script(given, min(room, given.tokens), "stop" if given.tokens <= room else "length")
    elif sampling.max_tokens is not None or sampling.ignore_eos:
        script = Script(MadeUpText(seed, said), room, "length")
    else:
        drawn = max(sampling.min_tokens, 1, _drawn_length(seed, limits.mean_output_tokens) - said)
        script = Script(MadeUpText(seed, said), min(room, drawn), "stop" if drawn <= room else "length")
    script = script.stopped(sampling.stop, include_stop=sampling.include_stop, min_tokens=sampling.min_tokens)
    after = limits.gives_back_after
    return script if after is None or after >= script.tokens else script.given_back(after)


def _answers(payload: Body) -> int:
    wanted = integer(payload, "n")
    if wanted is None:
        return 1
    if wanted < 1:
        raise bad_request(f"n must be at least 1, got {wanted}.")
    if wanted > MAX_ANSWERS:
        raise bad_request(f"n must be at most {MAX_ANSWERS}, got {wanted}.")
    if wanted > 1 and number(payload, "temperature") == 0:
        raise bad_request(f"n must be 1 when using greedy sampling, got {wanted}.")
    return wanted


def _too_few(value: int) -> ApiError:
    message = f"max_tokens must be at least 1, got {value}. (parameter=max_tokens, value={value})"
    return ApiError(400, "BadRequestError", message, "max_tokens")


def _drawn_length(seed: int, mean_tokens: int) -> int:
    """An exponential answer length, drawn from the request itself: the same request gets the same answer."""
    uniform = (xxhash.xxh3_64_intdigest(seed.to_bytes(8, "little")) + 1) / 2**64
    return math.ceil(-mean_tokens * math.log(uniform))
