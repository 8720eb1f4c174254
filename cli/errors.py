"""What a command may fail with; ``cli.main`` turns it into a message and an exit code."""

from __future__ import annotations


class CommandError(Exception):
    """The command cannot do what was asked; the message says why and what to do."""
