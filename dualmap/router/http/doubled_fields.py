"""Fields that a JSON object has more than once, of those that rights of callers depend on.

To keep the names of all fields costs several times what parsing does. So the bytes are searched for the names, at the
speed of C, and only a body that may have one twice is parsed once more: where a name stands in it twice, or a letter is
escaped.
"""

from __future__ import annotations

import json
import re
from collections import Counter
from collections.abc import Mapping
from typing import Any, Final

from dualmap.api_bodies.json_body import UnreadableJsonError
from dualmap.scheduling.tenants.tenant import Caller

MODEL_FIELDS: Final = frozenset({"model"})
TOKEN_FIELDS: Final = frozenset({"best_of", "max_completion_tokens", "max_output_tokens", "max_tokens", "n"})
CLASS_FIELDS: Final = frozenset({"priority", "service_tier"})
SALT_FIELDS: Final = frozenset({"cache_salt"})
RULED_FIELDS: Final = MODEL_FIELDS | TOKEN_FIELDS | CLASS_FIELDS | SALT_FIELDS

_NONE: Final[frozenset[str]] = frozenset()
_SELDOM: Final = CLASS_FIELDS | SALT_FIELDS | MODEL_FIELDS
_TOKENS_AND_SELDOM: Final = TOKEN_FIELDS | _SELDOM
_QUOTED: Final = {name: b'"%b"' % name.encode() for name in RULED_FIELDS}
_ESCAPED_LETTER: Final = re.compile(rb"\\u00[4-7]")


def doubled_fields(raw: bytes, body: Mapping[str, Any], caller: Caller) -> frozenset[str]:
    """The fields that the object has more than once, of those that rights depend on; looked for as far as rights of
    the caller may. ``body`` is the object that was read from ``raw``.

    Raises:
        UnreadableJsonError: it may have some, and is nested too deeply to say.
    """
    tenant = caller.tenant
    names = _TOKENS_AND_SELDOM if tenant.limits_tokens else _SELDOM  # adapters of tenants: a model is always a right
    if not may_be_doubled(raw, body, names):
        return _NONE
    found = Counter(names_of(raw))
    return frozenset(name for name in RULED_FIELDS if found[name] > 1)


def may_be_doubled(raw: bytes, body: Mapping[str, Any], names: frozenset[str]) -> bool:
    """Whether the object, ``body`` as it was read, may have one of these ruled fields more than once."""
    if b"\\u00" in raw and _ESCAPED_LETTER.search(raw) is not None:
        return True
    return max(map(raw.count, map(_QUOTED.__getitem__, body.keys() & names)), default=0) > 1


def names_of(raw: bytes) -> list[str]:
    """The names of the object's own fields, each as often as it is there."""
    names: list[str] = []

    def note(pairs: list[tuple[str, Any]]) -> None:  # the last object to end is the whole
        nonlocal names
        names = [name for name, _ in pairs]

    try:
        json.loads(raw.decode("utf-8-sig", "surrogatepass"), object_pairs_hook=note)
    except RecursionError as error:
        raise UnreadableJsonError("it is nested too deeply") from error
    return names
