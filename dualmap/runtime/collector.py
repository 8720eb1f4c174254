"""The garbage collector of a process that serves for months."""

from __future__ import annotations

import gc


def settle_collector() -> None:
    """Have the collector leave alone what exists by now, which is permanent: that keeps its pauses short.

    Call it once, when the process is ready.
    """
    gc.collect()
    gc.freeze()
    # A full collection waits until a quarter as many objects are old as the last one left. This one leaves none: if it
    # counted the frozen ones, old objects that only the collector frees would pile up to some ten thousands first.
    gc.collect()
