from __future__ import annotations

import pytest
from pydantic import ValidationError

from dualmap.scheduling.settings import PriorityClassSettings, SchedulingSettings
from dualmap.scheduling.tenants.classes import class_rank

CLASSES = (
    PriorityClassSettings(name="interactive", service_tiers=("priority",), engine_priority=-10),
    PriorityClassSettings(name="default", service_tiers=("auto", "default")),
    PriorityClassSettings(name="batch", service_tiers=("flex",), engine_priority=10, fills_idle=True),
)


@pytest.mark.parametrize(
    ("asked", "rank"),
    [
        ({}, 1),
        ({"named": "interactive"}, 0),
        ({"named": "batch", "service_tier": "priority"}, 2),
        ({"named": "gold"}, 1),
        ({"service_tier": "flex"}, 2),
        ({"service_tier": "scale"}, 1),
        ({"priority": -20}, 0),
        ({"priority": -10}, 0),
        ({"priority": 5}, 1),
        ({"priority": 99}, 2),
        ({"named": "interactive", "highest": "default"}, 1),
        ({"named": "interactive", "highest": "interactive"}, 0),
        ({"highest": "interactive"}, 0),
        ({"highest": "batch"}, 2),
        ({"service_tier": "priority", "highest": "batch"}, 2),
        ({"named": "interactive", "highest": ""}, 1),
        ({"named": "batch", "highest": ""}, 2),
        ({"named": "interactive", "highest": "gone"}, 1),
    ],
)
def test_a_class_is_what_is_asked_for_up_to_that_of_the_tenant(asked: dict[str, str | int], rank: int) -> None:
    assert class_rank(CLASSES, **asked) == rank


def test_without_a_usual_class_it_is_the_first() -> None:
    assert class_rank(CLASSES[::2]) == 0


@pytest.mark.parametrize(
    ("classes", "why"),
    [
        ([{"name": "one"}, {"name": "one"}], "two classes have one name"),
        ([{"name": "batch", "fills_idle": True}, {"name": "one"}], "come last"),
        ([{"name": "batch", "fills_idle": True}], "come last"),
        ([{"name": "one", "floor": 0.7}, {"name": "two", "floor": 0.7}], "more than 1"),
    ],
)
def test_classes_that_cannot_be_are_refused(classes: list[dict[str, object]], why: str) -> None:
    with pytest.raises(ValidationError, match=why):
        SchedulingSettings.model_validate({"classes": classes})
