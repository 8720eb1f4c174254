"""API keys as settings accept them, for requests of clients and for requests to instances."""

from __future__ import annotations

import re
from typing import Annotated

from pydantic import AfterValidator, SecretStr
from pydantic_core import PydanticCustomError

_BLANK = " \t\r\n"
_CONTROL = re.compile(r"[\x00-\x1f\x7f]")


def _as_sent(secret: SecretStr) -> SecretStr:
    """The key without blanks around it: a file that is mounted as a secret usually ends with a line break."""
    key = secret.get_secret_value().strip(_BLANK)
    if not key:
        raise PydanticCustomError("key", "must not be empty")
    if _CONTROL.search(key):
        raise PydanticCustomError("key", "must not contain a line break or another control character")
    return SecretStr(key)


ApiKey = Annotated[SecretStr, AfterValidator(_as_sent)]
"""Never empty: a request without a key must not have the right one. One line: it is sent as a header field."""
