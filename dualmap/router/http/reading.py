"""A kept stream is read in slices, between which the loop does other work."""

from __future__ import annotations

import asyncio

from dualmap.router.answers.kept_stream import KeptStream
from dualmap.router.answers.so_far import AnswerSoFar


async def read_so_far(kept: KeptStream) -> AnswerSoFar:
    """The part of the answer that the client has."""
    reading = kept.reading()
    while True:
        try:
            next(reading)
        except StopIteration as over:
            so_far: AnswerSoFar = over.value
            return so_far
        await asyncio.sleep(0)
