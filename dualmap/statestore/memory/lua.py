"""Functions as a Redis server runs them, with the Lua of Redis: version 5.1, ``redis.call``, ``cjson.decode``, and of
``struct`` the formats that the scripts use."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from functools import cache
from struct import Struct
from typing import Any

import orjson
from lupa import lua51  # type: ignore[import-untyped]

from dualmap.statestore.pool.replies import reply_error

_REDIS = b"""
local call, decode, pack, unpack_all, register = ...
redis = { call = call, error_reply = function(message) return { err = message } end, register_function = register }
cjson = { decode = decode }
struct = { pack = pack, unpack = function(format, text, at) return unpack(unpack_all(format, text, at or 1)) end }
"""

_NUMBERS = (int, float)


@cache
def _struct(form: bytes) -> Struct:
    """The struct of a format: Python has the letters of Lua's that the scripts use, where it begins with '<'."""
    return Struct(form)


def _packed(form: bytes, *figures: float) -> bytes:
    kinds = form.lstrip(b"<").decode()
    return _struct(form).pack(*[int(each) if kind in "BH" else each for kind, each in zip(kinds, figures, strict=True)])


def _unpacked(form: bytes, text: bytes, at: int) -> list[Any]:
    """The values of a text from a place on, and the place behind them. 'c0' is a text whose length comes before."""
    counted = form.removesuffix(b"c0")
    packed = _struct(counted)
    *found, last = packed.unpack_from(text, at - 1)
    end = at + packed.size
    return [*found, last, end] if counted == form else [*found, text[end - 1 : end - 1 + last], end + last]


class LuaFunctions:
    """Functions by their names, in one interpreter."""

    def __init__(self, call: Callable[..., Any]) -> None:
        """``call`` runs a command."""
        self._lua = lua51.LuaRuntime(encoding=None, register_eval=False, register_builtins=False)
        self._functions: dict[str, Callable[[Any, Any], Any]] = {}
        table = self._lua.table_from

        def call_from_lua(*words: Any) -> Any:
            reply = call(*words)
            if reply is None:
                return False
            return table([False if each is None else each for each in reply]) if isinstance(reply, list) else reply

        def register(name: bytes, function: Callable[[Any, Any], Any]) -> None:
            self._functions[name.decode()] = function

        def unpack_all(form: bytes, text: bytes, at: float) -> Any:
            return table(_unpacked(form, text, int(at)))

        self._lua.execute(
            _REDIS, call_from_lua, lambda text: self._given(orjson.loads(text)), _packed, unpack_all, register
        )

    def load(self, library: str) -> None:
        """Register the functions of a library, whose first line names it."""
        self._lua.execute(library.partition("\n")[2].encode())

    def call(self, name: str, key: bytes, arguments: Sequence[bytes]) -> Any:
        """The reply.

        Raises:
            StoreError: the function replied an error.
        """
        table = self._lua.table_from
        return self._reply(self._functions[name](table([key]), table(arguments)))

    def _given(self, value: Any) -> Any:
        """Convert a value for Lua, whose strings are bytes."""
        kind = type(value)
        if kind is str:
            return value.encode()
        if kind is dict:
            names, values = map(str.encode, value), self._given_each(value.values())
            return self._lua.table_from(dict(zip(names, values, strict=True)))
        return self._lua.table_from(self._given_each(value)) if kind is list else value

    def _given_each(self, values: Iterable[Any]) -> list[Any]:
        return [each if type(each) in _NUMBERS else self._given(each) for each in values]

    def _reply(self, value: Any) -> Any:
        """Convert a value from Lua as Redis does: numbers are cut, a table ends at its first nil."""
        if value is False:
            return None
        if isinstance(value, float) or value is True:
            return int(value)
        if lua51.lua_type(value) != "table":
            return value
        if (error := value[b"err"]) is not None:
            raise reply_error(error.decode())
        found = []
        for place in range(1, len(value) + 1):
            if (each := value[place]) is None:
                break
            found.append(self._reply(each))
        return found
