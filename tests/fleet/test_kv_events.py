"""A fleet that follows its instances' KV events expects of every request what its instance reports."""

from __future__ import annotations

import json
import urllib.request
from pathlib import Path
from typing import Any

from tests.fleet.fleet_process import Fleet, running_fleet, until
from tests.fleet.kv_views import complete, has_read_all, views
from tests.support.images import png_url

BLOCK_TOKENS = 128
EVENTS = "{endpoint: 'tcp://{host}:{port+10}', replay_endpoint: 'tcp://{host}:{port+20}'}"
# Room for 30 blocks an instance, so that the sessions evict each other's.
OPTIONS = (
    "--replicas", "2", "--workers", "2", "--instances", "2", "--emulator.kv_events_port_offset", "10",
    "--emulator.kv_capacity_tokens", str(30 * BLOCK_TOKENS), "--emulator.max_model_len", "3000",
)  # fmt: skip


def test_expected_cached_tokens_are_those_that_instances_report_under_eviction(tmp_path: Path) -> None:
    config = tmp_path / "fleet.yaml"
    config.write_text(f"pools: [{{name: default, kv_events: {EVENTS}}}]\n")
    with running_fleet(tmp_path, ("--config", str(config), *OPTIONS)) as fleet:
        until(lambda: views(fleet) == {"exact"}, "both instances are followed")
        wrong, reported = [], 0
        for turn in range(1, 8):
            for session in range(6):
                ids = [1000 + session] * BLOCK_TOKENS + list(range(2 * BLOCK_TOKENS * turn))
                expected, cached, _ = complete(fleet, ids)
                until(lambda: has_read_all(fleet), "all events are read")
                reported += cached
                if abs(expected - cached) > 16:
                    wrong.append((session, turn, expected, cached))

    assert reported > 0
    assert not wrong


def test_a_hybrid_model_is_expected_to_find_what_it_finds(tmp_path: Path) -> None:
    """Turns find the prompt before them and not its answer, and a part that prompts share from the third one on. The
    instances say themselves where they publish."""
    config = tmp_path / "fleet.yaml"
    config.write_text("pools: [{name: default, kv_events: instances}]\n")
    groups = '["window:200", "state:256", "window:500"]'
    options = (*OPTIONS, "--emulator.cache_groups", groups, "--emulator.kv_capacity_tokens", str(60 * BLOCK_TOKENS))
    with running_fleet(tmp_path, ("--config", str(config), *options)) as fleet:
        until(lambda: views(fleet) == {"exact"}, "both instances are followed")
        found = []
        for turn in range(1, 7):
            for session in range(6):
                ids = [1000] * 2 * BLOCK_TOKENS + [2000 + session] * 40 + list(range(300 * turn))
                expected, cached, _ = complete(fleet, ids)
                until(lambda: has_read_all(fleet), "all events are read")
                found.append((turn, session, expected, cached))

    wrong = [each for each in found if each[2] != each[3]]
    assert sum(cached > 0 for *_, cached in found) > 15
    assert {cached % 256 for *_, cached in found} == {0}
    assert not wrong


def chat(fleet: Fleet, messages: list[dict[str, Any]]) -> tuple[int, int, str]:
    """Expected and reported cached tokens, and the answer."""
    body = json.dumps({"model": fleet.model, "messages": messages, "max_tokens": 8}).encode()
    headers = {"content-type": "application/json"}
    request = urllib.request.Request(f"{fleet.endpoint}/v1/chat/completions", body, headers)
    with urllib.request.urlopen(request, timeout=60) as answer:
        said = json.loads(answer.read())
        cached = said["usage"]["prompt_tokens_details"]["cached_tokens"]
        return int(answer.headers["x-dualmap-cached-tokens"]), cached, said["choices"][0]["message"]["content"]


def test_chats_that_instances_tokenize_are_expected_to_find_what_they_find(tmp_path: Path) -> None:
    config = tmp_path / "fleet.yaml"
    config.write_text(f"pools: [{{name: default, tokenizer: instances, kv_events: {EVENTS}}}]\n")
    patient = ("--router.tokenize_timeout_s", "10")
    with running_fleet(tmp_path, ("--config", str(config), *OPTIONS, *patient)) as fleet:
        until(lambda: views(fleet) == {"exact"}, "both instances are followed")
        found = []
        for session in range(3):
            messages = [{"role": "system", "content": f"{session} You help. " * 60}]
            for turn in range(4):
                messages.append({"role": "user", "content": f"Question {turn}? " * 50})
                expected, cached, said = chat(fleet, messages)
                until(lambda: has_read_all(fleet), "all events are read")
                found.append((expected, cached))
                messages.append({"role": "assistant", "content": said})
        with urllib.request.urlopen(f"{fleet.endpoint}/metrics", timeout=60) as answer:
            page = answer.read().decode()

    wrong = [pair for pair in found if abs(pair[0] - pair[1]) > 16]
    assert sum(cached for _, cached in found) > 1000
    assert not wrong, found
    assert 'dualmap_miscounted_prompts_total{pool="default"} 0.0' in page


def test_chats_with_images_are_counted_and_found_as_instances_have_them(tmp_path: Path) -> None:
    config = tmp_path / "fleet.yaml"
    config.write_text(f"pools: [{{name: default, tokenizer: instances, kv_events: {EVENTS}}}]\n")
    options = ("--router.tokenize_timeout_s", "10", "--emulator.scale_out", "true")
    with running_fleet(tmp_path, ("--config", str(config), *OPTIONS, *options)) as fleet:
        until(lambda: views(fleet) == {"exact"}, "both instances are followed")
        found = []
        for session in range(3):
            messages: list[dict[str, Any]] = [{"role": "system", "content": "You see. " * 60}]
            for turn in range(3):
                image = {"type": "image_url", "image_url": {"url": png_url(28 * 12, 28 * 20, 10 * session + turn)}}
                said = {"type": "text", "text": f"Question {turn}? " * 20}
                messages.append({"role": "user", "content": [image, said]})
                expected, cached, answer = chat(fleet, messages)
                until(lambda: has_read_all(fleet), "all events are read")
                found.append((expected, cached))
                messages.append({"role": "assistant", "content": answer})
        with urllib.request.urlopen(f"{fleet.endpoint}/metrics", timeout=60) as page:
            metrics = page.read().decode()

    assert sum(cached for _, cached in found) > 1500
    assert all(expected == cached for expected, cached in found), found
    assert 'dualmap_tokenized_prompts_total{pool="default",result="rendered"} 9.0' in metrics
    assert 'dualmap_miscounted_prompts_total{pool="default"} 0.0' in metrics
