"""A server's words as errors."""

from __future__ import annotations

import pytest

from dualmap.statestore.errors import LeaseLostError, StoreConfigurationError, StoreError, StoreUnavailableError
from dualmap.statestore.pool.replies import MovedElsewhereError, ScriptMissingError, reply_error


@pytest.mark.parametrize(
    ("message", "error"),
    [
        ("MOVED 3999 127.0.0.1:6381", MovedElsewhereError),
        ("ERR Error running script (call to f_1): @user_script:1: -READONLY You can't write", MovedElsewhereError),
        ("LOADING Redis is loading the dataset in memory", StoreUnavailableError),
        ("OOM command not allowed when used memory > 'maxmemory'.", StoreUnavailableError),
        ("NOAUTH Authentication required.", StoreConfigurationError),
        ("NOPERM this user has no permissions to run the 'info' command", StoreConfigurationError),
        ("ERR The user executing the script can't run this command or subcommand script: f_1", StoreConfigurationError),
        ("ERR ACL failure in script: User fleet has no permissions to run the 'hset' command", StoreConfigurationError),
        ("NOSCRIPT No matching script.", ScriptMissingError),
        ("FENCED fence 7 is no longer the leader's", LeaseLostError),
        ("ERR unknown command 'FOO'", StoreError),
    ],
)
def test_error_replies_are_translated_once(message: str, error: type[StoreError]) -> None:
    assert type(reply_error(message)) is error
