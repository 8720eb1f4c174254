"""Fields that the gateway adds to the bodies of requests, in place of what their clients send."""

from __future__ import annotations

from typing import Final

from dualmap.router.http.model_field import Edit

BLANK: Final = b" \t\r\n"


def field_edit(body: bytes, field: bytes) -> Edit:
    """Adds a field at the end of the body, where it stands for one before, as for any reader. The body must be a JSON
    object."""
    end = body.rindex(b"}")
    return (end, end), field if body[:end].rstrip(BLANK).endswith(b"{") else b"," + field


def priority_field(priority: int) -> bytes:
    """vLLM's field for engines that schedule by priority: lower goes first."""
    return b'"priority":%d' % priority
