"""Effects of vLLM's control endpoints on an engine, as far as the fleet has to know: by the path and the query.
Pure."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Final

_NO: Final = frozenset({"0", "false", "f", "no", "n", "off"})
"""Query values that vLLM's server reads as false."""


@dataclass(frozen=True, slots=True)
class Effect:
    """The effect of a call that succeeds."""

    empties_cache: bool = False
    """The engine's KV cache is empty. It publishes that with its next computing step only."""
    stops: bool = False
    """The engine computes nothing until another call."""


def effect_of(path: str, query: Mapping[str, str]) -> Effect:
    """The effect of a call by its path and its query, with vLLM's defaults."""
    if path in ("/reset_prefix_cache", "/release_kv_cache_memory"):
        return Effect(empties_cache=True)
    if path == "/pause":
        return Effect(empties_cache=query.get("clear_cache", "true").strip().lower() not in _NO, stops=True)
    if path == "/sleep":
        return Effect(empties_cache=query.get("level", "1").strip() != "0", stops=True)
    return Effect()
