"""Models without weights."""

from __future__ import annotations

import json
from pathlib import Path
from random import Random

import pytest
from real_fleet.model_shape import SHAPES, write_model

from dualmap.simulation.workload.prompts import PromptWriter
from dualmap.simulation.workload.traces import TraceRequest

tokenizers = pytest.importorskip("tokenizers")


def test_the_tokenizer_counts_a_replays_prompts_as_the_trace_does(tmp_path: Path) -> None:
    write_model(tmp_path, SHAPES["qwen2.5-1.5b"])
    tokenizer = tokenizers.Tokenizer.from_file(str(tmp_path / "tokenizer.json"))

    for length in (1, 15, 512, 700):
        prompt = PromptWriter(512, "a salt").text(TraceRequest(0.0, length, 1, (3, 4)))
        # The space behind the last word is a token of its own.
        assert len(tokenizer.encode(prompt).ids) in (length, length + 1)
    assert json.loads((tmp_path / "config.json").read_text())["num_hidden_layers"] == 28


def test_a_text_of_ids_drawn_at_random_has_as_many_tokens(tmp_path: Path) -> None:
    """But for bytes that are no text by themselves, as with any tokenizer."""
    write_model(tmp_path, SHAPES["qwen2.5-0.5b"])
    tokenizer = tokenizers.Tokenizer.from_file(str(tmp_path / "tokenizer.json"))

    ids = Random(1).choices(range(300, tokenizer.get_vocab_size()), k=500)

    assert len(tokenizer.encode(tokenizer.decode(ids)).ids) == pytest.approx(500, rel=0.02)


def test_weights_are_counted_as_the_shape_has_them() -> None:
    assert SHAPES["qwen2.5-7b"].weight_bytes == pytest.approx(13.1e9, rel=0.02)
    assert SHAPES["qwen2.5-1.5b"].weight_bytes == pytest.approx(2.63e9, rel=0.02)
