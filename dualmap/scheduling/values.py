"""Values and records that are made for every request: dataclasses to readers and to the type checker, built in C.

The constructor that ``dataclass`` writes is Python and assigns field by field, which a request would pay for at each of
the many objects that it makes. ``msgspec`` makes the same classes with a constructor in C.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import MISSING, Field, dataclass, field, fields, is_dataclass
from typing import Any, Final, Protocol, TypeVar, dataclass_transform

import msgspec
import msgspec.structs

T = TypeVar("T")

_REPLACED = frozenset({"__dict__", "__weakref__", "__slots__"})


def documented(
    meaning: str, *, default: Any = MISSING, reported: bool = False, added: bool = False, sparse: bool = False
) -> Any:
    """A field with its meaning for the reference of Redis keys.

    ``reported`` marks what its replica reports once, when the request is placed, and what never changes afterwards.
    ``added`` marks what the oldest version beside this one does not write: it is the default then. ``sparse`` marks
    what is ``added`` for good: a record in which all that are sparse are 0 is written without them.
    """
    marks = {"reported": reported, "added": added or sparse, "sparse": sparse}
    return field(default=default, metadata={"meaning": meaning, **marks})


@dataclass_transform(frozen_default=True, field_specifiers=(field, documented))
def value(cls: type[T]) -> type[T]:
    """A frozen class with slots, equal and hashed by its fields.

    ``fields``, ``replace`` and ``asdict`` of ``dataclasses`` take it. Of the options of a field, ``default``,
    ``default_factory`` and ``metadata`` count. Fields behind ``_: KW_ONLY`` are given by name alone.
    msgspec encodes it as an array of its fields. It may have bases without fields, such as a protocol of its methods,
    and has the fields of ``dataclass(kw_only=True)`` bases, of which it is no instance, by name alone too.
    """
    return _made(cls, frozen=True)


@dataclass_transform(field_specifiers=(field,))
def record(cls: type[T]) -> type[T]:
    """Make a class like ``value`` does, but not frozen and without a hash."""
    return _made(cls, frozen=False)


def in_order(cls: type[T], values: Sequence[Any]) -> T:
    """The value of these fields in their declared order, also of those that are given by name otherwise: for what was
    written in that order. Fields at the end may be missing where they have defaults; further values are dropped."""
    return msgspec.convert(values, cls)


class _Replace(Protocol):
    def __call__(self, original: T, /, **changes: Any) -> T: ...


replaced: Final[_Replace] = msgspec.structs.replace  # type: ignore[assignment]  # the classes above are its structs
"""A copy of a value or record with other values in some fields: as ``dataclasses.replace``, but built in C."""


def _made(cls: type[T], *, frozen: bool) -> type[T]:
    own = dict(cls.__dict__)
    declared = fields(dataclass(init=False, repr=False, eq=False, frozen=frozen)(cls))  # type: ignore[arg-type]
    described = sorted(declared, key=lambda each: each.kw_only is True)
    named = [each for each in described if each.kw_only is True]
    names = _REPLACED | {each.name for each in described}
    bases: tuple[Any, ...] = (*(each for each in cls.__bases__ if each is not object and not is_dataclass(each)),)
    options: dict[str, Any] = {"module": cls.__module__, "frozen": frozen, "array_like": True}
    if named:  # msgspec has them by class
        placed = [_declared(each) for each in described if each not in named]
        bases = (*bases, msgspec.defstruct(f"_{cls.__name__}", placed, bases=(msgspec.Struct,), **options))
    else:
        bases = (*bases, msgspec.Struct)
    made: Any = msgspec.defstruct(
        cls.__name__,
        [_declared(each) for each in named or described],
        bases=bases,
        namespace={name: each for name, each in own.items() if name not in names},
        kw_only=bool(named),
        **options,
    )
    made.__qualname__ = cls.__qualname__
    made.__dataclass_fields__ = {each.name: each for each in described}
    return made  # type: ignore[no-any-return]


def _declared(described: Field[Any]) -> Any:
    """A field as msgspec takes it. Types are for the type checker alone."""
    if described.default is not MISSING:
        return described.name, Any, described.default
    if described.default_factory is not MISSING:
        return described.name, Any, msgspec.field(default_factory=described.default_factory)
    return described.name, Any
