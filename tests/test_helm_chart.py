"""The Helm chart: what Helm's own code renders is what the API accepts and what the fleet's processes read."""

from __future__ import annotations

import json
import re
import runpy
import subprocess
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any, get_args

import pytest
import redis
import yaml
from pydantic import BaseModel, SecretStr

pytest.importorskip("helm_python", reason="helm-python-sdk has no wheel for this platform")

import helm_python

from dualmap.cli.configuration import load_settings, split_flags
from dualmap.cli.main import command_parser
from dualmap.cli.settings import Settings
from dualmap.statestore.embedded import server_binary
from tests.support.helm_chart import (
    CHART,
    EXAMPLES,
    Manifest,
    Values,
    example,
    lint,
    manifests,
    named,
    of_kind,
    pods,
    texts,
)
from tests.support.kubernetes_cluster import PODS, POOLS, SERVICES, SLICES
from tests.support.kubernetes_schemas import NEWEST, complaints

SECRET: Values = {"secretName": "keys"}
DIGEST = f"sha256:{'0123456789abcdef' * 4}"
SWITCHES: dict[str, Values] = {
    "defaults": {},
    **{name: example(name) for name in EXAMPLES},
    "secrets": {
        "keys": {
            **dict.fromkeys(("admin", "api", "upstream", "tenantCache", "recordSalt"), SECRET),
            "admins": SECRET,
            "tenants": SECRET,
        },
        "store": {"passwordSecret": {"name": "store"}},
    },
    "sentinel": {
        "store": {
            "url": "rediss+sentinel://:$(STORE_PASSWORD)@s1,s2/fleet?ssl_ca_certs=/etc/dualmap-store-tls/ca.crt",
            "passwordSecret": {"name": "store"},
            "tlsSecret": "store-tls",
        }
    },
    "cluster": {
        "store": {
            "url": "redis+cluster://:$(STORE_PASSWORD)@r1:6379,r2:6379",
            "passwordSecret": {"name": "redis", "key": "redis-password"},
        }
    },
    "instances-with-tls": {
        "upstreamTlsSecret": "engines-ca",
        "fleet": {"upstream": {"ca_file": "/etc/dualmap-upstream-tls/ca.crt"}},
    },
    "store-url-from-a-secret": {"store": {"urlSecret": {"name": "store"}}},
    "no-persistence": {"valkey": {"persistence": {"enabled": False}}},
    "everything": {
        **example("emulated"),
        "ingress": {"enabled": True, "className": "nginx", "hosts": ["llm.example"]},
        "httpRoute": {"enabled": True, "parentRefs": [{"name": "gateway"}], "hostnames": ["llm.example"]},
        "monitoring": {
            "serviceMonitor": {"enabled": True, "labels": {"release": "prometheus"}},
            "rules": {"enabled": True, "runbookUrl": "https://git.example/dualmap/"},
            "dashboards": {"enabled": True, "annotations": {"folder": "llm"}},
        },
        "networkPolicy": {
            "clients": [{"namespaceSelector": {"matchLabels": {"team": "chat"}}}],
            "egress": {
                "enabled": True,
                "to": [{"to": [{"ipBlock": {"cidr": "10.0.0.0/8"}}], "ports": [{"port": 4318}]}],
            },
        },
        "routers": {
            "autoscaling": {"kind": "hpa"},
            "extraArgs": ["--router.log_level=debug"],
            "extraEnv": [{"name": "DUALMAP_ROUTER__UI", "value": "false"}],
            "extraVolumes": [{"name": "models", "persistentVolumeClaim": {"claimName": "models"}}],
            "extraVolumeMounts": [{"name": "models", "mountPath": "/models", "readOnly": True}],
            "podAnnotations": {"a": "b"},
            "podLabels": {"c": "d"},
            "extraContainers": [{"name": "agent", "image": "agent:1", "args": ["{{ .Release.Name }}"]}],
            "extraEnvFrom": [{"secretRef": {"name": "more"}}],
            "serviceAccountName": "routers",
            "nodeSelector": {"pool": "cpu"},
            "tolerations": [{"key": "cpu", "operator": "Exists"}],
            "priorityClassName": "high",
            "service": {"annotations": {"e": "f"}},
            "tlsSecret": "router-tls",
        },
        "workers": {
            "serviceAccount": {"annotations": {"g": "h"}},
            "extraEnvFrom": [{"configMapRef": {"name": "proxy"}}],
            "extraInitContainers": [{"name": "wait", "image": "busybox:1"}],
        },
        "image": {"pullSecrets": ["registry", {"name": "other"}], "digest": DIGEST},
        "commonLabels": {"team": "chat", "c": "common"},
        "valkey": {
            "image": {"digest": DIGEST},
            "extraContainers": [{"name": "exporter", "image": "exporter:1"}],
            "podLabels": {"k": "l"},
            "podAnnotations": {"m": "n"},
            "serviceAccountName": "store",
        },
        "pickers": {"enabled": True, "tlsSecret": "picker-tls", "autoscaling": {"kind": "hpa"}},
        "inferencePool": {"enabled": True, "annotations": {"i": "j"}},
        "extraObjects": [
            {"apiVersion": "v1", "kind": "ConfigMap", "metadata": {"name": "{{ .Release.Name }}-more"}},
            "apiVersion: v1\nkind: ConfigMap\nmetadata: {name: '{{ .Release.Name }}-text'}",
        ],
    },
    "keda": {"routers": {"autoscaling": {"kind": "keda"}}},
    "gateway": {
        **example("emulated"),
        "pickers": {"enabled": True},
        "inferencePool": {"enabled": True},
        "httpRoute": {"enabled": True, "parentRefs": [{"name": "gateway"}], "backend": "inferencePool"},
    },
}
"""Values by what they switch on."""

every_switch = pytest.mark.parametrize("values", SWITCHES.values(), ids=SWITCHES.keys())


def containers(objects: list[Manifest]) -> list[tuple[str, Manifest]]:
    """All containers, with the name of each one's workload."""
    return [
        (name, container)
        for name, pod in pods(objects).items()
        for container in (*pod["spec"].get("initContainers", ()), *pod["spec"]["containers"])
    ]


