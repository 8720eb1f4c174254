"""Values that are made for every request: frozen for the type checker, plain slots at run time.

A frozen dataclass sets each field by a call of ``object.__setattr__``, which makes an ``InstanceLoad`` cost six times
as much as the same class unfrozen. The type checker forbids assignment to a field of a value in any case.
"""

from __future__ import annotations

from dataclasses import MISSING, dataclass, field
from typing import Any, TypeVar, dataclass_transform

T = TypeVar("T")


def documented(meaning: str, *, default: Any = MISSING, told: bool = False) -> Any:
    """A field whose meaning the reference of Redis keys repeats; ``told`` once and for all by the one who makes it."""
    return field(default=default, metadata={"meaning": meaning, "told": told})


@dataclass_transform(frozen_default=True, field_specifiers=(field, documented))
def value(cls: type[T]) -> type[T]:
    """A dataclass with slots, equal and hashed by its fields, to which only its constructor assigns."""
    return dataclass(slots=True, unsafe_hash=True)(cls)
