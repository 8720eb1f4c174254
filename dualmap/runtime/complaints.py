"""Pydantic's complaints about a value, in words that say what to write instead."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

from dualmap.runtime.spelling import did_you_mean
from dualmap.runtime.tenant_settings import NAME_IN_WORDS, NAME_PATTERN


def in_words(detail: Mapping[str, Any], known: Iterable[str] = ()) -> str:
    """One of pydantic's errors in words, without its place; ``known`` are names that an unknown one may have meant."""
    if detail["type"] == "extra_forbidden":
        return f"there is no such field{did_you_mean(str(detail['loc'][-1]), known)}"
    if detail["type"] == "string_pattern_mismatch" and detail["ctx"]["pattern"] == NAME_PATTERN:
        return f"a name has {NAME_IN_WORDS}"
    return str(detail["msg"]).removeprefix("Value error, ")