def is_fleet(container: Manifest) -> bool:
    return container["image"].startswith(("dualmap-fleet:", "dualmap-fleet@"))


def settings_file(objects: list[Manifest], folder: Path) -> Path:
    """The settings file that the processes mount."""
    path = folder / "fleet.yaml"
    path.write_text(named(objects, "ConfigMap", "dualmap-settings")["data"]["fleet.yaml"], "utf-8")
    return path


SECRET_LISTS = {
    "DUALMAP_ROUTER__ADMINS": '[{"name": "ana", "key": "word"}]',
    "DUALMAP_TENANTS": '[{"name": "acme", "keys": [{"name": "ci", "key": "a-long-word"}]}]',
}
"""Contents of Secrets that hold a list."""


def environment(container: Manifest) -> dict[str, str]:
    """The variables of a container as the kubelet would set them; each Secret's value is a word."""
    values: dict[str, str] = {}
    for variable in container.get("env", ()):
        value = variable.get("value", "10.0.0.7" if "fieldRef" in variable.get("valueFrom", {}) else "word")
        if variable["name"] == "DUALMAP_STORE__URL" and "value" not in variable:
            value = "redis://store:6379"
        if variable["name"] in SECRET_LISTS and "value" not in variable:
            value = SECRET_LISTS[variable["name"]]
        for name, known in values.items():
            value = value.replace(f"$({name})", known)
        values[variable["name"]] = value
    return values


def settings_of(objects: list[Manifest], container: Manifest, folder: Path) -> Settings:
    """The settings of one of the fleet's processes, by the reader that it uses itself."""
    command, *arguments = container["args"]
    module, parser = command_parser(command)
    flags, rest = split_flags(arguments, getattr(module, "SHORTHANDS", {}))
    parser.parse_args(rest)
    variables = environment(container)
    file = settings_file(objects, folder) if "DUALMAP_CONFIG" in variables else None
    return load_settings(flags, {**variables, "DUALMAP_CONFIG": ""}, file)


# what Helm and the API say ------------------------------------------------------------------------------------
@every_switch
def test_helm_has_nothing_against_the_chart(values: Values) -> None:
    assert lint(values) == []


@every_switch
def test_the_three_newest_versions_of_the_api_accept_every_object(values: Values) -> None:
    objects = manifests(values)

    assert [found for each in objects for found in complaints(each)] == []
    identities = [(each["kind"], each["metadata"].get("namespace"), each["metadata"]["name"]) for each in objects]
    assert len(identities) == len(set(identities)), "two objects of one name"


def test_the_schemas_would_find_a_wrong_field() -> None:
    deployment = named(manifests({}), "Deployment", "dualmap-router")
    wrong = json.loads(json.dumps(deployment).replace("terminationGracePeriodSeconds", "gracePeriodSeconds"))

    assert len(NEWEST) == 3
    assert [found.partition(": ")[0] for found in complaints(wrong)] == NEWEST


@pytest.mark.parametrize(
    ("values", "named_in_the_error"),
    [
        ({"routers": {"replica": 3}}, "replica"),
        ({"fleet": {"router": {"drain_timeout": 60}}}, "drain_timeout"),
        ({"fleet": {"pools": [{"name": "a", "modle": "b"}]}}, "modle"),
        ({"engines": [{"name": "a", "imgae": "b"}]}, "imgae"),
        ({"routers": {"autoscaling": {"kind": "hpaa"}}}, "kind"),
        ({"image": {"digest": "latest"}}, "digest"),
        ({"image": {"pullSecrets": [{"nmae": "registry"}]}}, "nmae"),
    ],
)
def test_misspelt_names_among_the_values_are_refused(values: Values, named_in_the_error: str) -> None:
    with pytest.raises(helm_python.HelmValuesError, match=named_in_the_error):
        texts(values)


@pytest.mark.parametrize(
    "clients",
    [{"keys": {"api": SECRET}}, {"fleet": {"tenants": [{"name": "acme"}]}}, {"fleet": {"router": {"needs_key": True}}}],
    ids=str,
)
def test_routers_that_would_not_start_for_want_of_an_admin_key_are_refused(clients: Values) -> None:
    with pytest.raises(helm_python.HelmError, match=r"keys\.admin\.secretName"):
        texts(clients)
    texts({**clients, "keys": {**clients.get("keys", {}), "admin": SECRET}})


def secret_settings(model: type[BaseModel], path: tuple[str, ...] = ()) -> Iterator[tuple[str, ...]]:
    """Paths of the settings that are secrets; a list is ``[]`` in them."""
    for name, field in model.model_fields.items():
        for part in parts_of(field.annotation):
            if part is SecretStr:
                yield (*path, name)
            elif isinstance(part, type) and issubclass(part, BaseModel):
                is_list = str(field.annotation).startswith("tuple[")
                yield from secret_settings(part, (*path, name, *(("[]",) if is_list else ())))


def parts_of(annotation: object) -> Iterator[object]:
    """A type and all types that it is made of."""
    yield annotation
    for part in get_args(annotation):
        yield from parts_of(part)


SECRET_PATHS = sorted(set(secret_settings(Settings)))


def test_the_secrets_of_the_settings_are_found() -> None:
    assert {path[-1] for path in SECRET_PATHS} == {
        *("admin_key", "api_keys", "key", "record_salt", "tenant_cache_secret", "upstream_api_key", "webhook_secret"),
    }


@pytest.mark.parametrize("path", SECRET_PATHS, ids=lambda path: ".".join(path))
def test_every_secret_of_the_settings_is_refused_among_the_values_and_the_error_says_where_it_belongs(
    path: tuple[str, ...],
) -> None:
    value: Any = ["hunter22"] if path[-1] == "api_keys" else "hunter22"
    for name in reversed(path):
        value = [{"name": "a", **value}] if name == "[]" else {name: value}
        if name == "autoscale":
            value["autoscale"]["max_instances"] = 4

    with pytest.raises(helm_python.HelmRenderError, match=r"is a secret.*(Secret in|a Secret that)") as refused:
        texts({"fleet": value})

    assert ".".join(path).replace(".[]", "[0]") in str(refused.value)
    assert "hunter22" not in str(refused.value)


