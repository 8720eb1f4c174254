"""Building a pool's tokenizer from its settings."""

from __future__ import annotations

from pathlib import Path

import pytest

from dualmap.router.prompts.prompt import PromptTokenizer, read_prompt, sent_prompt
from dualmap.router.settings import RouterSettings
from dualmap.router.telemetry.metrics import RouterMetrics
from dualmap.router.tokens import NoTokenizerError, build_tokenizer
from dualmap.router.tokens.verified import FILES
from dualmap.runtime.clock import RealClock
from dualmap.runtime.pool_settings import PoolSettings
from dualmap.scheduling.estimates.learned import Learned
from dualmap.scheduling.prompts.blocks import BlockRule
from dualmap.scheduling.state.view import ClusterView

BODY = {"messages": [{"role": "user", "content": "How many tokens? " * 20}]}


def built(folder: Path | None) -> PromptTokenizer | None:
    """The tokenizer of a pool with this folder."""
    metrics = RouterMetrics(["default"]).pools["default"]
    settings = PoolSettings(tokenizer=folder)
    return build_tokenizer(settings, RouterSettings(), metrics, view=ClusterView, learned=Learned, clock=RealClock())


async def test_a_pool_with_a_folder_of_files_counts_by_them_and_one_without_estimates(model_folder: Path) -> None:
    counts = []
    for folder in (model_folder, None):
        tokenizer = built(folder)
        read = await read_prompt(
            sent_prompt("/v1/chat/completions", BODY), model="m", lora=None, rule=BlockRule(16, 64),
            learned=Learned(), tokenizer=tokenizer,
        )  # fmt: skip
        counts.append((read.count, read.chain.prompt_tokens))
    (counted, tokens), (estimated, _) = counts
    assert counted is not None and counted.by == FILES and estimated is None and tokens > 100


@pytest.mark.parametrize(
    ("name", "content", "complaint"),
    [
        ("tokenizer.json", "{}", "tokenizer.json"),
        ("tokenizer_config.json", "[]", "not a JSON object"),
        ("tokenizer_config.json", '{"chat_template": "{% if %}"}', "cannot be compiled"),
    ],
)
def test_files_that_cannot_be_used_stop_the_start_by_name(
    model_folder: Path, tmp_path: Path, name: str, content: str, complaint: str
) -> None:
    for file in model_folder.iterdir():
        (tmp_path / file.name).write_bytes(file.read_bytes())
    (tmp_path / name).write_text(content, encoding="utf-8")
    with pytest.raises(NoTokenizerError, match=complaint):
        built(tmp_path)


def test_missing_packages_are_named_with_their_remedy(model_folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("dualmap.router.tokens.find_spec", lambda library: None)
    with pytest.raises(NoTokenizerError, match=r"pip install .*transformers.*tokenizer: instances"):
        built(model_folder)


def test_a_template_file_replaces_the_models_own(model_folder: Path, tmp_path: Path) -> None:
    from dualmap.router.tokens.model_files import read_templates

    other = tmp_path / "other.jinja"
    other.write_text("{{ style }}:{{ messages | length }}", encoding="utf-8")
    templates = read_templates(model_folder, template_file=other, default_variables={"style": "x"})
    assert templates is not None and templates.of(BODY).render(BODY) == "x:1"
