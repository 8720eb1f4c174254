from __future__ import annotations

from typing import get_args

import pytest
from pydantic import ValidationError

from dualmap.scheduling import settings
from dualmap.scheduling.placing import policies
from dualmap.scheduling.placing.policies import build_policy, registry
from dualmap.scheduling.placing.policies.registry import BUILDERS, granting_order
from dualmap.scheduling.settings import PolicyName, SchedulingSettings


def test_every_name_that_can_be_configured_builds_the_policy_of_that_name() -> None:
    names = get_args(PolicyName)

    assert set(BUILDERS) == set(names)
    for name in names:
        assert build_policy(SchedulingSettings(policy=name)).name == name


def test_the_default_alone_looks_beyond_its_candidates() -> None:
    looking = [
        name for name in get_args(PolicyName) if build_policy(SchedulingSettings(policy=name)).beyond_from_s is not None
    ]

    assert looking == ["dualmap-least-cost"]


def test_the_default_is_least_cost_under_deadline_order() -> None:
    assert build_policy(SchedulingSettings()).name == "dualmap-least-cost"
    assert granting_order(SchedulingSettings()) == "deadline"


def test_the_papers_method_and_the_peers_serve_first_come_first_served() -> None:
    assert granting_order(SchedulingSettings(policy="dualmap")) == "fifo"
    assert granting_order(SchedulingSettings(policy="preble")) == "fifo"


def test_a_policy_of_another_package_has_the_order_that_it_is_made_for(monkeypatch: pytest.MonkeyPatch) -> None:
    made_for = {"in-turn": BUILDERS["round-robin"], "by-cost": BUILDERS["dualmap-least-cost"]}
    monkeypatch.setattr(registry, "BUILDERS", BUILDERS | made_for)
    monkeypatch.setattr(settings, "OWN_POLICIES", set(made_for))

    orders = [granting_order(SchedulingSettings.model_validate({"policy": name})) for name in made_for]

    assert orders == ["fifo", "deadline"]


def test_a_queue_order_that_is_named_is_kept() -> None:
    assert granting_order(SchedulingSettings(policy="dualmap", queue_order="deadline")) == "deadline"
    assert granting_order(SchedulingSettings(queue_order="fifo")) == "fifo"


def test_an_unknown_policy_is_refused_by_name() -> None:
    with pytest.raises(ValidationError, match="policy"):
        SchedulingSettings.model_validate({"policy": "magic"})


def test_the_package_exports_what_it_says() -> None:
    assert policies.__all__ == ["build_policy", "queue_order_of"]
