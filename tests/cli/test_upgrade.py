"""Which instances are upgraded together, and what the new revision gets."""

from __future__ import annotations

import argparse
from typing import Any

import pytest

from dualmap.cli.errors import CommandError, UsageError
from dualmap.cli.upgrade import Upgrade, add_arguments, batches, weights_of


def instances(**revisions: str) -> list[dict[str, Any]]:
    return [
        {"id": name, "revision": revision, "state": "ready", "url": f"http://{name}"}
        for name, revision in revisions.items()
    ]


FOUR = instances(a="v1", b="v1", c="v2", d="")


def test_those_of_other_revisions_are_upgraded_in_batches() -> None:
    assert batches(FOUR, "v2", None, 1) == [["a"], ["b"], ["d"]]
    assert batches(FOUR, "v2", None, 2) == [["a", "b"], ["d"]]
    assert batches(FOUR, "v2", ["c", "d"], 1) == [["d"]]
    assert batches(instances(a="v2"), "v2", None, 1) == []


@pytest.mark.parametrize(
    ("known", "only", "at_once", "why"),
    [
        (FOUR, ["x"], 1, "no instance 'x'"),
        (FOUR, None, 0, "1 at least"),
        (FOUR, None, 4, "would leave none"),
        (instances(a="v1"), None, 1, "only one instance"),
    ],
)
def test_an_upgrade_that_leaves_nothing_to_serve_is_refused(
    known: list[dict[str, Any]], only: list[str] | None, at_once: int, why: str
) -> None:
    with pytest.raises(UsageError, match=why):
        batches(known, "v2", only, at_once)


def test_sessions_follow_the_instances_that_serve() -> None:
    assert weights_of(FOUR, {}) == {"unlabelled": 25.0, "v1": 50.0, "v2": 25.0}
    assert weights_of(FOUR, {"v2": False})["v2"] == 0
    drained = [{**each, "state": "standby"} if each["id"] == "a" else each for each in FOUR]
    assert sum(weights_of(drained, {}).values()) == 100


class ScriptedApi:
    """A fleet that does at once what it is told."""

    def __init__(self, gate: str = "done") -> None:
        self.known = {each["id"]: each for each in instances(a="v1", b="v1")}
        self.calls: list[tuple[str, Any]] = []
        self._gate = gate

    def call(self, method: str, path: str, body: dict[str, Any] | None = None) -> Any:
        if method == "GET":
            if path == "/rollout":
                return {"rollout": {"state": self._gate, "why": "errors +3 points"}}
            return {"instances": [dict(each) for each in self.known.values()]}
        self.calls.append((path, body))
        name = path.split("/")[2].partition("?")[0] if path.startswith("/instances/") else ""
        if "/drain" in path:
            self.known[name]["state"] = "standby"
        elif path.endswith("/resume"):
            self.known[name]["state"] = "ready"
        elif name:
            self.known[name] |= body or {}
        return {}


def upgrade(api: ScriptedApi, *words: str) -> list[str]:
    parser, said = argparse.ArgumentParser(), list[str]()
    add_arguments(parser)
    arguments = parser.parse_args(["v2", "--run", "true", *words])
    Upgrade(api, arguments, said.append).run()
    return said


def test_each_instance_is_drained_replaced_labelled_and_given_its_share() -> None:
    api = ScriptedApi()

    said = upgrade(api, "--within", "30s")

    assert api.calls == [
        ("/revisions", {"weights": {"v1": 100.0}}),
        ("/instances/a/drain?within_s=30", None),
        ("/instances/a", {"revision": "v2"}),
        ("/instances/a/resume", None),
        ("/revisions", {"weights": {"v1": 50.0, "v2": 50.0}}),
        ("/instances/b/drain?within_s=30", None),
        ("/instances/b", {"revision": "v2"}),
        ("/instances/b/resume", None),
        ("/revisions", {"weights": {"v2": 100.0}}),
    ]
    assert said[-1] == "done: 2 instances are of revision v2"


def test_copies_fill_the_caches_of_the_first_new_engines() -> None:
    api = ScriptedApi()
    api.known |= {each["id"]: each for each in instances(c="v1")}

    upgrade(api, "--gate", "--shadow", "10")

    rollouts = [body for path, body in api.calls if path == "/rollout"]
    assert [body.get("shadow") for body in rollouts] == [10.0, None]
    with pytest.raises(UsageError, match="--shadow needs --gate"):
        upgrade(ScriptedApi(), "--shadow", "10")


def test_the_gate_stops_an_upgrade() -> None:
    api = ScriptedApi(gate="rolled back")

    with pytest.raises(CommandError, match="stopped by the gate, rolled back: errors"):
        upgrade(api, "--gate")

    assert ("/rollout", {"revision": "v2", "steps": [50.0]}) in api.calls
    assert api.known["b"]["revision"] == "v1"


def test_a_command_that_fails_leaves_its_instance_drained_and_stops() -> None:
    api = ScriptedApi()
    parser = argparse.ArgumentParser()
    add_arguments(parser)

    with pytest.raises(CommandError, match="stays drained"):
        Upgrade(api, parser.parse_args(["v2", "--run", "false"])).run()

    assert (api.known["a"]["state"], api.known["a"]["revision"]) == ("standby", "v1")


def test_a_second_call_goes_on_where_the_first_one_stopped() -> None:
    api = ScriptedApi()
    api.known["a"]["revision"] = "v2"

    upgrade(api)

    assert [path for path, _ in api.calls if "drain" in path] == ["/instances/b/drain?within_s=60"]
    assert upgrade(api) == ["all instances are of revision v2 already"]
