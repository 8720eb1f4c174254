"""Which run a request is a turn of, by what its client sends: one table of the names that clients give their sessions.

A request without any of them is known by its content, see ``statestore/lua/shared/runs.lua``. Names are hashed with
their tenant before they are kept anywhere (``scheduling.runs.turn.hashed_name``).
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from operator import itemgetter
from typing import Any, Final, TypeGuard

from dualmap.scheduling.values import value


@value
class Dialect:
    """The header fields by which clients name a run."""

    clients: str
    run: bytes
    agent: bytes = b""
    """The field of the agent, or sub-agent, within the run."""
    parent: bytes = b""
    """The field of the session, or agent, that started this one."""
    parent_is_run: bool = False
    """A sub-agent has a session of its own: the parent's is the run."""


DIALECTS: Final = (
    Dialect("Claude Code", b"x-claude-code-session-id", b"x-claude-code-agent-id", b"x-claude-code-parent-agent-id"),
    Dialect("Codex", b"session-id", b"thread-id"),
    Dialect("opencode", b"x-opencode-session", parent=b"x-parent-session-id", parent_is_run=True),
    Dialect("Dynamo", b"x-dynamo-session-id", parent=b"x-dynamo-parent-session-id", parent_is_run=True),
    Dialect("Qwen Code", b"x-qwen-code-session-id"),
    Dialect("Grok", b"x-grok-conv-id"),
    Dialect("LiteLLM, OpenHands", b"x-litellm-session-id"),
    Dialect("LiteLLM", b"x-litellm-trace-id"),
    Dialect("opencode, vLLM, OpenRouter", b"x-session-id", parent=b"x-parent-session-id", parent_is_run=True),
    Dialect("opencode, Fireworks, DeepInfra", b"x-session-affinity", parent=b"x-parent-session-id", parent_is_run=True),
    Dialect("Mistral Vibe", b"x-affinity"),
    Dialect("llm-d", b"x-session-token"),
    Dialect("SGLang Model Gateway", b"x-smg-routing-key"),
    Dialect("AIPerf", b"x-correlation-id"),
)
"""In the order in which they count."""
_BY_FIELD: Final = {each.run: (place, each) for place, each in enumerate(DIALECTS)}
_RUN_FIELDS: Final = frozenset(_BY_FIELD)
_field_name: Final = itemgetter(0)
_BODY_FIELDS: Final = frozenset({"metadata", "prompt_cache_key", "session_id"})
_CLAUDE_SESSION: Final = re.compile(r'session_(?:id": ?")?([0-9a-fA-F-]{36})')
"""In ``user_id``, which is ``user_…_session_UUID``, or in later versions a text of JSON with a ``session_id``."""
_ID: Final = re.compile(r"[0-9a-fA-F]{8}-?(?:[0-9a-fA-F]{4}-?){3}[0-9a-fA-F]{12}")
_LONGEST: Final = 1024
"""Longer names count as absent."""


@value
class SentRun:
    """The names of a run as a client sent them."""

    run: str
    agent: str = ""
    parent: str = ""
    field: str = ""
    """The header field or the field of the body that named it."""


def run_of(fields: Sequence[tuple[bytes, bytes]], body: Mapping[str, Any]) -> SentRun | None:
    """The run that a request names, by its header fields, whose names are lower-case, and its body; None: none."""
    first, place = None, len(DIALECTS)
    for name, text in () if _RUN_FIELDS.isdisjoint(map(_field_name, fields)) else fields:  # few requests have any
        known = _BY_FIELD.get(name)
        if known is not None and known[0] < place and text and len(text) <= _LONGEST:
            place, first = known[0], text
    if first is not None:
        return _by_header(DIALECTS[place], first, fields)
    return None if _BODY_FIELDS.isdisjoint(body) else _by_body(body)


def _by_header(dialect: Dialect, text: bytes, fields: Sequence[tuple[bytes, bytes]]) -> SentRun:
    session, agent, parent = text.decode("latin-1"), "", ""
    if dialect.agent or dialect.parent:
        for name, other in fields:
            if name == dialect.agent:
                agent = other[:_LONGEST].decode("latin-1")
            elif name == dialect.parent:
                parent = other[:_LONGEST].decode("latin-1")
    field = dialect.run.decode()
    if dialect.parent_is_run and parent:
        return SentRun(parent, session, parent, field)
    return SentRun(session, agent, parent, field)


def _by_body(body: Mapping[str, Any]) -> SentRun | None:
    session = body.get("session_id")
    if _is_name(session):
        return SentRun(session, field="session_id")
    metadata = body.get("metadata")
    if isinstance(metadata, dict):
        session, user = metadata.get("session_id"), metadata.get("user_id")
        if _is_name(session):
            return SentRun(session, field="metadata.session_id")
        found = _CLAUDE_SESSION.search(user) if _is_name(user) else None
        if found is not None:
            return SentRun(found[1], field="metadata.user_id")
    key = body.get("prompt_cache_key")
    # It may be that of an application, too: only one that is made for a conversation names a run.
    if _is_name(key) and _ID.fullmatch(key) is not None:
        return SentRun(key, field="prompt_cache_key")
    return None


def _is_name(found: object) -> TypeGuard[str]:
    return isinstance(found, str) and 0 < len(found) <= _LONGEST
