"""Values of the hot path."""

from __future__ import annotations

import inspect
import pickle
from dataclasses import KW_ONLY, asdict, dataclass, field, fields, replace

import pytest

from dualmap.scheduling.values import documented, in_order, record, value


@value
class Tokens:
    count: int
    cached: int = 0
    samples: list[int] = field(default_factory=list)

    @property
    def uncached(self) -> int:
        return self.count - self.cached


@value
class Hashed:
    count: int
    cached: int = documented("tokens found in a cache", default=0)


@record
class Counts:
    pending: int = 0


def test_values_are_equal_and_hashed_by_their_fields() -> None:
    assert Hashed(3) == Hashed(3, 0) != Hashed(3, 1)
    assert len({Hashed(3), Hashed(3, 0), Hashed(4)}) == 2


def test_no_python_code_runs_to_make_a_value() -> None:
    assert not inspect.isfunction(Tokens.__init__)


def test_a_value_cannot_be_changed() -> None:
    with pytest.raises(AttributeError):
        Tokens(3).count = 4


def test_a_value_takes_no_field_that_it_does_not_declare() -> None:
    with pytest.raises(AttributeError):
        Tokens(3).other = 1  # type: ignore[attr-defined]


def test_a_mutable_default_belongs_to_one_value() -> None:
    assert Tokens(1).samples is not Tokens(1).samples


def test_a_value_keeps_its_methods() -> None:
    assert Tokens(3, 1).uncached == 2


def test_the_functions_of_dataclasses_take_values() -> None:
    tokens = replace(Tokens(3), cached=2)

    assert asdict(tokens) == {"count": 3, "cached": 2, "samples": []}
    assert fields(Hashed)[1].metadata["meaning"] == "tokens found in a cache"


def test_a_value_crosses_processes() -> None:
    assert pickle.loads(pickle.dumps(Hashed(3, 1))) == Hashed(3, 1)


def test_a_record_can_be_changed() -> None:
    counts = Counts()

    counts.pending += 2

    assert counts == Counts(2)


@dataclass(frozen=True, kw_only=True)
class Counted:
    pending: int = 0


@value
class Load(Counted):
    name: str
    _: KW_ONLY
    limit: int
    share: float = 0.5


def test_a_value_has_fields_by_name_its_own_and_those_of_its_base() -> None:
    load = Load("a", pending=3, limit=5)

    assert (load.name, load.pending, load.limit, load.share) == ("a", 3, 5, 0.5)
    with pytest.raises(TypeError):
        Load("a", 3, 5)


def test_a_value_is_made_of_its_fields_in_their_order() -> None:
    assert [each.name for each in fields(Load)] == ["name", "pending", "limit", "share"]

    assert in_order(Load, ["a", 3, 5]) == Load("a", pending=3, limit=5)
    assert in_order(Load, ("a", 3, 5, 0.1, "of a later version")) == Load("a", pending=3, limit=5, share=0.1)
    with pytest.raises(ValueError, match="length 3"):
        in_order(Load, ["a", 3])
