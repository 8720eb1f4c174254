"""Errors of commands; ``dualmap.cli.main`` turns each into a message and an exit code."""

from __future__ import annotations

from dualmap.statestore.errors import StoreConfigurationError, StoreError


class CommandError(Exception):
    """The command cannot do what was requested; the message says why and what to do."""

    exit_code = 1


class UsageError(CommandError):
    """A word of the command line cannot be used."""

    exit_code = 2


class UnfitSettingsError(UsageError):
    """The settings were read and turn out not to be usable."""


def of_store(error: StoreError) -> CommandError:
    """The error of a command that cannot use the store: a ``store.url`` that its server refuses is a wrong setting."""
    return (UnfitSettingsError if isinstance(error, StoreConfigurationError) else CommandError)(str(error).rstrip("."))


def not_listening(error: OSError, flags: str) -> CommandError:
    """Why a server did not start; for an address that cannot be listened on, with the settings to change."""
    if error.filename is not None:
        return CommandError(str(error))
    return CommandError(f"{error.strerror or error}; choose another port with {flags} PORT, or 0 for any free one")
