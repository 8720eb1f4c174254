"""Values as JSON."""

from __future__ import annotations

import json
from types import MappingProxyType

import pytest

from dualmap.cli.as_json import as_json
from dualmap.scheduling.state.instance import InstanceSpec


def test_values_of_the_store_keep_their_names_and_numbers() -> None:
    told = json.loads(as_json({"instances": MappingProxyType({"a": InstanceSpec("a", "http://a")}), "ids": {"y", "x"}}))

    assert told["instances"]["a"]["url"] == "http://a"
    assert told["instances"]["a"]["state"] == "starting"
    assert told["ids"] == ["x", "y"]


def test_a_value_without_a_form_in_json_is_an_error() -> None:
    with pytest.raises(TypeError):
        as_json({"what": object()})
