"""KV events as vLLM publishes them over ZeroMQ: a PUB socket, and a ROUTER socket that replays the last batches.

Frames and payload are those of vLLM 0.32: ``[topic, sequence, payload]``, the payload ``[time, [event, …], rank]`` with
events as maps. A replay is requested by ``[b"", first sequence]``, and answered by ``[b"", topic, sequence, payload]``
for every batch that is kept, then one with the sequence 2^64 - 1.
"""

from __future__ import annotations

import asyncio
import struct
from collections import deque
from collections.abc import Mapping, Sequence
from typing import Any

import msgpack  # type: ignore[import-untyped]
import zmq
import zmq.asyncio

KEPT_BATCHES = 10_000
"""Batches kept for a replay; vLLM's default."""
_SEQUENCE = struct.Struct(">Q")
_END = b"\xff" * 8

Event = Mapping[str, Any] | Sequence[Any]


class KvEventPublisher:
    """Listens from its creation on, inside a running event loop.

    Raises:
        OSError: an endpoint is taken.
    """

    def __init__(
        self,
        endpoint: str,
        replay_endpoint: str | None = None,
        topic: str = "",
        *,
        rank: int = 0,
        kept_batches: int = KEPT_BATCHES,
        replays_topic: bool = True,
        replay_room: int | None = None,
    ) -> None:
        """A port 0 picks a free one. ``replays_topic``: as releases since 2026 answer a replay. ``replay_room``: only
        so many batches of a replay arrive, and its last one, as when a socket drops what it has no room for."""
        self.topic = topic
        self._topic = topic.encode()
        self._rank = rank
        self._replays_topic = replays_topic
        self._replay_room = replay_room
        self._kept: deque[tuple[int, bytes]] = deque(maxlen=kept_batches)
        self._sequence = 0
        self._context = zmq.asyncio.Context()
        self._sockets: list[Any] = []
        pub = self._bound(zmq.PUB, endpoint)
        self._pub: zmq.Socket[bytes] = zmq.Socket.shadow(pub.underlying)
        self.endpoint = pub.getsockopt_string(zmq.LAST_ENDPOINT)
        self.replay_endpoint: str | None = None
        self._replays: asyncio.Task[None] | None = None
        if replay_endpoint is not None:
            router = self._bound(zmq.ROUTER, replay_endpoint)
            self.replay_endpoint = router.getsockopt_string(zmq.LAST_ENDPOINT)
            self._replays = asyncio.get_running_loop().create_task(self._serve_replays(router))

    def publish(self, events: Sequence[Event], published_s: float) -> int:
        """One batch; its sequence. Subscribers that are not connected miss it."""
        sequence, self._sequence = self._sequence, self._sequence + 1
        payload = msgpack.packb([published_s, events, self._rank])
        self._kept.append((sequence, payload))
        self._pub.send_multipart([self._topic, _SEQUENCE.pack(sequence), payload], zmq.NOBLOCK)
        return sequence

    def lose(self, events: Sequence[Event], published_s: float) -> None:
        """Publish a batch that no subscriber receives, as if the network had lost it; a replay has it."""
        sequence, self._sequence = self._sequence, self._sequence + 1
        self._kept.append((sequence, msgpack.packb([published_s, events, self._rank])))

    async def close(self) -> None:
        if self._replays is not None:
            self._replays.cancel()
            await asyncio.gather(self._replays, return_exceptions=True)
        for socket in self._sockets:
            socket.close(0)
        self._context.destroy(linger=0)

    def _bound(self, kind: int, endpoint: str) -> Any:
        socket = self._context.socket(kind)
        self._sockets.append(socket)
        try:
            socket.setsockopt(zmq.LINGER, 0)
            socket.setsockopt(zmq.IPV6, 1)
            socket.set_hwm(100_000)
            socket.bind(endpoint)
        except zmq.ZMQError as error:
            for each in self._sockets:
                each.close(0)
            self._context.destroy(linger=0)
            raise OSError(f"cannot publish KV events at {endpoint}: {error}") from error
        return socket

    async def _serve_replays(self, router: Any) -> None:
        while True:
            frames = await router.recv_multipart()
            if len(frames) != 3:
                continue
            client, _, first = frames
            topic = [self._topic] if self._replays_topic else []
            wanted = [kept for kept in self._kept if kept[0] >= int.from_bytes(first, "big")]
            for place, (sequence, payload) in enumerate(wanted, 1):
                if self._replay_room is None or place <= self._replay_room or place == len(wanted):
                    await router.send_multipart([client, b"", *topic, _SEQUENCE.pack(sequence), payload])
            await router.send_multipart([client, b"", *([b""] if topic else []), _END, b""])
