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
    # In front of those of agents, as there: who sets it stands between an agent and the fleet.
    Dialect("Dynamo", b"x-dynamo-session-id", parent=b"x-dynamo-parent-session-id", parent_is_run=True),
    Dialect("Claude Code", b"x-claude-code-session-id", b"x-claude-code-agent-id", b"x-claude-code-parent-agent-id"),
    Dialect("Codex", b"session-id", b"thread-id"),
    Dialect("opencode", b"x-opencode-session", parent=b"x-parent-session-id", parent_is_run=True),
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
_BY_FIELD: Final = {each.run: each for each in DIALECTS}
_RUN_FIELDS: Final = frozenset(_BY_FIELD)
_field_name: Final = itemgetter(0)
_BODY_SESSIONS: Final = ("session_id", "litellm_session_id")
_BODY_FIELDS: Final = frozenset({"metadata", "prompt_cache_key", *_BODY_SESSIONS})
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
    if named := _RUN_FIELDS.intersection(map(_field_name, fields)):  # few requests have any
        texts = dict(reversed(fields))  # of several fields of a name the first one counts
        for dialect in DIALECTS if len(named) > 1 else [_BY_FIELD[name] for name in named]:
            text = texts.get(dialect.run)
            if text and len(text) <= _LONGEST:
                return _by_header(dialect, text, texts)
    return None if _BODY_FIELDS.isdisjoint(body) else _by_body(body)


def _by_header(dialect: Dialect, text: bytes, texts: Mapping[bytes, bytes]) -> SentRun:
    session = text.decode("latin-1")
    agent = texts.get(dialect.agent, b"")[:_LONGEST].decode("latin-1")
    parent = texts.get(dialect.parent, b"")[:_LONGEST].decode("latin-1")
    field = dialect.run.decode()
    if dialect.parent_is_run and parent:
        return SentRun(parent, session, parent, field)
    return SentRun(session, agent, parent, field)


def _by_body(body: Mapping[str, Any]) -> SentRun | None:
    for field in _BODY_SESSIONS:
        session = body.get(field)
        if _is_name(session):
            return SentRun(session, field=field)
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
