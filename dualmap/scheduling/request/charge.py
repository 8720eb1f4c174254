"""The charge of a request: what was computed for it, as far as its router, or the instance, has counted that.

    its instance reported a usage that is possible   that one, but no less than the router has counted
    a usage that no engine can have                  the most that is possible
    no usage                                         what the router has counted; what was expected where it saw nothing

What was sent keeps its request and its prompt, however its client leaves. It is given back where an instance failed it,
or it was never sent. What an instance refuses as the client's error counts as a request without tokens, as it computed
nothing.
"""

from __future__ import annotations

from typing import Final

from dualmap.scheduling.request.outcome import Outcome, Usage
from dualmap.scheduling.values import value

MOST_CONTEXT_TOKENS: Final = 1 << 24
"""No engine has a longer context; it bounds counts of which nothing else is known."""
TEMPLATE_TOKENS: Final = 4096
"""Most tokens that an engine adds to a prompt which a client did not send: its template, preambles of tools."""
MOST_EXPANSION: Final = 64
"""A prompt with media, of token ids, or of several texts has at most so many times the tokens that were expected."""


@value
class Counted:
    """The part of an answer that the router has seen."""

    output_tokens: int = 0
    """Events with output: each has a token at least. Events that only end an answer are not among them."""
    answer_bytes: int = 0
    """Bytes of an answer that does not stream, or shows no events."""

    def __add__(self, other: Counted) -> Counted:
        return Counted(self.output_tokens + other.output_tokens, self.answer_bytes + other.answer_bytes)


NOTHING_COUNTED: Final = Counted()


@value
class Expected:
    """The most that a request may have, as far as it says so."""

    prompt_tokens: int
    """0: nothing is known of its prompt."""
    output_tokens: int
    """The tokens of all answers of the request."""
    text_bytes: int = 0
    """Length of its prompt, where that is text alone; 0: its tokens are not bounded by it."""
    output_limit: int | None = None
    """The most tokens that all its answers may have; None: it sets no limit."""
    context_tokens: int | None = None
    """Tokens that fit its instance; None: that is not known."""

    @property
    def most_prompt_tokens(self) -> int:
        """No token of text is shorter than a byte."""
        if self.text_bytes:
            return self.text_bytes + TEMPLATE_TOKENS
        if not self.prompt_tokens:
            return MOST_CONTEXT_TOKENS
        return min(MOST_CONTEXT_TOKENS, MOST_EXPANSION * self.prompt_tokens + TEMPLATE_TOKENS)

    @property
    def most_output_tokens(self) -> int:
        if self.output_limit is not None:
            return self.output_limit
        return self.context_tokens or MOST_CONTEXT_TOKENS


@value
class Charge:
    """The tokens that a request is charged, beside the request itself."""

    prompt_tokens: int
    output_tokens: int
    cached_tokens: int = 0
    reported: bool = False
    """The instance reported them."""
    uncounted: bool = False
    """The tokens are expected ones: a limit keeps what the request drew."""


def is_plain(usage: Usage, answer_bound: int | None) -> bool:
    """Whether ``possible`` would leave the usage as it is, as far as that is seen without the bounds of its request:
    nearly all are so, and need none. ``answer_bound``: the most tokens of one answer; None: not known."""
    prompt, output, cached = usage.prompt_tokens, usage.output_tokens, usage.cached_tokens
    if prompt is None or output is None or answer_bound is None:
        return False
    return prompt <= TEMPLATE_TOKENS and output <= answer_bound and (cached is None or cached <= prompt)


def possible(usage: Usage, expected: Expected) -> Usage:
    """The usage as far as an engine can have it."""
    prompt, output, cached = usage.prompt_tokens, usage.output_tokens, usage.cached_tokens
    most_prompt = expected.most_prompt_tokens
    if prompt is not None and prompt > most_prompt:
        prompt = most_prompt
    if output is not None and output > expected.most_output_tokens:
        output = expected.most_output_tokens
    if cached is not None and prompt is not None and cached > prompt:
        cached = prompt
    if (prompt, output, cached) == (usage.prompt_tokens, usage.output_tokens, usage.cached_tokens):
        return usage
    return Usage(prompt, cached, output)


def counted_output(counted: Counted, expected: Expected, bytes_per_token: float) -> int:
    """The tokens of an answer by what its router has seen of it."""
    if not counted.answer_bytes:
        return counted.output_tokens
    by_bytes = round(counted.answer_bytes / max(1.0, bytes_per_token))
    return max(counted.output_tokens, min(by_bytes, expected.most_output_tokens))


def reported_charge(usage: Usage, seen_tokens: int) -> Charge | None:
    """The charge by a usage that has the tokens of prompt and answer; None where it lacks one of them. Its router has
    seen so many tokens of the answer."""
    prompt, output, cached = usage.prompt_tokens, usage.output_tokens, usage.cached_tokens
    if prompt is None or output is None:
        return None
    return Charge(prompt, output if output >= seen_tokens else seen_tokens, cached or 0, True)


def charge(
    usage: Usage | None,
    counted: Counted | None,
    expected: Expected,
    bytes_per_token: float,
    *,
    computes_unseen: bool = False,
) -> Charge:
    """The charge of a request that was sent, and that no instance failed.

    Args:
        usage: as its instance reported it, as far as it is possible.
        counted: what the router has seen; None: nothing of the answer passes here.
        computes_unseen: its instance was answering it, of which nothing was to be seen yet.
    """
    seen_tokens = 0 if counted is None else counted.output_tokens
    if usage is not None and (reported := reported_charge(usage, seen_tokens)) is not None:
        return reported
    prompt = expected.prompt_tokens if usage is None or usage.prompt_tokens is None else usage.prompt_tokens
    cached = 0 if usage is None or usage.cached_tokens is None else usage.cached_tokens
    if usage is not None and usage.output_tokens is not None:
        return Charge(prompt, max(usage.output_tokens, seen_tokens), cached)
    if counted is None:
        return Charge(prompt, expected.output_tokens, cached, uncounted=True)
    output = counted_output(counted, expected, bytes_per_token)
    return Charge(prompt, max(output, expected.output_tokens) if computes_unseen else output, cached)


def keeps_tokens(outcome: Outcome, *, begun: bool) -> bool:
    """Whether a request that no instance failed, and that was sent, is charged its tokens where it ends so. ``begun``:
    it had its first token."""
    if outcome is Outcome.CLIENT_ERROR:
        return begun
    return outcome not in _FAILED


_FAILED: Final = frozenset({Outcome.UPSTREAM_FAILED, Outcome.REFUSED})
