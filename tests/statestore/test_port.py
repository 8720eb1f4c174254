"""A pool as its callers see it: types say which calls there are, and to read is to change nothing."""

from __future__ import annotations

import ast
import copy
from pathlib import Path

import pytest

from dualmap.scheduling.steps import at_once
from dualmap.statestore.memory import MemoryStore
from dualmap.statestore.pool import PoolStore
from dualmap.statestore.pool.changes import Changes
from dualmap.statestore.port import ReplicaPool
from tests.statestore.samples import SCHEDULING, instance

ROOT = Path(__file__).resolve().parents[2]


def state_of(pool: PoolStore) -> dict[str, object]:
    """Return what the pool and its parts hold beside each other."""
    parts = {"": pool, **{name: part for name, part in vars(pool).items() if isinstance(part, Changes)}}
    return {
        f"{name}.{field}": copy.copy(held) if isinstance(held, dict) else held
        for name, part in parts.items()
        for field, held in vars(part).items()
        if not isinstance(held, Changes)
    }


def test_a_pool_is_what_a_replica_needs() -> None:
    pool: ReplicaPool = MemoryStore(SCHEDULING).pool("default")
    assert pool.name == "default"


async def test_reading_the_members_changes_nothing_but_what_is_known_of_their_texts() -> None:
    pool = MemoryStore(SCHEDULING).pool("default")
    await pool.members.put_instance(instance("a"))
    await pool.settings.change({"queue_order": "fifo"}, by="an operator")
    before = state_of(pool)

    assert (await pool.membership()).overrides == {"queue_order": "fifo"}

    after = state_of(pool)
    assert after.keys() == before.keys()
    assert {name for name in after if after[name] != before[name]} == {"_views._read"}


@pytest.mark.parametrize("room", ["scheduling", "statestore", "router", "workers"])
def test_no_class_answers_for_names_that_it_does_not_define(room: str) -> None:
    """Such a class is ``Any`` to the type checker, and go-to-definition ends at it."""
    found = [
        f"{path.relative_to(ROOT)}:{node.lineno}"
        for path in sorted((ROOT / room).rglob("*.py"))
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8")))
        if isinstance(node, ast.FunctionDef) and node.name in ("__getattr__", "__getattribute__")
    ]
    assert found == []


def test_a_call_of_a_part_needs_no_loop_where_the_store_is_in_the_process() -> None:
    pool = MemoryStore(SCHEDULING).pool("default")
    at_once(pool.members.put_instance(instance("a")))
    assert [*at_once(pool.loads())] == ["a"]
