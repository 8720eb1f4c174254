"""Pods and EndpointSlices are read as instances, and which of them serve."""

from __future__ import annotations

from typing import Any

import pytest

from dualmap.scheduling.state.instance import Role
from dualmap.workers.discovery.plan import Found
from dualmap.workers.discovery.pods import Pod, Rule, found_from, merged, pod_from, pods_of_slice, reading_of

UNIT = {"metadata": {"uid": "u", "name": "vllm-0", "labels": {"app": "vllm"}}}

READY = {"type": "Ready", "status": "True"}


def pod(name: str = "vllm-0", uid: str = "u", **about: Any) -> Pod:
    about = {"ip": "10.0.0.1", "is_ready": True, "is_terminating": False, "labels": {}, "annotations": {}, **about}
    return Pod(uid, name, **about)


def found_in(*pods: Pod, **rule: Any) -> tuple[dict[str, Found], tuple[str, ...]]:
    return found_from(reading_of(each, Rule(**rule)) for each in pods)


def instances(*pods: Pod, **rule: Any) -> dict[str, str]:
    """The URL of each instance, by id."""
    return {name: each.url for name, each in found_in(*pods, **rule)[0].items()}


def left_out(*pods: Pod, **rule: Any) -> str:
    found, texts = found_in(*pods, **rule)
    assert not found
    return " ".join(texts)


@pytest.mark.parametrize(
    ("status", "why"),
    [
        ({"podIP": "1.2.3.4", "conditions": [READY]}, ""),
        ({"podIP": "1.2.3.4", "conditions": [{"type": "Ready", "status": "False"}]}, "its pod is not ready"),
        # The containers are ready, a readiness gate is not: the kubelet folds it into Ready.
        (
            {
                "podIP": "1.2.3.4",
                "conditions": [
                    {"type": "ContainersReady", "status": "True"},
                    {"type": "example.com/gate", "status": "False"},
                    {"type": "Ready", "status": "False", "reason": "ReadinessGatesNotReady"},
                ],
            },
            "its pod is not ready",
        ),
        ({"conditions": [READY]}, "its pod has no address"),
        ({"phase": "Failed", "podIP": "1.2.3.4", "conditions": [READY]}, "its pod is not ready"),
        ({}, "its pod is not ready"),
        (None, "its pod is not ready"),
    ],
)  # fmt: skip
def test_a_pod_serves_while_it_is_ready_and_has_an_address(status: Any, why: str) -> None:
    assert pod_from({**UNIT, "status": status}).not_serving == why


def test_a_pod_that_terminates_serves_no_more_though_it_is_ready() -> None:
    status = {"podIP": "1.2.3.4", "conditions": [READY]}
    metadata = {**UNIT["metadata"], "deletionTimestamp": "2026-01-01T00:00:00Z"}

    assert pod_from({"metadata": metadata, "status": status}).not_serving == "its pod terminates"


@pytest.mark.parametrize(
    "given",
    [
        {},
        {"metadata": 7},
        {"metadata": {"name": "a"}},
        {"metadata": {"name": "a", "uid": "u", "labels": ["x"]}},
        {**UNIT, "status": {"conditions": {"type": "Ready"}}},
        {**UNIT, "status": "Running"},
    ],
)
def test_what_is_no_pod_is_refused(given: Any) -> None:
    with pytest.raises(ValueError, match=r"is missing|is no"):
        pod_from(given)


def test_the_url_is_made_of_address_and_port() -> None:
    assert instances(pod()) == {"vllm-0": "http://10.0.0.1:8000"}
    assert instances(pod(ip="fd00::1"), ports=(80,), scheme="https") == {"vllm-0": "https://[fd00::1]:80"}


@pytest.mark.parametrize(
    "name", ["dualmap/port", "llm-d.ai/active-ports", "smg.ai/worker-ports", "model.aibrix.ai/port"]
)
def test_ports_are_read_from_labels_and_annotations(name: str) -> None:
    assert instances(pod(labels={name: "9000"})) == {"vllm-0": "http://10.0.0.1:9000"}
    assert instances(pod(annotations={name: "8000, 8001"})) == {
        "vllm-0:8000": "http://10.0.0.1:8000",
        "vllm-0:8001": "http://10.0.0.1:8001",
    }


def test_our_label_wins_over_those_of_others() -> None:
    labels = {"dualmap/port": "1", "model.aibrix.ai/port": "2", "dualmap/role": "decode", "llm-d.ai/role": "prefill"}
    found, _ = found_in(pod(labels=labels))

    assert (found["vllm-0"].url, found["vllm-0"].role) == ("http://10.0.0.1:1", Role.DECODE)


@pytest.mark.parametrize(
    ("labels", "role"),
    [
        ({}, Role.MIXED),
        ({"dualmap/role": "prefill"}, Role.PREFILL),
        ({"llm-d.ai/role": "both"}, Role.MIXED),
        ({"llm-d.ai/role": "prefill-decode"}, Role.MIXED),
        ({"llm-d.ai/role": "encode-prefill"}, Role.PREFILL),
        ({"llm-d.ai/role": "encode-decode"}, Role.DECODE),
        ({"role-name": "decode"}, Role.DECODE),
        ({"role-name": "database"}, Role.MIXED),
    ],
)
def test_roles_are_read_from_labels_of_several_projects(labels: dict[str, str], role: Role) -> None:
    assert found_in(pod(labels=labels))[0]["vllm-0"].role is role