KEY_OF_A_TENANT = '[{"name": "a", "keys": [{"name": "b", "key": "hunter22"}]}]'


@pytest.mark.parametrize(
    ("values", "advice"),
    [
        ({"store": {"url": "redis://:hunter22@store"}}, "STORE_PASSWORD"),
        ({"store": {"url": "rediss+sentinel://u:hunter22@s1,s2/fleet"}}, "STORE_PASSWORD"),
        ({"store": {"url": "redis+sentinel://s1/fleet?sentinel_password=hunter22"}}, "STORE_PASSWORD"),
        ({"fleet": {"store": {"url": "redis://:hunter22@store"}}}, "urlSecret"),
        ({"fleet": {"pools": [{"tokenizer": "https://u:hunter22@hub"}]}}, "tokenizer"),
        ({"routers": {"extraEnv": [{"name": "DUALMAP_ROUTER__ADMIN_KEY", "value": "hunter22"}]}}, "secretKeyRef"),
        ({"workers": {"extraEnv": [{"name": "DUALMAP_STORE__URL", "value": "redis://:hunter22@s"}]}}, "secretKeyRef"),
        ({"pickers": {"extraEnv": [{"name": "DUALMAP_TENANTS", "value": KEY_OF_A_TENANT}]}}, "secretKeyRef"),
        ({"routers": {"extraEnv": [{"name": "DUALMAP_ROUTER", "value": "{admin_key: hunter22}"}]}}, "secretKeyRef"),
        ({"routers": {"extraArgs": ["--router.admin-key", "hunter22"]}}, "extraEnv"),
        ({"routers": {"extraArgs": [f"--tenants={KEY_OF_A_TENANT}"]}}, "extraEnv"),
        ({"workers": {"extraArgs": ["--store.url=redis://u:hunter22@s"]}}, "extraEnv"),
        ({"engines": [{"name": "a", "args": ["--api-key", "hunter22"]}]}, "VLLM_API_KEY"),
        ({"engines": [{"name": "a", "command": ["sh", "-c", "vllm serve m --api-key=hunter22"]}]}, "VLLM_API_KEY"),
        ({"engines": [{"name": "a", "env": [{"name": "VLLM_API_KEY", "value": "hunter22"}]}]}, "secretKeyRef"),
    ],
)
def test_secrets_by_other_ways_are_refused_too(values: Values, advice: str) -> None:
    with pytest.raises(helm_python.HelmRenderError, match=advice) as refused:
        texts(values)

    assert "hunter22" not in str(refused.value)


@pytest.mark.parametrize(
    "values",
    [
        {"store": {"url": "redis://u:$(STORE_PASSWORD)@store", "passwordSecret": {"name": "store"}}},
        {"store": {"url": "redis+sentinel://s1:26379,s2:26379/fleet?ssl_check_hostname=false"}},
        {"keys": {"admin": SECRET}, "fleet": {"tenants": [{"name": "a", "keys": [{"name": "b", "sha256": "0" * 64}]}]}},
        {"fleet": {"router": {"tls_key": "/etc/tls.key"}}},
        {"routers": {"extraEnv": [{"name": "OTEL_URL", "value": "http://otel:4317"}]}},
        {"routers": {"extraArgs": ["--router.admin_key=$(KEY)"]}},
        {"engines": [{"name": "a", "args": ["--api-key", "$(VLLM_KEY)"]}]},
    ],
)
def test_what_is_no_secret_is_not_taken_for_one(values: Values) -> None:
    assert texts(values)


@pytest.mark.parametrize(
    ("values", "advice"),
    [
        ({"ingress": {"enabled": True}}, "ingress.hosts"),
        ({"ingress": {"enabled": True, "hosts": ["a"], "paths": []}}, "ingress.paths"),
        ({"httpRoute": {"enabled": True}}, "httpRoute.parentRefs"),
        ({"httpRoute": {"enabled": True, "parentRefs": [{"name": "a"}], "paths": []}}, "httpRoute.paths"),
        (
            {"httpRoute": {"enabled": True, "parentRefs": [{"name": "a"}], "backend": "inferencePool"}},
            "inferencePool.enabled",
        ),
        ({"inferencePool": {"enabled": True}}, "pickers.enabled"),
        ({"inferencePool": {"enabled": True, "pool": "b"}, "pickers": {"enabled": True}}, "fleet.pools"),
        ({"engines": [{"name": "a", "pool": "b"}]}, "fleet.pools"),
        ({"commonLabels": {"app.kubernetes.io/instance": "a"}}, "app.kubernetes.io/instance"),
        ({"keys": {"tenants": SECRET}, "fleet": {"tenants": [{"name": "a"}]}}, "keep one"),
        (
            {"keys": {"admins": SECRET}, "fleet": {"router": {"admins": [{"name": "a", "sha256": "0" * 64}]}}},
            "keep one",
        ),
    ],
)
def test_what_would_lead_nowhere_is_refused(values: Values, advice: str) -> None:
    with pytest.raises(helm_python.HelmRenderError, match=advice):
        texts(values)


def test_all_complaints_come_at_once() -> None:
    with pytest.raises(helm_python.HelmRenderError, match=r"(?s)admin_key.*ingress.hosts.*httpRoute.parentRefs"):
        texts(
            {
                "fleet": {"router": {"admin_key": "hunter22"}},
                "ingress": {"enabled": True},
                "httpRoute": {"enabled": True},
            }
        )


# what a cluster's rules demand --------------------------------------------------------------------------------
def test_pull_secrets_are_named_alone_or_as_kubernetes_writes_them_and_reach_every_pod() -> None:
    objects = manifests({**example("emulated"), "image": {"pullSecrets": ["registry", {"name": "other"}]}})

    assert {json.dumps(pod["spec"]["imagePullSecrets"]) for pod in pods(objects).values()} == {
        '[{"name": "registry"}, {"name": "other"}]'
    }


