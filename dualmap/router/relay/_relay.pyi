KEEP: int
HIDE_IDS: int
HIDE_USAGE: int
EVENTS: int
MESSAGES: int
RESPONSES: int

TAKEN: int
OTHER: int
ENDED: int
BROKEN: int
SLOW: int
FULL: int

_Stream = tuple[int, int, bytes, bytes, bytes, bytes, int, int]
"""Reason, errno, unread, unsent, tail, log, chunks, outputs."""

class Relay:
    """The thread, and the streams that it has. Raises OSError where there are no descriptors or threads left."""

    def __new__(cls) -> Relay: ...
    def fileno(self) -> int:
        """A descriptor that is readable when streams were returned."""

    def attach(self, instance: int, client: int, flags: int, log_limit: int, data: bytes, mark: bytes, /) -> int:
        """Take a stream over, with the bytes of it that were read last. Returns its key; 0 where it is not taken, as
        these bytes are not plain, and none of them was sent then.

        Args:
            instance: descriptor from which the answer comes, between two of its chunks.
            client: descriptor to which it goes; nothing else may be waiting to be sent.
            flags: of the constants above.
            log_limit: most bytes of the log.
            mark: what an event with output has once, where chunks pass as they come; 32 bytes at most.
        """

    def take(self, key: int, /) -> _Stream | None:
        """Take a stream back, whether it was returned or not; None: it is not here any more."""

    def returned(self) -> list[tuple[int, _Stream]]:
        """The streams that were returned since the last call, by key."""

    def progressed(self, key: int, /) -> bool:
        """Whether bytes of the stream have come since the last call."""

    def counts(self) -> tuple[int, int]:
        """The number of streams that are here, and of chunks that have passed in all."""

    def close(self) -> None:
        """Stop the thread; streams that are here are forgotten."""
