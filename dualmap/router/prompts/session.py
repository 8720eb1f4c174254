"""Which session a request belongs to, as revisions need it: the run that its client names, else its conversation.

A conversation is known by its beginning up to the end of the first message of its user, which all its turns have. A
prompt that is no chat is known by its first bytes, or tokens, so that longer ones which begin alike belong together.
"""

from __future__ import annotations

from typing import Final

from xxhash import xxh3_64_hexdigest

from dualmap.router.prompts.inference_request import InferenceRequest, SentPrompt
from dualmap.scheduling.prompts.blocks import TextPrompt, TokenPrompt
from dualmap.scheduling.runs.turn import hashed_name

FIRST_TOKENS: Final = 1024
FIRST_BYTES: Final = 4 * FIRST_TOKENS
_USER: Final = b"\xffuser\xfe"
_MESSAGE: Final = b"\xff"
"""How a rendered prompt begins a message (``api_bodies.prompt``)."""


def session_of(request: InferenceRequest, sent: SentPrompt) -> str:
    """The session as a hash; those of different tenants are different ones."""
    tenant = request.tenant
    if request.run is not None:
        return hashed_name(tenant, request.run.run).run[:16]
    return xxh3_64_hexdigest(tenant.encode() + b"\n" + _beginning(sent))


def is_under_way(sent: SentPrompt) -> bool:
    """Whether the prompt is a chat that shows earlier turns: something follows the first message of its user."""
    if sent.whole is not None:
        sent = sent.whole()
    prompt = sent.prompt
    return isinstance(prompt, TextPrompt) and not sent.pooled and _answered_at(prompt.data) >= 0


def _answered_at(data: bytes) -> int:
    """Where the message behind the first one of the user begins; -1: there is none."""
    asked = data.find(_USER)
    return -1 if asked < 0 else data.find(_MESSAGE, asked + 1)


def _beginning(sent: SentPrompt) -> bytes:
    prompt = sent.prompt
    if isinstance(prompt, TokenPrompt):
        return prompt.token_ids[:FIRST_TOKENS].tobytes()
    if not isinstance(prompt, TextPrompt):  # a conversation of which the beginning is known by its blocks
        assert sent.whole is not None
        return _beginning(sent.whole())
    data = prompt.data
    if sent.pooled:
        return data
    if _USER not in data:
        return data[:FIRST_BYTES]
    answered = _answered_at(data)
    return data if answered < 0 else data[:answered]
