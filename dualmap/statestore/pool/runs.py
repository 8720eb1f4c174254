"""The ledger of a pool's runs: turns that may go, and those that wait for memory."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from enum import IntEnum
from typing import Final

import orjson
from xxhash import xxh3_64_hexdigest

from dualmap.scheduling.prompts.chain import SAMPLE_TOKENS
from dualmap.scheduling.runs.turn import AgentRecord, RunRecord, Turn
from dualmap.scheduling.values import value
from dualmap.statestore.call_values import RunMemory
from dualmap.statestore.pool.calls import Argument
from dualmap.statestore.pool.changes import Changes
from dualmap.statestore.pool.codec import pairs_from
from dualmap.statestore.pool.readable import checks_replies, count_from
from dualmap.statestore.records import pack_chain

MAX_TURNS: Final = 32
"""Most turns in one script call: a script stops everything else."""
_SHOWN: Final = 1000
"""Runs that are read for people at most, those that were seen last."""


class TurnStatus(IntEnum):
    """The reply to a turn."""

    WAITS = 0
    GOES = 1
    REFUSED = 2
    """Too many turns of its run wait already."""


@value
class RunLedger:
    """The figures of a pool's runs."""

    memory: RunMemory
    ended_runs: int
    """Runs that gave way by silence."""
    mean_service: float
    """Mean service of these, token-seconds."""
    runs: tuple[RunRecord, ...]
    """Those that were seen last, the last one first."""
    now_ms: int


class Runs(Changes):
    """The calls about runs."""

    @checks_replies
    async def admit(self, turns: Sequence[Turn], capacity_tokens: int) -> list[TurnStatus]:
        """Enter turns, and return for each whether it goes. A repetition changes nothing, and reports the turn as it
        is; one that the store has lost is entered again. Each turn that goes later is announced to its replica
        (``on_turn``). A turn is over by a release that names it (``PoolStore.release``)."""
        found: list[TurnStatus] = []
        for first in range(0, len(turns), MAX_TURNS):
            words: list[Argument] = [capacity_tokens]
            for turn in turns[first : first + MAX_TURNS]:
                words += (turn_json(turn), pack_chain(turn.chain.hashes))
            found += map(TurnStatus, await self._run("admit_turns", *words))
        return found

    def on_turn(self, replica_id: str, deliver: Callable[[str], None]) -> None:
        """Have ``deliver`` called with the id of each turn of a replica that goes after it has waited. Some calls may
        be lost with a connection; ``admit`` is authoritative."""
        self._calls.listen(self._keys.turns(replica_id), lambda text: deliver(text.decode(errors="replace")))

    async def turns_of(self, replica_id: str) -> list[str]:
        """The ids of the turns of a replica that are not over, sorted."""
        keys: Sequence[bytes] = await self._calls.command("HKEYS", self._keys.run_turns)
        own = f"{replica_id} ".encode()
        return sorted(key.removeprefix(own).decode(errors="replace") for key in keys if key.startswith(own))

    @checks_replies
    async def ledger(self) -> RunLedger:
        """The figures of all runs, and those runs that were seen last; for people."""
        keys = self._keys
        figures, names = await self._calls.together(
            [("HGETALL", keys.runs), ("ZREVRANGE", keys.runs_seen, 0, _SHOWN - 1)]
        )
        now_ms = await self._calls.now_ms()
        found = await self._calls.together([("HGETALL", keys.run(name.decode())) for name in names]) if names else []
        known = pairs_from(figures)
        runs = [_run_from(name.decode(), pairs_from(flat)) for name, flat in zip(names, found, strict=True) if flat]
        ended, mean_service = count_from(known.get(b"ended_runs", b"0")), float(known.get(b"mean_service", b"0"))
        return RunLedger(run_memory_from(known), ended, mean_service, tuple(runs), now_ms)


def run_memory_from(figures: Mapping[bytes, bytes]) -> RunMemory:
    """The memory of runs by the figures of the ledger."""
    counts = [figures.get(name, b"0") for name in (b"used_tokens", b"capacity_tokens", b"waiting_turns")]
    return RunMemory(*map(count_from, counts))


def turn_json(turn: Turn) -> bytes:
    """The turn as scripts take it, without its chain."""
    name, chain, share = turn.name, turn.chain, turn.share
    about = {
        "id": turn.turn_id,
        "replica_id": turn.replica_id,
        "run": name.run,
        "branch": name.branch or name.run,
        "parent": name.parent,
        "tenant": turn.tenant,
        "scope": xxh3_64_hexdigest(turn.tenant.encode()) if turn.tenant else "",
        "prompt": f"{chain.hashes[-1] if chain.tail_hash is None else chain.tail_hash:016x}",
        "tokens": turn.stored_tokens + chain.prompt_tokens,
        "stored_tokens": turn.stored_tokens,
        "waits_ms": round(turn.waits_s * 1000),
        "stride": SAMPLE_TOKENS // chain.block_tokens or 1,
        "block_tokens": chain.block_tokens,
    }
    if share is not None:
        about["share"] = (share.name, share.weight, share.instances)
    return orjson.dumps(about)


def _run_from(name: str, fields: dict[bytes, bytes]) -> RunRecord:
    texts = {each.decode(errors="replace"): text.decode(errors="replace") for each, text in fields.items()}
    waits = [int(text) for each, text in texts.items() if each.startswith("waits:")]
    agents = [_agent_from(each, text) for each, text in texts.items() if each.startswith("branch:")]

    def number(field: str) -> float:
        return float(texts.get(field, 0))

    return RunRecord(
        name,
        tenant=texts.get("tenant", ""),
        parent=texts.get("parent", ""),
        home=texts.get("home", ""),
        active=bool(number("active")),
        tokens=int(number("tokens")),
        busy=int(number("busy")),
        turns=int(number("turns")),
        output_tokens=int(number("output_tokens")),
        service=number("service"),
        charged_ms=int(number("charged_ms")),
        quantum_from=number("quantum_from"),
        interrupted=bool(number("interrupted")),
        begun_ms=int(number("begun_ms")),
        seen_ms=int(number("seen_ms")),
        level=int(number("level")),
        latest_ms=int(number("latest_ms")),
        parked_ms=int(number("parked_ms")),
        prefill_ms=int(number("prefill_ms")),
        decode_ms=int(number("decode_ms")),
        tool_ms=int(number("tool_ms")),
        agents=tuple(sorted(agents, key=lambda agent: (-agent.seen_ms, agent.name))),
        waiting=len(waits),
        waits_since_ms=min(waits, default=0),
    )


def _agent_from(field: str, text: str) -> AgentRecord:
    tokens, _shared, seen_ms, busy = map(int, text.split())
    return AgentRecord(field.removeprefix("branch:"), tokens, seen_ms, busy)
