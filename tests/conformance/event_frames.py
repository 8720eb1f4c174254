"""A server's KV events, as the frames that come."""

from __future__ import annotations

import asyncio
import struct
from typing import Any, Final

import msgpack  # type: ignore[import-untyped]
import zmq
import zmq.asyncio

BLOCK_TOKENS: Final = 32
END: Final = b"\xff" * 8
Frames = list[bytes]


class Events:
    """A subscription, and replays, as plain frames."""

    def __init__(self, endpoint: str, replay_endpoint: str) -> None:
        self._context = zmq.asyncio.Context()
        self._replay_endpoint = replay_endpoint
        self._subscription: Any = self._context.socket(zmq.SUB)
        self._subscription.subscribe(b"")
        self._subscription.connect(endpoint)

    async def next(self, timeout_s: float) -> Frames | None:
        if not await self._subscription.poll(round(timeout_s * 1000)):
            return None
        return list(await self._subscription.recv_multipart())

    async def replay(self, first: int) -> list[Frames]:
        """All answers, the last one included."""
        socket: Any = self._context.socket(zmq.DEALER)
        answers: list[Frames] = []
        try:
            socket.connect(self._replay_endpoint)
            await socket.send_multipart([b"", struct.pack(">Q", first)])
            async with asyncio.timeout(20):
                while not answers or answers[-1][-2] != END:
                    answers.append(await socket.recv_multipart())
        finally:
            socket.close(0)
        return answers

    async def stored(self, prompt: list[int]) -> list[dict[str, Any]]:
        """The events of a replay that have blocks of the prompt, once all of its full blocks are there."""
        whole, own = len(prompt) // BLOCK_TOKENS, frozenset(prompt)
        async with asyncio.timeout(20):
            while True:
                events = [event for frames in (await self.replay(0))[:-1] for event in msgpack.unpackb(frames[-1])[1]]
                found = [each for each in events if each["type"] == "BlockStored" and own.issuperset(each["token_ids"])]
                if sum(len(each["block_hashes"]) for each in found) >= whole:
                    return found
                await asyncio.sleep(0.05)

    def close(self) -> None:
        self._context.destroy(linger=0)
