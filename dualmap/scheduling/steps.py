"""Steps: the calls that a search or a plan has its driver make.

A decision over several steps is a generator: it yields a step, is sent the reply, and returns its result. It does no
I/O and never waits, so the same search is driven with awaits by a router, in virtual time by the simulator, and by hand
in a test.

A step is a frozen value that names one call of a port and holds its arguments. Its type says which port has the call
and what that replies, so ``reply = yield from Place(placement)`` is a ``PlaceReply`` to the type checker, and driving
steps on a port that lacks one of their calls is a type error.
"""

from __future__ import annotations

from collections.abc import Awaitable, Coroutine, Generator
from typing import Any, Generic, TypeAlias, TypeVar

Port = TypeVar("Port", contravariant=True)
Reply = TypeVar("Reply", covariant=True)
P = TypeVar("P")
R = TypeVar("R")


class Step(Generic[Port, Reply]):
    """One call of a ``Port``; a subclass has the arguments as its fields."""

    __slots__ = ()

    def on(self, port: Port) -> Awaitable[Reply]:
        """Call the port."""
        raise NotImplementedError

    def __iter__(self) -> Generator[Step[Port, Any], Any, Reply]:
        """Hand this step to the driver, and return the reply that the driver sends back."""
        reply: Reply = yield self
        return reply


Steps: TypeAlias = Generator[Step[P, Any], Any, R]
"""A decision whose steps call ``P``, and whose result is ``R``."""


async def drive(steps: Steps[P, R], port: P) -> R:
    """Carry the steps out on the port; its errors are raised in the search."""
    try:
        step = next(steps)
        while True:
            try:
                reply = await step.on(port)
            except Exception as error:
                step = steps.throw(error)
            else:
                step = steps.send(reply)
    except StopIteration as done:
        result: R = done.value
        return result


def drive_now(steps: Steps[P, R], port: P) -> R:
    """Carry the steps out on a port whose calls never wait."""
    return at_once(drive(steps, port))


def at_once(call: Coroutine[Any, Any, R]) -> R:
    """The result of a coroutine that never waits, without an event loop. Raises RuntimeError if it waits."""
    try:
        call.send(None)
    except StopIteration as done:
        result: R = done.value
        return result
    call.close()
    raise RuntimeError(f"{call!r} waits, which a call without an event loop cannot")
