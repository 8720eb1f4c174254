"""The server's error replies as this package's errors: the one place where they are translated."""

from __future__ import annotations

from statestore.errors import LeaseLostError, StoreConfigurationError, StoreError, StoreUnavailableError


class ScriptMissingError(StoreError):
    """The server does not know the script (yet, or any more): load it and repeat. Nothing was run."""


class MovedElsewhereError(StoreUnavailableError):
    """Another server has the pool now: find it and connect anew. Nothing was run."""


_ELSEWHERE = frozenset({"READONLY", "MOVED", "ASK"})
_UNAVAILABLE = frozenset({"LOADING", "MASTERDOWN", "CLUSTERDOWN", "TRYAGAIN", "NOREPLICAS", "BUSY", "MISCONF"})
_CONFIGURATION = frozenset({"NOAUTH", "WRONGPASS"})
_FORBIDDEN_IN_SCRIPT = ("The user executing the script can't", "ACL failure in script")
"""NOPERM for a command, a key or a channel that a script wants, in the words of older and newer servers."""

_FULL = "ERR max number of clients reached"
"""What a server says to a new connection before it closes it."""


def reply_error(message: str) -> StoreError:
    """The error that an error reply means."""
    if message.startswith(_FULL):
        return StoreUnavailableError(f"the store takes no more connections, raise its maxclients: {message}")
    if any(words in message for words in _FORBIDDEN_IN_SCRIPT):
        return StoreConfigurationError(f"the store allows this user too little: {message}")
    # An error inside a script may arrive behind a prefix of the server's own.
    for word in message.replace("-", " ").split()[:12]:
        if word in _ELSEWHERE:
            return MovedElsewhereError(f"the store moved to another server: {message}")
        if word in _UNAVAILABLE:
            return StoreUnavailableError(f"the store refuses calls: {message}")
        if word == "OOM":
            return StoreUnavailableError(f"the store is out of memory, raise its maxmemory: {message}")
        if word == "WRONGTYPE":
            return StoreError(f"somebody wrote to a key of the fleet, find it with TYPE and delete it: {message}")
        if word == "NOPERM":
            return StoreConfigurationError(f"the store allows this user too little: {message}")
        if word in _CONFIGURATION:
            return StoreConfigurationError(f"the store refuses this client, check user and password: {message}")
        if word == "NOSCRIPT":
            return ScriptMissingError(message)
        if word == "FENCED":
            return LeaseLostError(message.partition("FENCED")[2].strip())
    return StoreError(f"the store could not run a command: {message}")
