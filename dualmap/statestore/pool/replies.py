"""A server's replies as this package's errors: the one place where they are translated."""

from __future__ import annotations

import re

from dualmap.statestore.errors import LeaseLostError, StoreConfigurationError, StoreError, StoreUnavailableError


class ScriptMissingError(StoreError):
    """The server does not know the script (yet, or any more): load it and repeat. Nothing was run."""


class NoFunctionsError(StoreError):
    """The server has no functions, as it is older than Redis 7. Nothing was run."""


class MovedElsewhereError(StoreUnavailableError):
    """Another server has the pool now: connect again, which finds it. Nothing was run."""


class TooLateError(StoreUnavailableError):
    """The call arrived when its caller had given it up, or the server's clock was set forward. Nothing was run."""

    def __init__(self, message: str, now_ms: int) -> None:
        super().__init__(message)
        self.now_ms = now_ms
        """The server's time when it refused."""


class ForbiddenError(StoreConfigurationError):
    """The store's user lacks a right; the message says which one, and how an administrator grants it."""

    def __init__(self, reply: str, keys: str = "") -> None:
        """``keys`` is how the keys of the call begin, where that is known."""
        super().__init__(_missing_right(reply, keys))
        self.reply = reply

    def about(self, keys: bytes) -> ForbiddenError:
        """The error of a call whose keys begin with ``keys``."""
        return ForbiddenError(self.reply, keys.decode(errors="replace"))


_COMMAND = re.compile(r"run the '([^']+)' command")
_USER = re.compile(r"[Uu]ser (\S+) has no permissions")


def _missing_right(reply: str, keys: str) -> str:
    # Servers name the command, and that it is a key or a channel, but not which one.
    user = found[1] if (found := _USER.search(reply)) is not None and found[1] != "this" else "USER"
    prefix = keys.partition("{")[0] or "dualmap:"
    if command := _COMMAND.search(reply):
        what, rule = f"run {command[1].upper()}", f"+{command[1].lower()}"
    elif "channel" in reply:
        what, rule = f"use channels {prefix}*", f"&{prefix}*"
    elif "key" in reply:
        what, rule = f"read and write keys {keys or prefix}*", f"~{prefix}*"
    else:
        what, rule = "run a command that a script needs", "+@all -@dangerous +info"
    return f"the store allows this user too little, it may not {what}: grant it by ACL SETUSER {user} {rule} ({reply})"


_MOVED = (MovedElsewhereError, "the store moved to another server")
_REFUSES = (StoreUnavailableError, "the store refuses calls")
_STRANGER = (StoreConfigurationError, "the store refuses this client, check user and password")
_MEANINGS: dict[str, tuple[type[StoreError], str]] = {
    **dict.fromkeys(("READONLY", "MOVED", "ASK"), _MOVED),
    **dict.fromkeys(("LOADING", "MASTERDOWN", "CLUSTERDOWN", "TRYAGAIN", "NOREPLICAS", "BUSY", "MISCONF"), _REFUSES),
    "OOM": (StoreUnavailableError, "the store is out of memory, raise its maxmemory"),
    "WRONGTYPE": (
        StoreError,
        "something else overwrote a key of the fleet; the fleet deletes it and fills it again within a minute (its log"
        " has the name, behind 'unreadable state mended'); find out what else writes into this store, and delete"
        " nothing",
    ),
    **dict.fromkeys(("NOAUTH", "WRONGPASS"), _STRANGER),
    "NOSCRIPT": (ScriptMissingError, "the store does not know a script"),
}
_FORBIDDEN_IN_SCRIPT = ("The user executing the script can't", "ACL failure in script")
"""NOPERM for a command, a key or a channel that a script uses, as older and newer servers write it."""


def reply_error(message: str) -> StoreError:
    """The error that an error reply means."""
    kind, says = StoreError, "the store could not run a command"
    # An error inside a script may arrive behind a prefix of the server's own.
    words = message.replace("-", " ").split()[:12]
    if any(forbidden in message for forbidden in _FORBIDDEN_IN_SCRIPT) or "NOPERM" in words:
        return ForbiddenError(message)
    if "FENCED" in words:
        return LeaseLostError(message.partition("FENCED")[2].strip())
    if "LATE" in words:
        return TooLateError(f"the store was called too late: {message}", int(words[words.index("LATE") + 1]))
    if message.startswith("ERR Function not found"):
        kind, says = _MEANINGS["NOSCRIPT"]
    elif message.startswith("ERR unknown command") and "FCALL" in message[:32].upper():
        return NoFunctionsError(message)
    elif known := next((word for word in words if word in _MEANINGS), None):
        kind, says = _MEANINGS[known]
    return kind(f"{says}: {message}")
