"""Functions as a Redis server runs them, with the Lua of Redis: version 5.1, ``redis.call``, ``cjson.decode``, and of
``struct`` the formats that the scripts use."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import cache
from struct import Struct
from typing import Any

import orjson
from lupa import lua51  # type: ignore[import-untyped]

from dualmap.statestore.pool.replies import reply_error

_REDIS = b"""
local call, decode, pack, unpack_all, register, spread_limit = ...
redis = { call = call, error_reply = function(message) return { err = message } end, register_function = register }
cjson = { decode = decode }
struct = { pack = pack, unpack = function(format, text, at) return unpack(unpack_all(format, text, at or 1)) end }

-- The error that a table is, or false, its length, and its entries from a place on, so many at most.
local function spread(list, first)
  return list.err or false, #list, unpack(list, first, math.min(#list, first + spread_limit - 1))
end

-- The reply of a function: of a table the table, and what it has.
local function run(called, key, arguments)
  local reply = called({ key }, arguments)
  if type(reply) == 'table' then
    return reply, spread(reply, 1)
  end
  return reply
end

return run, spread
"""

_NUMBERS = (int, float)
_SPREAD = 1000
"""Entries of a table that Lua hands over at once: its stack has room for some thousand."""


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

    def __init__(self, commands: Mapping[bytes, Callable[..., Any]]) -> None:
        """``commands`` by their names, for the functions to call."""
        self._lua = lua51.LuaRuntime(encoding=None, register_eval=False, register_builtins=False)
        self._functions: dict[str, Callable[[Any, Any], Any]] = {}
        table = self._table = self._lua.table_from

        def call(name: bytes, *words: Any) -> Any:
            reply = commands[name](*words)
            if type(reply) is list:
                return table([False if each is None else each for each in reply])
            return False if reply is None else reply

        def register(name: bytes, function: Callable[[Any, Any], Any]) -> None:
            self._functions[name.decode()] = function

        def unpack_all(form: bytes, text: bytes, at: float) -> Any:
            return table(_unpacked(form, text, int(at)))

        self._run, self._spread = self._lua.execute(
            _REDIS, call, lambda text: self._given(orjson.loads(text)), _packed, unpack_all, register, _SPREAD
        )

    def load(self, library: str) -> None:
        """Register the functions of a library, whose first line names it."""
        self._lua.execute(library.partition("\n")[2].encode())

    def call(self, name: str, key: bytes, arguments: Sequence[bytes]) -> Any:
        """The reply.

        Raises:
            StoreError: the function replied an error.
        """
        reply = self._run(self._functions[name], key, self._table(arguments))
        return self._list(*reply) if type(reply) is tuple else self._reply(reply)

    def _given(self, value: Any) -> Any:
        """Convert a value for Lua, whose strings are bytes."""
        kind = type(value)
        if kind is str:
            return value.encode()
        if kind is dict:
            return self._table(dict(zip(map(str.encode, value), self._given_each(value.values()), strict=True)))
        return self._table(self._given_each(value)) if kind is list else value

    def _given_each(self, values: Iterable[Any]) -> list[Any]:
        return [
            each if type(each) in _NUMBERS else each.encode() if type(each) is str else self._given(each)
            for each in values
        ]

    def _reply(self, value: Any) -> Any:
        """Convert a value from Lua as Redis does: numbers are cut, a table ends at its first nil."""
        kind = type(value)
        if kind is bytes or kind is int or value is None:
            return value
        if value is False:
            return None
        return int(value) if kind is float or kind is bool else self._list(value, *self._spread(value, 1))

    def _list(self, table: Any, error: Any, length: int, *entries: Any) -> list[Any]:
        """Convert a table from Lua, of which the first entries are here."""
        if error is not False:
            raise reply_error(error.decode())
        found = [*entries]
        while len(found) < length:
            found += self._spread(table, len(found) + 1)[2:]
        if None in found:
            del found[found.index(None) :]
        return [*map(self._reply, found)]
