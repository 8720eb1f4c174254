"""A server's words as errors."""

from __future__ import annotations

import pytest

from dualmap.statestore.errors import LeaseLostError, StoreConfigurationError, StoreError, StoreUnavailableError
from dualmap.statestore.pool.replies import ForbiddenError, MovedElsewhereError, ScriptMissingError, reply_error


@pytest.mark.parametrize(
    ("message", "error"),
    [
        ("MOVED 3999 127.0.0.1:6381", MovedElsewhereError),
        ("ERR Error running script (call to f_1): @user_script:1: -READONLY You can't write", MovedElsewhereError),
        ("LOADING Redis is loading the dataset in memory", StoreUnavailableError),
        ("OOM command not allowed when used memory > 'maxmemory'.", StoreUnavailableError),
        ("NOAUTH Authentication required.", StoreConfigurationError),
        ("NOPERM this user has no permissions to run the 'info' command", ForbiddenError),
        ("ERR The user executing the script can't run this command or subcommand script: f_1", ForbiddenError),
        ("ERR ACL failure in script: User fleet has no permissions to run the 'hset' command", ForbiddenError),
        ("NOSCRIPT No matching script.", ScriptMissingError),
        ("FENCED fence 7 is no longer the leader's", LeaseLostError),
        ("ERR unknown command 'FOO'", StoreError),
    ],
)
def test_error_replies_are_translated_once(message: str, error: type[StoreError]) -> None:
    assert type(reply_error(message)) is error


@pytest.mark.parametrize(
    ("message", "right", "rule"),
    [
        ("NOPERM User fleet has no permissions to run the 'info' command", "run INFO", "ACL SETUSER fleet +info"),
        (
            "NOPERM this user has no permissions to run the 'config|get' command",
            "run CONFIG|GET",
            "ACL SETUSER USER +config|get",
        ),
        ("NOPERM No permissions to access a key", "read and write keys dualmap:*", "ACL SETUSER USER ~dualmap:*"),
        (
            "NOPERM this user has no permissions to access one of the keys used as arguments",
            "read and write keys dualmap:*",
            "ACL SETUSER USER ~dualmap:*",
        ),
        ("NOPERM No permissions to access a channel", "use channels dualmap:*", "ACL SETUSER USER &dualmap:*"),
        (
            "ERR The user executing the script can't access at least one of the keys mentioned",
            "read and write keys dualmap:*",
            "ACL SETUSER USER ~dualmap:*",
        ),
        ("ERR The user executing the script can't run this command or subcommand", "a script needs", "+@all -@danger"),
    ],
)
def test_a_right_that_is_missing_is_named_with_how_to_grant_it(message: str, right: str, rule: str) -> None:
    said = str(reply_error(message))

    assert right in said
    assert rule in said
    assert said.endswith(f"({message})")


def test_the_keys_of_a_call_are_named_where_they_are_known() -> None:
    error = reply_error("NOPERM No permissions to access a key")
    assert isinstance(error, ForbiddenError)

    said = str(error.about(b"mine:{default}:"))

    assert "read and write keys mine:{default}:*" in said
    assert "ACL SETUSER USER ~mine:*" in said
