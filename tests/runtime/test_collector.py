"""The garbage collector, once a process is ready."""

from __future__ import annotations

import gc
import weakref
from math import prod

from dualmap.runtime.collector import settle_collector


class Ring:
    """An object that only the collector frees."""

    def __init__(self) -> None:
        self.itself = self


def test_many_objects_at_the_start_do_not_put_off_the_collection_of_old_ones() -> None:
    thresholds = gc.get_threshold()
    settle_collector()
    try:
        gc.set_threshold(100, 5, 5)
        ring = Ring()
        old = weakref.ref(ring)
        gc.collect(0)
        gc.collect(1)
        del ring

        for _ in range(2 * prod((100, 5 + 2, 5 + 2))):
            Ring()

        assert old() is None
    finally:
        gc.unfreeze()
        gc.set_threshold(*thresholds)
