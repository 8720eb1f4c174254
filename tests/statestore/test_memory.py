"""The state machine in memory has the calls of the contract: nothing but their names connects the two."""

from __future__ import annotations

import inspect

import pytest

from statestore.base import PoolStore
from statestore.memory import MemoryPool, PoolState

OWN = {name for name in vars(MemoryPool) if not name.startswith("_")}
CALLS = sorted({name for name, _ in inspect.getmembers(PoolStore, inspect.iscoroutinefunction)} - OWN)


def parameters(method: object) -> list[tuple[str, inspect._ParameterKind]]:
    assert callable(method)
    return [(each.name, each.kind) for each in inspect.signature(method).parameters.values()]


def test_calls_are_found() -> None:
    assert len(CALLS) > 30


@pytest.mark.parametrize("name", [name for name in CALLS if name != "now_ms"])
def test_the_state_takes_what_the_contract_gives(name: str) -> None:
    assert parameters(getattr(PoolState, name)) == parameters(getattr(PoolStore, name))
