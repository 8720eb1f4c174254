"""A tiny suite, so that a whole experiment takes a second or two."""

from __future__ import annotations

import pytest

from dualmap.research.suites.suite import Suite
from dualmap.research.workload import Traffic


@pytest.fixture
def tiny_suite() -> Suite:
    return Suite(
        "tiny",
        traffic=(Traffic("uniform", "uniform"),),
        presets=("qwen2.5-7b-910b4",),
        sizes=(2,),
        rates=("3", "1.5x"),
        seeds=2,
        targets=("90", "both"),
        requests_per_instance=30,
        tolerance=0.3,
    )
