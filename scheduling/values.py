"""Values that are made for every request: frozen for the type checker, plain slots at run time.

A frozen dataclass sets each field by a call of ``object.__setattr__``, which makes an ``InstanceLoad`` cost six times
as much as the same class unfrozen. Nobody assigns to a field of a value either way: the type checker says so.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TypeVar, dataclass_transform

T = TypeVar("T")


@dataclass_transform(frozen_default=True, field_specifiers=(field,))
def value(cls: type[T]) -> type[T]:
    """A dataclass with slots, equal and hashed by its fields, to which only its constructor assigns."""
    return dataclass(slots=True, unsafe_hash=True)(cls)
