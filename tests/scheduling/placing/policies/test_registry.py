from __future__ import annotations

from typing import Any, get_args

import pytest
from pydantic import ValidationError

from dualmap.scheduling import settings
from dualmap.scheduling.placing import policies
from dualmap.scheduling.placing.decision import Policy
from dualmap.scheduling.placing.policies import build_policy, registry
from dualmap.scheduling.placing.policies.registry import BUILDERS, OPTIONS, granting_order
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


def test_every_option_says_what_it_is() -> None:
    fields = [(name, option, field) for name, each in OPTIONS.items() for option, field in each.model_fields.items()]

    assert fields
    assert [(name, option) for name, option, field in fields if not field.description] == []


@pytest.mark.parametrize("name", sorted(OPTIONS))
def test_a_policy_takes_its_options_and_refuses_others(name: str) -> None:
    plain = SchedulingSettings.model_validate({"policy": name})
    defaults = OPTIONS[name]().model_dump()

    assert build_policy(plain.model_copy(update={"policy_options": defaults})) == build_policy(plain)
    with pytest.raises(ValueError, match=rf"^scheduling\.policy_options: policy {name} has no option x; it has "):
        build_policy(plain.model_copy(update={"policy_options": {"x": 1}}))


def test_a_policy_of_another_package_checks_its_options_itself(monkeypatch: pytest.MonkeyPatch) -> None:
    def by_share(name: str, settings: SchedulingSettings, *, share: float = 0.5) -> Policy:
        if not 0 < share < 1:
            raise ValueError("share must be between 0 and 1")
        return BUILDERS["round-robin"](f"{name}-{share}", settings)

    monkeypatch.setattr(registry, "BUILDERS", BUILDERS | {"by-share": by_share})
    monkeypatch.setattr(settings, "OWN_POLICIES", {"by-share"})

    def built(**options: Any) -> Policy:
        return build_policy(SchedulingSettings.model_validate({"policy": "by-share", "policy_options": options}))

    assert (built().name, built(share=0.25).name) == ("by-share-0.5", "by-share-0.25")
    with pytest.raises(ValueError, match=r"^scheduling\.policy_options: share must be between 0 and 1"):
        built(share=2)
    with pytest.raises(ValueError, match=r"^scheduling\.policy_options: .*unexpected keyword argument 'part'"):
        built(part=0.5)


def test_a_queue_order_that_is_named_is_kept() -> None:
    assert granting_order(SchedulingSettings(policy="dualmap", queue_order="deadline")) == "deadline"
    assert granting_order(SchedulingSettings(queue_order="fifo")) == "fifo"


def test_an_unknown_policy_is_refused_by_name() -> None:
    with pytest.raises(ValidationError, match="policy"):
        SchedulingSettings.model_validate({"policy": "magic"})


def test_the_package_exports_what_it_says() -> None:
    assert policies.__all__ == ["build_policy", "queue_order_of"]