@pytest.mark.parametrize(
    ("image", "reference"),
    [
        ({}, "dualmap-fleet:0.0.0"),
        ({"tag": "1.2"}, "dualmap-fleet:1.2"),
        ({"digest": DIGEST}, f"dualmap-fleet@{DIGEST}"),
        ({"tag": "1.2", "digest": DIGEST}, f"dualmap-fleet:1.2@{DIGEST}"),
    ],
)
def test_an_image_is_named_by_tag_digest_or_both(image: Values, reference: str) -> None:
    version = yaml.safe_load((CHART / "Chart.yaml").read_text("utf-8"))["appVersion"]
    images = {each["image"] for _, each in containers(manifests({"image": image})) if is_fleet(each)}

    assert images == {reference.replace("0.0.0", version)}


def test_common_labels_are_on_every_object_and_pod_and_in_no_selector() -> None:
    common = {"team": "chat"}
    objects = manifests({**SWITCHES["everything"], "commonLabels": common, "extraObjects": []})

    assert [each["metadata"]["name"] for each in objects if not selects(common, each["metadata"]["labels"])] == []
    assert [name for name, pod in pods(objects).items() if not selects(common, pod["metadata"]["labels"])] == []
    plain = manifests({**SWITCHES["everything"], "commonLabels": {}, "extraObjects": []})
    assert [each["spec"]["selector"] for each in of_kind(objects, "Deployment", "StatefulSet", "Service")] == [
        each["spec"]["selector"] for each in of_kind(plain, "Deployment", "StatefulSet", "Service")
    ]


def test_a_label_of_a_pod_goes_before_a_common_one() -> None:
    assert pods(manifests(SWITCHES["everything"]))["dualmap-router"]["metadata"]["labels"]["c"] == "d"


def test_sidecars_run_beside_the_fleets_processes_which_stay_the_first_container() -> None:
    sidecar = {"name": "agent", "image": "agent:1", "args": ["{{ .Release.Name }}"]}
    more = {"extraContainers": [sidecar], "extraInitContainers": [{"name": "wait", "image": "busybox:1"}]}
    engine = {**example("emulated")["engines"][0], **more, "envFrom": [{"secretRef": {"name": "hub"}}]}
    parts = {name: more | {"extraEnvFrom": [{"secretRef": {"name": "hub"}}]} for name in ("routers", "workers")}
    objects = manifests({**example("emulated"), **parts, "engines": [engine]})

    for name in ("dualmap-router", "dualmap-worker", "dualmap-emulated"):
        pod = pods(objects)[name]["spec"]
        own, agent = pod["containers"]
        assert own["envFrom"] == [{"secretRef": {"name": "hub"}}], name
        assert (agent["name"], agent["args"]) == ("agent", ["dualmap"])
        assert [each["name"] for each in pod["initContainers"]] == ["wait"]


def test_an_account_that_exists_is_used_and_gets_the_rights() -> None:
    objects = manifests({"workers": {"serviceAccount": {"create": False, "name": "mine"}}})
    (binding,), (role,) = of_kind(objects, "RoleBinding"), of_kind(objects, "Role")

    assert of_kind(objects, "ServiceAccount") == []
    assert pods(objects)["dualmap-worker"]["spec"]["serviceAccountName"] == binding["subjects"][0]["name"] == "mine"
    assert binding["roleRef"]["name"] == role["metadata"]["name"]


def test_accounts_of_routers_pickers_store_and_engines_can_be_named_and_have_no_token() -> None:
    mine = {"serviceAccountName": "mine"}
    engine = {**example("emulated")["engines"][0], **mine}
    parts = {"routers": mine, "pickers": {**mine, "enabled": True}, "valkey": mine, "engines": [engine]}
    found = pods(manifests({**example("emulated"), **parts}))
    del found["dualmap-worker"]

    assert {pod["spec"]["serviceAccountName"] for pod in found.values()} == {"mine"}
    assert {pod["spec"]["automountServiceAccountToken"] for pod in found.values()} == {False}


# what the fleet's processes read ------------------------------------------------------------------------------
@every_switch
def test_processes_accept_their_arguments_environment_and_settings(values: Values, tmp_path: Path) -> None:
    objects = manifests(values)
    for _, container in containers(objects):
        if is_fleet(container):
            settings_of(objects, container, tmp_path)
            names = [variable["name"] for variable in container["env"]]
            assert len(names) == len(set(names))


def test_a_change_of_the_settings_restarts_what_reads_them_and_nothing_else() -> None:
    before = pods(manifests(example("emulated")))
    after = pods(manifests(example("emulated") | {"fleet": {"scheduling": {"slo_ttft_s": 9}}}))

    assert {name for name in before if before[name] != after[name]} == {"dualmap-router", "dualmap-worker"}


def test_keys_and_passwords_reach_the_processes_from_secrets(tmp_path: Path) -> None:
    objects = manifests(SWITCHES["secrets"])
    router = settings_of(objects, pods(objects)["dualmap-router"]["spec"]["containers"][0], tmp_path)
    worker = settings_of(objects, pods(objects)["dualmap-worker"]["spec"]["containers"][0], tmp_path)

    assert [key.get_secret_value() for key in router.router.api_keys] == ["word"]
    assert router.router.admin_key is not None
    assert router.router.upstream_api_key is not None
    assert router.router.tenant_cache_secret is not None
    assert router.router.record_salt is not None
    assert [admin.name for admin in router.router.admins] == ["ana"]
    assert [tenant.name for tenant in router.tenants] == ["acme"]
    assert worker.worker.upstream_api_key is not None
    assert (worker.router.admin_key, worker.router.api_keys, worker.tenants) == (None, (), ()), (
        "a worker needs no key of clients"
    )
    assert router.store.url == worker.store.url == "redis://:word@dualmap-valkey:6379/0"
    assert "hunter2" not in json.dumps(objects)


@every_switch
def test_secrets_are_references(values: Values) -> None:
    objects = manifests(values)

    assert of_kind(objects, "Secret") == []
    for _, container in containers(objects):
        for variable in container.get("env", ()):
            if variable["name"].endswith(("KEY", "KEYS", "PASSWORD", "SECRET", "SALT", "ADMINS", "TENANTS")):
                is_file = variable.get("value", "").startswith("/etc/dualmap-tls/")
                assert is_file or set(variable["valueFrom"]) == {"secretKeyRef"}


