"""The store contract: what instances have stored for conversations, on every backend."""

from __future__ import annotations

import pytest

from dualmap.statestore.pool import PoolStore, stored_responses
from dualmap.statestore.pool.stored_responses import StoredConversation
from tests.statestore.samples import assert_sums_hold, finish, first_token, instance, place


async def test_the_length_of_a_stored_response_is_known_until_many_others_came(
    pool: PoolStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(stored_responses, "STORED_RESPONSES", 3)
    await pool.responses.keep("first", StoredConversation(70))
    for number in range(3):
        await pool.responses.keep(f"other {number}", StoredConversation(number + 1))
    await pool.responses.keep("other 1", StoredConversation(9))

    async def tokens(name: str) -> int:
        return (await pool.responses.conversation(name)).tokens

    found = [await tokens(name) for name in ("first", "other 0", "other 1", "other 2", "never")]
    assert found == [70, 1, 9, 3, 0]
    await pool.responses.keep("last", StoredConversation(5))
    assert [await tokens(name) for name in ("first", "other 2", "last")] == [0, 3, 5]


async def test_the_run_of_a_stored_response_is_known_with_its_length(pool: PoolStore) -> None:
    await pool.responses.keep("of a run", StoredConversation(70, "0a1b"))
    await pool.responses.keep("of none", StoredConversation(9))

    assert await pool.responses.conversation("of a run") == StoredConversation(70, "0a1b")
    assert await pool.responses.conversation("of none") == StoredConversation(9)


async def test_a_stored_conversation_takes_kv_memory_and_no_prefill(pool: PoolStore) -> None:
    await pool.members.put_instance(instance("a"))
    await place(pool, "r", "a", tokens=400, stored_tokens=3000, pinned=True)

    load = (await pool.loads())["a"]
    assert (load.pending_tokens, load.context_tokens) == (400, 3000 + 400 + 50)
    await assert_sums_hold(pool)
    await first_token(pool, "r", "a")
    assert (await pool.loads())["a"].context_tokens == 3450
    await finish(pool, "r")
    assert (await pool.loads())["a"].context_tokens == 0
