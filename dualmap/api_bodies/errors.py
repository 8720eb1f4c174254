"""Errors of reading a body; who reads one translates them at its own edge."""

from __future__ import annotations


class PromptError(Exception):
    """The body of a request has no prompt that could be cut into blocks. Whether it has one for an engine, the engine
    knows.

    ``param`` names the offending part in the words of the body, for example ``messages[2].content``.
    """

    def __init__(self, message: str, param: str) -> None:
        super().__init__(message)
        self.param = param


class TooManyPartsError(PromptError):
    """The prompt has more messages, parts, tools or prompts than are read of a request."""
