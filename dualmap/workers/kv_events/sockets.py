"""The ZeroMQ sockets of one engine's events: the subscription, and the replay of missed batches.

A batch arrives in three frames: topic, sequence (8 bytes, big-endian), payload. A replay is requested by two frames, an
empty one and the first sequence wanted; each answer is an empty frame, then the frames of a batch (without the topic in
older releases), and the last one has the sequence 2^64 - 1.
"""

from __future__ import annotations

import asyncio
import struct
from collections.abc import AsyncGenerator, Sequence
from typing import Any, Final

import zmq
import zmq.asyncio
from zmq.utils.monitor import parse_monitor_message

from dualmap.workers.kv_events.decoding import Batch, UnreadableEventsError, read_batch

MAX_WAITING: Final = 10_000
"""Most batches that wait in the socket; further ones are lost, and requested again."""
MAX_PER_READ: Final = 64
MAX_BATCH_BYTES: Final = 64 << 20
"""A longer batch is refused, and its connection with it. The names of a million blocks take 34 MB."""
REPLAY_TIMEOUT_S: Final = 3.0
"""Timeout between two answers of a replay."""
_END: Final = 2**64 - 1
_SEQUENCE = struct.Struct(">Q")


class NoReplayError(Exception):
    """The replay endpoint does not answer."""


class EventSockets:
    """Connects when made, and again by itself whenever the connection is lost."""

    def __init__(self, context: zmq.asyncio.Context, endpoint: str, replay_endpoint: str | None, topic: str) -> None:
        self._context = context
        self._replay_endpoint = replay_endpoint
        self._socket = context.socket(zmq.SUB)
        self._socket.setsockopt(zmq.LINGER, 0)
        self._socket.setsockopt(zmq.RCVHWM, MAX_WAITING)
        self._socket.setsockopt(zmq.MAXMSGSIZE, MAX_BATCH_BYTES)
        self._socket.setsockopt(zmq.IPV6, 1)
        self._socket.setsockopt(zmq.RECONNECT_IVL, 100)
        self._socket.setsockopt(zmq.RECONNECT_IVL_MAX, 1000)
        self._socket.subscribe(topic.encode())
        self._reader: zmq.Socket[bytes] = zmq.Socket.shadow(self._socket.underlying)
        watched = zmq.EVENT_DISCONNECTED | zmq.EVENT_HANDSHAKE_SUCCEEDED
        self._monitor_socket = self._socket.get_monitor_socket(watched)
        self._monitor: zmq.Socket[bytes] = zmq.Socket.shadow(self._monitor_socket.underlying)
        self.connected = False
        try:
            self._socket.connect(endpoint)
        except zmq.ZMQError:  # no such address
            self.close()
            raise

    @property
    def replays(self) -> bool:
        return self._replay_endpoint is not None

    async def wait(self, timeout_s: float) -> bool:
        """Whether a batch waits, or one comes in time."""
        return bool(await self._socket.poll(round(timeout_s * 1000)))

    def read(self) -> list[Batch]:
        """The batches that wait, some at most. Raises UnreadableEventsError."""
        batches: list[Batch] = []
        while len(batches) < MAX_PER_READ:
            try:
                frames = self._reader.recv_multipart(zmq.NOBLOCK)
            except zmq.Again:
                break
            batches.append(_batch(frames))
        return batches

    def connection_was_lost(self) -> bool:
        """Whether a connection was lost since the last call; ``connected`` has the present state."""
        lost = False
        while True:
            try:
                frames = self._monitor.recv_multipart(zmq.NOBLOCK)
            except zmq.Again:
                return lost
            self.connected = parse_monitor_message(frames)["event"] == zmq.EVENT_HANDSHAKE_SUCCEEDED
            lost |= not self.connected

    async def replay(self, first: int) -> AsyncGenerator[Batch, None]:
        """Batches from a sequence on, as far as the engine keeps them.

        Raises:
            NoReplayError: there is no answer, or it ends halfway.
            UnreadableEventsError: see there.
        """
        socket = self._context.socket(zmq.DEALER)
        try:
            socket.setsockopt(zmq.LINGER, 0)
            socket.setsockopt(zmq.RCVHWM, MAX_WAITING)
            socket.setsockopt(zmq.MAXMSGSIZE, MAX_BATCH_BYTES)
            socket.setsockopt(zmq.IPV6, 1)
            assert self._replay_endpoint is not None
            socket.connect(self._replay_endpoint)
            async with asyncio.timeout(REPLAY_TIMEOUT_S):
                await socket.send_multipart([b"", _SEQUENCE.pack(first)])
            while True:
                async with asyncio.timeout(REPLAY_TIMEOUT_S):
                    frames: Any = await socket.recv_multipart()
                if len(frames) < 3:
                    raise UnreadableEventsError(f"a replay answered with {len(frames)} frames")
                if _SEQUENCE.unpack(frames[-2])[0] == _END:
                    return
                yield _batch(frames)
        except (TimeoutError, zmq.ZMQError) as error:
            raise NoReplayError(f"{self._replay_endpoint} does not answer: {error}") from error
        finally:
            socket.close(0)

    def close(self) -> None:
        self._socket.disable_monitor()
        self._monitor_socket.close(0)
        self._socket.close(0)


def _batch(frames: Sequence[bytes]) -> Batch:
    """The last two frames are sequence and payload, in a replay too."""
    if len(frames) < 2 or len(frames[-2]) != _SEQUENCE.size:
        raise UnreadableEventsError(f"a batch came in {len(frames)} frames without a sequence")
    return read_batch(_SEQUENCE.unpack(frames[-2])[0], frames[-1])
