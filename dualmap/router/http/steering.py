"""Fields of clients that steer engines: where KV is loaded from and sent to, and how a cache is reported.

An engine believes it: a host that a client names gets the KV of a prompt, or fills a cache that others share, and a
report of what is cached already spoils what the fleet knows of the instance. The fleet writes these itself where a
request is split. So a client's are dropped at both doors; ``router.trust_transfers`` lets those of transfers pass.
"""

from __future__ import annotations

import re
from collections.abc import Generator, Mapping
from typing import Any, Final

from dualmap.api_bodies.json_body import write_json
from dualmap.api_bodies.prompt import LongTexts
from dualmap.router.prompts.inference_request import with_texts

TRANSFER_KEYS: Final = ("kv_transfer_params", "ec_transfer_params")
REPORT_KEY: Final = "kv_cache_report_mode"
EXTRA_ARGS: Final = ("vllm_xargs", "extra_args")
"""Objects whose keys the engine takes as arguments of a request, beside those that its API names."""
SAMPLING: Final = "sampling_params"
"""Object of ``/inference/v1/generate`` in which such objects stand."""

_HEADERS: Final = (
    "x-gateway-destination-endpoint",
    "x-prefiller-host-port",
    "x-prefiller-url",
    "x-encoder-hosts-ports",
    "x-data-parallel-host-port",
    "x-kv-cache-source-host-port",
)
TRANSFER_HEADERS: Final = frozenset(spelled.encode() for name in _HEADERS for spelled in (name, name.replace("-", "_")))
"""Fields of a head by which sidecars and gateways are sent elsewhere; some servers read an underscore as a hyphen."""

_NAMES: Final = (*TRANSFER_KEYS, REPORT_KEY)


def _spellings(names: tuple[str, ...]) -> re.Pattern[bytes]:
    """Names as keys of JSON whose value is not null, with any of their letters escaped."""
    spelled = (b"".join(rb"(?:%c|\\u00(?i:%02x))" % (letter, letter) for letter in name.encode()) for name in names)
    return re.compile(b'"(?:' + b"|".join(spelled) + rb')"[ \t\r\n]*+(?::[ \t\r\n]*+(?!null)|\Z)')


_STEP_BYTES: Final = 256 << 10
_LONGEST_BYTES: Final = 1 << 10
"""More than a name takes with all its letters escaped, and blanks behind it."""
_SPELLINGS: Final = {False: _spellings(_NAMES), True: _spellings((REPORT_KEY,))}
"""Names that are dropped, by whether those of transfers are trusted."""


def overriding_fields(body: Mapping[str, Any], long_texts: LongTexts, *, trusts_transfers: bool) -> tuple[bytes, ...]:
    """Fields, as JSON, that take the place of what a body says of these; empty where it says nothing of them."""
    dropped = (REPORT_KEY,) if trusts_transfers else _NAMES
    fields = [b'"%b":null' % key.encode() for key in dropped if body.get(key) is not None]
    for name in (*EXTRA_ARGS, SAMPLING):
        if isinstance(given := body.get(name), dict):
            kept = _without(given, dropped)
            if kept is not given:
                fields.append(b'"%b":%b' % (name.encode(), write_json(with_texts(kept, long_texts))))
    return tuple(fields)


def _without(given: dict[str, Any], dropped: tuple[str, ...]) -> dict[str, Any]:
    """The object without the keys, in it and in the objects of arguments in it; itself where it has none of them."""
    kept = _rest_of(given, dropped)
    for name in EXTRA_ARGS:
        if isinstance(inner := kept.get(name), dict) and (rest := _rest_of(inner, dropped)) is not inner:
            kept = {**kept, name: rest}
    return kept


def _rest_of(given: dict[str, Any], dropped: tuple[str, ...]) -> dict[str, Any]:
    if given.keys().isdisjoint(dropped):
        return given
    return {key: each for key, each in given.items() if key not in dropped}


def may_steer(body: bytes, *, trusts_transfers: bool) -> Generator[None, None, bool]:
    """Whether a body that was not read may have a key that steers an engine, in any encoding that engines detect; found
    in steps."""
    if b"\0" in body:
        body = body.replace(b"\0", b"")  # UTF-16 or UTF-32: no other JSON has this byte
    spellings = _SPELLINGS[trusts_transfers]
    for start in range(0, len(body), _STEP_BYTES):
        if spellings.search(body, start, start + _STEP_BYTES + _LONGEST_BYTES) is not None:
            return True
        yield
    return False
