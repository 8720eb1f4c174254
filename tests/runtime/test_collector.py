"""The garbage collector, while a process starts, while it computes, and once it is ready."""

from __future__ import annotations

import gc
import weakref
from math import prod

import pytest

from dualmap.runtime.collector import collected_seldom, settle_collector, uncollected


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
        gc.set_threshold(*thresholds)


@pytest.mark.parametrize("enabled", [True, False])
def test_the_collector_rests_during_an_import_even_a_failing_one_and_is_as_before_after_it(enabled: bool) -> None:
    def failing() -> None:
        with uncollected():
            assert not gc.isenabled()
            raise ImportError

    (gc.enable if enabled else gc.disable)()
    try:
        with pytest.raises(ImportError):
            failing()

        assert gc.isenabled() == enabled
    finally:
        gc.enable()


def test_a_computation_looks_for_garbage_seldom_and_the_pace_is_as_before_after_it() -> None:
    usual = gc.get_threshold()

    with pytest.raises(ZeroDivisionError), collected_seldom():
        assert gc.get_threshold()[0] > usual[0] > 0
        raise ZeroDivisionError

    assert gc.get_threshold() == usual


def test_a_computation_collects_nothing_where_nothing_is_collected() -> None:
    usual = gc.get_threshold()
    gc.set_threshold(0)
    try:
        with collected_seldom():
            assert gc.get_threshold()[0] == 0
    finally:
        gc.set_threshold(*usual)