@pytest.mark.parametrize(("secret", "protocol"), [("", "http"), ("router-tls", "https")])
def test_the_endpoint_has_tls_where_there_is_a_secret_for_it(secret: str, protocol: str, tmp_path: Path) -> None:
    objects = manifests({"routers": {"tlsSecret": secret}})

    router = pods(objects)["dualmap-router"]["spec"]["containers"][0]
    settings = settings_of(objects, router, tmp_path)
    assert (settings.router.tls_certificate is not None) == (secret != "")
    protocols = [
        port["appProtocol"]
        for each in objects
        if each["kind"] == "Service"
        for port in each["spec"]["ports"]
        if port["name"] == "http"
    ]
    assert protocols == [protocol]


def test_a_replica_advertises_its_pods_address(tmp_path: Path) -> None:
    objects = manifests({})
    container = pods(objects)["dualmap-router"]["spec"]["containers"][0]
    settings = settings_of(objects, container, tmp_path)

    assert settings.router.advertise_url == f"http://10.0.0.7:{settings.router.ops_port}"
    variables = {variable["name"]: variable for variable in container["env"]}
    assert variables["POD_IP"]["valueFrom"]["fieldRef"]["fieldPath"] == "status.podIP"
    names = list(variables)
    assert names.index("POD_IP") < names.index("DUALMAP_ROUTER__ADVERTISE_URL"), "the kubelet knows earlier ones alone"


@every_switch
def test_routers_and_pickers_have_time_to_finish_what_they_serve(values: Values, tmp_path: Path) -> None:
    objects = manifests(values)
    for name in {"dualmap-router", "dualmap-picker"} & pods(objects).keys():
        pod = pods(objects)[name]["spec"]
        container = pod["containers"][0]
        pause_s = container["lifecycle"]["preStop"]["sleep"]["seconds"]
        router = settings_of(objects, container, tmp_path).router
        assert pod["terminationGracePeriodSeconds"] >= pause_s + router.stop_within_s


# what objects say of each other -------------------------------------------------------------------------------
def selects(selector: dict[str, str], labels: dict[str, str]) -> bool:
    return selector.items() <= labels.items()


@every_switch
def test_selectors_find_the_pods_that_they_mean(values: Values) -> None:
    objects = manifests(values)
    labels = {name: pod["metadata"]["labels"] for name, pod in pods(objects).items()}
    for workload in of_kind(objects, "Deployment", "StatefulSet"):
        selector = workload["spec"]["selector"]["matchLabels"]
        assert [name for name in labels if selects(selector, labels[name])] == [workload["metadata"]["name"]]
    for each in of_kind(objects, "PodDisruptionBudget"):
        selector = each["spec"]["selector"]["matchLabels"]
        assert [name for name in labels if selects(selector, labels[name])] == [each["metadata"]["name"]]
    for each in of_kind(objects, "NetworkPolicy"):
        assert any(selects(each["spec"]["podSelector"]["matchLabels"], pod) for pod in labels.values())


@every_switch
def test_the_ports_of_services_and_probes_are_those_of_the_containers(values: Values, tmp_path: Path) -> None:
    objects = manifests(values)
    templates = pods(objects)
    for service in of_kind(objects, "Service"):
        chosen = [pod for pod in templates.values() if selects(service["spec"]["selector"], pod["metadata"]["labels"])]
        assert chosen, service["metadata"]["name"]
        for port in service["spec"]["ports"]:
            for pod in chosen:
                assert port["targetPort"] in ports(pod["spec"]["containers"][0]), service["metadata"]["name"]
    for name, container in containers(objects):
        for probe in ("readinessProbe", "livenessProbe", "startupProbe"):
            for action in ("httpGet", "tcpSocket", "grpc"):
                port = container.get(probe, {}).get(action, {}).get("port")
                assert port is None or port in {*ports(container), *ports(container).values()}, name
    router = pods(objects)["dualmap-router"]["spec"]["containers"][0]
    settings = settings_of(objects, router, tmp_path)
    assert ports(router) == {"http": settings.router.port, "ops": settings.router.ops_port}
    worker = pods(objects)["dualmap-worker"]["spec"]["containers"][0]
    assert ports(worker) == {"ops": settings.worker.ops_port}


def ports(container: Manifest) -> dict[str, int]:
    return {port["name"]: port["containerPort"] for port in container["ports"]}


@every_switch
def test_files_that_settings_name_are_in_a_volume(values: Values, tmp_path: Path) -> None:
    objects = manifests(values)
    for name, container in containers(objects):
        mounts = tuple(f"{mount['mountPath']}/" for mount in container.get("volumeMounts", ()))
        variables = [each.get("value", "") for each in container.get("env", ()) if is_fleet(container)]
        settings = settings_file(objects, tmp_path).read_text("utf-8") if is_fleet(container) else ""
        for path in re.findall(r"(?<![:/\w])/etc/\S+", "\n".join([settings, *variables])):
            assert path.startswith(mounts), f"{name}: {path}"
        assert "ssl_ca_certs" not in "".join(variables) or "/etc/dualmap-store-tls/" in mounts


@every_switch
def test_what_scales_or_publishes_names_what_exists(values: Values) -> None:
    objects = manifests(values)
    for each in of_kind(objects, "HorizontalPodAutoscaler", "ScaledObject"):
        target = each["spec"]["scaleTargetRef"]
        assert "replicas" not in named(objects, target["kind"], target["name"])["spec"], "two writers of the size"
    for each in of_kind(objects, "Ingress"):
        for rule in each["spec"]["rules"]:
            for path in rule["http"]["paths"]:
                backend = path["backend"]["service"]
                offered = named(objects, "Service", backend["name"])["spec"]["ports"]
                assert backend["port"]["name"] in {port["name"] for port in offered}
    for each in of_kind(objects, "HTTPRoute"):
        for backend in each["spec"]["rules"][0]["backendRefs"]:
            named(objects, backend.get("kind", "Service"), backend["name"])


@every_switch
def test_what_a_pod_mounts_exists(values: Values) -> None:
    objects = manifests(values)
    for name, pod in pods(objects).items():
        claims = next(each for each in objects if each["metadata"]["name"] == name and "template" in each["spec"])
        volumes = {volume["name"] for volume in pod["spec"].get("volumes", ())}
        volumes |= {claim["metadata"]["name"] for claim in claims["spec"].get("volumeClaimTemplates", ())}
        for container in pod["spec"]["containers"]:
            assert {mount["name"] for mount in container.get("volumeMounts", ())} <= volumes
        for volume in pod["spec"].get("volumes", ()):
            if "configMap" in volume:
                named(objects, "ConfigMap", volume["configMap"]["name"])


