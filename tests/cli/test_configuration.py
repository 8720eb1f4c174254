"""Where settings come from, who wins, and how a wrong one is reported."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
import yaml

from dualmap.cli.configuration import ConfigurationError, annotation_at, load_settings, nearly_settings, split_flags
from dualmap.cli.main import main
from dualmap.cli.settings import Settings
from dualmap.scheduling.removed_settings import REMOVED


def load(*words: str, environment: dict[str, str] | None = None, config: Path | None = None) -> Settings:
    flags, rest = split_flags(words, {})
    assert rest == []
    return load_settings(flags, environment or {}, config)


def complaint(*words: str, environment: dict[str, str] | None = None, config: Path | None = None) -> str:
    with pytest.raises(ConfigurationError) as caught:
        load(*words, environment=environment, config=config)
    return str(caught.value)


@pytest.fixture
def fleet_yaml(tmp_path: Path) -> Path:
    path = tmp_path / "fleet.yaml"
    path.write_text("router:\n  port: 1001\n  host: 10.0.0.1\nscheduling: {policy: preble}\nworker:\n")
    return path


def test_defaults_hold_where_nothing_is_given() -> None:
    assert load() == Settings()


def test_flags_come_before_environment_before_file_before_defaults(fleet_yaml: Path) -> None:
    environment = {"DUALMAP_ROUTER__PORT": "1002", "DUALMAP_ROUTER__HOST": "10.0.0.2"}

    settings = load("--router.port", "1003", environment=environment, config=fleet_yaml)

    assert settings.router.port == 1003
    assert settings.router.host == "10.0.0.2"
    assert settings.scheduling.policy == "preble"
    assert settings.scheduling.slo_ttft_s == Settings().scheduling.slo_ttft_s


def test_the_file_may_be_named_by_the_environment_and_an_empty_section_means_its_defaults(fleet_yaml: Path) -> None:
    settings = load(environment={"DUALMAP_CONFIG": str(fleet_yaml)})
    assert settings.router.port == 1001
    assert settings.worker == Settings().worker


def test_a_flag_may_use_an_equals_sign_and_dashes() -> None:
    assert load("--scheduling.slo-ttft-s=2.5").scheduling.slo_ttft_s == 2.5


def test_the_last_of_two_equal_flags_wins() -> None:
    assert load("--router.port", "1", "--router.port", "2").router.port == 2


def test_lists_are_json_or_separated_by_commas() -> None:
    pools = '[{"name": "small", "model": "m", "instances": [{"id": "a", "url": "http://a:1"}]}]'

    settings = load("--pools", pools, environment={"DUALMAP_ROUTER__API_KEYS": "one, two"})

    assert settings.pools[0].instances[0].url == "http://a:1"
    assert [key.get_secret_value() for key in settings.router.api_keys] == ["one", "two"]


def test_a_whole_section_in_the_environment_leaves_its_other_values_alone(fleet_yaml: Path) -> None:
    settings = load(environment={"DUALMAP_ROUTER": '{"port": 7}'}, config=fleet_yaml)
    assert (settings.router.port, settings.router.host) == (7, "10.0.0.1")


def test_the_policys_own_parameters_come_from_every_source_and_keep_their_types(tmp_path: Path) -> None:
    path = tmp_path / "fleet.yaml"
    path.write_text("scheduling: {policy: sglang, policy_options: {balance_abs_threshold: 9, cache_threshold: 0.9}}")

    settings = load(
        *("--scheduling.policy_options.balance_rel_threshold", "2"),
        environment={"DUALMAP_SCHEDULING__POLICY_OPTIONS": '{"cache_threshold": 0.5}'},
        config=path,
    )

    given = {"balance_abs_threshold": 9, "balance_rel_threshold": 2, "cache_threshold": 0.5}
    assert settings.scheduling.policy_options == given


@pytest.mark.parametrize(
    ("options", "said"),
    [
        (
            '{"cache_threshold": 0.5}',
            "policy dualmap-least-cost has no option cache_threshold; it has",
        ),
        ('{"miss_penalty": "much"}', "scheduling.policy_options: miss_penalty: "),
        ('{"miss_penalty": .inf}', "scheduling.policy_options: miss_penalty: "),
    ],
)
def test_a_policy_that_does_not_take_its_options_stops_the_start(options: str, said: str) -> None:
    assert said in complaint("--scheduling.policy_options", options)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        (
            "scheduling: {least_cost: {miss_penalty: 1}}",
            "scheduling.least_cost: this setting was removed: the ",
        ),
        (
            "scheduling: {split: {transfer_latency_s: 1}}",
            "split.transfer_latency_s: this setting was removed",
        ),
        (
            "pools: [{discovery: {kubernetes: {service: s, resync_s: 9}}}]",
            "kubernetes.resync_s: this setting was",
        ),
        ("worker: {lease_ms: 3000}", "worker.lease_ms: this setting was removed: worker.lease_s, in seconds (from"),
        ("worker: {time_scale: 10}", "worker.time_scale: this setting was removed: scheduling.time_scale"),
        ("scheduling: {llm_d: {kv_weight: 1}}", "are scheduling.policy_options, by the same names (from"),
    ],
)
def test_a_removed_setting_stops_the_start_with_what_answers_it_now(tmp_path: Path, text: str, message: str) -> None:
    path = tmp_path / "fleet.yaml"
    path.write_text(text)

    assert message in complaint(config=path)


def test_no_removed_setting_is_one_that_there_is() -> None:
    assert [name for name in REMOVED if annotation_at(name.replace("pools.", "pools.0.").split("."))] == []


def test_an_optional_value_can_be_taken_back() -> None:
    assert load("--router.ops_port", "none", environment={"DUALMAP_ROUTER__OPS_PORT": "9"}).router.ops_port is None


@pytest.mark.parametrize(
    ("words", "environment", "name", "origin"),
    [
        (("--router.port", "many"), {}, "router.port", "--router.port"),
        (("--router.port=70000",), {}, "router.port", "--router.port"),
        ((), {"DUALMAP_SCHEDULING__POLICY": "best"}, "scheduling.policy", "DUALMAP_SCHEDULING__POLICY"),
        ((), {"DUALMAP_POOLS": '[{"instances": [{"id": "a"}]}]'}, "pools.0.instances.0.url", "DUALMAP_POOLS"),
    ],
)
def test_a_wrong_value_is_named_with_where_it_came_from(
    words: tuple[str, ...], environment: dict[str, str], name: str, origin: str
) -> None:
    message = complaint(*words, environment=environment)
    assert message.startswith(f"{name}: ")
    assert message.endswith(f"(from {origin})")


def test_a_wrong_value_in_the_file_is_named_with_the_file(tmp_path: Path) -> None:
    path = tmp_path / "wrong.yaml"
    path.write_text("worker: {lease_s: soon}\n")
    message = complaint(config=path)
    assert "worker.lease_s" in message
    assert "'soon'" in message
    assert str(path) in message


def test_all_wrong_values_are_reported_at_once() -> None:
    message = complaint("--router.port", "x", "--worker.lease_s", "y")
    assert [line.partition(":")[0] for line in message.splitlines()] == ["router.port", "worker.lease_s"]


@pytest.mark.parametrize(
    ("word", "meant"),
    [("--router.prot", "router.port"), ("--rooter.port", "router"), ("--sheduling.policy", "scheduling")],
)
def test_an_unknown_name_is_refused_with_the_nearest_known_one(word: str, meant: str) -> None:
    assert f"did you mean {meant}?" in complaint(word, "1")


def test_names_that_kubernetes_injects_are_not_settings() -> None:
    environment = {"DUALMAP_PORT": "tcp://10.0.0.1:8000", "DUALMAP_ROUTER_SERVICE_HOST": "10.0.0.1"}
    assert load(environment=environment) == Settings()


def test_a_variable_that_lacks_an_underscore_is_warned_of_unless_kubernetes_made_it() -> None:
    environment = {
        "DUALMAP_ROUTER_PORT": "1",
        "DUALMAP_SCHEDULING_SLO_TTFT_S": "1",
        "DUALMAP_ROUTER__HOST": "h",
        "DUALMAP_ROUTER_SERVICE_PORT": "1",
        "DUALMAP_STORE_URL": "tcp://10.0.0.1:8000",
        "ROUTER_PORT": "1",
    }

    assert nearly_settings(environment) == [
        "DUALMAP_ROUTER_PORT is not a setting; did you mean DUALMAP_ROUTER__PORT?",
        "DUALMAP_SCHEDULING_SLO_TTFT_S is not a setting; did you mean DUALMAP_SCHEDULING__SLO_TTFT_S?",
    ]


def test_the_command_warns_of_a_variable_that_does_nothing(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("DUALMAP_ROUTER_PORT", "1")

    assert main(["settings", "--list"]) == 0
    assert "warning: DUALMAP_ROUTER_PORT is not a setting" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ('pools: [{nam: "a"}]', "pools.0.nam: there is no such setting"),
        ("pools: []", "pools: must not be empty"),
        ('router: {admin_key: ""}', "router.admin_key: must not be empty"),
        ('router: {api_keys: ["a\\nb"]}', "router.api_keys.0: must not contain a line break"),
        ("router: {api_keys: secret}", "router.api_keys: input should be a list"),
        ("router: {max_body_bytes: 2000000000}", "router: max_buffered_body_bytes must not be below max_body_bytes"),
    ],
)
def test_a_complaint_is_one_and_in_the_words_of_a_configuration(tmp_path: Path, text: str, message: str) -> None:
    path = tmp_path / "fleet.yaml"
    path.write_text(text)

    (line,) = complaint(config=path).splitlines()

    assert line.startswith(message)


def test_secrets_stay_out_of_complaints() -> None:
    message = complaint("--router.admin_key", "[hunter2", "--store.prefix", "redis://user:hunter2@host")
    assert "hunter2" not in message

    message = complaint(
        "--store.url", "redis://h:1/0?password=hunter2", "--router.advertise_url", "http://h:1/?key=hunter2"
    )
    assert "hunter2" not in message


def test_a_file_that_is_missing_or_no_mapping_is_refused(tmp_path: Path) -> None:
    (tmp_path / "list.yaml").write_text("- router\n")
    (tmp_path / "broken.yaml").write_text("router: {port\n")
    assert "cannot read" in complaint(config=tmp_path / "absent.yaml")
    assert "must hold sections" in complaint(config=tmp_path / "list.yaml")
    assert "is not YAML" in complaint(config=tmp_path / "broken.yaml")


def test_a_setting_flag_without_a_value_is_refused() -> None:
    with pytest.raises(ConfigurationError, match=r"--router\.port needs a value"):
        split_flags(["--router.port"], {})


def test_a_commands_own_options_pass_through_and_its_shorthands_become_settings() -> None:
    flags, rest = split_flags(["--replicas", "2", "--policy", "preble", "x"], {"--policy": "scheduling.policy"})
    assert rest == ["--replicas", "2", "x"]
    assert [(flag.path, flag.value, flag.origin) for flag in flags] == [
        (("scheduling", "policy"), "preble", "--policy")
    ]


def test_two_pools_cannot_share_a_name_a_model_or_an_instance_id() -> None:
    twin = '{"name": "a", "model": "m"}, {"name": "%s", "model": "%s"}'
    assert "pool name 'a' is used by two pools" in complaint("--pools", f"[{twin % ('a', 'n')}]")
    assert "model name 'm' is used by two pools" in complaint("--pools", f"[{twin % ('b', 'm')}]")
    instance = '{"id": "i", "url": "http://h"}'
    assert "is no other pool" in complaint("--pools", '[{"name": "a", "fallback": "b"}]')
    assert "is no other pool" in complaint("--pools", '[{"name": "a", "fallback": "a"}]')
    assert "appears twice" in complaint("--pools", f'[{{"instances": [{instance}, {instance}]}}]')


def test_pools_that_a_tenant_may_use_exist() -> None:
    tenant = '[{"name": "acme", "pools": ["large"]}]'
    assert "tenant 'acme' names the unknown pool 'large'" in complaint("--tenants", tenant)


def test_a_lora_adapter_cannot_have_the_name_of_its_pools_model() -> None:
    assert "'m' of pool 'default' names both" in complaint("--pools", '[{"model": "m", "loras": ["m"]}]')
    assert "'x' of pool 'default' names both" in complaint("--pools", '[{"aliases": ["x"], "loras": ["x"]}]')


def test_a_key_that_is_given_twice_in_a_section_is_refused_by_name(tmp_path: Path) -> None:
    file = tmp_path / "fleet.yaml"
    file.write_text("router:\n  port: 1\nstore: {}\nrouter:\n  host: h\n")
    assert (
        complaint(config=file) == f"{file}: 'router' is given twice in one section, the second time in line 4: keep one"
    )
    file.write_text("pools:\n- model: a\n  model: b\n")
    assert "'model' is given twice" in complaint(config=file)
    assert "--pools: 'name' is given twice" in complaint("--pools", '[{"name": "a", "name": "b"}]')


def test_a_merged_section_may_be_overridden(tmp_path: Path) -> None:
    file = tmp_path / "fleet.yaml"
    file.write_text("router: &base {port: 1, host: h}\nemulator: {<<: *base, port: 2}\n")
    assert load_settings([], {}, file).emulator.port == 2


@pytest.mark.parametrize(
    ("flag", "value", "named"),
    [
        ("--scheduling.max_deferred_s", "inf", "scheduling.max_deferred_s"),
        ("--scheduling.split.slo_tpot_s", "inf", "scheduling.split.slo_tpot_s"),
        ("--pools", '[{"transfer_timeout_s": .inf}]', "pools.0.transfer_timeout_s"),
    ],
)
def test_a_number_that_is_not_finite_is_refused_by_name(flag: str, value: str, named: str) -> None:
    assert complaint("--router.port", "1", flag, value).endswith(f"{named} must be finite")


def test_the_command_stops_with_exit_code_2_and_names_the_value(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("DUALMAP_ROUTER__PORT", "many")

    code = main(["settings"])

    assert code == 2
    assert "router.port" in (error := capsys.readouterr().err)
    assert "DUALMAP_ROUTER__PORT" in error


@pytest.mark.parametrize(
    ("document", "said"),
    [
        ({"pools": [{"modle": "m"}]}, "pools.0.modle: there is no such setting; did you mean pools.0.model?"),
        ({"pools": [{"instances": [{"id": "a", "urll": "http://a"}]}]}, "did you mean pools.0.instances.0.url?"),
        ({"pools": [{"autoscale": {"max_instancs": 3}}]}, "did you mean pools.0.autoscale.max_instances?"),
        (
            {"tenants": [{"name": "a", "limits": {"tokens_per_minut": 5}}]},
            "did you mean tenants.0.limits.tokens_per_minute?",
        ),
        (
            {"tenants": [{"name": "a", "model_limits": {"m": {"tokens_per_minut": 5}}}]},
            "did you mean tenants.0.model_limits.m.tokens_per_minute?",
        ),
        ({"tenants": [{"name": "A B"}]}, "a name has letters, digits"),
        ({"tenants": [{"name": "a", "weight": float("inf")}]}, "input should be a finite number"),
    ],
)
def test_a_misspelt_name_within_a_list_is_answered_with_the_one_that_may_be_meant(
    document: dict[str, object], said: str, tmp_path: Path
) -> None:
    path = tmp_path / "fleet.yaml"
    path.write_text(yaml.safe_dump(document), "utf-8")

    with pytest.raises(ConfigurationError, match=re.escape(said)):
        load_settings((), {}, path)


def test_a_count_of_tokens_may_be_written_in_thousands_and_millions(tmp_path: Path) -> None:
    path = tmp_path / "fleet.yaml"
    path.write_text(
        "tenants: [{name: a, limits: {tokens_per_minute: 100k}, model_limits: {m: {tokens_per_day: 2M}}}]\n"
        "pools: [{instances: [{id: a, url: http://a, kv_capacity_tokens: 1.5M}]}]",
        "utf-8",
    )
    flags, _ = split_flags(["--emulator.max_num_batched_tokens", "8k"], {})

    settings = load_settings(flags, {"DUALMAP_EMULATOR__KV_CAPACITY_TOKENS": "1M"}, path)

    (tenant,) = settings.tenants
    assert (tenant.limits.tokens_per_minute, tenant.model_limits["m"].tokens_per_day) == (100_000, 2_000_000)
    assert settings.pools[0].instances[0].kv_capacity_tokens == 1_500_000
    assert (settings.emulator.max_num_batched_tokens, settings.emulator.kv_capacity_tokens) == (8000, 1_000_000)


@pytest.mark.parametrize("amount", ["lots", "100m", "-1k", "1.5"])
def test_a_wrong_count_of_tokens_is_named_as_it_was_written(amount: str) -> None:
    with pytest.raises(ConfigurationError, match=f"emulator.kv_capacity_tokens: .*not '{amount}'"):
        load_settings((), {"DUALMAP_EMULATOR__KV_CAPACITY_TOKENS": amount})
