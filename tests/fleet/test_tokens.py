"""A fleet whose tokenizer's files are not those of its instances."""

from __future__ import annotations

import json
import urllib.request
from pathlib import Path

from tests.conformance.agent_sessions import SESSIONS
from tests.fleet.fleet_process import Fleet, running_fleet, until
from tests.router.tokens.tokenizer_files import TEMPLATE, train_tokenizer


def metrics(fleet: Fleet) -> dict[str, float]:
    with urllib.request.urlopen(f"{fleet.endpoint}/metrics", timeout=60) as answer:
        lines = answer.read().decode().splitlines()
    return {line.rpartition(" ")[0]: float(line.rpartition(" ")[2]) for line in lines if not line.startswith("#")}


def test_wrong_files_are_found_out_before_a_request_and_the_instances_count(tmp_path: Path) -> None:
    folder, config = tmp_path / "model", tmp_path / "fleet.yaml"
    folder.mkdir()
    train_tokenizer([Path(__file__).read_text(encoding="utf-8")]).save(str(folder / "tokenizer.json"))
    (folder / "tokenizer_config.json").write_text(json.dumps({"chat_template": TEMPLATE}), encoding="utf-8")
    config.write_text(f"pools: [{{name: default, tokenizer: {folder}}}]\n", encoding="utf-8")
    options = ("--replicas", "1", "--workers", "1", "--instances", "1", "--router.tokenize_timeout_s", "10")
    with running_fleet(tmp_path, ("--config", str(config), *options)) as fleet:
        until(
            lambda: metrics(fleet)['dualmap_tokens_mistrusted{pool="default"}'] == 1, "the files are mistrusted", 60.0
        )
        until(
            lambda: "tokens mistrusted" in fleet.dualmap("inspect", "overview", "--store.url", fleet.store_url),
            "the store knows",
            30.0,
        )
        for _ in range(2):
            for path, session in SESSIONS.items():
                for body in session():
                    limit = "max_output_tokens" if path == "/v1/responses" else "max_tokens"
                    sent = json.dumps({**body, "model": fleet.model, limit: 2}).encode()
                    headers = {"content-type": "application/json"}
                    request = urllib.request.Request(f"{fleet.endpoint}{path}", sent, headers)
                    with urllib.request.urlopen(request, timeout=60) as answer:
                        assert answer.status == 200
        found = metrics(fleet)

    exact, by_bytes = (
        found[f'dualmap_tokenized_prompts_total{{pool="default",result="{how}"}}'] for how in ("exact", "bytes")
    )
    assert exact >= sum(1 for session in SESSIONS.values() for _ in session())
    assert by_bytes == 0 and found['dualmap_miscounted_prompts_total{pool="default"}'] == 0
