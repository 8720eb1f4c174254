"""The tokenizer that vLLM would load from a folder."""

from __future__ import annotations

import json
import logging
import shutil
from pathlib import Path

import pytest
import tokenizers

from dualmap.router.tokens import encoder
from dualmap.router.tokens.encoder import LocalEncoder, _by_transformers
from dualmap.router.tokens.fast_tokenizer import id_bytes

TEXT = "def f(x):\n    return x+12345  # it's\n\n\n\tÉé"


async def test_a_model_whose_code_replaces_its_file_is_tokenized_as_transformers_does(
    model_folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = tmp_path / "model"
    shutil.copytree(model_folder, folder)
    (folder / "tokenizer_config.json").write_text(json.dumps({"eos_token": "<|im_end|>"}), encoding="utf-8")
    (folder / "config.json").write_text(json.dumps({"model_type": "qwen2"}), encoding="utf-8")
    by_file = tokenizers.Tokenizer.from_file(str(folder / "tokenizer.json")).encode(TEXT, add_special_tokens=False)
    monkeypatch.setattr(encoder, "_by_transformers", _by_transformers)

    ids, _ = LocalEncoder(folder).encode([TEXT])

    loaded = _by_transformers(folder)
    assert loaded is not None
    assert ids == id_bytes(tokenizers.Tokenizer.from_str(loaded).encode(TEXT, add_special_tokens=False).ids)
    assert ids != id_bytes(by_file.ids), "the file alone gives other tokens"


async def test_a_missing_library_is_named(
    model_folder: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(encoder, "find_spec", lambda name: None)
    with caplog.at_level(logging.WARNING):
        assert _by_transformers(model_folder) is None
    assert "transformers is not installed" in caplog.text
