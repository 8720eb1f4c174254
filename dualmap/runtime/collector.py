"""The garbage collector while a process starts, while it computes, and once it serves for months."""

from __future__ import annotations

import contextlib
import gc
from collections.abc import Iterator
from typing import Final

YOUNG_OBJECTS: Final = 50_000
"""New objects after which a computation looks for garbage among them; some megabytes."""


@contextlib.contextmanager
def uncollected() -> Iterator[None]:
    """Import modules in it: what they make stays, so a collector that looks for garbage among it finds none, and takes
    a fifth of the time of a start."""
    was_enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if was_enabled:
            gc.enable()


@contextlib.contextmanager
def collected_seldom() -> Iterator[None]:
    """Compute in it, where hardly any garbage has cycles: looking at the usual pace would take 2 to 6 % of the time."""
    usual = gc.get_threshold()
    gc.set_threshold(max(usual[0], YOUNG_OBJECTS) if usual[0] else 0, *usual[1:])
    try:
        yield
    finally:
        gc.set_threshold(*usual)


def settle_collector() -> None:
    """Have the collector leave alone what exists by now, which is permanent: that keeps its pauses short.

    Call it once, when the process is ready.
    """
    gc.collect()
    gc.freeze()
    # A full collection waits until a quarter as many objects are old as the last one left. This one leaves none: if it
    # counted the frozen ones, old objects that only the collector frees would pile up to some ten thousands first.
    gc.collect()
