"""The weights of a pool's revisions, the homes of its sessions, and who changed what."""

from __future__ import annotations

import secrets
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Final

from dualmap.scheduling.revisions.rollout import Move, Rollout
from dualmap.scheduling.revisions.weights import NO_WEIGHTS, Home, RevisionWeights
from dualmap.scheduling.values import value
from dualmap.statestore.pool.calls import Command
from dualmap.statestore.pool.changes import Change, Changes
from dualmap.statestore.pool.logs import last_logged, logged
from dualmap.statestore.pool.readable import checks_replies, is_readable

MAX_HOMES: Final = 250_000
"""Homes in one generation; there are two. Kept while revisions have weights, some 40 MB then at most."""
KEPT_CHANGES: Final = 1000
WEIGHTS: Final = "weights"
ROLLOUT: Final = "rollout"
"""Fields of the key ``revisions``."""


@value
class RevisionChange:
    """A change of the weights, for people."""

    at_ms: int
    by: str
    text: str


class Revisions(Changes):
    """The revisions of a pool."""

    @checks_replies
    async def weights(self) -> RevisionWeights:
        """The weights as they are now."""
        return weights_from(await self._calls.command("HGET", self._keys.revisions, WEIGHTS))

    @checks_replies
    async def change(
        self,
        changed: Callable[[RevisionWeights], RevisionWeights],
        text: str,
        *,
        by: str,
        fence: int | None = None,
    ) -> RevisionWeights:
        """Change the weights as follows from what they are, in one step; returns the new ones. ``changed`` may raise:
        then nothing is. The epoch grows, so that every replica knows it soon. ``text`` goes to the log of changes."""
        keys, key = self._keys, self._keys.revisions

        async def derive() -> tuple[RevisionWeights, Change]:
            known = await self._calls.command("HGET", key, WEIGHTS)
            wanted = _salted(changed(weights_from(known)))
            line = RevisionChange(await self._calls.now_ms(), by, text)
            commands: list[Command] = [
                ("HSET", key, WEIGHTS, wanted.text()) if wanted.in_force else ("HDEL", key, WEIGHTS),
                *logged(keys.revisions_history, line, KEPT_CHANGES),
                ("HINCRBY", keys.meta, "epoch", 1),
            ]
            if not wanted.in_force:
                commands.append(("UNLINK", keys.homes_new, keys.homes_old))
            return wanted, Change(commands, ((key, WEIGHTS, known),), fence)

        return await self._derive(derive)

    @checks_replies
    async def rollout(self) -> Rollout | None:
        """The rollout that runs, or the last one; None: there was none."""
        return rollout_from(await self._calls.command("HGET", self._keys.revisions, ROLLOUT))

    @checks_replies
    async def conduct(
        self,
        planned: Callable[[Rollout | None, RevisionWeights, int], Move | None],
        *,
        by: str,
        fence: int | None = None,
    ) -> Move | None:
        """Move the rollout as ``planned`` from what it and the weights are, and the time, in one step; None where
        nothing is planned. ``planned`` may raise: then nothing changes. A move that says something goes to the log."""
        keys, key = self._keys, self._keys.revisions

        async def derive() -> tuple[Move | None, Change]:
            texts = await self._calls.together([("HGET", key, WEIGHTS), ("HGET", key, ROLLOUT)])
            now_ms, weights = await self._calls.now_ms(), weights_from(texts[0])
            move = planned(rollout_from(texts[1]), weights, now_ms)
            if move is None:
                return None, Change()
            commands: list[Command] = [("HSET", key, ROLLOUT, move.rollout.text())]
            if move.weights != weights:
                move = replace(move, weights=_salted(move.weights))
                commands += (("HSET", key, WEIGHTS, move.weights.text()), ("HINCRBY", keys.meta, "epoch", 1))
            if move.text:
                commands += logged(keys.revisions_history, RevisionChange(now_ms, by, move.text), KEPT_CHANGES)
            return move, Change(commands, ((key, WEIGHTS, texts[0]), (key, ROLLOUT, texts[1])), fence)

        return await self._derive(derive)

    @checks_replies
    async def restore(self, weights: RevisionWeights, rollout: Rollout | None) -> int:
        """Enter weights and a rollout that the store has lost; what it has stays. Returns how many of the two were
        entered."""
        restored = 0
        if weights.in_force:
            restored += await self._restored(WEIGHTS, weights.text(), ("HINCRBY", self._keys.meta, "epoch", 1))
        if rollout is not None:  # the second one, as a rollout without its weights would be paused
            restored += await self._restored(ROLLOUT, rollout.text())
        return restored

    async def _restored(self, name: str, text: bytes, *more: Command) -> bool:
        key = self._keys.revisions
        return await self._make(Change((("HSET", key, name, text), *more), ((key, name, None),))) is not None

    @checks_replies
    async def history(self, limit: int) -> Sequence[RevisionChange]:
        """The last changes, the latest first."""
        return await last_logged(self._calls, self._keys.revisions_history, RevisionChange, limit)

    @checks_replies
    async def home(self, session: str) -> Home | None:
        """The home of a session; None where none is known. One of the older generation is kept on in the newer."""
        newer, older = self._keys.homes_new, self._keys.homes_old
        kept = await self._calls.together([("HGET", newer, session), ("HGET", older, session)])
        text = kept[0] or kept[1]
        if text is None:
            return None
        if kept[0] is None:
            await self._make(Change((("HSETNX", newer, session, text),)))
        return Home.parse(text.decode(errors="replace"))

    @checks_replies
    async def settle(self, session: str, home: Home, former: Home | None) -> Home:
        """Give a session a home in place of the ``former`` one, unless another request of it was faster; returns the
        home that it has then."""
        key, former_text = self._keys.homes_new, None if former is None else former.text.encode()
        commands: tuple[Command, ...] = (("HSET", key, session, home.text), ("HLEN", key))
        made = await self._make(Change(commands, ((key, session, former_text),)))
        if made is None:
            return await self.home(session) or home
        if made[-1] > MAX_HOMES:
            await self._make(Change((("RENAME", key, self._keys.homes_old),)))
        return home


def _salted(weights: RevisionWeights) -> RevisionWeights:
    """The weights with a salt, which stays as long as revisions have weights."""
    return weights if weights.salt else replace(weights, salt=secrets.token_hex(8))


def rollout_from(text: bytes | None) -> Rollout | None:
    """The rollout in the record; None where there is none that can be read."""
    if text is None or not is_readable(lambda: Rollout.parse(text)):
        return None
    return Rollout.parse(text)


def weights_from(text: bytes | None) -> RevisionWeights:
    """The weights in the record; none where there is no record that can be read."""
    if text is None or not is_readable(lambda: RevisionWeights.parse(text)):
        return NO_WEIGHTS
    return RevisionWeights.parse(text)