# rights -------------------------------------------------------------------------------------------------------
@every_switch
def test_containers_are_unprivileged_and_their_root_is_read_only(values: Values) -> None:
    objects = manifests(values)
    for name, pod in pods(objects).items():
        security = pod["spec"]["securityContext"]
        assert security["runAsNonRoot"] is True, name
        assert security["runAsUser"] > 0, name
        assert security["seccompProfile"] == {"type": "RuntimeDefault"}, name
        ours = [each for each in pod["spec"]["containers"] if each["name"] not in ("agent", "exporter")]
        for container in ours:
            own = container["securityContext"]
            assert own["allowPrivilegeEscalation"] is False, name
            assert own["readOnlyRootFilesystem"] is True, name
            assert own["capabilities"] == {"drop": ["ALL"]}, name
        for volume in pod["spec"].get("volumes", ()):
            assert set(volume) - {"name"} <= {"configMap", "emptyDir", "persistentVolumeClaim", "secret"}, name


@every_switch
def test_workers_alone_have_a_right_on_the_api(values: Values) -> None:
    objects = manifests(values)
    with_a_token = {name for name, pod in pods(objects).items() if pod["spec"]["automountServiceAccountToken"]}

    assert with_a_token == {"dualmap-worker"}
    assert of_kind(objects, "ClusterRole", "ClusterRoleBinding") == []
    (account,) = of_kind(objects, "ServiceAccount")
    assert pods(objects)["dualmap-worker"]["spec"]["serviceAccountName"] == account["metadata"]["name"]
    for binding in of_kind(objects, "RoleBinding"):
        named(objects, "Role", binding["roleRef"]["name"])
        assert [subject["name"] for subject in binding["subjects"]] == [account["metadata"]["name"]]


def test_network_policies_let_through_what_the_fleet_calls() -> None:
    objects = manifests(SWITCHES["everything"])
    labels = {name: pod["metadata"]["labels"] for name, pod in pods(objects).items()}
    fleet = {"dualmap-router", "dualmap-worker", "dualmap-picker"}

    def chosen(peers: list[Manifest]) -> set[str]:
        selectors = [each["podSelector"]["matchLabels"] for each in peers if "podSelector" in each]
        return {name for name in labels if any(selects(selector, labels[name]) for selector in selectors)}

    def let_in(name: str, port: str) -> set[str]:
        rules = named(objects, "NetworkPolicy", name)["spec"]["ingress"]
        opened = [rule for rule in rules if {"port": port} in rule.get("ports", [{"port": port}])]
        return {caller for rule in opened for caller in chosen(rule["from"])}

    assert let_in("dualmap-valkey", "valkey") == fleet, "nobody else reaches the store"
    assert let_in("dualmap-router", "ops") == fleet
    assert let_in("dualmap-engines", "http") == {*fleet, "dualmap-emulated"}
    egress = named(objects, "NetworkPolicy", "dualmap-egress")["spec"]
    assert {name for name in labels if selects(egress["podSelector"]["matchLabels"], labels[name])} == fleet
    assert {name for rule in egress["egress"] for name in chosen(rule.get("to", []))} == labels.keys()


@pytest.mark.parametrize(
    ("source", "paths"),
    [
        ({"label_selector": "app=vllm"}, {PODS}),
        ({"inference_pool": "qwen"}, {PODS, POOLS}),
        ({"service": "vllm"}, {PODS, SERVICES, SLICES}),
    ],
)
def test_the_role_has_the_rights_that_discovery_needs_and_no_more(source: dict[str, str], paths: set[str]) -> None:
    objects = manifests({"fleet": {"pools": [{"name": "a", "discovery": {"kubernetes": source}}]}})
    (role,) = of_kind(objects, "Role")

    assert {(rule["apiGroups"][0], rule["resources"][0]) for rule in role["rules"]} == {called(path) for path in paths}
    assert {verb for rule in role["rules"] for verb in rule["verbs"]} == {"list", "watch"}


def called(path: str) -> tuple[str, str]:
    """The group and the resource of a path of the API."""
    return "" if path.startswith("/api/") else path.split("/")[2], path.rpartition("/")[2]


@pytest.mark.parametrize(
    ("workload", "rights"),
    [
        ("deployment/vllm", [("apps", "deployments/scale", "get, patch"), ("", "pods", "patch")]),
        ("statefulset/vllm", [("apps", "statefulsets/scale", "get, patch")]),
        ("leaderworkerset/vllm", [("leaderworkerset.x-k8s.io", "leaderworkersets/scale", "get, patch")]),
    ],
)
def test_a_fleet_that_scales_a_workload_may_change_that_one_alone(
    workload: str, rights: list[tuple[str, str, str]]
) -> None:
    found = {"kubernetes": {"label_selector": "app=vllm"}}
    autoscale = {"max_instances": 4, "actuator": "kubernetes", "workload": workload}
    objects = manifests({"fleet": {"pools": [{"name": "a", "discovery": found, "autoscale": autoscale}]}})
    (role,) = of_kind(objects, "Role")
    rules = {(rule["apiGroups"][0], rule["resources"][0], ", ".join(rule["verbs"])): rule for rule in role["rules"]}

    assert rules.keys() == {("", "pods", "list, watch"), *rights}
    assert rules[rights[0]]["resourceNames"] == ["vllm"]


def test_a_fleet_that_scales_both_roles_may_change_both_workloads_by_the_names_that_the_chart_gives_them() -> None:
    objects = manifests(example("prefill-decode"))
    (role,) = of_kind(objects, "Role")
    (scales,) = [[each for each in role["rules"] if each["resources"] == ["statefulsets/scale"]]]
    settings = yaml.safe_load(named(objects, "ConfigMap", "dualmap-settings")["data"]["fleet.yaml"])
    autoscale = settings["pools"][0]["autoscale"]
    workloads = {each["workload"].partition("/")[2] for each in (autoscale, autoscale["decode"])}

    assert {name for rule in scales for name in rule["resourceNames"]} == workloads
    for name in workloads:
        assert "replicas" not in named(objects, "StatefulSet", name)["spec"]


