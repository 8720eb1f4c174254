"""Bad settings of the autoscaler stop the start with what is wrong."""

from __future__ import annotations

from typing import Any

import pytest
from pydantic import ValidationError

from dualmap.scheduling.scaling.scale_settings import AutoscaleSettings, autoscale_of

BY_KUBERNETES: dict[str, Any] = {"actuator": "kubernetes", "workload": "deployment/vllm"}


@pytest.mark.parametrize(
    ("given", "told"),
    [
        ({"min_instances": 5, "max_instances": 3}, "min_instances 5 is above max_instances 3"),
        ({"min_instances": -1, "max_instances": 3}, "min_instances"),
        ({"min_instances": 0, "max_instances": 0}, "max_instances"),
        ({"max_instances": 3, "actuator": "webhook"}, "needs webhook_url and webhook_secret"),
        ({"max_instances": 3, "actuator": "command"}, "needs command"),
        ({"max_instances": 3, "start_s": 0}, "start_s"),
        ({"max_instances": 3, "decode": {"min_instances": 2, "max_instances": 1}}, "min_instances 2 is above"),
        ({"max_instances": 3, **BY_KUBERNETES, "decode": {"max_instances": 1}}, "needs decode.workload"),
        (
            {"max_instances": 3, **BY_KUBERNETES, "decode": {"max_instances": 1, "workload": "deployment/vllm"}},
            "each role needs its own",
        ),
    ],
)
def test_what_does_not_fit_together_is_refused(given: dict[str, Any], told: str) -> None:
    with pytest.raises(ValidationError, match=told):
        AutoscaleSettings(**given)


def test_decode_instances_have_their_own_bounds_and_what_is_not_said_is_as_for_the_others() -> None:
    whole = AutoscaleSettings(
        min_instances=1,
        max_instances=4,
        start_s=50.0,
        idle_s=70.0,
        **BY_KUBERNETES,
        decode={"min_instances": 0, "max_instances": 2, "workload": "statefulset/decode"},
    )
    of_decode = whole.of_decode

    assert of_decode is not None
    assert (of_decode.bounds, of_decode.start_s, of_decode.idle_s) == ("0:2", 50.0, 70.0)
    assert (of_decode.workload, of_decode.leaves_in_order, whole.leaves_in_order) == ("statefulset/decode", True, False)
    assert AutoscaleSettings(max_instances=1).of_decode is None


def test_bounds_are_written_as_on_the_command_line() -> None:
    assert autoscale_of("2:6") == AutoscaleSettings(min_instances=2, max_instances=6)
    assert autoscale_of("2:6").bounds == "2:6"
    assert autoscale_of("0:3").min_instances == 0


@pytest.mark.parametrize("text", ["", "3", "6:2", "0:0", "a:b", "2:", "-1:4"])
def test_a_wrong_pair_is_named(text: str) -> None:
    with pytest.raises(ValueError, match="MIN"):
        autoscale_of(text)
