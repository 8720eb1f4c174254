"""A server's replies as this package's errors: the one place where they are translated."""

from __future__ import annotations

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


_MOVED = (MovedElsewhereError, "the store moved to another server")
_REFUSES = (StoreUnavailableError, "the store refuses calls")
_FORBIDDEN = (StoreConfigurationError, "the store allows this user too little")
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
    "NOPERM": _FORBIDDEN,
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
    if any(forbidden in message for forbidden in _FORBIDDEN_IN_SCRIPT):
        kind, says = _FORBIDDEN
    elif "FENCED" in words:
        return LeaseLostError(message.partition("FENCED")[2].strip())
    elif "LATE" in words:
        return TooLateError(f"the store was called too late: {message}", int(words[words.index("LATE") + 1]))
    elif message.startswith("ERR Function not found"):
        kind, says = _MEANINGS["NOSCRIPT"]
    elif message.startswith("ERR unknown command") and "FCALL" in message[:32].upper():
        return NoFunctionsError(message)
    elif known := next((word for word in words if word in _MEANINGS), None):
        kind, says = _MEANINGS[known]
    return kind(f"{says}: {message}")