def test_a_role_is_read_from_the_label_that_is_configured_after_those_that_are_known() -> None:
    labels = {"dynamo-role": "prefill", "llm-d.ai/role": "decode"}

    assert found_in(pod(labels=labels), role_label="dynamo-role")[0]["vllm-0"].role is Role.DECODE
    del labels["llm-d.ai/role"]
    assert found_in(pod(labels=labels), role_label="dynamo-role")[0]["vllm-0"].role is Role.PREFILL
    assert found_in(pod(labels=labels))[0]["vllm-0"].role is Role.MIXED
    assert "role 'frontend'" in left_out(pod(labels={"dynamo-role": "frontend"}), role_label="dynamo-role")


def test_aliases_are_read_from_an_annotation() -> None:
    named = pod(annotations={"dualmap/aliases": "gpt-4o, org/model:7b, gpt-4o"})

    assert found_in(named)[0]["vllm-0"].aliases == ("gpt-4o", "org/model:7b")
    assert found_in(pod())[0]["vllm-0"].aliases == ()


@pytest.mark.parametrize("text", ["two words", ",".join(f"m{number}" for number in range(65)), "é"])
def test_aliases_that_are_no_model_names_are_left_out_with_the_reason(text: str) -> None:
    assert "dualmap/aliases" in left_out(pod(annotations={"dualmap/aliases": text}))


def test_an_encoder_is_left_out() -> None:
    assert "role 'encode'" in left_out(pod(labels={"llm-d.ai/role": "encode"}))


@pytest.mark.parametrize(("text", "ranks"), [("2", [0, 1]), ("8-10", [8, 9, 10]), ("3-3", [3])])
def test_each_data_parallel_rank_is_an_instance(text: str, ranks: list[int]) -> None:
    found, _ = found_in(pod(annotations={"dualmap/data-parallel-ranks": text}))

    assert [each.data_parallel_rank for each in found.values()] == ranks
    assert list(found) == [f"vllm-0:dp{rank}" for rank in ranks]


@pytest.mark.parametrize(
    "labels",
    [
        {"dualmap/data-parallel-ranks": text} for text in ("0", "9-8", "x", "-1", "0-5000")
    ] + [{"dualmap/port": text} for text in ("http", "0", "70000", "", ",")],
)  # fmt: skip
def test_what_cannot_be_read_is_left_out_with_the_reason(labels: dict[str, str]) -> None:
    assert repr(next(iter(labels.values()))) in left_out(pod(labels=labels))


def test_a_pod_of_another_model_is_left_out_where_the_pool_names_its_own() -> None:
    other = pod(labels={"model.aibrix.ai/name": "qwen"})

    assert "'qwen'" in left_out(other, models=frozenset({"llama"}))
    assert instances(other, models=frozenset({"qwen"})) == instances(other) != {}


@pytest.mark.parametrize("order", [1, -1])
def test_of_two_pods_of_one_name_the_one_that_does_not_terminate_counts(order: int) -> None:
    pods = [pod(uid="old", is_terminating=True), pod(uid="new", ip="10.0.0.2")][::order]

    assert found_in(*pods)[0]["vllm-0"].uid == "new"


def endpoint(uid: str = "u", **conditions: bool) -> dict[str, Any]:
    return {
        "addresses": ["10.0.0.1"],
        "conditions": conditions,
        "targetRef": {"kind": "Pod", "uid": uid, "name": f"pod-{uid}"},
    }


def endpoint_slice(*endpoints: dict[str, Any], port: int = 8080) -> dict[str, Any]:
    return {"metadata": {"uid": "s", "name": "s"}, "ports": [{"port": port}], "endpoints": list(endpoints)}


def test_endpoints_of_a_slice_are_pods_on_its_port() -> None:
    given = endpoint_slice(endpoint("a"), endpoint("b", ready=False), endpoint("c", ready=False, terminating=True))
    pods = pods_of_slice(given, own_port=False)

    assert [each.not_serving for each in pods] == ["", "its pod is not ready", "its pod terminates"]
    assert instances(pods[0]) == {"pod-a": "http://10.0.0.1:8080"}
    assert instances(*pods_of_slice(endpoint_slice(endpoint()), own_port=True), ports=(9,)) == {
        "pod-u": "http://10.0.0.1:9"
    }


def test_a_pod_that_two_slices_name_serves_where_one_of_them_says_so() -> None:
    slices = [endpoint_slice(endpoint(ready=ready)) for ready in (False, True, False)]
    (one,) = merged(pod for each in slices for pod in pods_of_slice(each, own_port=False))

    assert not one.not_serving


def test_an_endpoint_that_is_no_pod_is_none() -> None:
    assert pods_of_slice(endpoint_slice({"addresses": ["a"], "conditions": {}}), own_port=False) == ()


def test_a_revision_is_read_from_a_label_or_from_what_a_controller_sets() -> None:
    labels = {"dualmap/revision": "v2", "pod-template-hash": "6b7f"}

    assert found_in(pod(labels=labels))[0]["vllm-0"].revision == "v2"
    del labels["dualmap/revision"]
    assert found_in(pod(labels=labels), revision_label="pod-template-hash")[0]["vllm-0"].revision == "6b7f"
    assert found_in(pod(labels=labels))[0]["vllm-0"].revision == ""
    assert "no label" in left_out(pod(labels={"dualmap/revision": "two words"}))
