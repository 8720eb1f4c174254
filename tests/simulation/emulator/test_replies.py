"""Texts of answers."""

from __future__ import annotations

from simulation.emulator.replies import AnswerText


def test_an_answer_s_text_does_not_depend_on_how_it_is_cut() -> None:
    text = AnswerText()
    whole = text.tokens(12345, 0, 9000)
    assert len(whole) == 36_000
    assert whole == b"".join(text.tokens(12345, start, 90) for start in range(0, 9000, 90))
    assert whole.isascii() and b'"' not in whole and b"\\" not in whole


def test_answers_with_other_seeds_differ() -> None:
    text = AnswerText()
    assert text.tokens(1, 0, 50) != text.tokens(2, 0, 50)
