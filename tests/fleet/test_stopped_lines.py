"""Lines of a batch leave an instance for requests that somebody waits for, and continue with what they have."""

from __future__ import annotations

import io
import json
import re
import urllib.request
from pathlib import Path

from openai import OpenAI

from tests.fleet.fleet_process import QUICK, Fleet, running_fleet, until

CLASSES = "scheduling: {slo_ttft_s: 0.5, classes: [{name: default}, {name: batch, evictable: true}]}"
OPTIONS = (
    *(*QUICK, "--instances", "1", "--replicas", "1", "--workers", "1", "--time-scale", "2"),
    *("--preset", "qwen2.5-7b-910b4:kv_capacity_tokens=8192"),
)
LINES, ANSWER_TOKENS = 6, 500


def test_a_line_that_is_stopped_for_a_request_ends_with_all_of_its_tokens(tmp_path: Path) -> None:
    (tmp_path / "fleet.yaml").write_text(CLASSES)
    options = (*OPTIONS, "--config", str(tmp_path / "fleet.yaml"), "--router.batches.storage", str(tmp_path / "files"))
    with (
        running_fleet(tmp_path, options) as fleet,
        OpenAI(base_url=f"{fleet.endpoint}/v1", api_key="any", timeout=60) as client,
    ):
        body = {"model": fleet.model, "max_tokens": ANSWER_TOKENS, "ignore_eos": True}
        lines = [
            {
                "custom_id": str(number),
                "method": "POST",
                "url": "/v1/completions",
                "body": body | {"prompt": f"{number}"},
            }
            for number in range(LINES)
        ]
        text = "\n".join(map(json.dumps, lines)).encode()
        file = client.files.create(file=("lines.jsonl", io.BytesIO(text)), purpose="batch")
        batch = client.batches.create(input_file_id=file.id, endpoint="/v1/completions", completion_window="1h")
        until(lambda: len(fleet.live_requests()) >= 5, "lines run")

        client.completions.create(model=fleet.model, prompt="word " * 6450, max_tokens=2)

        until(lambda: client.batches.retrieve(batch.id).status == "completed", "the batch is over")
        over = client.batches.retrieve(batch.id)
        answers = [json.loads(line) for line in client.files.content(over.output_file_id or "").text.splitlines()]
        assert len(answers) == LINES
        for each in answers:
            assert each["response"]["body"]["usage"]["completion_tokens"] == ANSWER_TOKENS
        assert evictions(fleet) > 0


def evictions(fleet: Fleet) -> float:
    """The times that a stream left an instance for a request of a higher class."""
    with urllib.request.urlopen(f"{fleet.endpoint}/metrics") as page:
        found = re.findall(r'dualmap_continuations_total\{[^}]*failure="evicted"[^}]*\} (\S+)', page.read().decode())
    return sum(map(float, found))