def test_a_number_of_engines_that_the_fleet_sets_is_not_set_again() -> None:
    engine = {**example("emulated")["engines"][0], "autoscaling": {"kind": "fleet"}}
    objects = manifests({**example("emulated"), "engines": [engine]})

    assert "replicas" not in named(objects, "StatefulSet", "dualmap-emulated")["spec"]
    assert of_kind(objects, "ScaledObject", "HorizontalPodAutoscaler") == []


def test_without_discovery_there_are_no_rights() -> None:
    pools = [{"name": "a", "instances": [{"id": "b", "url": "http://b:8000"}]}]

    assert of_kind(manifests({"fleet": {"pools": pools}}), "Role", "RoleBinding") == []


def test_a_pool_in_another_namespace_has_its_rights_there() -> None:
    there = {"kubernetes": {"label_selector": "app=vllm", "namespace": "models"}}
    objects = manifests({"fleet": {"pools": [{"name": "a", "discovery": there}]}})
    (role,), (binding,) = of_kind(objects, "Role"), of_kind(objects, "RoleBinding")

    assert role["metadata"]["namespace"] == binding["metadata"]["namespace"] == "models"
    assert binding["subjects"][0]["namespace"] == "llm"


# monitoring ---------------------------------------------------------------------------------------------------
def test_alerts_and_dashboards_are_those_of_the_composed_fleet() -> None:
    objects = manifests(SWITCHES["everything"])
    alerts = yaml.safe_load((CHART.parents[1] / "prometheus" / "alerts.yml").read_text("utf-8"))
    dashboards = sorted((CHART.parents[1] / "grafana" / "dashboards").glob("*.json"))
    (rule,) = of_kind(objects, "PrometheusRule")
    shown = {
        name: json.loads(text)
        for each in of_kind(objects, "ConfigMap")
        if "grafana_dashboard" in each["metadata"].get("labels", ())
        for name, text in each["data"].items()
    }

    linked = json.dumps(rule["spec"]["groups"])
    assert json.loads(linked.replace("https://git.example/dualmap/", "")) == alerts["groups"]
    assert "https://git.example/dualmap/docs/operate/runbook.md#" in linked
    assert shown == {path.name: json.loads(path.read_text("utf-8")) for path in dashboards}


def test_prometheus_scrapes_the_own_port_of_every_process_and_keeps_the_fleets_labels() -> None:
    objects = manifests(SWITCHES["everything"])
    (monitor,) = of_kind(objects, "ServiceMonitor")
    (service,) = [
        each
        for each in of_kind(objects, "Service")
        if selects(monitor["spec"]["selector"]["matchLabels"], each["metadata"]["labels"])
    ]
    (endpoint,) = monitor["spec"]["endpoints"]

    assert endpoint["honorLabels"] is True
    assert endpoint["port"] in {port["name"] for port in service["spec"]["ports"]}
    scraped = {
        name for name, pod in pods(objects).items() if selects(service["spec"]["selector"], pod["metadata"]["labels"])
    }
    assert scraped == {"dualmap-router", "dualmap-worker", "dualmap-picker"}


# gateways -----------------------------------------------------------------------------------------------------
def test_a_gateway_finds_the_pickers_and_reaches_what_they_choose(tmp_path: Path) -> None:
    objects = manifests(SWITCHES["gateway"])
    (pool,), (route,) = of_kind(objects, "InferencePool"), of_kind(objects, "HTTPRoute")
    picker = named(objects, "Service", pool["spec"]["endpointPickerRef"]["name"])
    chosen = {
        name
        for name, pod in pods(objects).items()
        if selects(pool["spec"]["selector"]["matchLabels"], pod["metadata"]["labels"])
    }

    (backend,) = route["spec"]["rules"][0]["backendRefs"]
    assert (backend["kind"], backend["name"]) == ("InferencePool", pool["metadata"]["name"])
    assert picker["spec"]["ports"][0]["port"] == pool["spec"]["endpointPickerRef"]["port"]["number"]
    assert chosen == {"dualmap-emulated"}
    open_to_all = [
        rule for rule in named(objects, "NetworkPolicy", "dualmap-engines")["spec"]["ingress"] if "from" not in rule
    ]
    assert open_to_all == [{"ports": [{"port": "http"}]}], "the gateway sends requests to engines itself"
    (container,) = pods(objects)["dualmap-picker"]["spec"]["containers"]
    settings = settings_of(objects, container, tmp_path)
    assert settings.picker.port == ports(container)["grpc"]
    assert settings.router.advertise_url == f"http://10.0.0.7:{settings.picker.ops_port}"


GATEWAYS = sorted((Path(__file__).parents[1] / "examples" / "gateways").glob("*.yaml"))


@pytest.mark.parametrize("path", GATEWAYS, ids=lambda path: path.stem)
def test_examples_of_gateways_are_well_formed_and_find_the_chart(path: Path) -> None:
    text = path.read_text("utf-8")
    objects = [each for each in yaml.safe_load_all(text) if each]
    secure = {"tlsSecret": "dualmap-picker"} if "pickers.tlsSecret=dualmap-picker" in text else {}
    fleet = manifests({**example("emulated"), "pickers": {"enabled": True, **secure}})

    assert [found for each in objects for found in complaints(each)] == []
    (gateway,), (route,), (pool,) = (of_kind(objects, kind) for kind in ("Gateway", "HTTPRoute", "InferencePool"))
    assert [parent["name"] for parent in route["spec"]["parentRefs"]] == [gateway["metadata"]["name"]]
    assert [backend["name"] for backend in route["spec"]["rules"][0]["backendRefs"]] == [pool["metadata"]["name"]]
    picker = named(fleet, "Service", pool["spec"]["endpointPickerRef"]["name"])
    assert picker["spec"]["ports"][0]["port"] == pool["spec"]["endpointPickerRef"]["port"]["number"]
    selector = pool["spec"]["selector"]["matchLabels"]
    assert any(selects(selector, pod["metadata"]["labels"]) for pod in pods(fleet).values())
    for rule in of_kind(objects, "DestinationRule"):
        assert rule["spec"]["host"] == picker["metadata"]["name"]
        assert (rule["spec"]["trafficPolicy"]["tls"]["mode"] == "DISABLE") == (not secure)


