"""A small model's folder, and its tokenizer without what takes seconds to load."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from dualmap.router.tokens import encoder
from tests.router.tokens import tokenizer_files
from tests.router.tokens.tokenizer_files import TEMPLATE, train_tokenizer


@pytest.fixture(autouse=True)
def without_transformers(monkeypatch: pytest.MonkeyPatch) -> None:
    """Loading a tokenizer by transformers takes seconds: tests that are not about it take the file as it is."""
    monkeypatch.setattr(encoder, "_by_transformers", lambda folder: None)


@pytest.fixture(scope="session")
def model_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("model")
    train_tokenizer([Path(tokenizer_files.__file__).read_text(encoding="utf-8")]).save(str(folder / "tokenizer.json"))
    config = {"eos_token": {"content": "<|im_end|>"}, "chat_template": TEMPLATE}
    (folder / "tokenizer_config.json").write_text(json.dumps(config), encoding="utf-8")
    return folder