def test_the_example_for_every_gateway_that_is_promised_is_there() -> None:
    assert {path.stem for path in GATEWAYS} == {"istio", "envoy-gateway", "kgateway"}


# the fleet's pods and engines ---------------------------------------------------------------------------------
def labels_of(selector: str) -> dict[str, str]:
    return dict(part.split("=") for part in selector.split(","))


@pytest.mark.parametrize("name", EXAMPLES)
def test_discovery_finds_the_engines_of_the_chart_and_nothing_else(name: str, tmp_path: Path) -> None:
    objects = manifests(example(name))
    settings = load_settings((), {}, settings_file(objects, tmp_path))
    found: set[str] = set()
    for pool in settings.pools:
        assert pool.discovery is not None
        selector = pool.discovery.kubernetes.label_selector
        assert selector is not None
        found |= {
            name for name, pod in pods(objects).items() if selects(labels_of(selector), pod["metadata"]["labels"])
        }

    engines = {f"dualmap-{engine['name']}" for engine in example(name)["engines"]}
    assert found == engines


def test_the_packaged_chart_is_whole_and_its_version_is_that_of_the_image(tmp_path: Path) -> None:
    values = {**SWITCHES["everything"], "image": {}}
    archive = helm_python.package(CHART, destination=tmp_path, version="1.4.0", app_version="v1.4.0")
    with helm_python.Chart.load(archive) as chart:
        packed = chart.render(values, name="dualmap", namespace="llm")

    here = texts(values)
    assert packed["dualmap/templates/monitoring.yaml"].count("\n") == here["dualmap/templates/monitoring.yaml"].count(
        "\n"
    )
    assert packed.keys() == here.keys()
    assert 'image: "dualmap-fleet:v1.4.0"' in packed["dualmap/templates/routers.yaml"]


def test_every_value_is_used() -> None:
    templates = "".join(path.read_text("utf-8") for path in (CHART / "templates").iterdir())

    def unused(values: Values, path: str = "") -> Iterator[str]:
        for name, value in values.items():
            if not re.search(rf'[."]{name}\b', templates):
                yield f"{path}{name}"
            if isinstance(value, dict) and name not in ("fleet", "labels", "podSecurityContext", "securityContext"):
                yield from unused(value, f"{path}{name}.")

    values = yaml.safe_load((CHART / "values.yaml").read_text("utf-8"))
    resources = {"cpu", "memory", "requests", "limits"}
    assert {path for path in unused(values) if path.rpartition(".")[2] not in resources} == set()


def test_the_notes_say_what_to_try() -> None:
    notes = texts(example("emulated"))["dualmap/templates/NOTES.txt"]

    assert "kubectl -n llm port-forward service/dualmap 8000" in notes
    assert '"model": "qwen2.5-7b"' in notes
    assert "No admin key" in notes
    assert "No admin key" not in texts(SWITCHES["secrets"])["dualmap/templates/NOTES.txt"]


def test_the_plain_manifests_are_those_of_the_chart() -> None:
    folder = CHART.parents[1] / "kubernetes"
    rendered = runpy.run_path(str(CHART.parent / "manifests.py"))["examples"]()

    assert {path.name: path.read_text("utf-8") for path in folder.iterdir()} == rendered, "run: make docs"
    for text in rendered.values():
        assert [found for each in yaml.safe_load_all(text) if each for found in complaints(each)] == []


# the store ----------------------------------------------------------------------------------------------------
def test_the_own_store_keeps_what_it_was_given_when_it_starts_again(tmp_path: Path) -> None:
    """The real server takes the arguments of the chart, the password among them."""
    (container,) = pods(manifests(SWITCHES["secrets"]))["dualmap-valkey"]["spec"]["containers"]
    folder, variables = tmp_path / "data", environment(container)
    folder.mkdir()
    words = [word.replace("$(STORE_PASSWORD)", variables["STORE_PASSWORD"]) for word in container["args"]]
    words = [str(folder) if word == "/data" else word for word in words]
    socket = tmp_path / "valkey.sock"

    for value in (None, b"kept"):
        command = [str(server_binary()), *words, "--port", "0", "--unixsocket", str(socket)]
        with subprocess.Popen(command, stdout=subprocess.DEVNULL) as server:
            try:
                with redis.Redis(unix_socket_path=str(socket), password=variables["REDISCLI_AUTH"]) as client:
                    eventually(client)
                    assert client.get("key") == value
                    client.set("key", "kept")
                    assert client.config_get("maxmemory", "maxmemory-policy", "save", "protected-mode") == {
                        "maxmemory": str(768 << 20),
                        "maxmemory-policy": "noeviction",
                        "save": "",
                        "protected-mode": "no",
                    }
                with redis.Redis(unix_socket_path=str(socket)) as nobody, pytest.raises(redis.AuthenticationError):
                    nobody.ping()
            finally:
                server.terminate()


def eventually(client: redis.Redis) -> None:
    """Wait until a server serves."""
    deadline_s = time.monotonic() + 30
    while True:
        try:
            client.ping()
            return
        except (redis.ConnectionError, redis.BusyLoadingError):
            assert time.monotonic() < deadline_s
            time.sleep(0.02)


def test_counts_of_tokens_may_be_written_in_thousands_and_millions(tmp_path: Path) -> None:
    limits = {"tokens_per_minute": "100k", "tokens_per_day": "2M"}
    objects = manifests({"keys": {"admin": SECRET}, "fleet": {"tenants": [{"name": "acme", "limits": limits}]}})

    settings = settings_of(objects, pods(objects)["dualmap-router"]["spec"]["containers"][0], tmp_path)

    assert settings.tenants[0].limits.tokens_per_minute == 100_000
    assert settings.tenants[0].limits.tokens_per_day == 2_000_000
    with pytest.raises(helm_python.HelmValuesError, match="tokens_per_minute"):
        texts({"fleet": {"tenants": [{"name": "acme", "limits": {"tokens_per_minute": "lots"}}]}})
